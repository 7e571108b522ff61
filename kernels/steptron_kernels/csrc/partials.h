// Partial sums of units of work, added in an order that the number of units alone decides.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>

#include "parallel.h"

namespace steptron {

// Sums [units, size] over the units, pairwise, in place: the result is the first row.
inline at::Tensor sum_of_partials(const at::Tensor& partials) {
  constexpr int64_t kColumns = 256;
  const int64_t units = partials.size(0), size = partials.size(1);
  if (units == 0) return at::zeros({size}, partials.options());
  float* data = partials.mutable_data_ptr<float>();
  parallel_each(ceil_div(size, kColumns), [&](int64_t block) {
    const int64_t first = block * kColumns, last = std::min(size, first + kColumns);
    for (int64_t step = 1; step < units; step *= 2) {
      for (int64_t i = 0; i + step < units; i += 2 * step) {
        float* sum = data + i * size;
        const float* term = sum + step * size;
#pragma omp simd
        for (int64_t j = first; j < last; ++j) sum[j] += term[j];
      }
    }
  });
  return partials[0].clone();  // a view would keep all of them alive
}

}  // namespace steptron
