// Zero-centred RMSNorm, row by row. The mathematics stands in ../rms_norm/plain.py.
#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <cstdint>

#include "simd.h"

namespace steptron {

// r = 1 / sqrt(mean(x^2) + eps)
inline float inverse_rms(int64_t n, const float* x, float eps) {
  const float sum = sum_over(n, [&](int64_t j) { return x[j] * x[j]; });
  return 1.0f / std::sqrt(sum / static_cast<float>(n) + eps);
}

// y = x r (1 + w)
inline void scale_row(int64_t n, const float* x, const float* w, float r, float* y) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) y[j] = x[j] * r * (1.0f + w[j]);
}

// dx = r g - x r^3 <g, x> / n with g = dy (1 + w), plus d_x unless that is null; adds dy x r to dw. dx may be d_x.
inline void rms_norm_row_backward(int64_t n, const float* dy, const float* x, const float* w, float r,
                                  const float* d_x, float* dx, float* dw) {
  const float dot = sum_over(n, [&](int64_t j) { return dy[j] * (1.0f + w[j]) * x[j]; });
  const float factor = dot * r * r * r / static_cast<float>(n);
  if (d_x == nullptr) {
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      dw[j] += dy[j] * x[j] * r;
      dx[j] = dy[j] * (1.0f + w[j]) * r - x[j] * factor;
    }
  } else {
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      dw[j] += dy[j] * x[j] * r;
      dx[j] = d_x[j] + (dy[j] * (1.0f + w[j]) * r - x[j] * factor);
    }
  }
}

// Rows of a tensor that is normalised by a weight.
inline int64_t rows_of(const at::Tensor& x, const at::Tensor& weight) {
  TORCH_CHECK(weight.dim() == 1 && x.dim() > 0 && x.size(-1) == weight.size(0),
              "weight: expected one number per column, got ", weight.sizes(), " for x ", x.sizes());
  return weight.size(0) == 0 ? 0 : x.numel() / weight.size(0);
}

}  // namespace steptron
