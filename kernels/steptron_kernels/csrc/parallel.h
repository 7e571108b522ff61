// Work is cut by its size, never by the number of threads: results do not depend on how many there are.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace steptron {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls body(i) for 0 <= i < n. Each thread takes the next unit when it is done with one, so that neither units of
// unequal size (experts) nor a core that somebody else uses keep the others waiting.
template <typename Body>
void parallel_each(int64_t n, const Body& body) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(n, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < n; i = next++) body(i);
  });
}

}  // namespace steptron
