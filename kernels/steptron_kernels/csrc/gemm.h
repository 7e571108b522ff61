// Matrix products out of oneDNN's small-block kernels (brgemm), which torch exposes and torch.compile's own
// CPU templates call: AVX2, AVX-512, AVX512-BF16 or AMX, whichever the machine has.
//
// Operands are float, or bfloat16 rounded from float; sums and results are always float. A product is cut into
// blocks of kRows rows; the right operand comes in panels of kPanel columns, for bfloat16 with pairs of rows
// interleaved as the instructions want it. Depth is cut into steps of kDepth, in the same order whatever the
// cut of the rows: a row's result does not depend on its neighbours.
#pragma once

#include <ATen/native/CPUBlas.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace steptron {

constexpr int64_t kRows = 64;
constexpr int64_t kPanel = 64;
constexpr int64_t kDepth = 512;

using bf16 = c10::BFloat16;

// The bfloat16 layout holds rows in pairs: an odd depth is filled up with a row of zeros.
template <typename T>
constexpr int64_t padded_depth(int64_t depth) {
  return std::is_same_v<T, bf16> ? depth + (depth & 1) : depth;
}

// The right operand [K, N] of a product: panel p starts at data + p * stride and has ld elements a row.
template <typename T>
struct Panels {
  const T* data;
  int64_t ld;
  int64_t stride;
};

inline void tile(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                 int64_t ldc, bool add) {
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, a, b, c, /*is_vnni=*/false);
}

inline void tile(int64_t m, int64_t n, int64_t k, const bf16* a, int64_t lda, const bf16* b, int64_t ldb, float* c,
                 int64_t ldc, bool add) {
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, a, b, c, /*is_vnni=*/true);
}

// Ends a thread's use of the matrix unit (AMX tiles).
template <typename T>
void release() {
  at::native::cpublas::brgemm_release(std::is_same_v<T, bf16>);
}

// C[m, n0:n1] (+)= A[m, K] B[K, n0:n1], by one thread. n0 is a multiple of kPanel; K is a padded depth.
template <typename T>
void multiply_block(int64_t m, int64_t n0, int64_t n1, int64_t k, const T* a, int64_t lda, Panels<T> b, float* c,
                    int64_t ldc, bool add) {
  // A sum of nothing.
  for (int64_t i = 0; k == 0 && !add && i < m; ++i) std::fill(c + i * ldc + n0, c + i * ldc + n1, 0.0f);
  for (int64_t k0 = 0; k0 < k; k0 += kDepth) {
    const int64_t depth = std::min(kDepth, k - k0);
    for (int64_t n = n0; n < n1; n += kPanel) {
      const T* panel = b.data + n / kPanel * b.stride + k0 * b.ld;
      tile(m, std::min(kPanel, n1 - n), depth, a + k0, lda, panel, b.ld, c + n, ldc, add || k0 > 0);
    }
  }
}

// A row as an element of a left operand; an odd depth is filled up with zero for bfloat16.
inline void load_row(int64_t k, const float* source, float* out) { std::copy_n(source, k, out); }
inline void load_row(int64_t k, const float* source, bf16* out) {
  auto* bits = reinterpret_cast<uint16_t*>(out);
  for (int64_t j = 0; j < k; ++j) bits[j] = static_cast<uint16_t>(bf16_bits(source[j]) >> 16);
  if (k & 1) bits[k] = 0;
}

// A block of rows as the left operand: float rows as they are, or rounded into scratch.
inline const float* left_operand(const float* x, int64_t& ld, int64_t, int64_t, std::vector<float>&) { return x; }
const bf16* left_operand(const float* x, int64_t& ld, int64_t rows, int64_t k, std::vector<bf16>& scratch);

// Rows of a matrix [K, N] (float, ld) as panels; columns past N are zero.
void pack_rows(int64_t k, int64_t n, const float* source, int64_t ld, float* panels);
void pack_rows(int64_t k, int64_t n, const float* source, int64_t ld, bf16* panels);
// The same from the transposed matrix [N, K].
void pack_columns(int64_t k, int64_t n, const float* source, int64_t ld, float* panels);
void pack_columns(int64_t k, int64_t n, const float* source, int64_t ld, bf16* panels);
// A matrix [K, M] transposed to a left operand [M, padded depth K].
void pack_left(int64_t k, int64_t m, const float* source, int64_t ld, float* packed);
void pack_left(int64_t k, int64_t m, const float* source, int64_t ld, bf16* packed);

// Elements of a packed matrix.
template <typename T>
int64_t packed_size(int64_t k, int64_t n) {
  return ceil_div(n, kPanel) * kPanel * padded_depth<T>(k);
}

template <typename T>
Panels<T> packed_panels(const T* data, int64_t k) {
  return {data, kPanel, kPanel * padded_depth<T>(k)};
}

// Float matrices with K rows need no packing.
inline Panels<float> plain_panels(const float* data, int64_t ld) { return {data, ld, kPanel}; }

// C[M, N] (+)= A[M, K] B[K, N] with A float (rounded on the way for bfloat16), on all threads.
template <typename T>
void multiply(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, Panels<T> b, float* c, int64_t ldc,
              bool add = false);
// The same with A packed by pack_left.
template <typename T>
void multiply_packed(int64_t m, int64_t n, int64_t k, const T* a, Panels<T> b, float* c, int64_t ldc, bool add = false);

// dW[N, K] (+)= dY[M, N]^T X[M, K], on all threads.
template <typename T>
void multiply_transposed(int64_t m, int64_t n, int64_t k, const float* dy, int64_t ld_dy, const float* x, int64_t ld_x,
                         float* dw, bool add = false);

}  // namespace steptron
