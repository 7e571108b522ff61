// Polar Express: A = X X^T, B = bA + cA A, X <- aX + B X, a few steps of it on every matrix of a batch.
//
// A and A A are symmetric: their blocks on and above the diagonal are computed, the others mirrored, which saves a
// quarter of all products, and a third of those of square matrices. Scaling, rounding and the search for the largest entry happen while a block
// of results is in the cache. X changes in place, a panel of its columns at a time.
//
// Every entry is a sum in an order of its own, whoever computes it: how the work is shared among threads changes no
// result. Small matrices are taken whole, one a thread, so that they stay in its cache; large ones are cut.
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "../csrc/gemm.h"
#include "../csrc/tensors.h"
#include "../csrc/transpose.h"

namespace steptron {
namespace {

// A matrix that takes more than this is cut, one at a time; of the others there is one a thread.
constexpr int64_t kWhole = int64_t{8} << 20;
// Blocks of a symmetric product that share a packed right operand.
constexpr int64_t kBlocks = 8;

// float16's values: 11 bits from 2^-14 on, multiples of 2^-24 below, infinity from 65520 on; ties to even. Adding
// 1.5 * 2^13 times the power of two below |x| leaves those bits.
inline float round_to_half(float x) {
  constexpr uint32_t kExponent = 0x7f800000u, kSmallest = (127u - 14) << 23, kBeyond = (127u + 16) << 23;
  const uint32_t exponent = std::min(std::max(float_to_bits(x) & kExponent, kSmallest), kBeyond);
  const float shift = bits_to_float(exponent + (13u << 23) + 0x400000u);
  const float rounded = (x + shift) - shift;
  const float infinity = bits_to_float((float_to_bits(x) & 0x80000000u) | kExponent);
  return std::abs(rounded) > 65504.0f ? infinity : rounded;
}

// What X, A and B are kept as, and what they are rounded to.
struct Float {
  using Element = float;
  static float round(float x) { return x; }
};
struct HalfInFloat {
  using Element = float;
  static float round(float x) { return round_to_half(x); }
};
struct BfloatInFloat {
  using Element = float;
  static float round(float x) { return bits_to_float(bf16_bits(x)); }
};
struct Bfloat {
  using Element = bf16;
  static float round(float x) { return bits_to_float(bf16_bits(x)); }
};

// Element j as a float.
inline float value(const float* row, int64_t j) { return row[j]; }
inline float value(const bf16* row, int64_t j) {
  return bits_to_float(static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(row)[j]) << 16);
}

// Sets element j to what is rounded already.
inline void set(float* row, int64_t j, float x) { row[j] = x; }
inline void set(bf16* row, int64_t j, float x) {
  reinterpret_cast<uint16_t*>(row)[j] = static_cast<uint16_t>(float_to_bits(x) >> 16);
}

// The right operand of X X^T: rows of X as columns of a panel.
inline void pack_transposed(int64_t rows, int64_t depth, const float* x, int64_t ld, float* panel) {
  transpose(rows, depth, x, ld, panel, kPanel);
}
inline void pack_transposed(int64_t rows, int64_t depth, const bf16* x, int64_t ld, bf16* panel) {
  transpose(rows, depth / 2, reinterpret_cast<const uint32_t*>(x), ld / 2, reinterpret_cast<uint32_t*>(panel), kPanel);
}

// The right operand of B X: columns of X as they are.
inline void pack_plain(int64_t rows, int64_t columns, const float* x, int64_t ld, float* panel) {
  for (int64_t i = 0; i < rows; ++i) std::copy_n(x + i * ld, columns, panel + i * kPanel);
}
inline void pack_plain(int64_t rows, int64_t columns, const bf16* x, int64_t ld, bf16* panel) {
  for (int64_t i = 0; i < rows; i += 2) {
    const auto* first = reinterpret_cast<const uint16_t*>(x + i * ld);
    auto* out = reinterpret_cast<uint32_t*>(panel + i * kPanel);
    if (i + 1 == rows) {
      for (int64_t j = 0; j < columns; ++j) out[j] = first[j];
    } else {
      const uint16_t* second = first + ld;
#pragma omp simd
      for (int64_t j = 0; j < columns; ++j) out[j] = first[j] | static_cast<uint32_t>(second[j]) << 16;
    }
  }
}

// A block of whole pairs of rows, transposed; both have rows of ld elements.
inline void mirror(int64_t rows, int64_t columns, const float* block, float* out, int64_t ld, float*) {
  transpose(rows, columns, block, ld, out, ld);
}
inline void mirror(int64_t rows, int64_t columns, const bf16* block, bf16* out, int64_t ld, bf16* scratch) {
  pack_plain(rows, columns, block, ld, scratch);
  transpose(rows / 2, columns, reinterpret_cast<const uint32_t*>(scratch), kPanel, reinterpret_cast<uint32_t*>(out),
            ld / 2);
}

// Magnitudes compare like the integers that they are stored as, and NaN is larger than infinity.
inline uint32_t magnitude(float x) { return float_to_bits(x) & 0x7fffffffu; }

// Of the entries that a unit of work makes, by column of its blocks.
struct Largest {
  uint32_t columns[kPanel] = {};

