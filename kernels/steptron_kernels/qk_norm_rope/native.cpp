// Norm and rotation of the query and key heads of a fused projection, one pass over memory each way.
#include <torch/library.h>

#include <cmath>
#include <optional>
#include <tuple>

#include "../csrc/parallel.h"
#include "../csrc/partials.h"
#include "../csrc/simd.h"
#include "../csrc/tensors.h"

namespace steptron {
namespace {

constexpr int64_t kRowsPerUnit = 16;

// A row of the projection: n query heads, g key heads, g value heads of D numbers, then gates.
struct Layout {
  int64_t rows, batch, columns, heads, groups, head_dim, rotated;
  const float *projected, *query_weight, *key_weight, *cos, *sin;
  int64_t cos_strides[2], sin_strides[2];

  Layout(const at::Tensor& projected_SBP, const at::Tensor& query_weight_D, const at::Tensor& key_weight_D,
         const at::Tensor& cos_SB1R, const at::Tensor& sin_SB1R, int64_t num_heads, int64_t num_groups)
      : heads(num_heads),
        groups(num_groups),
        projected(contiguous_data_of(projected_SBP, "projected")),
        query_weight(contiguous_data_of(query_weight_D, "query_weight")),
        key_weight(contiguous_data_of(key_weight_D, "key_weight")),
        cos(data_of(cos_SB1R, "cos")),
        sin(data_of(sin_SB1R, "sin")) {
    TORCH_CHECK(projected_SBP.dim() == 3, "projected: expected [S, B, P], got ", projected_SBP.sizes());
    batch = projected_SBP.size(1), columns = projected_SBP.size(2), rows = projected_SBP.size(0) * batch;
    head_dim = query_weight_D.size(0), rotated = cos_SB1R.size(-1);
    TORCH_CHECK(key_weight_D.sizes() == query_weight_D.sizes(), "key_weight: expected ", query_weight_D.sizes(),
                ", got ", key_weight_D.sizes());
    TORCH_CHECK(columns >= gates(), "projected: expected at least ", gates(), " columns, got ", columns);
    const int64_t expected[] = {projected_SBP.size(0), batch, 1, rotated};
    TORCH_CHECK(cos_SB1R.sizes() == at::IntArrayRef(expected) && sin_SB1R.sizes() == cos_SB1R.sizes(),
                "cos, sin: expected ", at::IntArrayRef(expected), ", got ", cos_SB1R.sizes(), ", ", sin_SB1R.sizes());
    TORCH_CHECK(2 * rotated <= head_dim, "cos: ", 2 * rotated, " rotated dimensions of ", head_dim);
    cos_strides[0] = cos_SB1R.stride(0), cos_strides[1] = cos_SB1R.stride(1);
    sin_strides[0] = sin_SB1R.stride(0), sin_strides[1] = sin_SB1R.stride(1);
  }

  int64_t normed() const { return heads + groups; }
  int64_t values() const { return normed() * head_dim; }
  int64_t gates() const { return values() + groups * head_dim; }
  int64_t units() const { return ceil_div(rows, kRowsPerUnit); }

  // Calls body(unit, row, cosines, sines).
  template <typename Body>
  void each(const Body& body) const {
    parallel_each(units(), [&](int64_t unit) {
      for (int64_t i = unit * kRowsPerUnit; i < std::min(rows, (unit + 1) * kRowsPerUnit); ++i) {
        const int64_t s = i / batch, b = i % batch;
        body(unit, i, cos + s * cos_strides[0] + b * cos_strides[1], sin + s * sin_strides[0] + b * sin_strides[1]);
      }
    });
  }
};

// D and R as constants where the compiler shall unroll for them, zero where they are known at run time alone.
template <int64_t kHeadDim, int64_t kRotated>
struct Head {
  int64_t head_dim, rotated;

  explicit Head(const Layout& layout)
      : head_dim(kHeadDim ? kHeadDim : layout.head_dim), rotated(kHeadDim ? kRotated : layout.rotated) {}

  int64_t size() const { return kHeadDim ? kHeadDim : head_dim; }
  int64_t pairs() const { return kHeadDim ? kRotated : rotated; }

  float sum_of_squares(const float* x) const {
    return sum_over(size(), [&](int64_t m) { return x[m] * x[m]; });
  }

  void forward(const float* x, const float* w, float r, const float* cos, const float* sin, float* y) const {
    const int64_t second = pairs();
#pragma omp simd
    for (int64_t m = 0; m < pairs(); ++m) {
      const float a = x[m] * r * (1.0f + w[m]), b = x[m + second] * r * (1.0f + w[m + second]);
      y[m] = a * cos[m] - b * sin[m];
      y[m + second] = b * cos[m] + a * sin[m];
    }
#pragma omp simd
    for (int64_t m = 2 * pairs(); m < size(); ++m) y[m] = x[m] * r * (1.0f + w[m]);
  }

