// Routed experts: gather, gate and up, clamped SwiGLU with the routing weight, down, and the sum over each token's
// experts, block by block of at most kRows rows of one expert, so that intermediate results stay in the cache.
//
// Rows are sorted by expert. Inside, each expert's rows are filled up with zeros to a multiple of kFill, so that the
// products meet few different sizes (oneDNN compiles a kernel for each).
#include <torch/library.h>

#include <limits>
#include <optional>
#include <tuple>

#include "../csrc/gemm.h"
#include "../csrc/swiglu.h"
#include "../csrc/tensors.h"

namespace steptron {
namespace {

constexpr int64_t kFill = 16;
constexpr int64_t kGradientRows = 256;  // rows of a weight's gradient that one unit of work computes

// A block of one expert's rows: its place among the N rows, and among the filled-up ones.
struct Block {
  int64_t expert, row, rows, filled_row, filled_rows;
};

struct Layout {
  std::vector<Block> blocks;
  std::vector<int64_t> first, first_filled, first_block;  // by expert, and the total last
  std::vector<int64_t> filled_of;                         // filled-up place of each row

  // Rows of the expert that has most.
  int64_t largest() const {
    int64_t rows = 0;
    for (size_t e = 0; e + 1 < first.size(); ++e) rows = std::max(rows, first[e + 1] - first[e]);
    return rows;
  }
};

// What does not fit together is refused here: the loops below trust it.
void check(const at::Tensor& x, const std::optional<at::Tensor>& slot, const std::optional<at::Tensor>& rows_of,
           int64_t rows, const at::Tensor& weights) {
  TORCH_CHECK(x.dim() == 2, "x: expected two dimensions, got ", x.sizes());
  TORCH_CHECK(weights.numel() == rows, "weights: expected one for each of ", rows, " rows, got ", weights.sizes());
  TORCH_CHECK(slot.has_value() == rows_of.has_value(), "slot and rows_of come together");
  if (!slot) {
    TORCH_CHECK(x.size(0) == rows, "x: expected the ", rows, " rows that the experts' counts add up to, got ", x.size(0));
    return;
  }
  TORCH_CHECK(rows_of->dim() == 2 && rows_of->size(0) == x.size(0) && rows_of->size(1) > 0,
              "rows_of: expected [", x.size(0), ", K], got ", rows_of->sizes());
  for (const at::Tensor& index : {*slot, *rows_of}) {
    TORCH_CHECK(index.scalar_type() == at::kLong && index.is_contiguous() && index.numel() == rows,
                "plan: expected ", rows, " contiguous int64, as many as the experts' counts add up to, got ",
                index.sizes());
    const int64_t* data = index.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < rows; ++i)
      TORCH_CHECK_INDEX(data[i] >= 0 && data[i] < rows, "plan: ", data[i], " is not below ", rows);
  }
}

Layout lay_out(const at::Tensor& tokens_per_expert) {
  const auto counts = tokens_per_expert.to(at::kLong).contiguous();
  const int64_t *data = counts.const_data_ptr<int64_t>(), experts = counts.numel();
  Layout layout;
  layout.first = layout.first_filled = layout.first_block = {0};
  for (int64_t e = 0; e < experts; ++e) {
    TORCH_CHECK(data[e] >= 0, "tokens_per_expert: ", data[e], " of expert ", e, " is negative");
    const int64_t row = layout.first.back(), filled = layout.first_filled.back(), count = data[e];
    const int64_t filled_count = ceil_div(count, kFill) * kFill;
    for (int64_t i = 0; i < count; i += kRows)
      layout.blocks.push_back(
          {e, row + i, std::min(kRows, count - i), filled + i, std::min(kRows, filled_count - i)});
    for (int64_t i = 0; i < count; ++i) layout.filled_of.push_back(filled + i);
    layout.first.push_back(row + count);
    layout.first_filled.push_back(filled + filled_count);
    layout.first_block.push_back(static_cast<int64_t>(layout.blocks.size()));
  }
  return layout;
}


// Rows of a matrix: row n is row n, or, with slots (token * top_k + choice), that of the slot's token.
struct Source {
  const float* data;
  const int64_t* slot;
  int64_t top_k, ld;
  const float* row(int64_t n) const { return data + (slot == nullptr ? n : slot[n] / top_k) * ld; }
  int64_t weight(int64_t n) const { return slot == nullptr ? n : slot[n]; }
};

Source source_of(const at::Tensor& x, const std::optional<at::Tensor>& slot, const std::optional<at::Tensor>& rows_of) {
  if (!slot) return {data_of(x, "x"), nullptr, 1, x.stride(0)};
  return {data_of(x, "x"), slot->const_data_ptr<int64_t>(), rows_of->size(1), x.stride(0)};
}

template <typename T>
void load_block(const Source& source, const Block& block, int64_t k, std::vector<T>& out) {
  const int64_t depth = padded_depth<T>(k);
  out.resize(kRows * depth);
  for (int64_t i = 0; i < block.rows; ++i) load_row(k, source.row(block.row + i), out.data() + i * depth);
  std::fill(out.data() + block.rows * depth, out.data() + block.filled_rows * depth, T(0.0f));
}

// out[t] = sum of the rows of token t, in the order of its experts.
void sum_rows(const at::Tensor& rows_of, const Layout& layout, const float* rows, int64_t size, float* out) {
  const int64_t *row = rows_of.const_data_ptr<int64_t>(), tokens = rows_of.size(0), top_k = rows_of.size(1);
  constexpr int64_t kTokens = 64;
  parallel_each(ceil_div(tokens, kTokens), [&](int64_t unit) {
    for (int64_t t = unit * kTokens; t < std::min(tokens, (unit + 1) * kTokens); ++t) {
      float* target = out + t * size;
      std::copy_n(rows + layout.filled_of[row[t * top_k]] * size, size, target);
      for (int64_t k = 1; k < top_k; ++k) {
        const float* source = rows + layout.filled_of[row[t * top_k + k]] * size;
        for (int64_t j = 0; j < size; ++j) target[j] += source[j];
      }
    }
  });
}

// Filled-up rows back to rows.
void keep_rows(const Layout& layout, const float* filled, int64_t size, float* out) {
  parallel_each(static_cast<int64_t>(layout.blocks.size()), [&](int64_t i) {
    const Block& block = layout.blocks[i];
    std::copy_n(filled + block.filled_row * size, block.rows * size, out + block.row * size);
  });
}

at::Tensor collect(const at::Tensor& x, const std::optional<at::Tensor>& rows_of, const Layout& layout,
                   const at::Tensor& filled) {
  const int64_t size = filled.size(1);
  auto out = at::empty({x.size(0), size}, x.options());
  if (rows_of)
    sum_rows(*rows_of, layout, filled.const_data_ptr<float>(), size, out.mutable_data_ptr<float>());
  else
    keep_rows(layout, filled.const_data_ptr<float>(), size, out.mutable_data_ptr<float>());
  return out;
}

// An expert's matrix as the right operand of a product: packed, or in float a matrix [depth, columns] as it is.
template <typename T>
Panels<T> expert_panels(const at::Tensor& matrices, int64_t expert, int64_t depth) {
  const T* data = matrices.const_data_ptr<T>() + expert * matrices.stride(0);
  if constexpr (std::is_same_v<T, float>)
    if (matrices.dim() == 3) return plain_panels(data, matrices.stride(1));
  return packed_panels<T>(data, depth);
}

float sum_of_squares(const float* values, int64_t n) {
  return sum_over(n, [&](int64_t j) { return values[j] * values[j]; });
}

float* squares_of(const at::Tensor& squared_norms, int64_t rows) {
  TORCH_CHECK(squared_norms.scalar_type() == at::kFloat && squared_norms.is_contiguous() && squared_norms.dim() == 2 &&
                  squared_norms.size(0) == rows && squared_norms.size(1) == 2,
              "squared_norms: expected contiguous float32 [", rows, ", 2], got ", squared_norms.sizes());
  return squared_norms.mutable_data_ptr<float>();
}

template <typename T>
std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, const std::optional<at::Tensor>& slot,
                                           const std::optional<at::Tensor>& rows_of, const at::Tensor& gate_up,
                                           const at::Tensor& down, const at::Tensor& tokens_per_expert,
                                           const at::Tensor& weights, int64_t width, std::optional<double> limit,
                                           bool clamp_after_silu, const std::optional<at::Tensor>& squared_norms) {
  const Layout layout = lay_out(tokens_per_expert);
  check(x, slot, rows_of, layout.first.back(), weights);
  float* squares = squared_norms ? squares_of(*squared_norms, layout.first.back()) : nullptr;
  const int64_t hidden = x.size(1), filled = layout.first_filled.back();
  const Source source = source_of(x, slot, rows_of);
  const float *weight = contiguous_data_of(weights, "weights"), bound = limit_of(limit);
  auto projected = at::empty({filled, 2 * width}, x.options()), y = at::empty({filled, hidden}, x.options());
  float *projected_data = projected.mutable_data_ptr<float>(), *y_data = y.mutable_data_ptr<float>();
  const int64_t depth = padded_depth<T>(hidden);
  parallel_each(static_cast<int64_t>(layout.blocks.size()), [&](int64_t i) {
    thread_local std::vector<T> left, rounded;
    thread_local std::vector<float> activated;
    const Block& block = layout.blocks[i];
    load_block(source, block, hidden, left);
    float* gate = projected_data + block.filled_row * 2 * width;
    multiply_block(block.filled_rows, 0, 2 * width, depth, left.data(), depth,
                   expert_panels<T>(gate_up, block.expert, hidden), gate, 2 * width, false);
    activated.resize(kRows * width);
    for (int64_t r = 0; r < block.rows; ++r, gate += 2 * width)
      swiglu_row(width, gate, gate + width, bound, clamp_after_silu, weight[source.weight(block.row + r)],
                 activated.data() + r * width);
    std::fill_n(activated.data() + block.rows * width, (block.filled_rows - block.rows) * width, 0.0f);
    int64_t ld = width;
    const T* down_left = left_operand(activated.data(), ld, block.filled_rows, width, rounded);
    float* output = y_data + block.filled_row * hidden;
    multiply_block(block.filled_rows, 0, hidden, padded_depth<T>(width), down_left, ld,
                   expert_panels<T>(down, block.expert, width), output, hidden, false);
    release<T>();
    if (squares != nullptr) {
      for (int64_t r = 0; r < block.rows; ++r) {
        const float w = weight[source.weight(block.row + r)];
        float* square = squares + 2 * (block.row + r);
        square[0] = w == 0.0f ? -1.0f : sum_of_squares(activated.data() + r * width, width) / w / w;
        square[1] = w == 0.0f ? -1.0f : sum_of_squares(output + r * hidden, hidden) / w / w;
      }
    }
  });
  return {collect(x, rows_of, layout, y), projected};
}