  uint32_t of_all() const { return *std::max_element(columns, columns + kPanel); }
};

template <typename Body>
uint32_t largest_of(int64_t units, const Body& body) {
  std::vector<uint32_t> largest(units);
  parallel_each(units, [&](int64_t unit) { largest[unit] = body(unit); });
  return *std::max_element(largest.begin(), largest.end());
}

// The given matrix or the result, [R, C], seen as one with no more rows than columns.
template <typename T>
struct View {
  T* data;
  int64_t ld, rows, columns;
  bool transposed;
};

// A matrix of the iteration. Its rows are not a power of two apart, which would put them into one part of the cache.
template <typename T>
struct Matrix {
  static int64_t stride(int64_t columns) {
    constexpr int64_t kLine = 64 / sizeof(T);
    const int64_t lines = ceil_div(columns, kLine);
    return (lines % 8 == 0 ? lines + 1 : lines) * kLine;
  }

  Matrix(T* data, int64_t rows, int64_t columns)
      : data(data), rows(rows), columns(columns), depth(padded_depth<T>(columns)), ld(stride(columns)) {}

  T* at(int64_t i, int64_t j) const { return data + i * ld + j; }

  // What an odd depth is filled up with.
  void pad() const {
    for (int64_t i = 0; depth > columns && i < rows; ++i) *at(i, columns) = T(0);
  }

  T* data;
  int64_t rows, columns, depth, ld;
};

// A thread's working space.
template <typename T>
struct Workspace {
  static Workspace& of_thread() {
    thread_local Workspace space;
    return space;
  }

  static T* sized(std::vector<T>& memory, int64_t size) {
    if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
    return memory.data();
  }

  T* panel(int64_t depth) { return sized(panel_, depth * kPanel); }

  float sums[kBlocks * kRows * kPanel];
  float block[kRows * kPanel];

 private:
  std::vector<T> panel_;
};

template <typename Format>
class Iteration {
  using T = typename Format::Element;
  // Elements side by side in a panel that belong to one column.
  static constexpr int64_t kInterleaved = std::is_same_v<T, bf16> ? 2 : 1;

 public:
  // Elements of memory that matrices [l, k] need.
  static int64_t size(int64_t l, int64_t k) { return l * (Matrix<T>::stride(k) + 2 * Matrix<T>::stride(l)); }

  Iteration(T* memory, int64_t l, int64_t k)
      : x_(memory, l, k),
        gram_(memory + l * x_.ld, l, l),
        b_(gram_.data + l * gram_.ld, l, l),
        edge_(ceil_div(ceil_div(l, ceil_div(l, kRows)), 16) * 16) {
    for (const auto& matrix : {x_, gram_, b_}) matrix.pad();
    for (int64_t column = ceil_div(l, edge_); column-- > 0;)
      for (int64_t row = 0; row <= column; row += kBlocks)
        pieces_.push_back({column, row, std::min(column + 1, row + kBlocks)});
  }