  // The inverse rotation into dx, then the norm's gradients: dx in place, dw added to.
  void backward(const float* dy, const float* x, const float* w, float r, const float* cos, const float* sin,
                float* dx, float* dw) const {
    const int64_t second = pairs();
#pragma omp simd
    for (int64_t m = 0; m < pairs(); ++m) {
      const float a = dy[m] * cos[m] + dy[m + second] * sin[m], b = dy[m + second] * cos[m] - dy[m] * sin[m];
      dx[m] = a;
      dx[m + second] = b;
    }
#pragma omp simd
    for (int64_t m = 2 * pairs(); m < size(); ++m) dx[m] = dy[m];
    const float dot = sum_over(size(), [&](int64_t m) { return dx[m] * (1.0f + w[m]) * x[m]; });
    const float factor = dot * r * r * r / static_cast<float>(size());
#pragma omp simd
    for (int64_t m = 0; m < size(); ++m) {
      dw[m] += dx[m] * x[m] * r;
      dx[m] = dx[m] * (1.0f + w[m]) * r - x[m] * factor;
    }
  }
};

// Calls body with the Head of these sizes: constants for the sizes of the presets and of the release.
template <typename Body>
void with_head(const Layout& layout, const Body& body) {
  const int64_t d = layout.head_dim, r = layout.rotated;
  if (d == 32 && r == 16) return body(Head<32, 16>(layout));
  if (d == 32 && r == 8) return body(Head<32, 8>(layout));
  if (d == 64 && r == 32) return body(Head<64, 32>(layout));
  if (d == 64 && r == 16) return body(Head<64, 16>(layout));
  if (d == 128 && r == 64) return body(Head<128, 64>(layout));
  if (d == 128 && r == 32) return body(Head<128, 32>(layout));
  body(Head<0, 0>(layout));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> qk_norm_rope(const at::Tensor& projected, const at::Tensor& query_weight,
                                                            const at::Tensor& key_weight, const at::Tensor& cos,
                                                            const at::Tensor& sin, int64_t num_heads,
                                                            int64_t num_groups, double eps) {
  const Layout layout(projected, query_weight, key_weight, cos, sin, num_heads, num_groups);
  const int64_t n = num_heads, g = num_groups, d = layout.head_dim, normed = layout.normed();
  auto q = at::empty({projected.size(0), projected.size(1), n, d}, projected.options());
  auto k = at::empty({projected.size(0), projected.size(1), g, d}, projected.options());
  auto scale = at::empty({layout.rows, normed}, projected.options());
  float *queries = q.mutable_data_ptr<float>(), *keys = k.mutable_data_ptr<float>();
  float* scales = scale.mutable_data_ptr<float>();
  with_head(layout, [&](const auto& head) {
    layout.each([&](int64_t, int64_t i, const float* cosines, const float* sines) {
      const float* row = layout.projected + i * layout.columns;
      float* r = scales + i * normed;
      for (int64_t h = 0; h < normed; ++h) r[h] = head.sum_of_squares(row + h * d);
#pragma omp simd
      for (int64_t h = 0; h < normed; ++h)
        r[h] = 1.0f / std::sqrt(r[h] / static_cast<float>(d) + static_cast<float>(eps));
      for (int64_t h = 0; h < n; ++h)
        head.forward(row + h * d, layout.query_weight, r[h], cosines, sines, queries + (i * n + h) * d);
      for (int64_t h = 0; h < g; ++h)
        head.forward(row + (n + h) * d, layout.key_weight, r[n + h], cosines, sines, keys + (i * g + h) * d);
    });
  });
  return {q, k, scale};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> qk_norm_rope_backward(
    const at::Tensor& d_q, const at::Tensor& d_k, const at::Tensor& d_v, const std::optional<at::Tensor>& d_gate,
    const at::Tensor& projected, const at::Tensor& query_weight, const at::Tensor& key_weight, const at::Tensor& cos,
    const at::Tensor& sin, const at::Tensor& scale) {
  const int64_t n = d_q.size(2), g = d_k.size(2);
  const Layout layout(projected, query_weight, key_weight, cos, sin, n, g);
  const int64_t d = layout.head_dim, normed = layout.normed();
  const float *queries = contiguous_data_of(d_q, "d_q"), *keys = contiguous_data_of(d_k, "d_k");
  const float *values = contiguous_data_of(d_v, "d_v"), *scales = contiguous_data_of(scale, "scale");
  const float* gates = d_gate.has_value() ? contiguous_data_of(*d_gate, "d_gate") : nullptr;
  auto d_projected = at::empty_like(projected), partials = at::zeros({layout.units(), 2 * d}, projected.options());
  float *out = d_projected.mutable_data_ptr<float>(), *d_weights = partials.mutable_data_ptr<float>();
  with_head(layout, [&](const auto& head) {
    layout.each([&](int64_t unit, int64_t i, const float* cosines, const float* sines) {
      const float *row = layout.projected + i * layout.columns, *r = scales + i * normed;
      float *target = out + i * layout.columns, *dw = d_weights + unit * 2 * d;
      for (int64_t h = 0; h < n; ++h)
        head.backward(queries + (i * n + h) * d, row + h * d, layout.query_weight, r[h], cosines, sines,
                      target + h * d, dw);
      for (int64_t h = n; h < normed; ++h)
        head.backward(keys + (i * g + h - n) * d, row + h * d, layout.key_weight, r[h], cosines, sines,
                      target + h * d, dw + d);
      std::copy_n(values + i * g * d, g * d, target + layout.values());
      if (gates != nullptr) std::copy_n(gates + i * n, n, target + layout.gates());
    });
  });
  const auto d_weight = sum_of_partials(partials);
  return {d_projected, d_weight.slice(0, 0, d), d_weight.slice(0, d)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(steptron_kernels, library) {
  library.def(
      "qk_norm_rope(Tensor projected, Tensor query_weight, Tensor key_weight, Tensor cos, Tensor sin, int num_heads,"
      " int num_groups, float eps) -> (Tensor, Tensor, Tensor)",
      &qk_norm_rope);
  library.def(
      "qk_norm_rope_backward(Tensor d_q, Tensor d_k, Tensor d_v, Tensor? d_gate, Tensor projected, Tensor query_weight,"
      " Tensor key_weight, Tensor cos, Tensor sin, Tensor scale) -> (Tensor, Tensor, Tensor)",
      &qk_norm_rope_backward);
}

}  // namespace steptron