// dW[e] = left[rows of e]^T right[rows of e]: rows [n0, n1) of it, by one thread. Left holds filled-up rows [., n];
// right(first row, rows, scratch) gives a matrix [filled-up rows, k].
template <typename T, typename Right>
void weight_gradient(const Layout& layout, int64_t expert, int64_t n0, int64_t n1, int64_t n, int64_t k,
                     const float* left, const Right& right, float* dw) {
  constexpr int64_t kStep = 512;
  thread_local std::vector<T> packed_left, packed_right;
  thread_local std::vector<float> scratch;
  const int64_t begin = layout.first_filled[expert], end = layout.first_filled[expert + 1];
  float* target = dw + expert * n * k + n0 * k;
  if (begin == end) std::fill_n(target, (n1 - n0) * k, 0.0f);
  for (int64_t f0 = begin; f0 < end; f0 += kStep) {
    const int64_t depth = std::min(kStep, end - f0);
    packed_left.resize((n1 - n0) * depth);
    pack_left(depth, n1 - n0, left + f0 * n + n0, n, packed_left.data());
    const float* rows = right(f0, depth, scratch);
    Panels<T> panels;
    if constexpr (std::is_same_v<T, bf16>) {
      packed_right.resize(packed_size<T>(depth, k));
      pack_rows(depth, k, rows, k, packed_right.data());
      panels = packed_panels<T>(packed_right.data(), depth);
    } else {
      panels = plain_panels(rows, k);
    }
    for (int64_t m = 0; m < n1 - n0; m += kRows)
      multiply_block(std::min(kRows, n1 - n0 - m), 0, k, depth, packed_left.data() + m * depth, depth, panels,
                     target + m * k, k, f0 > begin);
  }
  release<T>();
}