  // Returns the largest entry.
  float run(View<const float> source, View<float> result, const std::vector<double>& rows) {
    const double squares = sum_of_squares(source);
    if (!std::isfinite(squares)) {
      constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
      for (int64_t i = 0; i < result.rows; ++i) std::fill_n(result.data + i * result.ld, result.columns, kNaN);
      return kNaN;
    }
    uint32_t largest = load(source, 1.01 * std::sqrt(squares) + 1e-7);
    for (size_t i = 0; i < rows.size(); i += 3) {
      const float a = rows[i], b = rows[i + 1], c = rows[i + 2];
      const auto plain = [](const T*, int64_t, float sum) { return sum; };
      const auto with_gram = [=](const T* gram, int64_t j, float sum) { return b * value(gram, j) + c * sum; };
      largest = std::max({largest, symmetric(x_, gram_, plain), symmetric(gram_, b_, with_gram), apply(a)});
    }
    store(result);
    return bits_to_float(largest);
  }

 private:
  struct Piece {
    int64_t column, first, last;
  };

  static double sum_of_squares(View<const float> source) {
    constexpr int64_t kDoubles = 16;
    std::vector<double> sums(source.rows);
    parallel_each(ceil_div(source.rows, kRows), [&](int64_t unit) {
      for (int64_t i = unit * kRows; i < std::min(source.rows, (unit + 1) * kRows); ++i) {
        const float* row = source.data + i * source.ld;
        double lanes[kDoubles] = {};
        for (int64_t j0 = 0; j0 < source.columns; j0 += kDoubles) {
          const int64_t count = std::min(kDoubles, source.columns - j0);
#pragma omp simd
          for (int64_t j = 0; j < count; ++j) lanes[j] += static_cast<double>(row[j0 + j]) * row[j0 + j];
        }
        for (const double lane : lanes) sums[i] += lane;
      }
    });
    double total = 0;
    for (const double sum : sums) total += sum;
    return total;
  }

  // X = M / divisor.
  uint32_t load(View<const float> source, double divisor) {
    // Beyond that, neither the divisor nor the quotient's operands are left to overflow.
    const float scale = divisor > 0x1p100 ? 0x1p-100f : 1.0f;
    const float scaled = static_cast<float>(divisor * scale);
    return largest_of(ceil_div(x_.rows, kRows), [&](int64_t unit) {
      float* block = Workspace<T>::of_thread().block;
      const int64_t i0 = unit * kRows, rows = std::min(kRows, x_.rows - i0);
      Largest largest;
      for (int64_t j0 = 0; j0 < x_.columns; j0 += kPanel) {
        const int64_t columns = std::min(kPanel, x_.columns - j0);
        const float* from = source.data + (source.transposed ? j0 * source.ld + i0 : i0 * source.ld + j0);
        if (source.transposed) transpose(columns, rows, from, source.ld, block, kPanel);
        for (int64_t i = 0; i < rows; ++i) {
          const float* row = source.transposed ? block + i * kPanel : from + i * source.ld;
          T* out = x_.at(i0 + i, j0);
#pragma omp simd
          for (int64_t j = 0; j < columns; ++j) {
            const float rounded = Format::round(row[j] * scale / scaled);
            largest.columns[j] = std::max(largest.columns[j], magnitude(rounded));
            set(out, j, rounded);
          }
        }
      }
      return largest.of_all();
    });
  }

  void store(View<float> result) const {
    parallel_each(ceil_div(x_.rows, kRows), [&](int64_t unit) {
      float* block = Workspace<T>::of_thread().block;
      const int64_t i0 = unit * kRows, rows = std::min(kRows, x_.rows - i0);
      for (int64_t j0 = 0; j0 < x_.columns; j0 += kPanel) {
        const int64_t columns = std::min(kPanel, x_.columns - j0);
        float* to = result.data + (result.transposed ? j0 * result.ld + i0 : i0 * result.ld + j0);
        for (int64_t i = 0; i < rows; ++i) {
          const T* row = x_.at(i0 + i, j0);
          float* out = result.transposed ? block + i * kPanel : to + i * result.ld;
          for (int64_t j = 0; j < columns; ++j) out[j] = value(row, j);
        }
        if (result.transposed) transpose(rows, columns, block, kPanel, to, result.ld);
      }
    });
  }

