// Cross entropy of a linear head and its gradients, some hundred tokens at a time. The mathematics stands in plain.py.
//
// Logits of a chunk of tokens are made block by block: kRows tokens times a group of vocabulary panels, whose
// exponentials are taken against the block's own maximum while they are in the cache. Once a token's blocks are all
// there, one factor for each block turns them into the softmax.
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <memory>
#include <tuple>
#include <vector>

#include "../csrc/gemm.h"
#include "../csrc/tensors.h"

namespace steptron {
namespace {

// Counted tokens are filled up to a multiple of this with rows of zeros: few sizes of blocks, few compiled kernels.
constexpr int64_t kRowMultiple = 16;
constexpr int64_t kGroupWeights = 1 << 17;  // elements of the weight in a group of panels: they stay in the L2 cache
constexpr int64_t kMostPanels = 8;
constexpr int64_t kChunkLogits = 1 << 21;  // logits alive at once, as long as that leaves kFewestRows tokens
constexpr int64_t kFewestRows = 256, kMostRows = 512;

template <typename T>
std::unique_ptr<T[]> scratch(int64_t size) {
  return std::make_unique_for_overwrite<T[]>(static_cast<size_t>(size));
}

// exp(row - maximum) in place; returns the maximum and the sum. A logit that is not finite makes the sum NaN.
std::tuple<float, float> exponentials(float* row, int64_t size) {
  float maximum = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : maximum)
  for (int64_t j = 0; j < size; ++j) maximum = row[j] > maximum ? row[j] : maximum;
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < size; ++j) {
    const float logit = row[j];
    row[j] = exp_of(logit - maximum);
    sum += row[j] + logit * 0.0f;
  }
  return {maximum, sum};
}

template <typename T>
class LinearCrossEntropy {
 public:
  // h is [rows, hidden] and contiguous, `counted` of its rows are tokens and the rest zeros.
  LinearCrossEntropy(const float* h, const int64_t* labels, int64_t rows, int64_t counted, int64_t hidden,
                     int64_t vocab, Panels<T> weight_t, Panels<T> weight, float* grad_h, float* grad_w)
      : h_(h), labels_(labels), rows_(rows), counted_(counted), hidden_(hidden), vocab_(vocab), weight_t_(weight_t),
        weight_(weight), grad_h_(grad_h), grad_w_(grad_w), panels_(ceil_div(vocab, kPanel)) {
    panels_per_group_ = std::clamp<int64_t>(kGroupWeights / (std::max<int64_t>(hidden, 1) * kPanel), 1, kMostPanels);
    groups_ = ceil_div(panels_, panels_per_group_);
    const int64_t fitting = kChunkLogits / std::max<int64_t>(vocab, 1) / kRows * kRows;
    chunk_ = std::min(rows, std::clamp(fitting, kFewestRows, kMostRows));
    // Not a multiple of a large power of two, which would put a column into few sets of the cache.
    ld_ = panels_ * kPanel + 16;
    maxima_ = scratch<float>(chunk_ * groups_);
    sums_ = scratch<float>(chunk_ * groups_);
    label_logits_ = scratch<float>(chunk_);
    losses_ = scratch<double>(chunk_);
    if (needs_gradients()) logits_ = scratch<float>(chunk_ * ld_);
    if constexpr (std::is_same_v<T, bf16>) {
      left_ = scratch<T>(rows * padded_depth<T>(hidden));
      if (grad_h != nullptr) rounded_ = scratch<T>(chunk_ * ld_);
      if (grad_w != nullptr) right_ = scratch<T>(packed_size<T>(chunk_, hidden));
    }
  }

  double run() {
    round_hidden();
    double total = 0.0;
    for (int64_t start = 0; start < rows_; start += chunk_) {
      const int64_t rows = std::min(chunk_, rows_ - start);
      make_exponentials(start, rows);
      total += normalise(start, rows);
      if (!needs_gradients()) continue;
      finish_vocabulary(start, rows);
      if (grad_h_ != nullptr) hidden_gradient(start, rows);
    }
    return total;
  }

 private:
  bool needs_gradients() const { return grad_h_ != nullptr || grad_w_ != nullptr; }

