// SwiGLU with the release's clipping, one pass over memory each way.
#include "../csrc/swiglu.h"

#include <torch/library.h>

#include <optional>

#include "../csrc/parallel.h"
#include "../csrc/tensors.h"

namespace steptron {
namespace {

constexpr int64_t kElementsPerUnit = 8192;

struct Rows {
  int64_t count, width, per_unit;

  explicit Rows(const at::Tensor& gate_up) {
    TORCH_CHECK(gate_up.dim() > 0 && gate_up.size(-1) % 2 == 0,
                "gate_up: expected as many gate as up columns, got shape ", gate_up.sizes());
    width = gate_up.size(-1) / 2;
    count = width == 0 ? 0 : gate_up.numel() / (2 * width);
    per_unit = std::max<int64_t>(1, kElementsPerUnit / std::max<int64_t>(1, width));
  }

  template <typename Body>
  void each(const Body& body) const {
    parallel_each(ceil_div(count, per_unit), [&](int64_t unit) {
      for (int64_t i = unit * per_unit; i < std::min(count, (unit + 1) * per_unit); ++i) body(i);
    });
  }
};

at::Tensor swiglu(const at::Tensor& gate_up, std::optional<double> limit, bool clamp_after_silu) {
  const Rows rows(gate_up);
  const int64_t f = rows.width;
  const float bound = limit_of(limit), *in = contiguous_data_of(gate_up, "gate_up");
  auto shape = gate_up.sizes().vec();
  shape.back() = f;
  auto y = at::empty(shape, gate_up.options());
  float* out = y.mutable_data_ptr<float>();
  rows.each([&](int64_t i) {
    const float* gate = in + i * 2 * f;
    swiglu_row(f, gate, gate + f, bound, clamp_after_silu, 1.0f, out + i * f);
  });
  return y;
}

at::Tensor swiglu_backward(const at::Tensor& dy, const at::Tensor& gate_up, std::optional<double> limit,
                           bool clamp_after_silu) {
  const Rows rows(gate_up);
  const int64_t f = rows.width;
  const float bound = limit_of(limit), *in = contiguous_data_of(gate_up, "gate_up");
  const float* grad = contiguous_data_of(dy, "dy");
  auto d_gate_up = at::empty_like(gate_up);
  float* out = d_gate_up.mutable_data_ptr<float>();
  rows.each([&](int64_t i) {
    const float* gate = in + i * 2 * f;
    float* d_gate = out + i * 2 * f;
    swiglu_row_backward(f, gate, gate + f, bound, clamp_after_silu, 1.0f, grad + i * f, d_gate, d_gate + f, nullptr);
  });
  return d_gate_up;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(steptron_kernels, library) {
  library.def("swiglu(Tensor gate_up, float? limit, bool clamp_after_silu) -> Tensor", &swiglu);
  library.def("swiglu_backward(Tensor dy, Tensor gate_up, float? limit, bool clamp_after_silu) -> Tensor",
              &swiglu_backward);
}

}  // namespace steptron
