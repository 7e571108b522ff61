// Attention over the keys of a window or of all the past, forward and backward. The mathematics stands in plain.py.
//
// A unit of work takes the queries of one group of one sequence: a block of tokens times the group's heads, against
// the keys that the block can see, a step of keys at a time. Scores stand transposed, [keys, columns], with one column
// per head and token: so the softmax goes down the columns without any sum across a vector, and the probabilities are
// the operand of every product as they are, with no transposition but of the small blocks of q, o and their gradients.
// The softmax is made of powers of two.
//
// The backward keeps the logarithm of each query's sum and computes the probabilities again. The keys' gradients are
// sums over the queries: the queries are cut into a few segments, each sums on its own, and the segments are added up
// in order. A sink is one more term of a query's sum, with no value.
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <memory>
#include <tuple>

#include "../csrc/gemm.h"
#include "../csrc/tensors.h"
#include "../csrc/transpose.h"

namespace steptron {
namespace {

constexpr int64_t kAlign = 16;              // keys are taken by so many, and columns of a head
constexpr int64_t kColumns = 64;            // columns of a block, at least
constexpr int64_t kScores = 16384;          // scores of a step, about
constexpr int64_t kUnits = 16;              // units of the backward, at least
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504088896341f;

int64_t align_down(int64_t x) { return x / kAlign * kAlign; }
int64_t align_up(int64_t x) { return ceil_div(x, kAlign) * kAlign; }

// 2^x for x up to 1, as exact as exp_of; 0 below -126.5. NaN stays NaN.
inline float power_of_two(float x) {
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits: with 127, those of the exponent.
  constexpr float kRound = 12582912.0f + 127.0f;
  // Rounding of very large scores may leave x above 1.
  const float clamped = x < -127.0f ? -127.0f : (x > 1.0f ? 1.0f : x);
  const float shifted = clamped + kRound;
  const float r = clamped - (shifted - kRound);
  // Minimax polynomial of 2^r for |r| <= 1/2, relative error 2e-9.
  float p = 1.5353362e-4f;
  p = p * r + 1.3398874e-3f;
  p = p * r + 9.6184374e-3f;
  p = p * r + 5.5503325e-2f;
  p = p * r + 2.4022648e-1f;
  p = p * r + 6.9314720e-1f;
  p = p * r + 1.0f;
  return p * bits_to_float(float_to_bits(shifted) << 23);
}

// A tensor [tokens, B, heads, D] whose last dimension is contiguous.
struct Rows {
  const float* data;
  int64_t token, batch, head;

  Rows(const at::Tensor& x, const char* name)
      : data(data_of(x, name)), token(x.stride(0)), batch(x.stride(1)), head(x.stride(2)) {}
  const float* at(int64_t t, int64_t b, int64_t h) const { return data + t * token + b * batch + h * head; }
};

// A matrix [m, n] transposed into dst [n, width]: zeros where m < width.
void transpose_padded(int64_t m, int64_t n, const float* src, int64_t ld_src, float* dst, int64_t ld_dst,
                      int64_t width) {
  transpose(m, n, src, ld_src, dst, ld_dst);
  for (int64_t j = 0; m < width && j < n; ++j) std::fill_n(dst + j * ld_dst + m, width - m, 0.0f);
}

struct Range {
  int64_t begin, end;
};

// Smallest and largest document of some tokens.
struct Extremes {
  int64_t low, high;
  bool meet(Extremes other) const { return low <= other.high && other.low <= high; }
  bool only(int64_t document) const { return low == document && high == document; }
};

// Sizes of a call and how the work is cut: by sizes alone.
struct Layout {
  int64_t S, T, B, n, g, r, D, offset, window;
  int64_t block;        // query tokens of a block
  int64_t columns;      // of a block: column h * block + t is head h of the group, token t
  int64_t blocks;       // of queries
  int64_t padded_keys;  // T in whole kAlign
  int64_t ld_keys;      // of transposed keys: an odd number of kAlign, so that rows do not share cache sets
  int64_t step;         // keys at once
  float scale;          // of the scores
  float unit;           // of the products q k: what makes a score's exponential a power of two

