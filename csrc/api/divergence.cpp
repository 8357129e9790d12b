// Operator row_divergence_: divergences between rows of student and teacher logits, and their
// gradient. grpo_fast/kernels/divergence.py documents the results, and rows/divergence.h
// the algorithm.
//
// Layout: the logits of student and teacher are (C, V) fp32 with any row stride.
//
// Rounding: kRun neighbouring columns are summed in fp32, and these sums are added in fp64. Outputs
// are fp64.
//
// Parallelism: threads compute different rows.
#include <torch/csrc/stable/library.h>

#include "api/chunk.h"
#include "rows/divergence.h"

namespace grpo_fast {
namespace {

// Checks the logits of the student or the teacher, and describes them as a Chunk without targets.
Chunk chunk_of(const Tensor& logits, const LogitTransform& transform) {
  check_rows(logits, "logits");
  STD_TORCH_CHECK(is_fp32(logits), "logits: expected float32");
  return {logits.size(0), logits.size(1), nullptr, transform.logit_scale,
          transform.softcap.value_or(0), transform.temperature};
}

// Checks that x is fp32 and has the shape of the logits.
void check_like(const Tensor& logits, const Tensor& x, const char* name) {
  check_rows(x, name);
  STD_TORCH_CHECK(is_fp32(x), name, ": expected float32");
  check_shape(x, name, logits.size(0), logits.size(1));
}

// Returns a view of one row of the student's or the teacher's logits.
DivergenceSide side(const Chunk& chunk, const Matrix<float>& logits, int64_t row) {
  return {chunk.start(logits, row), chunk.width(row), chunk.transform(), chunk.softcap > 0};
}

// Calls run(std::integral_constant<int, kind>{}), so that the kind of divergence is a compile-time
// constant.
template <class F>
void with_kind(int64_t kind, const F& run) {
  STD_TORCH_CHECK(kind >= 0 && kind < k_divergence_count, "kind: expected a number below ",
                  k_divergence_count, ", got ", kind);
  static_assert(k_divergence_count == 3);
  if (kind == 0) return run(std::integral_constant<int, 0>{});
  if (kind == 1) return run(std::integral_constant<int, 1>{});
  run(std::integral_constant<int, 2>{});
}

// Computes the divergence of every row. If `out` is given, writes the gradient with respect to the
// student's logits to it. Returns values, centers, lse and teacher_lse in one (4, C) fp64 tensor.
// The center of a row is the sum of its slopes (rows/divergence.h).
Tensor row_divergence_(Tensor logits, Tensor teacher, std::optional<Tensor> out, Tensor weights,
                       std::optional<Tensor> known, int64_t kind, double beta, double logit_scale,
                       std::optional<double> softcap, double temperature,
                       double teacher_logit_scale,
                       std::optional<double> teacher_softcap, double teacher_temperature) {
  const Chunk chunk = chunk_of(logits, {logit_scale, softcap, temperature});
  const Chunk other =
      chunk_of(teacher, {teacher_logit_scale, teacher_softcap, teacher_temperature});
  check_like(logits, teacher, "teacher");
  if (out) check_like(logits, *out, "out");
  STD_TORCH_CHECK(!out || out->data_ptr() != logits.data_ptr() || !chunk.rows,
                  "out: expected memory that is not that of the logits");
  const int64_t rows = chunk.rows;
  const float* w = checked_vector<float>(weights, rows, "weights");
  const double* given = known ? checked_vector<double>(*known, 4 * rows, "known") : nullptr;
  const Tensor found = empty(logits, 4 * rows, ScalarType::Double);
  double* to = data<double>(found);
  const auto x = matrix<float>(logits), y = matrix<float>(teacher);
  const auto d = out ? matrix<float>(*out) : Matrix<float>{nullptr, 0};
  with_kind(kind, [&](auto number) {
    for_each_row(chunk, [&](int64_t row) {
      DivergenceRow<decltype(number)::value> own(side(chunk, x, row), side(other, y, row),
                                                 static_cast<float>(beta));
      // If the vocabulary is sharded, use the lse of the full row, which the caller passes. The
      // divergence is then summed over the columns of this shard only.
      const double lse = given ? given[2 * rows + row] : own.lse();
      const double teacher_lse = given ? given[3 * rows + row] : own.teacher_lse();
      float* to_row = out ? chunk.start(d, row) : nullptr;
      DivergenceSums sums = own.sums(lse, teacher_lse, to_row);
      if (out && given) sums.center = given[rows + row];
      // Write zeros if the weight of the row is 0. The row may contain NaN, and 0 * NaN is NaN.
      if (out && w[row] == 0) write_zeros(to_row, chunk.width(row));
      if (out && w[row] != 0) own.write(to_row, sums.center, w[row]);
      const double each[] = {sums.value, sums.center, lse, teacher_lse};
      for (int i = 0; i < 4; ++i) to[i * rows + row] = each[i];
    });
  });
  return found;
}

}  // namespace
}  // namespace grpo_fast

STABLE_TORCH_LIBRARY(GRPO_FAST_LIBRARY, library) {
  library.def(
      "row_divergence_(Tensor logits, Tensor teacher, Tensor(a!)? out, Tensor weights,"
      " Tensor? known, int kind, float beta, float logit_scale, float? softcap, float temperature,"
      " float teacher_logit_scale, float? teacher_softcap,"
      " float teacher_temperature) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(GRPO_FAST_LIBRARY, CPU, library) {
  library.impl("row_divergence_", TORCH_BOX(&grpo_fast::row_divergence_));
}