  void round_hidden() {
    if constexpr (std::is_same_v<T, bf16>) {
      const int64_t depth = padded_depth<T>(hidden_);
      parallel_each(ceil_div(rows_, kRows), [&](int64_t block) {
        auto* out = reinterpret_cast<uint16_t*>(left_.get());
        for (int64_t i = block * kRows; i < std::min(rows_, (block + 1) * kRows); ++i) {
          for (int64_t j = 0; j < hidden_; ++j)
            out[i * depth + j] = static_cast<uint16_t>(bf16_bits(h_[i * hidden_ + j]) >> 16);
          if (depth > hidden_) out[i * depth + hidden_] = 0;
        }
      });
    }
  }

  const T* hidden_rows(int64_t row) const {
    if constexpr (std::is_same_v<T, bf16>)
      return left_.get() + row * padded_depth<T>(hidden_);
    else
      return h_ + row * hidden_;
  }

  void make_exponentials(int64_t start, int64_t rows) {
    const int64_t blocks = ceil_div(rows, kRows), depth = padded_depth<T>(hidden_);
    // Blocks of the same group follow each other: its weights stay in the cache.
    parallel_each(blocks * groups_, [&](int64_t unit) {
      thread_local std::vector<float> block_logits;
      const int64_t group = unit / blocks, r0 = unit % blocks * kRows, count = std::min(kRows, rows - r0);
      const int64_t n0 = group * panels_per_group_ * kPanel;
      const int64_t n1 = std::min(vocab_, n0 + panels_per_group_ * kPanel), width = n1 - n0;
      float* out = nullptr;
      int64_t ld = ld_;
      if (needs_gradients()) {
        out = logits_.get() + r0 * ld_;
      } else {
        ld = panels_per_group_ * kPanel;
        block_logits.resize(kRows * ld);
        out = block_logits.data() - n0;
      }
      multiply_block(count, n0, n1, depth, hidden_rows(start + r0), depth, weight_t_, out, ld, false);
      release<T>();
      for (int64_t i = 0; i < count; ++i) {
        float* row = out + i * ld;
        const int64_t r = r0 + i, label = labels_[start + r];
        if (label >= n0 && label < n1) label_logits_[r] = row[label];
        std::tie(maxima_[r * groups_ + group], sums_[r * groups_ + group]) = exponentials(row + n0, width);
      }
    });
  }

  // Sum of the chunk's losses; leaves the factor of each block of exponentials in `sums_`.
  double normalise(int64_t start, int64_t rows) {
    parallel_each(ceil_div(rows, kRows), [&](int64_t block) {
      for (int64_t r = block * kRows; r < std::min(rows, (block + 1) * kRows); ++r) {
        float *maxima = maxima_.get() + r * groups_, *sums = sums_.get() + r * groups_;
        const float maximum = *std::max_element(maxima, maxima + groups_);
        double sum = 0.0;
        for (int64_t g = 0; g < groups_; ++g) {
          const double relative = std::exp(static_cast<double>(maxima[g]) - maximum);
          sum += relative * sums[g];
          maxima[g] = static_cast<float>(relative);
        }
        const bool counts = start + r < counted_;
        losses_[r] = counts ? std::log(sum) + (static_cast<double>(maximum) - label_logits_[r]) : 0.0;
        for (int64_t g = 0; g < groups_; ++g) sums[g] = counts ? static_cast<float>(maxima[g] / sum) : 0.0f;
      }
    });
    double total = 0.0;
    for (int64_t r = 0; r < rows; ++r) total += losses_[r];
    return total;
  }