  Layout(const at::Tensor& q, const at::Tensor& k, int64_t query_offset, int64_t visible)
      : S(q.size(0)), T(k.size(0)), B(q.size(1)), n(q.size(2)), g(k.size(2)), r(n / std::max<int64_t>(g, 1)),
        D(q.size(3)), offset(query_offset), window(visible) {
    block = kAlign * ceil_div(kColumns, kAlign * std::max<int64_t>(r, 1));
    columns = r * block;
    blocks = ceil_div(S, block);
    padded_keys = align_up(T);
    ld_keys = padded_keys + (padded_keys / kAlign % 2 == 0 ? kAlign : 0);
    step = std::clamp(align_down(kScores / std::max<int64_t>(columns, 1)), kAlign, int64_t{128});
    scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(D)));
    unit = scale * kLog2E;
  }

  int64_t first_query(int64_t i) const { return i * block; }
  int64_t queries_of(int64_t i) const { return std::min(block, S - i * block); }
  // Keys that some query of the block may see, in whole kAlign.
  Range keys_of(int64_t i) const {
    const int64_t first = offset + first_query(i);
    return {align_down(std::max<int64_t>(0, first - window + 1)), align_up(first + queries_of(i))};
  }
};

// Documents of the keys, with the extremes of every kAlign keys.
class Documents {
 public:
  Documents(const c10::optional<at::Tensor>& documents, const Layout& l) : length_(l.T) {
    if (!documents.has_value()) return;
    TORCH_CHECK(documents->scalar_type() == at::kLong && documents->is_contiguous(),
                "documents: expected contiguous int64");
    data_ = documents->const_data_ptr<int64_t>();
    pieces_ = l.padded_keys / kAlign;
    extremes_.resize(l.B * pieces_);
    parallel_each(l.B * pieces_, [&](int64_t unit) {
      const int64_t first = unit % pieces_ * kAlign;
      extremes_[unit] = extremes(unit / pieces_, first, std::min(l.T, first + kAlign));
    });
  }

  bool present() const { return data_ != nullptr; }
  int64_t of(int64_t b, int64_t key) const { return data_[b * length_ + std::min(key, length_ - 1)]; }

  Extremes extremes(int64_t b, int64_t begin, int64_t end) const {
    const auto [low, high] = std::minmax_element(data_ + b * length_ + begin, data_ + b * length_ + end);
    return {*low, *high};
  }

  // Whether some of the keys, in whole kAlign, can be in documents within these extremes.
  bool meet(int64_t b, int64_t begin, int64_t end, Extremes documents) const {
    const Extremes* all = extremes_.data() + b * pieces_;
    return std::any_of(all + begin / kAlign, all + end / kAlign, [&](Extremes keys) { return keys.meet(documents); });
  }

 private:
  const int64_t* data_ = nullptr;
  int64_t length_, pieces_ = 0;
  std::vector<Extremes> extremes_;
};

// What a block of queries sees.
class Visibility {
 public:
  Visibility(const Layout& l, const Documents& documents, int64_t b, int64_t i)
      : l_(l), documents_(documents), b_(b), first_(l.offset + l.first_query(i)), keys_(l.keys_of(i)) {
    if (!documents.present()) return;
    extremes_ = documents.extremes(b, first_, first_ + l.queries_of(i));
    thread_local std::vector<int64_t> numbers;
    numbers.resize(l.block);
    for (int64_t t = 0; t < l.block; ++t) numbers[t] = documents.of(b, first_ + t);
    numbers_ = numbers.data();
    while (keys_.begin + kAlign < keys_.end && !documents.meet(b, keys_.begin, keys_.begin + kAlign, extremes_))
      keys_.begin += kAlign;
  }

  // Calls body(begin, end) for every step of keys of which some may be seen, first to last, steps about equal.
  template <typename Body>
  void for_steps(const Body& body) const {
    const int64_t count = keys_.end - keys_.begin;
    const int64_t step = align_up(ceil_div(count, ceil_div(count, l_.step)));
    for (int64_t begin = keys_.begin; begin < keys_.end; begin += step) {
      const int64_t end = std::min(keys_.end, begin + step);
      if (!documents_.present() || documents_.meet(b_, begin, end, extremes_)) body(begin, end);
    }
  }

