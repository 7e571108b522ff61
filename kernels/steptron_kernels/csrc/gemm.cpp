#include "gemm.h"

#include <memory>

#include "transpose.h"

namespace steptron {
namespace {

// Two rows rounded to bfloat16, element by element side by side.
void interleave(int64_t n, const float* first, const float* second, uint32_t* out) {
  if (second == nullptr) {
    for (int64_t j = 0; j < n; ++j) out[j] = bf16_bits(first[j]) >> 16;
    return;
  }
  for (int64_t j = 0; j < n; ++j) out[j] = (bf16_bits(first[j]) >> 16) | bf16_bits(second[j]);
}

}  // namespace

const bf16* left_operand(const float* x, int64_t& ld, int64_t rows, int64_t k, std::vector<bf16>& scratch) {
  const int64_t padded = padded_depth<bf16>(k);
  scratch.resize(rows * padded);
  for (int64_t i = 0; i < rows; ++i) load_row(k, x + i * ld, scratch.data() + i * padded);
  ld = padded;
  return scratch.data();
}

void pack_rows(int64_t k, int64_t n, const float* source, int64_t ld, float* panels) {
  for (int64_t n0 = 0; n0 < n; n0 += kPanel) {
    float* panel = panels + n0 * k;
    const int64_t width = std::min(kPanel, n - n0);
    for (int64_t i = 0; i < k; ++i) {
      std::copy_n(source + i * ld + n0, width, panel + i * kPanel);
      std::fill_n(panel + i * kPanel + width, kPanel - width, 0.0f);
    }
  }
}

void pack_rows(int64_t k, int64_t n, const float* source, int64_t ld, bf16* panels) {
  for (int64_t n0 = 0; n0 < n; n0 += kPanel) {
    auto* panel = reinterpret_cast<uint32_t*>(panels + n0 * padded_depth<bf16>(k));
    const int64_t width = std::min(kPanel, n - n0);
    for (int64_t i = 0; i < k; i += 2) {
      const float* first = source + i * ld + n0;
      interleave(width, first, i + 1 < k ? first + ld : nullptr, panel + i / 2 * kPanel);
      std::fill_n(panel + i / 2 * kPanel + width, kPanel - width, 0u);
    }
  }
}

void pack_columns(int64_t k, int64_t n, const float* source, int64_t ld, float* panels) {
  for (int64_t n0 = 0; n0 < n; n0 += kPanel) {
    float* panel = panels + n0 * k;
    const int64_t width = std::min(kPanel, n - n0);
    transpose(width, k, source + n0 * ld, ld, panel, kPanel);
    for (int64_t i = 0; width < kPanel && i < k; ++i) std::fill_n(panel + i * kPanel + width, kPanel - width, 0.0f);
  }
}

void pack_columns(int64_t k, int64_t n, const float* source, int64_t ld, bf16* panels) {
  const int64_t pairs = padded_depth<bf16>(k) / 2;
  thread_local std::vector<uint32_t> rows;
  rows.resize(kPanel * pairs);
  for (int64_t n0 = 0; n0 < n; n0 += kPanel) {
    const int64_t width = std::min(kPanel, n - n0);
    for (int64_t j = 0; j < width; ++j)
      load_row(k, source + (n0 + j) * ld, reinterpret_cast<bf16*>(rows.data() + j * pairs));
    std::fill(rows.begin() + width * pairs, rows.end(), 0u);
    transpose(kPanel, pairs, rows.data(), pairs, reinterpret_cast<uint32_t*>(panels + n0 * 2 * pairs), kPanel);
  }
}

void pack_left(int64_t k, int64_t m, const float* source, int64_t ld, float* packed) {
  transpose(k, m, source, ld, packed, k);
}

void pack_left(int64_t k, int64_t m, const float* source, int64_t ld, bf16* packed) {
  const int64_t pairs = padded_depth<bf16>(k) / 2;
  thread_local std::vector<uint32_t> rows;
  rows.resize(kSquare * m);
  for (int64_t p = 0; p < pairs; p += kSquare) {
    const int64_t count = std::min(kSquare, pairs - p);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = 2 * (p + i);
      const float* first = source + row * ld;
      interleave(m, first, row + 1 < k ? first + ld : nullptr, rows.data() + i * m);
    }
    transpose(count, m, rows.data(), m, reinterpret_cast<uint32_t*>(packed) + p, pairs);
  }
}