template <typename T>
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& dy, const at::Tensor& x, const std::optional<at::Tensor>& slot,
    const std::optional<at::Tensor>& rows_of, const at::Tensor& gate_up, const at::Tensor& down,
    const at::Tensor& tokens_per_expert, const at::Tensor& weights, const at::Tensor& projected, int64_t width,
    std::optional<double> limit, bool clamp_after_silu) {
  const Layout layout = lay_out(tokens_per_expert);
  check(x, slot, rows_of, layout.first.back(), weights);
  const int64_t hidden = x.size(1), filled = layout.first_filled.back(), experts = tokens_per_expert.numel();
  const Source source = source_of(x, slot, rows_of), grad = source_of(dy, slot, rows_of);
  const float *weight = contiguous_data_of(weights, "weights"), bound = limit_of(limit);
  const float* projected_data = projected.const_data_ptr<float>();
  auto d_projected = at::empty_like(projected), activated = at::empty({filled, width}, x.options());
  auto dx = at::empty({filled, hidden}, x.options()), d_weights = at::empty_like(weights);
  auto dy_filled = at::empty({filled, hidden}, x.options());
  float *d_projected_data = d_projected.mutable_data_ptr<float>(), *activated_data = activated.mutable_data_ptr<float>();
  float *dx_data = dx.mutable_data_ptr<float>(), *d_weight = d_weights.mutable_data_ptr<float>();
  float* dy_data = dy_filled.mutable_data_ptr<float>();
  const auto rows_of_block = [&](int64_t i) {
    thread_local std::vector<T> rounded;
    thread_local std::vector<float> d_activated;
    const Block& block = layout.blocks[i];
    const int64_t at = block.filled_row;
    for (int64_t r = 0; r < block.filled_rows; ++r) {
      float* target = dy_data + (at + r) * hidden;
      r < block.rows ? std::copy_n(grad.row(block.row + r), hidden, target) : std::fill_n(target, hidden, 0.0f);
    }
    int64_t ld = hidden;
    const T* left = left_operand(dy_data + at * hidden, ld, block.filled_rows, hidden, rounded);
    d_activated.resize(kRows * width);
    multiply_block(block.filled_rows, 0, width, padded_depth<T>(hidden), left, ld,
                   expert_panels<T>(down, block.expert, hidden), d_activated.data(), width, false);
    for (int64_t r = 0; r < block.filled_rows; ++r) {
      const float* gate = projected_data + (at + r) * 2 * width;
      float *d_gate = d_projected_data + (at + r) * 2 * width, *h = activated_data + (at + r) * width;
      if (r < block.rows) {
        d_weight[source.weight(block.row + r)] =
            swiglu_row_backward(width, gate, gate + width, bound, clamp_after_silu, weight[source.weight(block.row + r)],
                                d_activated.data() + r * width, d_gate, d_gate + width, h);
      } else {
        std::fill_n(d_gate, 2 * width, 0.0f);
        std::fill_n(h, width, 0.0f);
      }
    }
    ld = 2 * width;
    left = left_operand(d_projected_data + at * 2 * width, ld, block.filled_rows, 2 * width, rounded);
    multiply_block(block.filled_rows, 0, hidden, padded_depth<T>(2 * width), left, ld,
                   expert_panels<T>(gate_up, block.expert, 2 * width), dx_data + at * hidden, hidden, false);
    release<T>();
  };
  auto d_gate_up = at::empty({experts, 2 * width, hidden}, x.options());
  auto d_down = at::empty({experts, hidden, width}, x.options());
  float *d_gate_up_data = d_gate_up.mutable_data_ptr<float>(), *d_down_data = d_down.mutable_data_ptr<float>();
  const int64_t gate_up_units = ceil_div(2 * width, kGradientRows), down_units = ceil_div(hidden, kGradientRows);
  const int64_t units = gate_up_units + down_units;
  const auto rows_of_weights = [&](int64_t expert, int64_t unit) {
    if (unit < gate_up_units) {
      const auto gathered = [&](int64_t filled_row, int64_t count, std::vector<float>& rows) -> const float* {
        const int64_t row = layout.first[expert] + filled_row - layout.first_filled[expert];
        const int64_t real = std::min(count, layout.first[expert + 1] - row);
        rows.resize(count * hidden);
        for (int64_t r = 0; r < real; ++r) std::copy_n(source.row(row + r), hidden, rows.data() + r * hidden);
        std::fill_n(rows.data() + real * hidden, (count - real) * hidden, 0.0f);
        return rows.data();
      };
      const int64_t n0 = unit * kGradientRows, n1 = std::min(2 * width, n0 + kGradientRows);
      weight_gradient<T>(layout, expert, n0, n1, 2 * width, hidden, d_projected_data, gathered, d_gate_up_data);
    } else {
      const auto activations = [&](int64_t filled_row, int64_t, std::vector<float>&) -> const float* {
        return activated_data + filled_row * width;
      };
      const int64_t n0 = (unit - gate_up_units) * kGradientRows, n1 = std::min(hidden, n0 + kGradientRows);
      weight_gradient<T>(layout, expert, n0, n1, hidden, width, dy_data, activations, d_down_data);
    }
  };
  // An expert whole on one thread finds its rows still in the cache; where that would leave threads without work, rows
  // first, then weights. The order of every sum is the same.
  if (layout.largest() * at::get_num_threads() * 4 <= layout.first.back()) {
    parallel_each(experts, [&](int64_t expert) {
      for (int64_t i = layout.first_block[expert]; i < layout.first_block[expert + 1]; ++i) rows_of_block(i);
      for (int64_t unit = 0; unit < units; ++unit) rows_of_weights(expert, unit);
    });
  } else {
    parallel_each(static_cast<int64_t>(layout.blocks.size()), rows_of_block);
    parallel_each(experts * units, [&](int64_t i) { rows_of_weights(i / units, i % units); });
  }
  return {collect(x, rows_of, layout, dx), d_gate_up, d_down, d_weights};
}