  // Exponentials to gradients of the logits, and from them the gradient of the weight, a panel at a time.
  void finish_vocabulary(int64_t start, int64_t rows) {
    Panels<T> hidden_panels{};
    if constexpr (std::is_same_v<T, float>) hidden_panels = plain_panels(h_ + start * hidden_, hidden_);
    if constexpr (std::is_same_v<T, bf16>) {
      if (grad_w_ != nullptr) {
        parallel_each(ceil_div(hidden_, kPanel), [&](int64_t p) {
          const int64_t k0 = p * kPanel;
          pack_rows(rows, std::min(kPanel, hidden_ - k0), h_ + start * hidden_ + k0, hidden_,
                    right_.get() + k0 * padded_depth<T>(rows));
        });
        hidden_panels = packed_panels<T>(right_.get(), rows);
      }
    }
    parallel_each(panels_, [&](int64_t panel) {
      thread_local std::vector<T> transposed;
      const int64_t n0 = panel * kPanel, width = std::min(kPanel, vocab_ - n0), group = panel / panels_per_group_;
      for (int64_t r = 0; r < rows; ++r) {
        float* row = logits_.get() + r * ld_ + n0;
        const float factor = sums_[r * groups_ + group];
        for (int64_t j = 0; j < width; ++j) row[j] *= factor;
        const int64_t label = labels_[start + r] - n0;
        if (label >= 0 && label < width && start + r < counted_) row[label] -= 1.0f;
        if constexpr (std::is_same_v<T, bf16>) {
          if (rounded_ == nullptr) continue;
          auto* out = reinterpret_cast<uint16_t*>(rounded_.get()) + r * ld_ + n0;
          for (int64_t j = 0; j < width; ++j) out[j] = static_cast<uint16_t>(bf16_bits(row[j]) >> 16);
          if (width & 1) out[width] = 0;
        }
      }
      if (grad_w_ == nullptr) return;
      const int64_t depth = padded_depth<T>(rows);
      transposed.resize(kPanel * depth);
      pack_left(rows, width, logits_.get() + n0, ld_, transposed.data());
      multiply_block(width, 0, hidden_, depth, transposed.data(), depth, hidden_panels, grad_w_ + n0 * hidden_,
                     hidden_, start > 0);
      release<T>();
    });
  }

  void hidden_gradient(int64_t start, int64_t rows) {
    const int64_t blocks = ceil_div(rows, kRows), panels = ceil_div(hidden_, kPanel);
    const T* left;
    if constexpr (std::is_same_v<T, bf16>)
      left = rounded_.get();
    else
      left = logits_.get();
    // As few cuts of the columns as give the threads something to do: each reads the left operand anew.
    const int64_t cuts = std::min(panels, ceil_div(int64_t{16}, blocks));
    const int64_t columns = ceil_div(panels, cuts) * kPanel;
    parallel_each(blocks * cuts, [&](int64_t unit) {
      const int64_t r0 = unit / cuts * kRows, c0 = unit % cuts * columns;
      if (c0 >= hidden_) return;
      multiply_block(std::min(kRows, rows - r0), c0, std::min(hidden_, c0 + columns), padded_depth<T>(vocab_),
                     left + r0 * ld_, ld_, weight_, grad_h_ + (start + r0) * hidden_, hidden_, false);
      release<T>();
    });
  }

  const float* h_;
  const int64_t* labels_;
  int64_t rows_, counted_, hidden_, vocab_;
  Panels<T> weight_t_, weight_;
  float *grad_h_, *grad_w_;
  int64_t panels_, panels_per_group_, groups_, chunk_, ld_;
  // [chunk, groups]
  std::unique_ptr<float[]> maxima_, sums_;
  // [chunk]
  std::unique_ptr<float[]> label_logits_;
  std::unique_ptr<double[]> losses_;
  // [chunk, ld]: exponentials of the logits, then gradients; the latter rounded
  std::unique_ptr<float[]> logits_;
  std::unique_ptr<T[]> rounded_;
  // Rounded hidden states, as left operand and, for a chunk, as right operand.
  std::unique_ptr<T[]> left_, right_;
};

// The rows of h that count, filled up with zeros.
at::Tensor gather(const float* h, int64_t ld, const std::vector<int64_t>& tokens, int64_t rows, int64_t hidden,
                  const at::TensorOptions& options) {
  auto out = at::empty({rows, hidden}, options);
  float* target = out.mutable_data_ptr<float>();
  const auto counted = static_cast<int64_t>(tokens.size());
  parallel_each(ceil_div(rows, kRows), [&](int64_t block) {
    for (int64_t i = block * kRows; i < std::min(rows, (block + 1) * kRows); ++i) {
      if (i < counted)
        std::copy_n(h + tokens[i] * ld, hidden, target + i * hidden);
      else
        std::fill_n(target + i * hidden, hidden, 0.0f);
    }
  });
  return out;
}

at::Tensor spread(const at::Tensor& grad, const std::vector<int64_t>& tokens, int64_t count) {
  const int64_t hidden = grad.size(1);
  auto out = at::zeros({count, hidden}, grad.options());
  const float* source = grad.const_data_ptr<float>();
  float* target = out.mutable_data_ptr<float>();
  for (size_t i = 0; i < tokens.size(); ++i) std::copy_n(source + i * hidden, hidden, target + tokens[i] * hidden);
  return out;
}

