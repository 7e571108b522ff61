// The router in one pass over the tokens each way. The mathematics stands in plain.py.
#include <torch/library.h>

#include <memory>
#include <tuple>
#include <vector>

#include "../csrc/gemm.h"
#include "../csrc/tensors.h"

namespace steptron {
namespace {

constexpr float kEpsilon = 1e-20f;
constexpr int64_t kLanes = 8;

// Orders as the selection does: the larger value first, NaN before all, of equals the lower index.
inline uint64_t selection_key(float value, uint32_t index) {
  const uint32_t bits = float_to_bits(value + 0.0f);  // -0 equals 0
  const uint32_t ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(value != value ? 0xffffffffu : ordered) << 32 | (0xffffffffu - index);
}

// Indices of the `top_k` largest of scores + bias, in that order; keys has room for E rounded up to kLanes.
void select(const float* scores, const float* bias, int64_t num_experts, int64_t top_k, uint64_t* keys,
            int64_t* experts) {
  const int64_t padded = ceil_div(num_experts, kLanes) * kLanes;
  for (int64_t e = 0; e < num_experts; ++e)
    keys[e] = selection_key(scores[e] + bias[e], static_cast<uint32_t>(e));
  std::fill(keys + num_experts, keys + padded, uint64_t{0});
  for (int64_t k = 0; k < top_k; ++k) {
    uint64_t best = 0;
#pragma omp simd reduction(max : best)
    for (int64_t e = 0; e < padded; ++e) best = keys[e] > best ? keys[e] : best;
    experts[k] = 0xffffffffu - static_cast<uint32_t>(best);
    keys[experts[k]] = 0;
  }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> route(const at::Tensor& h, const at::Tensor& weight,
                                                     const at::Tensor& bias, int64_t top_k, double scaling) {
  const int64_t count = h.size(0), hidden = h.size(1), num_experts = weight.size(0);
  TORCH_CHECK(weight.dim() == 2 && weight.size(1) == hidden && bias.numel() == num_experts,
              "weight and bias: expected [E, ", hidden, "] and [E], got ", weight.sizes(), " and ", bias.sizes());
  TORCH_CHECK(top_k >= 1 && top_k <= num_experts, "top_k: expected 1 to ", num_experts, ", got ", top_k);
  const float *in = data_of(h, "h"), *w = contiguous_data_of(weight, "weight"), *b = contiguous_data_of(bias, "bias");
  auto experts_TK = at::empty({count, top_k}, h.options().dtype(at::kLong));
  auto weights_TK = at::empty({count, top_k}, h.options()), scores_TE = at::empty({count, num_experts}, h.options());
  int64_t* experts = experts_TK.mutable_data_ptr<int64_t>();
  float *weights = weights_TK.mutable_data_ptr<float>(), *scores = scores_TE.mutable_data_ptr<float>();

  auto packed = std::make_unique_for_overwrite<float[]>(packed_size<float>(hidden, num_experts));
  parallel_each(ceil_div(num_experts, kPanel), [&](int64_t p) {
    const int64_t e0 = p * kPanel;
    pack_columns(hidden, std::min(kPanel, num_experts - e0), w + e0 * hidden, hidden, packed.get() + e0 * hidden);
  });
  const int64_t ld = h.stride(0);
  const float factor = static_cast<float>(scaling);
  parallel_each(ceil_div(count, kRows), [&](int64_t block) {
    thread_local std::vector<uint64_t> keys;
    keys.resize(ceil_div(num_experts, kLanes) * kLanes);
    const int64_t t0 = block * kRows, rows = std::min(kRows, count - t0);
    float* logits = scores + t0 * num_experts;
    multiply_block(rows, 0, num_experts, hidden, in + t0 * ld, ld, packed_panels(packed.get(), hidden), logits,
                   num_experts, false);
    for (int64_t i = 0; i < rows * num_experts; ++i) logits[i] = sigmoid_of(logits[i]);
    for (int64_t t = t0; t < t0 + rows; ++t) {
      const float* score = scores + t * num_experts;
      int64_t* chosen = experts + t * top_k;
      select(score, b, num_experts, top_k, keys.data(), chosen);
      float total = 0.0f;
      for (int64_t k = 0; k < top_k; ++k) total += score[chosen[k]];
      const float scale = factor / (total + kEpsilon);
      for (int64_t k = 0; k < top_k; ++k) weights[t * top_k + k] = score[chosen[k]] * scale;
    }
  });
  return {experts_TK, weights_TK, scores_TE};
}

// Gradients of h and of the weight (empty where not asked for); a gradient that is absent is zero.
std::tuple<at::Tensor, at::Tensor> route_backward(const std::optional<at::Tensor>& grad_weights,
                                                  const std::optional<at::Tensor>& grad_scores, const at::Tensor& h,
                                                  const at::Tensor& weight, const at::Tensor& experts_TK,
                                                  const at::Tensor& scores_TE, double scaling, bool needs_h,
                                                  bool needs_w) {
  const int64_t count = h.size(0), hidden = h.size(1), num_experts = weight.size(0), top_k = experts_TK.size(1);
  const float *in = data_of(h, "h"), *w = contiguous_data_of(weight, "weight");
  const float* scores = contiguous_data_of(scores_TE, "scores");
  const int64_t* experts = experts_TK.const_data_ptr<int64_t>();
  const float* d_weights = grad_weights ? contiguous_data_of(*grad_weights, "grad_weights") : nullptr;
  const float* d_scores = grad_scores ? contiguous_data_of(*grad_scores, "grad_scores") : nullptr;
  auto grad_h = at::empty({needs_h ? count : 0, hidden}, h.options());
  auto grad_w = at::empty({needs_w ? num_experts : 0, hidden}, h.options());
  float* dh = needs_h ? grad_h.mutable_data_ptr<float>() : nullptr;
  auto buffer = std::make_unique_for_overwrite<float[]>(count * num_experts);
  float* d_logits = buffer.get();
  const float factor = static_cast<float>(scaling);
  parallel_each(ceil_div(count, kRows), [&](int64_t block) {
    const int64_t t0 = block * kRows, rows = std::min(kRows, count - t0);
    float* target = d_logits + t0 * num_experts;
    if (d_scores != nullptr)
      std::copy_n(d_scores + t0 * num_experts, rows * num_experts, target);
    else
      std::fill_n(target, rows * num_experts, 0.0f);
    for (int64_t t = t0; d_weights != nullptr && t < t0 + rows; ++t) {
      const float *score = scores + t * num_experts, *dw = d_weights + t * top_k;
      const int64_t* chosen = experts + t * top_k;
      float total = kEpsilon, dot = 0.0f;
      for (int64_t k = 0; k < top_k; ++k) {
        total += score[chosen[k]];
        dot += dw[k] * score[chosen[k]];
      }
      // The share first: scores that are all zero, total 1e-20, must not make infinity times zero.
      const float mean = dot / total, scale = factor / total;
      for (int64_t k = 0; k < top_k; ++k) d_logits[t * num_experts + chosen[k]] += (dw[k] - mean) * scale;
    }
    const float* p = scores + t0 * num_experts;
    for (int64_t i = 0; i < rows * num_experts; ++i) target[i] *= p[i] * (1.0f - p[i]);
    if (dh != nullptr)
      multiply_block(rows, 0, hidden, num_experts, target, num_experts, plain_panels(w, hidden), dh + t0 * hidden,
                     hidden, false);
  });
  if (needs_w)
    multiply_transposed<float>(count, num_experts, hidden, d_logits, num_experts, in, h.stride(0),
                               grad_w.mutable_data_ptr<float>(), false);
  return {grad_h, grad_w};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(steptron_kernels, library) {
  library.def("route(Tensor h, Tensor weight, Tensor bias, int top_k, float scaling) -> (Tensor, Tensor, Tensor)",
              &route);
  library.def(
      "route_backward(Tensor? grad_weights, Tensor? grad_scores, Tensor h, Tensor weight, Tensor experts, "
      "Tensor scores, float scaling, bool needs_h, bool needs_w) -> (Tensor, Tensor)",
      &route_backward);
}

}  // namespace steptron