namespace {

// Blocks of rows times groups of panels: enough units for the threads also where there are few rows.
template <typename Block>
void for_blocks(int64_t m, int64_t n, const Block& block) {
  if (m == 0 || n == 0) return;
  const int64_t row_blocks = ceil_div(m, kRows);
  const int64_t panels = ceil_div(n, kPanel);
  // A function of the sizes alone.
  const int64_t groups = row_blocks >= 32 ? 1 : std::min(panels, ceil_div(int64_t{32}, row_blocks));
  const int64_t columns = ceil_div(panels, groups) * kPanel;
  parallel_each(row_blocks * groups, [&](int64_t unit) {
    const int64_t n0 = unit % groups * columns;
    if (n0 >= n) return;
    const int64_t m0 = unit / groups * kRows;
    block(m0, std::min(kRows, m - m0), n0, std::min(n, n0 + columns));
  });
}

}  // namespace

template <typename T>
void multiply(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, Panels<T> b, float* c, int64_t ldc,
              bool add) {
  for_blocks(m, n, [&](int64_t m0, int64_t rows, int64_t n0, int64_t n1) {
    thread_local std::vector<T> scratch;
    int64_t ld = lda;
    const T* left = left_operand(a + m0 * lda, ld, rows, k, scratch);
    multiply_block(rows, n0, n1, padded_depth<T>(k), left, ld, b, c + m0 * ldc, ldc, add);
    release<T>();
  });
}

template <typename T>
void multiply_packed(int64_t m, int64_t n, int64_t k, const T* a, Panels<T> b, float* c, int64_t ldc, bool add) {
  const int64_t depth = padded_depth<T>(k);
  for_blocks(m, n, [&](int64_t m0, int64_t rows, int64_t n0, int64_t n1) {
    multiply_block(rows, n0, n1, depth, a + m0 * depth, depth, b, c + m0 * ldc, ldc, add);
    release<T>();
  });
}

template <typename T>
void multiply_transposed(int64_t m, int64_t n, int64_t k, const float* dy, int64_t ld_dy, const float* x, int64_t ld_x,
                         float* dw, bool add) {
  if (m == 0 && !add) std::fill_n(dw, n * k, 0.0f);
  // Depth by depth, so that the packed operands stay in the cache.
  constexpr int64_t kStep = 1024;
  const int64_t longest = padded_depth<T>(std::min(m, kStep));
  auto left = std::make_unique_for_overwrite<T[]>(n * longest);
  std::unique_ptr<T[]> right;
  if constexpr (std::is_same_v<T, bf16>) right = std::make_unique_for_overwrite<T[]>(packed_size<T>(longest, k));
  for (int64_t m0 = 0; m0 < m; m0 += kStep) {
    const int64_t depth = std::min(kStep, m - m0), padded = padded_depth<T>(depth);
    parallel_each(ceil_div(n, kPanel), [&](int64_t p) {
      const int64_t n0 = p * kPanel;
      pack_left(depth, std::min(kPanel, n - n0), dy + m0 * ld_dy + n0, ld_dy, left.get() + n0 * padded);
    });
    Panels<T> panels;
    if constexpr (std::is_same_v<T, bf16>) {
      parallel_each(ceil_div(k, kPanel), [&](int64_t p) {
        const int64_t k0 = p * kPanel;
        pack_rows(depth, std::min(kPanel, k - k0), x + m0 * ld_x + k0, ld_x, right.get() + k0 * padded);
      });
      panels = packed_panels<T>(right.get(), depth);
    } else {
      panels = plain_panels(x + m0 * ld_x, ld_x);
    }
    multiply_packed<T>(n, k, depth, left.get(), panels, dw, k, add || m0 > 0);
  }
}

#define STEPTRON_INSTANTIATE(T)                                                                                       \
  template void multiply<T>(int64_t, int64_t, int64_t, const float*, int64_t, Panels<T>, float*, int64_t, bool);      \
  template void multiply_packed<T>(int64_t, int64_t, int64_t, const T*, Panels<T>, float*, int64_t, bool);            \
  template void multiply_transposed<T>(int64_t, int64_t, int64_t, const float*, int64_t, const float*, int64_t,       \
                                       float*, bool);
STEPTRON_INSTANTIATE(float)
STEPTRON_INSTANTIATE(bf16)
#undef STEPTRON_INSTANTIATE

}  // namespace steptron
