// Operator mm_: the matrix product out = a * b, or out += a * b.
//
// The product can also be scaled row by row, and scaled rows of another matrix can be added to it.
// The result is rounded once. gemm/multiply.h documents blocking, rounding and parallelism.
#include <torch/csrc/stable/library.h>

#include <numeric>
#include <tuple>

#include "api/tensors.h"
#include "gemm/result.h"

namespace grpo_fast {
namespace {

// Arguments of the product diag(out_scales) * a * diag(scales) * b + added, which is stored in
// `out` or added to it.
struct Product {
  Tensor a, b, out;  // a (M, K), or transposed (K, M); b (K, N), or transposed (N, K)
  bool a_transposed, b_transposed, add;
  bool tiles;  // whether to use torch's AMX product
  const float *scales, *out_scales;
  Added added;

  int64_t m() const { return a.size(a_transposed ? 1 : 0); }
  int64_t k() const { return a.size(a_transposed ? 0 : 1); }
  int64_t n() const { return b.size(b_transposed ? 0 : 1); }
  // Returns whether `a` contains Positive16 numbers, which torch stores as int16.
  bool is_positive() const { return a.scalar_type() == ScalarType::Short; }
};

// Checks the dtypes and shapes of a product.
void check(const Product& p) {
  p.is_positive() ? check_matrix(p.a, "a") : check_operand(p.a, "a");
  check_operand(p.b, "b"), check_operand(p.out, "out");
  const int64_t b_k = p.b.size(p.b_transposed ? 1 : 0);
  STD_TORCH_CHECK(is_fp32(p.a) || !is_fp32(p.b),
                  "b: expected bfloat16 if a has 16 bits, got float32");
  STD_TORCH_CHECK(b_k == p.k(), "b: expected K = ", p.k(), " as in a, got ", b_k);
  check_shape(p.out, "out", p.m(), p.n());
  STD_TORCH_CHECK(!p.tiles || (!is_fp32(p.b) && torch_kernel().brgemm),
                  "tiles: expected a bfloat16 b and a torch with brgemm");
  STD_TORCH_CHECK(!p.is_positive() || !p.a_transposed || !p.b_transposed,
                  "b: expected contiguous rows if a is a transposed int16 matrix");
}

// Checks the additional rows, and sorts them by id, so that a block finds its rows by binary
// search.
Added checked_added(const std::optional<Tensor>& coefficients, const std::optional<Tensor>& values,
                    const std::optional<Tensor>& ids, const std::optional<Tensor>& rows,
                    const Tensor& out) {
  if (!coefficients) return {};
  STD_TORCH_CHECK(values, "added: expected values with coefficients, got None");
  const int64_t count = coefficients->size(0), height = values->size(0);
  check_operand(*values, "added");
  STD_TORCH_CHECK(values->size(1) == out.size(1), "added: expected ", out.size(1),
                  " columns, got ", values->size(1));
  STD_TORCH_CHECK(rows || height >= count, "added: expected ", count, " rows, got ", height);
  STD_TORCH_CHECK(ids || out.size(0) >= count, "added: expected at most ", out.size(0),
                  " coefficients, got ", count);
  Added added{checked_vector(coefficients, count, "added_coefficients"),
              ids ? checked_indices(*ids, count, out.size(0), "added_ids") : nullptr,
              rows ? checked_indices(*rows, count, height, "added_rows") : nullptr,
              values->data_ptr(), values->stride(0), is_fp32(*values)};
  added.order.resize(count);
  std::iota(added.order.begin(), added.order.end(), 0);
  if (ids)
    std::stable_sort(added.order.begin(), added.order.end(),
                     [&](int64_t s, int64_t t) { return added.ids[s] < added.ids[t]; });
  return added;
}

// Computes the product with a micro-kernel. `a` is stored as S, and `b` is stored as T.
template <class S, class T, class Kernel>
void run(const Product& p) {
  const Operand<S> a{data<S>(p.a), p.a.stride(0), p.a_transposed};
  const Operand<T> b{data<T>(p.b), p.b.stride(0), !p.b_transposed};
  const Problem<S, T> problem{p.m(), p.n(), p.k(), a, b, p.scales};
  multiply<Kernel>(problem, [&](const Block& block, float* sums, int64_t stride) {
    if (p.out_scales) scale_rows(p.out_scales, block, sums, stride);
    p.added.add(block, sums, stride);
    const auto store_to = [&](auto* to) {
      store_block(block, sums, stride, to, p.out.stride(0), p.add);
    };
    is_fp32(p.out) ? store_to(data<float>(p.out)) : store_to(data<Bfloat16>(p.out));
  });
}

// Computes the product that struct Product describes. `scales` (K,) requires a transposed `a` in
// fp32 or int16. added_coefficients, added, added_ids and added_rows are the fields of the struct
// Added, where `added` is called `values`.
void mm_(Tensor a, Tensor b, Tensor out, bool a_transposed, bool b_transposed, bool add, bool tiles,
         std::optional<Tensor> scales, std::optional<Tensor> out_scales,
         std::optional<Tensor> added_coefficients, std::optional<Tensor> added,
         std::optional<Tensor> added_ids, std::optional<Tensor> added_rows) {
  Product p{a, b, out, a_transposed, b_transposed, add, tiles, nullptr, nullptr, {}};
  check(p);
  STD_TORCH_CHECK(!scales || (a_transposed && a.scalar_type() != ScalarType::BFloat16),
                  "scales: expected a transposed a that is float32 or int16");
  p.scales = checked_vector(scales, p.k(), "scales");
  p.out_scales = checked_vector(out_scales, p.m(), "out_scales");
  p.added = checked_added(added_coefficients, added, added_ids, added_rows, out);
  if (p.m() == 0 || p.n() == 0) return;
  if (is_fp32(b)) return run<float, float, Vectors>(p);
  const auto with_kernel = [&](auto stored) {
    using S = decltype(stored);
    tiles ? run<S, Bfloat16, Tiles>(p) : run<S, Bfloat16, Vectors>(p);
  };
  if (is_fp32(a)) return with_kernel(float{});
  p.is_positive() ? with_kernel(Positive16{}) : with_kernel(Bfloat16{});
}

// Returns three flags: whether fp32 products use FMA, whether bf16 products use AVX512_BF16, and
// whether torch has an AMX product.
std::tuple<bool, bool, bool> features() {
#if defined(__FMA__)
  constexpr bool has_fma = kLanes >= 8;
#else
  constexpr bool has_fma = false;
#endif
  return {has_fma, kHasDot16, torch_kernel().brgemm != nullptr};
}

}  // namespace
}  // namespace grpo_fast

STABLE_TORCH_LIBRARY(GRPO_FAST_LIBRARY, library) {
  library.def(
      "mm_(Tensor a, Tensor b, Tensor(a!) out, bool a_transposed, bool b_transposed, bool add,"
      " bool tiles, Tensor? scales, Tensor? out_scales, Tensor? added_coefficients, Tensor? added,"
      " Tensor? added_ids, Tensor? added_rows) -> ()");
  library.def("features() -> (bool, bool, bool)");
}

STABLE_TORCH_LIBRARY_IMPL(GRPO_FAST_LIBRARY, CompositeExplicitAutograd, library) {
  library.impl("features", TORCH_BOX(&grpo_fast::features));
}

STABLE_TORCH_LIBRARY_IMPL(GRPO_FAST_LIBRARY, CPU, library) {
  library.impl("mm_", TORCH_BOX(&grpo_fast::mm_));
}