  // Sets the scores [keys, columns] of what is not seen to -infinity.
  void mask(int64_t begin, int64_t end, float* scores) const {
    thread_local std::vector<int32_t> seen;
    seen.resize(l_.block);
    for (int64_t key = begin; key < end; ++key) {
      // Tokens low .. high of the block are at or after the key, and within its window.
      const int64_t low = std::clamp<int64_t>(key - first_, 0, l_.block);
      const int64_t high = std::clamp<int64_t>(key - first_ + l_.window, 0, l_.block);
      const int64_t number = documents_.present() ? documents_.of(b_, key) : 0;
      const bool one_document = !documents_.present() || extremes_.only(number);
      if (low == 0 && high == l_.block && one_document) continue;
      for (int64_t t = 0; t < l_.block; ++t) seen[t] = t >= low && t < high;
      if (!one_document)
        for (int64_t t = 0; t < l_.block; ++t) seen[t] &= numbers_[t] == number;
      float* row = scores + (key - begin) * l_.columns;
      for (int64_t h = 0; h < l_.r; ++h)
        for (int64_t t = 0; t < l_.block; ++t) row[h * l_.block + t] = seen[t] ? row[h * l_.block + t] : -kInfinity;
    }
  }

 private:
  const Layout& l_;
  const Documents& documents_;
  int64_t b_, first_;
  Range keys_;
  Extremes extremes_{0, 0};
  const int64_t* numbers_ = nullptr;
};

void store(int64_t count, const float* source, float* target) { std::copy_n(source, count, target); }

void store(int64_t count, const float* source, bf16* target) {
  auto* bits = reinterpret_cast<uint16_t*>(target);
  for (int64_t e = 0; e < count; ++e) bits[e] = static_cast<uint16_t>(bf16_bits(source[e]) >> 16);
}

// Buffers of a thread, out of one allocation that is kept.
class Scratch {
 public:
  explicit Scratch(int64_t floats) {
    thread_local std::vector<float> memory;
    if (static_cast<int64_t>(memory.size()) < floats) memory.resize(floats);
    next_ = memory.data();
  }
  template <typename T>
  T* take(int64_t count) {
    const int64_t floats = align_up(ceil_div(count * static_cast<int64_t>(sizeof(T)), sizeof(float)));
    return reinterpret_cast<T*>(std::exchange(next_, next_ + floats));
  }

 private:
  float* next_;
};

// Keys or values of every group as the operands of products.
template <typename T>
class Packed {
 public:
  Packed(const Layout& l, int64_t elements)
      : l_(l), data_(std::make_unique_for_overwrite<T[]>(l.B * l.g * elements)), elements_(elements) {}

  // As rows [padded_keys, padded D], zeros after the last.
  static Packed rows(const Layout& l, const Rows& x) {
    const int64_t depth = padded_depth<T>(l.D);
    Packed packed(l, l.padded_keys * depth);
    packed.for_pieces([&](int64_t pair, int64_t first) {
      for (int64_t t = first; t < first + kAlign; ++t) {
        T* target = packed.data_.get() + pair * packed.elements_ + t * depth;
        std::fill_n(target, depth, T(0.0f));
        if (t < l.T) store(l.D, x.at(t, pair / l.g, pair % l.g), target);
      }
    });
    return packed;
  }

  // Transposed, [D, ld_keys].
  static Packed columns(const Layout& l, const Rows& x) {
    Packed packed(l, l.D * l.ld_keys);
    packed.for_pieces([&](int64_t pair, int64_t first) {
      thread_local std::vector<float> piece;
      piece.resize(l.D * kAlign);
      transpose_padded(std::min(kAlign, l.T - first), l.D, x.at(first, pair / l.g, pair % l.g), x.token, piece.data(),
                       kAlign, kAlign);
      T* target = packed.data_.get() + pair * packed.elements_ + first;
      for (int64_t d = 0; d < l.D; ++d) store(kAlign, piece.data() + d * kAlign, target + d * l.ld_keys);
    });
    return packed;
  }

  const T* rows_from(int64_t pair, int64_t key) const {
    return data_.get() + pair * elements_ + key * padded_depth<T>(l_.D);
  }
  const T* columns_from(int64_t pair, int64_t key) const { return data_.get() + pair * elements_ + key; }

 private:
  template <typename Body>
  void for_pieces(const Body& body) const {
    const int64_t pieces = l_.padded_keys / kAlign;
    parallel_each(l_.B * l_.g * pieces, [&](int64_t unit) { body(unit / pieces, unit % pieces * kAlign); });
  }

