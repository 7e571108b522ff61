// Residual sum and its zero-centred RMSNorm, one pass over memory each way.
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "../csrc/parallel.h"
#include "../csrc/partials.h"
#include "../csrc/rms_norm.h"
#include "../csrc/tensors.h"

namespace steptron {
namespace {

constexpr int64_t kRowsPerUnit = 32;

std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& delta,
                                                            const at::Tensor& weight, double eps) {
  TORCH_CHECK(x.sizes() == delta.sizes(), "delta: expected the shape of x, ", x.sizes(), ", got ", delta.sizes());
  const int64_t size = weight.size(0), rows = rows_of(x, weight);
  const float *in = contiguous_data_of(x, "x"), *added = contiguous_data_of(delta, "delta");
  const float* w = contiguous_data_of(weight, "weight");
  auto sum = at::empty_like(x), y = at::empty_like(x), scale = at::empty({rows}, x.options());
  float *sums = sum.mutable_data_ptr<float>(), *out = y.mutable_data_ptr<float>();
  float* scales = scale.mutable_data_ptr<float>();
  parallel_each(ceil_div(rows, kRowsPerUnit), [&](int64_t unit) {
    for (int64_t i = unit * kRowsPerUnit; i < std::min(rows, (unit + 1) * kRowsPerUnit); ++i) {
      const float *row = in + i * size, *term = added + i * size;
      float* target = sums + i * size;
#pragma omp simd
      for (int64_t j = 0; j < size; ++j) target[j] = row[j] + term[j];
      scales[i] = inverse_rms(size, target, static_cast<float>(eps));
      scale_row(size, target, w, scales[i], out + i * size);
    }
  });
  return {sum, y, scale};
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm_backward(const std::optional<at::Tensor>& d_sum, const at::Tensor& dy,
                                                         const at::Tensor& sum, const at::Tensor& weight,
                                                         const at::Tensor& scale) {
  const int64_t size = weight.size(0), rows = rows_of(sum, weight), units = ceil_div(rows, kRowsPerUnit);
  const float *grad = contiguous_data_of(dy, "dy"), *sums = contiguous_data_of(sum, "sum");
  const float *w = contiguous_data_of(weight, "weight"), *scales = contiguous_data_of(scale, "scale");
  const float* through = d_sum.has_value() ? contiguous_data_of(*d_sum, "d_sum") : nullptr;
  auto dx = at::empty_like(sum), partials = at::zeros({units, size}, sum.options());
  float *out = dx.mutable_data_ptr<float>(), *dw = partials.mutable_data_ptr<float>();
  parallel_each(units, [&](int64_t unit) {
    for (int64_t i = unit * kRowsPerUnit; i < std::min(rows, (unit + 1) * kRowsPerUnit); ++i)
      rms_norm_row_backward(size, grad + i * size, sums + i * size, w, scales[i],
                            through == nullptr ? nullptr : through + i * size, out + i * size, dw + unit * size);
  });
  return {dx, sum_of_partials(partials)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(steptron_kernels, library) {
  library.def("add_rms_norm(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
              &add_rms_norm);
  library.def("add_rms_norm_backward(Tensor? d_sum, Tensor dy, Tensor sum, Tensor weight, Tensor scale)"
              " -> (Tensor, Tensor)",
              &add_rms_norm_backward);
}

}  // namespace steptron
