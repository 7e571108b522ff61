// Element-wise building blocks as plain loops: the compiler vectorises them for the machine that they
// are built on (-O3 -march=native). No fast-math: NaN and infinity come through.
#pragma once

#include <cstdint>
#include <cstring>

namespace steptron {

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// e^x within 1.1 ulp: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial in r (Cephes' coefficients), and
// n added to the exponent. 0 below -87.3, where the result would not be a normal number; infinity above 88.7.
inline float exp_of(float x) {
  constexpr float kSmallest = -87.336539f, kLargest = 88.722835f;
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
  constexpr float kRound = 12582912.0f;
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const float value = bits_to_float(float_to_bits(p) + (float_to_bits(shifted) << 23));
  const float normal = x < kSmallest ? 0.0f : value;
  return x <= kLargest ? normal : x + bits_to_float(0x7f800000u);  // infinity, or NaN from NaN
}

inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }

// term(0) + ... + term(n - 1), in kLanes sums that are then added pairwise. The order depends on n alone. (The
// compiler's own reductions add the lanes of a vector one after the other, which takes longer than a short row.)
constexpr int64_t kLanes = 16;

template <typename Term>
[[gnu::always_inline]] inline float sum_over(int64_t n, const Term& term) {
  float lanes[kLanes] = {};
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
#pragma omp simd
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] += term(j + l);
  }
  const int64_t rest = n - j;
#pragma omp simd
  for (int64_t l = 0; l < rest; ++l) lanes[l] += term(j + l);
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  return lanes[0];
}

// Rounds to bfloat16 (to nearest, ties to even), kept in the upper 16 bits; NaN stays NaN.
inline uint32_t bf16_bits(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  return value != value ? (bits | 0x00400000u) & 0xffff0000u : rounded;
}

}  // namespace steptron
