// Head-wise attention gate, one pass over memory each way.
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "../csrc/parallel.h"
#include "../csrc/simd.h"
#include "../csrc/tensors.h"

namespace steptron {
namespace {

constexpr int64_t kElementsPerUnit = 8192;

// Outputs of heads [rows, n, D], contiguous, with gate logits [rows, n] that are read by row stride.
struct Heads {
  const float *o, *gate;
  int64_t rows, heads, head_dim, gate_stride;

  Heads(const at::Tensor& o_RnD, const at::Tensor& gate_Rn)
      : o(contiguous_data_of(o_RnD, "o")), gate(data_of(gate_Rn, "gate")) {
    TORCH_CHECK(o_RnD.dim() == 3 && gate_Rn.sizes() == o_RnD.sizes().slice(0, 2),
                "gate: expected one logit per head, got ", gate_Rn.sizes(), " for outputs ", o_RnD.sizes());
    rows = o_RnD.size(0), heads = o_RnD.size(1), head_dim = o_RnD.size(2);
    gate_stride = gate_Rn.stride(0);
  }

  // Calls body(row, sigmoids of its gates, of its negated gates).
  template <typename Body>
  void each(const Body& body) const {
    const int64_t per_unit = std::max<int64_t>(1, kElementsPerUnit / std::max<int64_t>(1, heads * head_dim));
    parallel_each(ceil_div(rows, per_unit), [&](int64_t unit) {
      std::vector<float> sigmoids(2 * heads);
      float *open = sigmoids.data(), *closed = open + heads;
      for (int64_t i = unit * per_unit; i < std::min(rows, (unit + 1) * per_unit); ++i) {
        const float* logits = gate + i * gate_stride;
#pragma omp simd
        for (int64_t h = 0; h < heads; ++h) {
          open[h] = sigmoid_of(logits[h]);
          closed[h] = sigmoid_of(-logits[h]);
        }
        body(i, open, closed);
      }
    });
  }
};

at::Tensor head_gate(const at::Tensor& o, const at::Tensor& gate) {
  const Heads heads(o, gate);
  const int64_t n = heads.heads, d = heads.head_dim;
  auto y = at::empty_like(o);
  float* out = y.mutable_data_ptr<float>();
  heads.each([&](int64_t i, const float* open, const float*) {
    for (int64_t h = 0; h < n; ++h) {
      const float *row = heads.o + (i * n + h) * d, s = open[h];
      float* target = out + (i * n + h) * d;
#pragma omp simd
      for (int64_t m = 0; m < d; ++m) target[m] = row[m] * s;
    }
  });
  return y;
}

std::tuple<at::Tensor, at::Tensor> head_gate_backward(const at::Tensor& dy, const at::Tensor& o,
                                                      const at::Tensor& gate) {
  const Heads heads(o, gate);
  const int64_t n = heads.heads, d = heads.head_dim;
  const float* grad = contiguous_data_of(dy, "dy");
  auto d_o = at::empty_like(o), d_gate = at::empty({heads.rows, n}, o.options());
  float *out = d_o.mutable_data_ptr<float>(), *d_logits = d_gate.mutable_data_ptr<float>();
  heads.each([&](int64_t i, const float* open, const float* closed) {
    for (int64_t h = 0; h < n; ++h) {
      const float *row = heads.o + (i * n + h) * d, *g = grad + (i * n + h) * d, s = open[h];
      float* target = out + (i * n + h) * d;
      const float dot = sum_over(d, [&](int64_t m) {
        target[m] = g[m] * s;
        return g[m] * row[m];
      });
      d_logits[i * n + h] = dot * s * closed[h];
    }
  });
  return {d_o, d_gate};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(steptron_kernels, library) {
  library.def("head_gate(Tensor o, Tensor gate) -> Tensor", &head_gate);
  library.def("head_gate_backward(Tensor dy, Tensor o, Tensor gate) -> (Tensor, Tensor)", &head_gate_backward);
}

}  // namespace steptron