  // Y = rounded term(Y' old, Z Z^T): the blocks on and above the diagonal, and their mirror images.
  template <typename Term>
  uint32_t symmetric(const Matrix<T>& z, const Matrix<T>& y, const Term& term) {
    return largest_of(pieces_.size(), [&](int64_t unit) {
      auto& space = Workspace<T>::of_thread();
      const Piece& piece = pieces_[unit];
      const int64_t j0 = piece.column * edge_, columns = std::min(edge_, z.rows - j0);
      T* panel = space.panel(std::max(kRows, std::min(kDepth, z.depth)));
      const auto sums_of = [&](int64_t block) { return space.sums + (block - piece.first) * kRows * kPanel; };
      for (int64_t k0 = 0; k0 < z.depth; k0 += kDepth) {
        const int64_t depth = std::min(kDepth, z.depth - k0);
        pack_transposed(columns, depth, z.at(j0, k0), z.ld, panel);
        for (int64_t block = piece.first; block < piece.last; ++block) {
          const T* left = z.at(block * edge_, k0);
          if (block == piece.column)
            multiply_diagonal(columns, depth, left, z.ld, panel, sums_of(block), k0 > 0);
          else
            tile(edge_, columns, depth, left, z.ld, panel, kPanel, sums_of(block), kPanel, k0 > 0);
        }
      }
      release<T>();
      Largest largest;
      for (int64_t block = piece.first; block < piece.last; ++block) {
        const bool on_diagonal = block == piece.column;
        const int64_t i0 = block * edge_, rows = on_diagonal ? columns : edge_;
        if (on_diagonal) mirror_diagonal(columns, sums_of(block));
        for (int64_t i = i0; i < i0 + rows; ++i)
          finish(columns, term, gram_.at(i, j0), sums_of(block) + (i - i0) * kPanel, y.at(i, j0), largest);
        if (!on_diagonal) mirror(rows, columns, y.at(i0, j0), y.at(j0, i0), y.ld, panel);
      }
      return largest.of_all();
    });
  }

  // X = aX + B X.
  uint32_t apply(float a) {
    const auto with_x = [=](const T* x, int64_t j, float sum) { return a * value(x, j) + sum; };
    return largest_of(ceil_div(x_.columns, kPanel), [&](int64_t unit) {
      auto& space = Workspace<T>::of_thread();
      const int64_t j0 = unit * kPanel, columns = std::min(kPanel, x_.columns - j0);
      T* panel = space.panel(b_.depth);
      pack_plain(x_.rows, columns, x_.at(0, j0), x_.ld, panel);
      Largest largest;
      for (int64_t i0 = 0; i0 < x_.rows; i0 += kRows) {
        const int64_t rows = std::min(kRows, x_.rows - i0);
        for (int64_t k0 = 0; k0 < b_.depth; k0 += kDepth)
          tile(rows, columns, std::min(kDepth, b_.depth - k0), b_.at(i0, k0), b_.ld, panel + k0 * kPanel, kPanel,
               space.sums, kPanel, k0 > 0);
        for (int64_t i = 0; i < rows; ++i)
          finish(columns, with_x, x_.at(i0 + i, j0), space.sums + i * kPanel, x_.at(i0 + i, j0), largest);
      }
      release<T>();
      return largest.of_all();
    });
  }

  // A row of results, out[j] = rounded term(old, j, sums[j]), which may take the place of old.
  template <typename Term>
  static void finish(int64_t n, const Term& term, const T* old, const float* sums, T* out, Largest& largest) {
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      const float rounded = Format::round(term(old, j, sums[j]));
      largest.columns[j] = std::max(largest.columns[j], magnitude(rounded));
      set(out, j, rounded);
    }
  }