  const Layout& l_;
  std::unique_ptr<T[]> data_;
  int64_t elements_;
};

// A block of queries, or of their gradients, as right operands: [D, columns] and, if wanted, [columns, D].
void take_block(const Layout& l, const Rows& x, int64_t b, int64_t group, int64_t i, float* columns, float* rows) {
  const int64_t count = l.queries_of(i);
  for (int64_t h = 0; h < l.r; ++h) {
    const float* source = x.at(l.first_query(i), b, group * l.r + h);
    transpose_padded(count, l.D, source, x.token, columns + h * l.block, l.columns, l.block);
    if (rows == nullptr) continue;
    float* target = rows + h * l.block * l.D;
    for (int64_t t = 0; t < count; ++t) std::copy_n(source + t * x.token, l.D, target + t * l.D);
    std::fill_n(target + count * l.D, (l.block - count) * l.D, 0.0f);
  }
}

void take_block(const Layout& l, const Rows& x, int64_t b, int64_t group, int64_t i, bf16* columns, bf16* rows) {
  const int64_t count = l.queries_of(i), depth = padded_depth<bf16>(l.D);
  thread_local std::vector<bf16> rounded;
  rounded.resize(l.columns * depth);
  if (count < l.block || depth > l.D) std::fill_n(reinterpret_cast<uint16_t*>(rounded.data()), l.columns * depth, 0);
  for (int64_t h = 0; h < l.r; ++h) {
    const float* source = x.at(l.first_query(i), b, group * l.r + h);
    bf16* target = rounded.data() + h * l.block * depth;
    for (int64_t t = 0; t < count; ++t) store(l.D, source + t * x.token, target + t * depth);
  }
  transpose(l.columns, depth / 2, reinterpret_cast<const uint32_t*>(rounded.data()), depth / 2,
            reinterpret_cast<uint32_t*>(columns), l.columns);
  if (rows == nullptr) return;
  for (int64_t c = 0; c < l.columns; c += 2) {
    const auto* first = reinterpret_cast<const uint16_t*>(rounded.data()) + c * depth;
    const uint16_t* second = first + depth;
    auto* target = reinterpret_cast<uint32_t*>(rows) + c / 2 * l.D;
    for (int64_t d = 0; d < l.D; ++d) target[d] = first[d] | static_cast<uint32_t>(second[d]) << 16;
  }
}

// Writes [D, columns] to a contiguous [S, B, n, D].
void put_columns(const Layout& l, const float* columns, int64_t b, int64_t group, int64_t i, float* x) {
  const int64_t ld = l.B * l.n * l.D;
  for (int64_t h = 0; h < l.r; ++h)
    transpose(l.D, l.queries_of(i), columns + h * l.block, l.columns,
              x + l.first_query(i) * ld + (b * l.n + group * l.r + h) * l.D, ld);
}

// [rows, columns] times one factor per column.
void scale_columns(int64_t rows, int64_t columns, const float* factors, float* x) {
  for (int64_t d = 0; d < rows; ++d)
    for (int64_t c = 0; c < columns; ++c) x[d * columns + c] *= factors[c];
}

// A bfloat16 in the upper 16 bits, what is below has to be dropped: to nearest, halves away from zero. NaN stays NaN if
// it came out of a product of bfloat16 operands: its lower bits are zero, so that nothing is carried.
inline uint32_t rounded_bits(float x) { return float_to_bits(x) + 0x8000u; }

// Values of two rows [columns] of a right operand: for bfloat16 they stand side by side.
inline void store_pair(float first, float second, int64_t c, int64_t columns, float* pair) {
  pair[c] = first;
  pair[columns + c] = second;
}

inline void store_pair(float first, float second, int64_t c, int64_t, bf16* pair) {
  reinterpret_cast<uint32_t*>(pair)[c] = (rounded_bits(first) >> 16) | (rounded_bits(second) & 0xffff0000u);
}

// State of a block's softmax: of every column the largest product q k so far, the same as a logarithm (times `unit`;
// 0 where nothing has been seen), and the sum of powers relative to it.
struct Running {
  float *largest, *shift, *sums;
  float* rescale;  // what sums made before the last step have to be multiplied with
};

