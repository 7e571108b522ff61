// Transposition of matrices, 16 x 16 at a time in registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

namespace steptron {

constexpr int64_t kSquare = 16;

namespace detail {

// The compiler makes one 512-bit register of it, or two of 256.
typedef uint32_t Lanes __attribute__((vector_size(4 * kSquare)));

// Of rows i and i + kStep, exchanges the lanes that have to cross between them.
template <int64_t kStep, size_t... kLane>
inline void exchange(Lanes& low, Lanes& high, std::index_sequence<kLane...>) {
  const Lanes a = low, b = high;
  low = __builtin_shufflevector(a, b, (kLane & kStep ? kLane - kStep + kSquare : kLane)...);
  high = __builtin_shufflevector(a, b, (kLane & kStep ? kLane + kSquare : kLane + kStep)...);
}

template <int64_t kStep>
inline void exchange_all(Lanes* rows) {
#pragma GCC unroll 16
  for (int64_t i = 0; i < kSquare; ++i)
    if ((i & kStep) == 0) exchange<kStep>(rows[i], rows[i + kStep], std::make_index_sequence<kSquare>());
}

inline void transpose_square(const uint32_t* src, int64_t ld_src, uint32_t* dst, int64_t ld_dst) {
  Lanes rows[kSquare];
#pragma GCC unroll 16
  for (int64_t i = 0; i < kSquare; ++i) std::memcpy(&rows[i], src + i * ld_src, sizeof(Lanes));
  exchange_all<8>(rows);
  exchange_all<4>(rows);
  exchange_all<2>(rows);
  exchange_all<1>(rows);
#pragma GCC unroll 16
  for (int64_t i = 0; i < kSquare; ++i) std::memcpy(dst + i * ld_dst, &rows[i], sizeof(Lanes));
}

}  // namespace detail

// dst[j][i] = src[i][j] for i < m, j < n; elements are 32 bits, of any type.
template <typename T>
void transpose(int64_t m, int64_t n, const T* src, int64_t ld_src, T* dst, int64_t ld_dst) {
  static_assert(sizeof(T) == sizeof(uint32_t));
  for (int64_t i0 = 0; i0 < m; i0 += kSquare) {
    for (int64_t j0 = 0; j0 < n; j0 += kSquare) {
      const T* from = src + i0 * ld_src + j0;
      T* to = dst + j0 * ld_dst + i0;
      const int64_t rows = std::min(kSquare, m - i0), columns = std::min(kSquare, n - j0);
      if (rows == kSquare && columns == kSquare) {
        detail::transpose_square(reinterpret_cast<const uint32_t*>(from), ld_src, reinterpret_cast<uint32_t*>(to),
                                 ld_dst);
        continue;
      }
      for (int64_t j = 0; j < columns; ++j)
        for (int64_t i = 0; i < rows; ++i) to[j * ld_dst + i] = from[i * ld_src + j];
    }
  }
}

}  // namespace steptron