  // The block of Z Z^T on the diagonal: kSquare columns at a time, from the top to the diagonal.
  static void multiply_diagonal(int64_t n, int64_t depth, const T* z, int64_t ld, const T* panel, float* sums,
                                bool add) {
    for (int64_t j = 0; j < n; j += kSquare)
      tile(std::min(n, j + kSquare), std::min(kSquare, n - j), depth, z, ld, panel + j * kInterleaved, kPanel, sums + j,
           kPanel, add);
  }

  // And what is below it.
  static void mirror_diagonal(int64_t n, float* sums) {
    for (int64_t j = kSquare; j < n; j += kSquare)
      transpose(j, std::min(kSquare, n - j), sums + j, kPanel, sums + j * kPanel, kPanel);
  }

  Matrix<T> x_, gram_, b_;
  int64_t edge_;
  std::vector<Piece> pieces_;
};

template <typename Format>
void run(const at::Tensor& m, at::Tensor& o, at::Tensor& largest, const std::vector<double>& rows) {
  using T = typename Format::Element;
  const int64_t count = m.size(0), r = m.size(1), c = m.size(2);
  const int64_t l = std::min(r, c), k = std::max(r, c), size = Iteration<Format>::size(l, k);
  const float* data = data_of(m, "m");
  float* out = o.mutable_data_ptr<float>();
  float* out_largest = largest.mutable_data_ptr<float>();
  const int64_t threads = at::get_num_threads(), left = count % threads;
  const int64_t whole = size * int64_t{sizeof(T)} > kWhole ? 0 : 2 * left > threads ? count : count - left;
  const auto run_one = [&](T* space, int64_t i) {
    const View<const float> source{data + i * m.stride(0), m.stride(1), r, c, r > c};
    out_largest[i] = Iteration<Format>(space, l, k).run(source, {out + i * r * c, c, r, c, r > c}, rows);
  };
  const auto space = std::make_unique_for_overwrite<T[]>(std::clamp<int64_t>(whole, 1, threads) * size);
  parallel_each(whole, [&](int64_t i) { run_one(space.get() + at::get_thread_num() * size, i); });
  for (int64_t i = whole; i < count; ++i) run_one(space.get(), i);
}

std::tuple<at::Tensor, at::Tensor> polar_express(const at::Tensor& m, at::ArrayRef<double> rows, at::ScalarType dtype,
                                                 bool bf16_products) {
  TORCH_CHECK(m.dim() == 3 && m.size(1) > 0 && m.size(2) > 0, "m: expected [N, R, C], got ", m.sizes());
  TORCH_CHECK(rows.size() % 3 == 0, "rows: expected three coefficients a step, got ", rows.size());
  const at::Tensor source = m.stride(2) == 1 || m.size(2) == 1 ? m : m.contiguous();
  auto o = at::empty(m.sizes(), m.options()), largest = at::empty({m.size(0)}, m.options());
  const std::vector<double> coefficients = rows.vec();
  if (dtype == at::kFloat)
    run<Float>(source, o, largest, coefficients);
  else if (dtype == at::kHalf)
    run<HalfInFloat>(source, o, largest, coefficients);
  else if (dtype == at::kBFloat16 && bf16_products)
    run<Bfloat>(source, o, largest, coefficients);
  else if (dtype == at::kBFloat16)
    run<BfloatInFloat>(source, o, largest, coefficients);
  else
    TORCH_CHECK(false, "dtype: expected float32, float16 or bfloat16, got ", dtype);
  return {o, largest};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(steptron_kernels, library) {
  library.def(
      "polar_express(Tensor m, float[] rows, ScalarType dtype, bool bf16_products) -> (Tensor, Tensor)",
      [](const at::Tensor& m, at::ArrayRef<double> rows, at::ScalarType dtype, bool bf16_products) {
        return polar_express(m, rows, dtype, bf16_products);
      });
}

}  // namespace steptron
