// SwiGLU with the release's clipping, row by row. The mathematics stands in ../swiglu/plain.py.
//
// Outputs may be the inputs themselves (same address), element by element; otherwise they must not overlap.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd.h"

namespace steptron {
namespace swiglu_detail {

enum class Clip { kNone, kAfterSilu, kBeforeSilu };

// clamp(x, -inf, limit) and clamp(x, -limit, limit); NaN stays NaN.
inline float at_most(float x, float limit) { return x > limit ? limit : x; }
inline float within(float x, float limit) { return x < -limit ? -limit : at_most(x, limit); }

template <Clip clip>
void forward(int64_t f, const float* gate, const float* up, float limit, float weight, float* hidden) {
#pragma omp simd
  for (int64_t j = 0; j < f; ++j) {
    const float g = clip == Clip::kBeforeSilu ? at_most(gate[j], limit) : gate[j];
    const float silu = g * sigmoid_of(g);
    const float left = clip == Clip::kAfterSilu ? at_most(silu, limit) : silu;
    const float right = clip == Clip::kNone ? up[j] : within(up[j], limit);
    hidden[j] = left * right * weight;
  }
}

template <Clip clip, bool with_hidden>
float backward(int64_t f, const float* gate, const float* up, float limit, float weight, const float* d_hidden,
               float* d_gate, float* d_up, float* hidden) {
  return sum_over(f, [&](int64_t j) {
    const float raw_gate = gate[j], raw_up = up[j], d = d_hidden[j];
    const float g = clip == Clip::kBeforeSilu ? at_most(raw_gate, limit) : raw_gate;
    const float sigmoid = sigmoid_of(g), silu = g * sigmoid;
    const float left = clip == Clip::kAfterSilu ? at_most(silu, limit) : silu;
    const float right = clip == Clip::kNone ? raw_up : within(raw_up, limit);
    const float swiglu = left * right, d_swiglu = d * weight;
    float d_left = d_swiglu * right, d_right = d_swiglu * left;
    // As torch.clamp: the gradient passes at the limit itself.
    if (clip == Clip::kAfterSilu) d_left = silu <= limit ? d_left : 0.0f;
    if (clip != Clip::kNone) d_right = std::fabs(raw_up) <= limit ? d_right : 0.0f;
    const float d_silu = d_left * (sigmoid * (1.0f + g * (1.0f - sigmoid)));
    d_gate[j] = clip == Clip::kBeforeSilu && !(raw_gate <= limit) ? 0.0f : d_silu;
    d_up[j] = d_right;
    if (with_hidden) hidden[j] = swiglu * weight;
    return d * swiglu;
  });
}

}  // namespace swiglu_detail

// hidden = weight * swiglu(gate, up), f elements each. limit: infinity for no clipping.
inline void swiglu_row(int64_t f, const float* gate, const float* up, float limit, bool clamp_after_silu, float weight,
                       float* hidden) {
  using namespace swiglu_detail;
  auto run = std::isinf(limit)  ? forward<Clip::kNone>
             : clamp_after_silu ? forward<Clip::kAfterSilu>
                                : forward<Clip::kBeforeSilu>;
  run(f, gate, up, limit, weight, hidden);
}

// Gradients of swiglu_row; returns that of the weight. hidden, unless null, receives swiglu_row's result once more.
inline float swiglu_row_backward(int64_t f, const float* gate, const float* up, float limit, bool clamp_after_silu,
                                 float weight, const float* d_hidden, float* d_gate, float* d_up, float* hidden) {
  using namespace swiglu_detail;
  const bool again = hidden != nullptr;
  auto run = std::isinf(limit)  ? (again ? backward<Clip::kNone, true> : backward<Clip::kNone, false>)
             : clamp_after_silu ? (again ? backward<Clip::kAfterSilu, true> : backward<Clip::kAfterSilu, false>)
                                : (again ? backward<Clip::kBeforeSilu, true> : backward<Clip::kBeforeSilu, false>);
  return run(f, gate, up, limit, weight, d_hidden, d_gate, d_up, hidden);
}

}  // namespace steptron
