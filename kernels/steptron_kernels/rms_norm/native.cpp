// Zero-centred RMSNorm, one pass over memory each way.
#include "../csrc/rms_norm.h"

#include <torch/library.h>

#include <tuple>

#include "../csrc/parallel.h"
#include "../csrc/partials.h"
#include "../csrc/tensors.h"

namespace steptron {
namespace {

constexpr int64_t kRowsPerUnit = 32;

std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const int64_t size = weight.size(0), rows = rows_of(x, weight);
  const float *in = contiguous_data_of(x, "x"), *w = contiguous_data_of(weight, "weight");
  auto y = at::empty_like(x), scale = at::empty({rows}, x.options());
  float *out = y.mutable_data_ptr<float>(), *scales = scale.mutable_data_ptr<float>();
  parallel_each(ceil_div(rows, kRowsPerUnit), [&](int64_t unit) {
    for (int64_t i = unit * kRowsPerUnit; i < std::min(rows, (unit + 1) * kRowsPerUnit); ++i) {
      scales[i] = inverse_rms(size, in + i * size, static_cast<float>(eps));
      scale_row(size, in + i * size, w, scales[i], out + i * size);
    }
  });
  return {y, scale};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& dy, const at::Tensor& x,
                                                     const at::Tensor& weight, const at::Tensor& scale) {
  const int64_t size = weight.size(0), rows = rows_of(x, weight), units = ceil_div(rows, kRowsPerUnit);
  const float *grad = contiguous_data_of(dy, "dy"), *in = contiguous_data_of(x, "x");
  const float *w = contiguous_data_of(weight, "weight"), *scales = contiguous_data_of(scale, "scale");
  auto dx = at::empty_like(x), partials = at::zeros({units, size}, x.options());
  float *out = dx.mutable_data_ptr<float>(), *dw = partials.mutable_data_ptr<float>();
  parallel_each(units, [&](int64_t unit) {
    for (int64_t i = unit * kRowsPerUnit; i < std::min(rows, (unit + 1) * kRowsPerUnit); ++i)
      rms_norm_row_backward(size, grad + i * size, in + i * size, w, scales[i], nullptr, out + i * size,
                            dw + unit * size);
  });
  return {dx, sum_of_partials(partials)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(steptron_kernels, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", &rms_norm);
  library.def("rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor scale) -> (Tensor, Tensor)",
              &rms_norm_backward);
}

}  // namespace steptron
