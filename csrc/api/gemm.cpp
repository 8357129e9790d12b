// out (M, N) = or += a (M, K) * b (K, N) for matrices of torch, see gemm.h.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "gemm/multiply.h"
#include "api/tensors.h"

namespace grpo_fast {
namespace {

// Rows that the result gets on top before it is rounded: coefficients[t] * values[rows[t]] to row ids[i], t = order[i].
struct Additions {
  const int64_t *ids = nullptr, *order = nullptr, *rows = nullptr;  // ids in ascending order; no rows: t
  const float* coefficients = nullptr;
  const void* values = nullptr;
  int64_t count = 0, stride = 0;
  bool is_fp32 = false;

  void add(const Block& block, float* sums, int64_t sums_stride) const {
    for (const int64_t* at = std::lower_bound(ids, ids + count, block.row); at < ids + count; ++at) {
      if (*at >= block.row + block.rows) return;
      const int64_t t = order[at - ids], start = (rows ? rows[t] : t) * stride + block.column;
      float* to = sums + (*at - block.row) * sums_stride;
      if (coefficients[t] == 0) continue;
      is_fp32 ? add_scaled(static_cast<const float*>(values) + start, coefficients[t], block.columns, to)
              : add_scaled(static_cast<const Bfloat16*>(values) + start, coefficients[t], block.columns, to);
    }
  }
};

// Every row by a number; exact zeros where that is 0.
void scale_rows(const float* scales, const Block& block, float* sums, int64_t stride) {
  for (int64_t row = 0; row < block.rows; ++row, sums += stride) {
    const float scale = scales[block.row + row];
    by_vectors(block.columns, [&](int64_t c, int64_t count) GRPO_FAST_BODY {
      store_up_to(sums + c, scale == 0 ? Floats{} : load_up_to(sums + c, count) * scale, count);
    });
  }
}

template <class T>
Operand<T> operand(const Tensor& x, bool transposed) {
  return {data<T>(x), x.stride(0), transposed};
}

// out, fp32 or bf16, = or += the product; adjust(block, sums, stride) may change a block before it is rounded.
template <class Kernel, class S, class T, class Adjust>
void multiply_into(const Problem<S, T>& p, const Tensor& out, bool add, const Adjust& adjust) {
  multiply<Kernel>(p, [&](const Block& block, float* sums, int64_t stride) {
    adjust(block, sums, stride);
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

void check_indices(const Tensor& x, int64_t count, int64_t end, const char* name) {
  check_vector(x, count, ScalarType::Long, name);
  for (int64_t i = 0; i < count; ++i)
    STD_TORCH_CHECK(data<int64_t>(x)[i] >= 0 && data<int64_t>(x)[i] < end, name, ": expected indices from 0 to ",
                    end - 1, ", got ", data<int64_t>(x)[i]);
}

Additions make_additions(const std::optional<Tensor>& ids, const std::optional<Tensor>& order,
                         const std::optional<Tensor>& coefficients, const std::optional<Tensor>& rows,
                         const std::optional<Tensor>& values, const Tensor& out) {
  if (!ids) return {};
  STD_TORCH_CHECK(order && coefficients && values, "added: expected order, coefficients and values with ids, got None");
  const int64_t count = ids->size(0);
  check_operand(*values, "added");
  STD_TORCH_CHECK(values->size(1) == out.size(1), "added: expected ", out.size(1), " columns, got ", values->size(1));
  check_indices(*ids, count, out.size(0), "added_ids");
  check_indices(*order, count, count, "added_order");
  if (rows) check_indices(*rows, count, values->size(0), "added_rows");
  STD_TORCH_CHECK(rows || values->size(0) >= count, "added: expected ", count, " rows, got ", values->size(0));
  check_vector(*coefficients, count, ScalarType::Float, "added_coefficients");
  return {data<int64_t>(*ids), data<int64_t>(*order), rows ? data<int64_t>(*rows) : nullptr, data<float>(*coefficients),
          values->data_ptr(), count, values->stride(0), values->scalar_type() == ScalarType::Float};
}

// out (M, N) = or += diag(out_scales) * a * b + additions, rounded once. a is stored as (M, K), or transposed as (K, M);
// b as (K, N), or transposed as (N, K). An a of int16 holds Positive16. parts, scales (K,) and keeps_heavy: see
// Problem; tiles: through torch; added_...: see Additions.
void mm_(Tensor a, Tensor b, Tensor out, bool a_transposed, bool b_transposed, bool add, int64_t parts, bool tiles,
         std::optional<Tensor> scales, bool keeps_heavy, std::optional<Tensor> out_scales,
         std::optional<Tensor> added_ids, std::optional<Tensor> added_order, std::optional<Tensor> added_coefficients,
         std::optional<Tensor> added_rows, std::optional<Tensor> added) {
  const bool is_positive = a.scalar_type() == ScalarType::Short;
  is_positive ? check_matrix(a, "a") : check_operand(a, "a");
  check_operand(b, "b"), check_operand(out, "out");
  const int64_t m = a.size(a_transposed ? 1 : 0), k = a.size(a_transposed ? 0 : 1);
  const int64_t n = b.size(b_transposed ? 0 : 1), b_k = b.size(b_transposed ? 1 : 0);
  const bool a_is_fp32 = a.scalar_type() == ScalarType::Float, b_is_fp32 = b.scalar_type() == ScalarType::Float;
  const bool narrows = (a_is_fp32 || is_positive) && !b_is_fp32;
  STD_TORCH_CHECK(a_is_fp32 || !b_is_fp32, "b: expected bfloat16 beside an a of 16 bits, got float32");
  STD_TORCH_CHECK(b_k == k, "b: expected K = ", k, " as in a, got ", b_k);
  STD_TORCH_CHECK(out.size(0) == m && out.size(1) == n, "out: expected (", m, ", ", n, ")");
  STD_TORCH_CHECK(!tiles || (!b_is_fp32 && torch_kernel().brgemm),
                  "tiles: expected a bfloat16 b and a torch with brgemm");
  STD_TORCH_CHECK(parts == 1 || (parts == 2 && narrows),
                  "parts: expected 1, or 2 for an a that is rounded to the bfloat16 of b, got ", parts);
  STD_TORCH_CHECK(!scales || (a_transposed && (a_is_fp32 || narrows)),
                  "scales: expected a transposed a that is float32 or rounded");
  STD_TORCH_CHECK(!keeps_heavy || (parts == 1 && narrows && a_transposed && !b_transposed),
                  "keeps_heavy: expected parts = 1, a transposed a that is rounded to the bfloat16 of b, b as it is");
  const float* by_k = optional_vector(scales, k, "scales");
  const float* by_out_row = optional_vector(out_scales, m, "out_scales");
  const Additions additions = make_additions(added_ids, added_order, added_coefficients, added_rows, added, out);
  if (m == 0 || n == 0) return;
  const auto run = [&](auto stored, auto multiplied, auto kernel) {
    using S = decltype(stored);
    using T = decltype(multiplied);
    const Problem<S, T> p{
        m, n, k, operand<S>(a, a_transposed), operand<T>(b, b_transposed), static_cast<int>(parts), by_k, keeps_heavy};
    multiply_into<decltype(kernel)>(p, out, add, [&](const Block& block, float* sums, int64_t stride) {
      if (by_out_row) scale_rows(by_out_row, block, sums, stride);
      additions.add(block, sums, stride);
    });
  };
  if (b_is_fp32) return run(float{}, float{}, Vectors{});
  if (a_is_fp32) return tiles ? run(float{}, Bfloat16{}, Tiles{}) : run(float{}, Bfloat16{}, Vectors{});
  if (is_positive) return tiles ? run(Positive16{}, Bfloat16{}, Tiles{}) : run(Positive16{}, Bfloat16{}, Vectors{});
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
      " Tensor? scales, bool keeps_heavy, Tensor? out_scales, Tensor? added_ids, Tensor? added_order,"
      " Tensor? added_coefficients, Tensor? added_rows, Tensor? added) -> ()");
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