// A step of the softmax: products q k become powers relative to the largest so far, as a right operand.
template <typename T>
void softmax_step(int64_t keys, int64_t columns, float unit, const float* products, const Running& running, T* powers) {
  float *__restrict largest = running.largest, *__restrict shift = running.shift;
  float *__restrict sums = running.sums, *__restrict rescale = running.rescale;
  for (int64_t c = 0; c < columns; ++c) rescale[c] = largest[c] == -kInfinity ? -kInfinity : shift[c];
  for (int64_t j = 0; j < keys; ++j) {
    const float* row = products + j * columns;
    for (int64_t c = 0; c < columns; ++c) largest[c] = row[c] > largest[c] ? row[c] : largest[c];
  }
  for (int64_t c = 0; c < columns; ++c) {
    // -infinity - -infinity must not become NaN.
    shift[c] = largest[c] == -kInfinity ? 0.0f : largest[c] * unit;
    rescale[c] = power_of_two(rescale[c] - shift[c]);
    sums[c] *= rescale[c];
  }
  for (int64_t j = 0; j < keys; j += 2) {
    const float *first = products + j * columns, *second = first + columns;
    T* __restrict pair = powers + j * columns;
#pragma GCC ivdep
    for (int64_t c = 0; c < columns; ++c) {
      const float a = power_of_two(first[c] * unit - shift[c]), b = power_of_two(second[c] * unit - shift[c]);
      sums[c] += a + b;
      store_pair(a, b, c, columns, pair);
    }
  }
}

// Every second unit from the end, so that a range of units holds early and late blocks alike: late ones see more.
int64_t balanced(int64_t unit, int64_t count) { return unit % 2 == 0 ? unit / 2 : count - 1 - unit / 2; }

template <typename T>
void forward(const Layout& l, const Documents& documents, const Rows& q, const Rows& k, const Rows& v,
             const float* sinks, float* output, float* all_shifts, float* all_sums) {
  const auto keys = Packed<T>::rows(l, k);
  const auto values = Packed<T>::columns(l, v);
  const int64_t C = l.columns, depth = padded_depth<T>(l.D);
  parallel_each(l.B * l.g * l.blocks, [&](int64_t unit) {
    const int64_t pair = unit / l.blocks, b = pair / l.g, group = pair % l.g, i = balanced(unit % l.blocks, l.blocks);
    Scratch scratch((depth + l.D + 2 * l.step + 2) * C + 6 * kAlign);
    T* q_DC = scratch.take<T>(depth * C);
    float *o_DC = scratch.take<float>(l.D * C), *scores_KC = scratch.take<float>(l.step * C);
    T* powers_KC = scratch.take<T>(l.step * C);
    float *shift = all_shifts + (pair * l.blocks + i) * C, *sums = all_sums + (pair * l.blocks + i) * C;
    const Running running{scratch.take<float>(C), shift, sums, scratch.take<float>(C)};
    take_block(l, q, b, group, i, q_DC, static_cast<T*>(nullptr));
    for (int64_t h = 0; h < l.r; ++h) {
      const float sink = sinks ? sinks[group * l.r + h] : -kInfinity;
      std::fill_n(running.largest + h * l.block, l.block, sink / l.scale);
      std::fill_n(shift + h * l.block, l.block, sink * kLog2E);
    }
    std::fill_n(sums, C, sinks ? 1.0f : 0.0f);
    const Visibility visibility(l, documents, b, i);
    bool first = true;
    visibility.for_steps([&](int64_t begin, int64_t end) {
      tile(end - begin, C, depth, keys.rows_from(pair, begin), depth, q_DC, C, scores_KC, C, false);
      visibility.mask(begin, end, scores_KC);
      softmax_step(end - begin, C, l.unit, scores_KC, running, powers_KC);
      if (!first) scale_columns(l.D, C, running.rescale, o_DC);
      tile(l.D, C, end - begin, values.columns_from(pair, begin), l.ld_keys, powers_KC, C, o_DC, C, !first);
      first = false;
    });
    for (int64_t c = 0; c < C; ++c) running.rescale[c] = 1.0f / sums[c];
    scale_columns(l.D, C, running.rescale, o_DC);
    put_columns(l, o_DC, b, group, i, output);
    // Tokens past the last have no probabilities in the backward.
    for (int64_t h = 0; h < l.r; ++h) {
      std::fill_n(shift + h * l.block + l.queries_of(i), l.block - l.queries_of(i), kInfinity);
      std::fill_n(sums + h * l.block + l.queries_of(i), l.block - l.queries_of(i), 1.0f);
    }
    release<T>();
  });
}

