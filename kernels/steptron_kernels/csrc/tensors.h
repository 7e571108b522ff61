// Checks and views of the tensors that operations receive.
#pragma once

#include <ATen/ATen.h>

#include <limits>
#include <optional>

namespace steptron {

// Elements of a float CPU tensor whose last dimension is contiguous.
inline const float* data_of(const at::Tensor& x, const char* name) {
  TORCH_CHECK(x.device().is_cpu() && x.scalar_type() == at::kFloat, name, ": expected float32 on the CPU, got ",
              x.scalar_type(), " on ", x.device());
  TORCH_CHECK(x.numel() == 0 || x.dim() == 0 || x.stride(-1) == 1 || x.size(-1) == 1, name,
              ": its last dimension must be contiguous, strides are ", x.strides());
  return x.const_data_ptr<float>();
}

inline const float* contiguous_data_of(const at::Tensor& x, const char* name) {
  TORCH_CHECK(x.is_contiguous(), name, ": expected a contiguous tensor, strides are ", x.strides());
  return data_of(x, name);
}

// The clamp of activations: infinity for none.
inline float limit_of(std::optional<double> limit) {
  TORCH_CHECK(!limit.has_value() || *limit >= 0, "limit: expected a number from 0 on, got ", *limit);
  return limit.has_value() ? static_cast<float>(*limit) : std::numeric_limits<float>::infinity();
}

}  // namespace steptron
