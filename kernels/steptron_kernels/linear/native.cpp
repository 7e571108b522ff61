// y = x W^T and its two gradients. W comes packed, both ways, from a cache that the Python side keeps.
#include <torch/library.h>

#include "../csrc/gemm.h"
#include "../csrc/tensors.h"

namespace steptron {
namespace {

template <typename T>
constexpr at::ScalarType kType = std::is_same_v<T, bf16> ? at::kBFloat16 : at::kFloat;

// Every matrix [N, K] of a stack as panels of W^T (for y = x W^T) or of W (for dx = dy W).
template <typename T>
void pack(const float* w, int64_t count, int64_t n, int64_t k, bool transposed, T* out) {
  const int64_t depth = transposed ? k : n, columns = transposed ? n : k;
  const int64_t panels = ceil_div(columns, kPanel), size = packed_size<T>(depth, columns);
  parallel_each(count * panels, [&](int64_t unit) {
    const int64_t matrix = unit / panels, c0 = unit % panels * kPanel;
    const float* source = w + matrix * n * k;
    T* target = out + matrix * size + c0 * padded_depth<T>(depth);
    const int64_t width = std::min(kPanel, columns - c0);
    if (transposed)
      pack_columns(depth, width, source + c0 * k, k, target);
    else
      pack_rows(depth, width, source + c0, k, target);
  });
}

at::Tensor pack_weight(const at::Tensor& w, bool transposed, bool in_bf16) {
  const float* data = contiguous_data_of(w, "weight");
  const int64_t n = w.size(-2), k = w.size(-1), count = w.numel() / std::max<int64_t>(1, n * k);
  const int64_t depth = transposed ? k : n, columns = transposed ? n : k;
  if (in_bf16) {
    auto out = at::empty({count, packed_size<bf16>(depth, columns)}, w.options().dtype(at::kBFloat16));
    pack(data, count, n, k, transposed, out.mutable_data_ptr<bf16>());
    return out;
  }
  auto out = at::empty({count, packed_size<float>(depth, columns)}, w.options());
  pack(data, count, n, k, transposed, out.mutable_data_ptr<float>());
  return out;
}

// x [M, K] times a packed right operand [K, N].
at::Tensor multiply_rows(const at::Tensor& x, const at::Tensor& packed, int64_t k, int64_t n) {
  const float* data = data_of(x, "x");
  const int64_t m = x.size(0);
  const bool in_bf16 = packed.scalar_type() == at::kBFloat16;
  TORCH_CHECK(x.dim() == 2 && x.size(1) == k, "x: expected [M, ", k, "], got ", x.sizes());
  TORCH_CHECK(packed.numel() == (in_bf16 ? packed_size<bf16>(k, n) : packed_size<float>(k, n)),
              "packed: not a matrix of ", k, " rows and ", n, " columns");
  auto y = at::empty({m, n}, x.options());
  float* out = y.mutable_data_ptr<float>();
  if (in_bf16)
    multiply<bf16>(m, n, k, data, x.stride(0), packed_panels(packed.const_data_ptr<bf16>(), k), out, n);
  else
    multiply<float>(m, n, k, data, x.stride(0), packed_panels(packed.const_data_ptr<float>(), k), out, n);
  return y;
}

// x [M, K] times a plain float matrix [K, N].
at::Tensor multiply_plain(const at::Tensor& x, const at::Tensor& w) {
  TORCH_CHECK(x.dim() == 2 && w.dim() == 2 && x.size(1) == w.size(0), "x ", x.sizes(), " does not fit w ", w.sizes());
  auto y = at::empty({x.size(0), w.size(1)}, x.options());
  multiply<float>(x.size(0), w.size(1), x.size(1), data_of(x, "x"), x.stride(0),
                  plain_panels(data_of(w, "w"), w.stride(0)), y.mutable_data_ptr<float>(), w.size(1));
  return y;
}

// dy [M, N]^T times x [M, K].
at::Tensor weight_gradient(const at::Tensor& dy, const at::Tensor& x, bool in_bf16) {
  TORCH_CHECK(x.dim() == 2 && dy.dim() == 2 && x.size(0) == dy.size(0), "x ", x.sizes(), " does not fit dy ",
              dy.sizes());
  const int64_t m = x.size(0), n = dy.size(1), k = x.size(1);
  auto dw = at::empty({n, k}, x.options());
  auto run = in_bf16 ? multiply_transposed<bf16> : multiply_transposed<float>;
  run(m, n, k, data_of(dy, "dy"), dy.stride(0), data_of(x, "x"), x.stride(0), dw.mutable_data_ptr<float>(), false);
  return dw;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(steptron_kernels, library) {
  library.def("pack_weight(Tensor weight, bool transposed, bool in_bf16) -> Tensor", &pack_weight);
  library.def("linear(Tensor x, Tensor packed, int depth, int columns) -> Tensor", &multiply_rows);
  library.def("linear_plain(Tensor x, Tensor weight) -> Tensor", &multiply_plain);
  library.def("linear_weight_gradient(Tensor dy, Tensor x, bool in_bf16) -> Tensor", &weight_gradient);
}

}  // namespace steptron