// Loss, and the gradients that are asked for (otherwise empty) of h and of the weight.
std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_cross_entropy(const at::Tensor& h, const at::Tensor& weight,
                                                                    const at::Tensor& packed_transposed,
                                                                    const std::optional<at::Tensor>& packed,
                                                                    const at::Tensor& labels, const at::Tensor& mask,
                                                                    bool needs_h, bool needs_w) {
  const int64_t count = h.size(0), hidden = h.size(1), vocab = weight.size(0);
  TORCH_CHECK(weight.dim() == 2 && weight.size(1) == hidden, "weight: expected [V, ", hidden, "], got ",
              weight.sizes());
  TORCH_CHECK(labels.scalar_type() == at::kLong && labels.numel() == count && labels.is_contiguous(),
              "labels: expected int64 [", count, "], contiguous");
  TORCH_CHECK(mask.scalar_type() == at::kBool && mask.numel() == count && mask.is_contiguous(),
              "mask: expected bool [", count, "], contiguous");
  const int64_t* all_labels = labels.const_data_ptr<int64_t>();
  const bool* counts = mask.const_data_ptr<bool>();
  std::vector<int64_t> tokens, token_labels;
  tokens.reserve(count);
  token_labels.reserve(count + kRowMultiple);
  for (int64_t t = 0; t < count; ++t) {
    if (!counts[t]) continue;
    TORCH_CHECK_INDEX(all_labels[t] >= 0 && all_labels[t] < vocab, "labels: token ", t, " has label ", all_labels[t],
                      ", which is not in a vocabulary of ", vocab);
    tokens.push_back(t);
    token_labels.push_back(all_labels[t]);
  }
  const auto counted = static_cast<int64_t>(tokens.size());
  if (counted == 0)
    return {at::zeros({}, h.options()), at::zeros({needs_h ? count : 0, hidden}, h.options()),
            at::zeros({needs_w ? vocab : 0, hidden}, h.options())};

  const int64_t rows = ceil_div(counted, kRowMultiple) * kRowMultiple;
  token_labels.resize(rows, 0);
  const float* data = data_of(h, "h");
  const bool all_count = counted == count;
  const bool direct = all_count && rows == count && h.is_contiguous();
  const at::Tensor compact = direct ? h : gather(data, h.stride(0), tokens, rows, hidden, h.options());
  auto grad_h = at::empty({needs_h ? rows : 0, hidden}, h.options());
  auto grad_w = at::empty({needs_w ? vocab : 0, hidden}, h.options());

  const auto run = [&]<typename T>(Panels<T> weight_t, Panels<T> weight_panels) {
    return LinearCrossEntropy<T>(compact.const_data_ptr<float>(), token_labels.data(), rows, counted, hidden, vocab,
                                 weight_t, weight_panels, needs_h ? grad_h.mutable_data_ptr<float>() : nullptr,
                                 needs_w ? grad_w.mutable_data_ptr<float>() : nullptr)
        .run();
  };
  double total;
  if (packed_transposed.scalar_type() == at::kBFloat16) {
    TORCH_CHECK(!needs_h || packed.has_value(), "packed: the gradient of h needs the packed weight");
    total = run(packed_panels(packed_transposed.const_data_ptr<bf16>(), hidden),
                needs_h ? packed_panels(packed->const_data_ptr<bf16>(), vocab) : Panels<bf16>{});
  } else {
    total = run(packed_panels(packed_transposed.const_data_ptr<float>(), hidden),
                plain_panels(contiguous_data_of(weight, "weight"), hidden));
  }
  auto loss = at::scalar_tensor(total, h.options());
  if (needs_h) grad_h = all_count ? grad_h.narrow(0, 0, count) : spread(grad_h, tokens, count);
  return {loss, grad_h, grad_w};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(steptron_kernels, library) {
  library.def(
      "linear_cross_entropy(Tensor h, Tensor weight, Tensor packed_transposed, Tensor? packed, Tensor labels, "
      "Tensor mask, bool needs_h, bool needs_w) -> (Tensor, Tensor, Tensor)",
      &linear_cross_entropy);
}

}  // namespace steptron