// The output; and of every row what its softmax was relative to and one over the sum: apart, since a log-sum-exp of large
// scores has few digits left for the sum.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                             const c10::optional<at::Tensor>& sink,
                                             const c10::optional<at::Tensor>& documents, int64_t window,
                                             int64_t query_offset, bool in_bf16) {
  const Layout l(q, k, query_offset, window);
  auto output = at::empty(q.sizes(), q.options());
  auto shift = at::empty({l.B, l.g, l.blocks, l.columns}, q.options()), sum = at::empty_like(shift);
  const auto run = in_bf16 ? forward<bf16> : forward<float>;
  run(l, Documents(documents, l), Rows(q, "q"), Rows(k, "k"), Rows(v, "v"),
      sink.has_value() ? contiguous_data_of(*sink, "sink") : nullptr, output.mutable_data_ptr<float>(),
      shift.mutable_data_ptr<float>(), sum.mutable_data_ptr<float>());
  return {output, shift, sum.reciprocal_()};
}

// Runs of query blocks that see about equally many keys.
struct Segments {
  std::vector<Range> blocks, keys;
  std::vector<int64_t> places;  // of each segment's first key in the partial sums of a pair
  int64_t size = 0;             // keys of all segments

  explicit Segments(const Layout& l) {
    const int64_t count = std::min(std::max<int64_t>(l.blocks, 1), ceil_div(kUnits, std::max<int64_t>(l.B * l.g, 1)));
    int64_t total = 0, done = 0;
    for (int64_t i = 0; i < l.blocks; ++i) total += l.keys_of(i).end - l.keys_of(i).begin;
    for (int64_t i = 0; i < l.blocks; ++i) {
      const int64_t segment = done * count / std::max<int64_t>(total, 1);
      done += l.keys_of(i).end - l.keys_of(i).begin;
      if (i == 0 || segment != last_) {
        last_ = segment;
        blocks.push_back({i, i});
        keys.push_back({l.keys_of(i).begin, 0});
      }
      blocks.back().end = i + 1;
      keys.back().end = l.keys_of(i).end;
    }
    for (const Range& range : keys) {
      places.push_back(size);
      size += range.end - range.begin;
    }
  }

 private:
  int64_t last_ = 0;
};

// A gradient as the products see it, so that the gradients of a query's scores add up to zero.
template <typename T>
float rounded(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return bits_to_float(bf16_bits(x));
}

// A step of the backward, from products q k and d_o v: the probabilities as a left operand, the gradients of the scores
// as a left and as a right operand. Float operands take the places of what they are made from.
void gradients_step(int64_t keys, int64_t columns, float unit, float* scores, float* products, const float* shift,
                    const float* inverse, const float* dot, float*, float*, float*) {
  for (int64_t j = 0; j < keys; ++j) {
    float *__restrict p = scores + j * columns, *__restrict d = products + j * columns;
    for (int64_t c = 0; c < columns; ++c) {
      p[c] = power_of_two(p[c] * unit - shift[c]) * inverse[c];
      d[c] = p[c] * (d[c] - dot[c]);
    }
  }
}

void gradients_step(int64_t keys, int64_t columns, float unit, float* scores, float* products, const float* shift,
                    const float* inverse, const float* dot, bf16* left_p, bf16* left_d, bf16* right_d) {
  for (int64_t j = 0; j < keys; j += 2) {
    const float *s0 = scores + j * columns, *s1 = s0 + columns, *d0 = products + j * columns, *d1 = d0 + columns;
    auto *p = reinterpret_cast<uint16_t*>(left_p) + j * columns, *d = reinterpret_cast<uint16_t*>(left_d) + j * columns;
    auto* right = reinterpret_cast<uint32_t*>(right_d) + j / 2 * columns;
#pragma GCC ivdep
    for (int64_t c = 0; c < columns; ++c) {
      const float p0 = power_of_two(s0[c] * unit - shift[c]) * inverse[c];
      const float p1 = power_of_two(s1[c] * unit - shift[c]) * inverse[c];
      const uint32_t first = rounded_bits(p0 * (d0[c] - dot[c])), second = rounded_bits(p1 * (d1[c] - dot[c]));
      p[c] = static_cast<uint16_t>(rounded_bits(p0) >> 16);
      p[columns + c] = static_cast<uint16_t>(rounded_bits(p1) >> 16);
      d[c] = static_cast<uint16_t>(first >> 16);
      d[columns + c] = static_cast<uint16_t>(second >> 16);
      right[c] = (first >> 16) | (second & 0xffff0000u);
    }
  }
}

