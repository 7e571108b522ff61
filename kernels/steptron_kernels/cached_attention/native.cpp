// Attention of a few new tokens of each sequence to what is cached of it. The mathematics stands in plain.py.
//
// A unit of work takes one group of key-value heads of one sequence: the columns (queries times the group's heads)
// against the keys that one of the queries sees. Keys are taken sixteen at a time and transposed, so that a vector
// holds the scores of sixteen keys and no sum goes across it; values are read row by row, each once for all columns.
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <vector>

#include "../csrc/parallel.h"
#include "../csrc/simd.h"
#include "../csrc/tensors.h"

namespace steptron {
namespace {

constexpr int64_t kTile = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

const int64_t* indices_of(const at::Tensor& x, at::IntArrayRef sizes, const char* name) {
  TORCH_CHECK(x.device().is_cpu() && x.scalar_type() == at::kLong && x.is_contiguous() && x.sizes() == sizes, name,
              ": expected contiguous int64 ", sizes, " on the CPU, got ", x.scalar_type(), " ", x.sizes());
  return x.const_data_ptr<int64_t>();
}

template <bool kBf16>
inline float operand(float x) {
  return kBf16 ? bits_to_float(bf16_bits(x)) : x;
}

struct Cached {
  const float *q, *k, *v, *sink;
  const int64_t *table, *first, *places;
  int64_t queries, heads, groups, head_dim, columns_of_table, rows;
  int64_t window;  // largest visible distance plus one
  float* out;
};

template <bool kBf16>
void attend(const Cached& a, int64_t sequence, int64_t group, std::vector<float>& room) {
  const int64_t D = a.head_dim, per_group = a.heads / a.groups, X = a.queries * per_group;
  const int64_t first = a.first[sequence], *places = a.places + sequence * a.queries;
  const int64_t* table = a.table + sequence * a.columns_of_table;
  int64_t begin = a.columns_of_table, end = 0;
  for (int64_t i = 0; i < a.queries; ++i) {
    begin = std::min(begin, std::max<int64_t>(0, places[i] - a.window + 1 - first));
    end = std::max(end, places[i] + 1 - first);
  }
  TORCH_CHECK(begin < end && end <= a.columns_of_table, "table: sequence ", sequence, " has ", a.columns_of_table,
              " columns from place ", first, " on, which do not hold what its queries see");
  for (int64_t c = begin; c < end; ++c)
    TORCH_CHECK(table[c] >= 0 && table[c] < a.rows, "table: row ", table[c], " is outside of the pool's ", a.rows);
  const int64_t padded = ceil_div(end - begin, kTile) * kTile;
  room.resize(X * (padded + D) + kTile * D);
  float *scores = room.data(), *query = scores + X * padded, *tile = query + X * D;
  const float scale = 1.0f / std::sqrt(static_cast<float>(D));
  const auto head = [&](int64_t x) { return group * per_group + x % per_group; };
  for (int64_t x = 0; x < X; ++x) {
    const float* source = a.q + ((sequence * a.queries + x / per_group) * a.heads + head(x)) * D;
    for (int64_t d = 0; d < D; ++d) query[x * D + d] = operand<kBf16>(source[d]);
  }
  for (int64_t c = begin; c < end; c += kTile) {
    const int64_t count = std::min(kTile, end - c);
    for (int64_t l = 0; l < kTile; ++l) {
      const float* key = a.k + (table[c + std::min(l, count - 1)] * a.groups + group) * D;
      for (int64_t d = 0; d < D; ++d) tile[d * kTile + l] = operand<kBf16>(key[d]);
    }
    for (int64_t x = 0; x < X; ++x) {
      float sums[kTile] = {};
      for (int64_t d = 0; d < D; ++d) {
        const float factor = query[x * D + d];
#pragma omp simd
        for (int64_t l = 0; l < kTile; ++l) sums[l] += factor * tile[d * kTile + l];
      }
      float* target = scores + x * padded + (c - begin);
#pragma omp simd
      for (int64_t l = 0; l < kTile; ++l) target[l] = sums[l] * scale;
    }
  }
  for (int64_t x = 0; x < X; ++x) {
    const int64_t place = places[x / per_group];
    const int64_t from = std::max<int64_t>(begin, place - a.window + 1 - first) - begin, to = place + 1 - first - begin;
    float *row = scores + x * padded, largest = -kInfinity;
    for (int64_t c = from; c < to; ++c) largest = row[c] > largest || row[c] != row[c] ? row[c] : largest;
    if (a.sink != nullptr) largest = std::max(largest, a.sink[head(x)]);
    float sum = 0.0f;
    for (int64_t c = 0; c < from; ++c) row[c] = 0.0f;
    sum = sum_over(to - from, [&](int64_t c) { return row[from + c] = exp_of(row[from + c] - largest); });
    for (int64_t c = to; c < end - begin; ++c) row[c] = 0.0f;
    if (a.sink != nullptr) sum += exp_of(a.sink[head(x)] - largest);
    const float inverse = 1.0f / sum;
    for (int64_t c = from; c < to; ++c) row[c] = operand<kBf16>(row[c] * inverse);
  }
  float* sums = query;  // is not needed any more
  std::fill_n(sums, X * D, 0.0f);
  for (int64_t c = begin; c < end; ++c) {
    const float* value = a.v + (table[c] * a.groups + group) * D;
    for (int64_t d = 0; d < D; ++d) tile[d] = operand<kBf16>(value[d]);
    for (int64_t x = 0; x < X; ++x) {
      const float p = scores[x * padded + (c - begin)];
      float* target = sums + x * D;
#pragma omp simd
      for (int64_t d = 0; d < D; ++d) target[d] += p * tile[d];
    }
  }
  for (int64_t x = 0; x < X; ++x)
    std::copy_n(sums + x * D, D, a.out + ((sequence * a.queries + x / per_group) * a.heads + head(x)) * D);
}

at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& table,
                            const at::Tensor& first, const at::Tensor& places, int64_t window,
                            const std::optional<at::Tensor>& sink, bool in_bf16) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 3 && k.sizes() == v.sizes() && q.size(3) == k.size(2) &&
                  q.size(2) % k.size(1) == 0 && table.dim() == 2,
              "shapes do not fit together: q ", q.sizes(), ", k ", k.sizes(), ", v ", v.sizes());
  TORCH_CHECK(window >= 1, "window: expected at least 1, got ", window);
  const int64_t sequences = q.size(0);
  auto out = at::empty_like(q);
  const Cached a{
      contiguous_data_of(q, "q"),
      contiguous_data_of(k, "k"),
      contiguous_data_of(v, "v"),
      sink.has_value() ? contiguous_data_of(*sink, "sink") : nullptr,
      indices_of(table, {sequences, table.size(1)}, "table"),
      indices_of(first, {sequences}, "first"),
      indices_of(places, {sequences, q.size(1)}, "places"),
      q.size(1),
      q.size(2),
      k.size(1),
      k.size(2),
      table.size(1),
      k.size(0),
      window,
      out.mutable_data_ptr<float>(),
  };
  parallel_each(sequences * a.groups, [&](int64_t unit) {
    thread_local std::vector<float> room;
    if (in_bf16)
      attend<true>(a, unit / a.groups, unit % a.groups, room);
    else
      attend<false>(a, unit / a.groups, unit % a.groups, room);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(steptron_kernels, library) {
  library.def(
      "cached_attention(Tensor q, Tensor k, Tensor v, Tensor table, Tensor first, Tensor places, int window, "
      "Tensor? sink, bool in_bf16) -> Tensor",
      &cached_attention);
}

}  // namespace steptron
