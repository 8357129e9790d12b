// out (M, N) = or += a (M, K) * b (K, N) for matrices of torch, see gemm.h.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "gemm.h"
#include "tensors.h"

namespace grpo_fast {
namespace {

template <class T>
Operand<T> operand(const Tensor& x, bool transposed) {
  return {data<T>(x), x.stride(0), transposed};
}

// Rows of an fp32 matrix that are added to rows of the result before it is rounded: `values[rows[i]]` to row ids[i].
struct Additions {
  const int64_t *ids = nullptr, *rows = nullptr;  // ids in ascending order
  const float* values = nullptr;
  int64_t count = 0, stride = 0;

  void add(const Block& block, float* sums, int64_t sums_stride) const {
    for (const int64_t* at = std::lower_bound(ids, ids + count, block.row); at < ids + count; ++at) {
      if (*at >= block.row + block.rows) return;
      float* to = sums + (*at - block.row) * sums_stride;
      const float* from = values + rows[at - ids] * stride + block.column;
      for (int64_t column = 0; column < block.columns; ++column) to[column] += from[column];
    }
  }
};

template <class Kernel, class S, class T>
void multiply_into(const Problem<S, T>& p, const Tensor& out, bool add, const Additions& additions) {
  multiply<Kernel>(p, [&](const Block& block, float* sums, int64_t stride) {
    additions.add(block, sums, stride);
    const auto store_to = [&](auto* to) {
      to += block.row * out.stride(0) + block.column;
      store_block(sums, stride, to, out.stride(0), block.rows, block.columns, add);
    };
    if (out.scalar_type() == ScalarType::Float)
      store_to(data<float>(out));
    else
      store_to(data<Bfloat16>(out));
  });
}

Additions make_additions(const std::optional<Tensor>& ids, const std::optional<Tensor>& rows,
                         const std::optional<Tensor>& values, const Tensor& out) {
  if (!ids) return {};
  STD_TORCH_CHECK(rows && values, "added_rows, added: expected them with added_ids, got None");
  check_vector(*ids, ids->size(0), ScalarType::Long, "added_ids");
  check_vector(*rows, ids->size(0), ScalarType::Long, "added_rows");
  check_matrix(*values, "added");
  STD_TORCH_CHECK(values->scalar_type() == ScalarType::Float && values->size(1) == out.size(1),
                  "added: expected a float32 matrix of ", out.size(1), " columns");
  return {data<int64_t>(*ids), data<int64_t>(*rows), data<float>(*values), ids->size(0), values->stride(0)};
}

// out (M, N) = or += a * b, then out[added_ids[i]] += added[added_rows[i]] before the result is rounded. a is stored as
// (M, K), or transposed as (K, M); b as (K, N), or transposed as (N, K). parts, scales (K,), keeps_heavy and
// thresholds (M,): see Problem; tiles: through torch.
void mm_(Tensor a, Tensor b, Tensor out, bool a_transposed, bool b_transposed, bool add, int64_t parts, bool tiles,
         std::optional<Tensor> scales, bool keeps_heavy, std::optional<Tensor> thresholds,
         std::optional<Tensor> added_ids, std::optional<Tensor> added_rows, std::optional<Tensor> added) {
  check_operand(a, "a"), check_operand(b, "b"), check_operand(out, "out");
  const int64_t m = a.size(a_transposed ? 1 : 0), k = a.size(a_transposed ? 0 : 1);
  const int64_t n = b.size(b_transposed ? 0 : 1), b_k = b.size(b_transposed ? 1 : 0);
  const bool a_is_fp32 = a.scalar_type() == ScalarType::Float, b_is_fp32 = b.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(a_is_fp32 || !b_is_fp32, "b: expected the dtype of a, bfloat16, got float32");
  STD_TORCH_CHECK(b_k == k, "b: expected K = ", k, " as in a, got ", b_k);
  STD_TORCH_CHECK(out.size(0) == m && out.size(1) == n, "out: expected (", m, ", ", n, ")");
  STD_TORCH_CHECK(!tiles || (!b_is_fp32 && torch_kernel().brgemm),
                  "tiles: expected a bfloat16 b and a torch with brgemm");
  STD_TORCH_CHECK(parts == 1 || (parts == 2 && a_is_fp32 && !b_is_fp32),
                  "parts: expected 1, or 2 for a float32 a and a bfloat16 b, got ", parts);
  STD_TORCH_CHECK(!scales || (a_transposed && a_is_fp32), "scales: expected a transposed float32 a");
  STD_TORCH_CHECK(!keeps_heavy || (parts == 1 && a_is_fp32 && !b_is_fp32 && !b_transposed),
                  "keeps_heavy: expected parts = 1, a float32 a and a bfloat16 b that is not transposed");
  STD_TORCH_CHECK(thresholds.has_value() == (keeps_heavy && !a_transposed),
                  "thresholds: expected them with keeps_heavy and an a that is not transposed, and only then");
  const float* by_k = optional_vector(scales, k, "scales");
  const float* by_row = optional_vector(thresholds, m, "thresholds");
  const Additions additions = make_additions(added_ids, added_rows, added, out);
  if (m == 0 || n == 0) return;
  const auto run = [&](auto stored, auto multiplied, auto kernel) {
    using S = decltype(stored);
    using T = decltype(multiplied);
    const Problem<S, T> p{
        m, n, k, operand<S>(a, a_transposed), operand<T>(b, b_transposed), static_cast<int>(parts), by_k, keeps_heavy,
        by_row};
    multiply_into<decltype(kernel)>(p, out, add, additions);
  };
  if (b_is_fp32) return run(float{}, float{}, Vectors{});
  if (a_is_fp32) return tiles ? run(float{}, Bfloat16{}, Tiles{}) : run(float{}, Bfloat16{}, Vectors{});
  tiles ? run(Bfloat16{}, Bfloat16{}, Tiles{}) : run(Bfloat16{}, Bfloat16{}, Vectors{});
}

bool has_fma() {
#if defined(__FMA__)
  return kLanes >= 8;
#else
  return false;
#endif
}

bool has_dot16() {
  return kHasDot16;
}

bool has_tiles() {
  return torch_kernel().brgemm != nullptr;
}

}  // namespace
}  // namespace grpo_fast

STABLE_TORCH_LIBRARY(grpo_fast_gemm, library) {
  library.def(
      "mm_(Tensor a, Tensor b, Tensor(a!) out, bool a_transposed, bool b_transposed, bool add, int parts, bool tiles,"
      " Tensor? scales, bool keeps_heavy, Tensor? thresholds, Tensor? added_ids, Tensor? added_rows, Tensor? added)"
      " -> ()");
  library.def("has_fma() -> bool");
  library.def("has_dot16() -> bool");
  library.def("has_tiles() -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(grpo_fast_gemm, CompositeExplicitAutograd, library) {
  library.impl("has_fma", TORCH_BOX(&grpo_fast::has_fma));
  library.impl("has_dot16", TORCH_BOX(&grpo_fast::has_dot16));
  library.impl("has_tiles", TORCH_BOX(&grpo_fast::has_tiles));
}

STABLE_TORCH_LIBRARY_IMPL(grpo_fast_gemm, CPU, library) {
  library.impl("mm_", TORCH_BOX(&grpo_fast::mm_));
}