// What the backward fills.
struct Gradients {
  float *q, *k, *v;  // contiguous
  float* sinks;      // [B, blocks, n], to be summed; null without sinks
};

template <typename T>
void backward(const Layout& l, const Documents& documents, const Rows& d_output, const Rows& q, const Rows& k,
              const Rows& v, const Rows& output, const float* shifts, const float* inverses, const float* sinks,
              Gradients gradients) {
  constexpr bool in_place = std::is_same_v<T, float>;
  const auto keys = Packed<T>::rows(l, k), values = Packed<T>::rows(l, v);
  const auto key_columns = Packed<T>::columns(l, k);
  const Segments segments(l);
  const int64_t count = segments.blocks.size(), C = l.columns, depth = padded_depth<T>(l.D);
  const auto partials_k = std::make_unique_for_overwrite<float[]>(l.B * l.g * segments.size * l.D);
  const auto partials_v = std::make_unique_for_overwrite<float[]>(l.B * l.g * segments.size * l.D);

  parallel_each(l.B * l.g * count, [&](int64_t unit) {
    const int64_t pair = unit / count, segment = unit % count, b = pair / l.g, group = pair % l.g;
    const Range seen = segments.keys[segment];
    const int64_t place = (pair * segments.size + segments.places[segment]) * l.D;
    float *sum_k = partials_k.get() + place, *sum_v = partials_v.get() + place;
    std::fill_n(sum_k, (seen.end - seen.begin) * l.D, 0.0f);
    std::fill_n(sum_v, (seen.end - seen.begin) * l.D, 0.0f);
    Scratch scratch((2 * depth + 3 * l.D + 5 * l.step + 1) * C + 11 * kAlign);
    T *q_DC = scratch.take<T>(depth * C), *q_CD = scratch.take<T>(l.D * C);
    T *d_o_DC = scratch.take<T>(depth * C), *d_o_CD = scratch.take<T>(l.D * C);
    float *d_q_DC = scratch.take<float>(l.D * C), *dot = scratch.take<float>(C);
    float *scores_KC = scratch.take<float>(l.step * C), *products_KC = scratch.take<float>(l.step * C);
    T *left_p, *left_d, *right_d;
    if constexpr (in_place) {
      left_p = scores_KC;
      left_d = right_d = products_KC;
    } else {
      left_p = scratch.take<T>(l.step * C);
      left_d = scratch.take<T>(l.step * C);
      right_d = scratch.take<T>(l.step * C);
    }
    for (int64_t i = segments.blocks[segment].begin; i < segments.blocks[segment].end; ++i) {
      take_block(l, q, b, group, i, q_DC, q_CD);
      take_block(l, d_output, b, group, i, d_o_DC, d_o_CD);
      const float *shift = shifts + (pair * l.blocks + i) * C, *inverse = inverses + (pair * l.blocks + i) * C;
      std::fill_n(dot, C, 0.0f);
      for (int64_t h = 0; h < l.r; ++h) {
        const int64_t head = group * l.r + h;
        float d_sink = 0.0f;
        for (int64_t t = 0; t < l.queries_of(i); ++t) {
          const float *o = output.at(l.first_query(i) + t, b, head), *d_o = d_output.at(l.first_query(i) + t, b, head);
          float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
          for (int64_t d = 0; d < l.D; ++d) sum += o[d] * rounded<T>(d_o[d]);
          dot[h * l.block + t] = sum;
          const int64_t c = h * l.block + t;
          if (sinks) d_sink -= power_of_two(sinks[head] * kLog2E - shift[c]) * inverse[c] * sum;
        }
        if (sinks) gradients.sinks[(b * l.blocks + i) * l.n + head] = d_sink;
      }
      const Visibility visibility(l, documents, b, i);
      bool first = true;
      visibility.for_steps([&](int64_t begin, int64_t end) {
        const int64_t K = end - begin, sum = (begin - seen.begin) * l.D;
        tile(K, C, depth, keys.rows_from(pair, begin), depth, q_DC, C, scores_KC, C, false);
        visibility.mask(begin, end, scores_KC);
        tile(K, C, depth, values.rows_from(pair, begin), depth, d_o_DC, C, products_KC, C, false);
        gradients_step(K, C, l.unit, scores_KC, products_KC, shift, inverse, dot, left_p, left_d, right_d);
        tile(K, l.D, C, left_p, C, d_o_CD, l.D, sum_v + sum, l.D, true);
        tile(K, l.D, C, left_d, C, q_CD, l.D, sum_k + sum, l.D, true);
        tile(l.D, C, K, key_columns.columns_from(pair, begin), l.ld_keys, right_d, C, d_q_DC, C, !first);
        first = false;
      });
      for (int64_t e = 0; e < l.D * C; ++e) d_q_DC[e] *= l.scale;
      put_columns(l, d_q_DC, b, group, i, gradients.q);
    }
    release<T>();
  });

  // The segments' sums, in order.
  const int64_t pieces = l.padded_keys / kAlign;
  parallel_each(l.B * l.g * pieces, [&](int64_t unit) {
    const int64_t pair = unit / pieces, first = unit % pieces * kAlign;
    for (int64_t t = first; t < std::min(l.T, first + kAlign); ++t) {
      float *d_k = gradients.k + (t * l.B * l.g + pair) * l.D, *d_v = gradients.v + (t * l.B * l.g + pair) * l.D;
      std::fill_n(d_k, l.D, 0.0f);
      std::fill_n(d_v, l.D, 0.0f);
      for (int64_t s = 0; s < count; ++s) {
        if (t < segments.keys[s].begin || t >= segments.keys[s].end) continue;
        const int64_t row = (pair * segments.size + segments.places[s] + t - segments.keys[s].begin) * l.D;
        for (int64_t d = 0; d < l.D; ++d) d_k[d] += partials_k[row + d];
        for (int64_t d = 0; d < l.D; ++d) d_v[d] += partials_v[row + d];
      }
      for (int64_t d = 0; d < l.D; ++d) d_k[d] *= l.scale;
    }
  });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& d_output, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& output,
    const at::Tensor& shift, const at::Tensor& inverse, const c10::optional<at::Tensor>& sink,
    const c10::optional<at::Tensor>& documents,
    int64_t window, int64_t query_offset, bool in_bf16) {
  const Layout l(q, k, query_offset, window);
  const bool with_sink = sink.has_value();
  auto d_q = at::empty(q.sizes(), q.options()), d_k = at::empty(k.sizes(), q.options());
  auto d_v = at::empty(v.sizes(), q.options()), d_sink = at::zeros({with_sink ? l.n : 0}, q.options());
  std::vector<float> d_sinks(with_sink ? l.B * l.blocks * l.n : 0);
  const auto run = in_bf16 ? backward<bf16> : backward<float>;
  run(l, Documents(documents, l), Rows(d_output, "d_output"), Rows(q, "q"), Rows(k, "k"), Rows(v, "v"),
      Rows(output, "output"), contiguous_data_of(shift, "shift"), contiguous_data_of(inverse, "inverse"),
      with_sink ? contiguous_data_of(*sink, "sink") : nullptr,
      {d_q.mutable_data_ptr<float>(), d_k.mutable_data_ptr<float>(), d_v.mutable_data_ptr<float>(), d_sinks.data()});
  float* total = d_sink.mutable_data_ptr<float>();
  for (size_t e = 0; e < d_sinks.size(); ++e) total[e % l.n] += d_sinks[e];
  return {d_q, d_k, d_v, d_sink};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(steptron_kernels, library) {
  library.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? documents, int window, int query_offset,"
      " bool in_bf16) -> (Tensor, Tensor, Tensor)",
      &attention);
  library.def(
      "attention_backward(Tensor d_output, Tensor q, Tensor k, Tensor v, Tensor output, Tensor shift, Tensor inverse, Tensor? sink,"
      " Tensor? documents, int window, int query_offset, bool in_bf16) -> (Tensor, Tensor, Tensor, Tensor)",
      &attention_backward);
}

}  // namespace steptron