std::tuple<at::Tensor, at::Tensor> experts_forward(const at::Tensor& x, const std::optional<at::Tensor>& slot,
                                                   const std::optional<at::Tensor>& rows_of, const at::Tensor& gate_up,
                                                   const at::Tensor& down, const at::Tensor& tokens_per_expert,
                                                   const at::Tensor& weights, int64_t width,
                                                   std::optional<double> limit, bool clamp_after_silu,
                                                   const std::optional<at::Tensor>& squared_norms) {
  auto run = gate_up.scalar_type() == at::kBFloat16 ? forward<bf16> : forward<float>;
  return run(x, slot, rows_of, gate_up, down, tokens_per_expert, weights, width, limit, clamp_after_silu,
             squared_norms);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> experts_backward(
    const at::Tensor& dy, const at::Tensor& x, const std::optional<at::Tensor>& slot,
    const std::optional<at::Tensor>& rows_of, const at::Tensor& gate_up, const at::Tensor& down,
    const at::Tensor& tokens_per_expert, const at::Tensor& weights, const at::Tensor& projected, int64_t width,
    std::optional<double> limit, bool clamp_after_silu) {
  auto run = gate_up.scalar_type() == at::kBFloat16 ? backward<bf16> : backward<float>;
  return run(dy, x, slot, rows_of, gate_up, down, tokens_per_expert, weights, projected, width, limit,
             clamp_after_silu);
}

// Counting sort of the selections by expert, stable.
std::tuple<at::Tensor, at::Tensor, at::Tensor> row_plan(const at::Tensor& experts, int64_t num_experts) {
  TORCH_CHECK(experts.is_contiguous() && experts.scalar_type() == at::kLong, "experts: expected contiguous int64");
  const int64_t slots = experts.numel();
  const int64_t* expert = experts.const_data_ptr<int64_t>();
  auto slot = at::empty({slots}, experts.options()), rows = at::empty_like(experts);
  auto counts = at::zeros({num_experts}, experts.options());
  int64_t *slot_data = slot.mutable_data_ptr<int64_t>(), *row_data = rows.mutable_data_ptr<int64_t>();
  int64_t* count = counts.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < slots; ++i) {
    TORCH_CHECK_INDEX(expert[i] >= 0 && expert[i] < num_experts, "experts: ", expert[i], " is not below ", num_experts);
    ++count[expert[i]];
  }
  std::vector<int64_t> next(num_experts, 0);
  for (int64_t e = 1; e < num_experts; ++e) next[e] = next[e - 1] + count[e - 1];
  for (int64_t i = 0; i < slots; ++i) {
    const int64_t row = next[expert[i]]++;
    slot_data[row] = i;
    row_data[i] = row;
  }
  return {slot, rows, counts};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(steptron_kernels, library) {
  library.def("row_plan(Tensor experts, int num_experts) -> (Tensor, Tensor, Tensor)", &row_plan);
  library.def(
      "experts(Tensor x, Tensor? slot, Tensor? rows_of, Tensor gate_up, Tensor down, Tensor tokens_per_expert, "
      "Tensor weights, int width, float? limit, bool clamp_after_silu, Tensor(a!)? squared_norms=None) "
      "-> (Tensor, Tensor)",
      &experts_forward);
  library.def(
      "experts_backward(Tensor dy, Tensor x, Tensor? slot, Tensor? rows_of, Tensor gate_up, Tensor down, "
      "Tensor tokens_per_expert, Tensor weights, Tensor projected, int width, float? limit, bool clamp_after_silu) "
      "-> (Tensor, Tensor, Tensor, Tensor)",
      &experts_backward);
}

}  // namespace steptron
