// Operator linear_rows: the LM head fused with log-softmax. It can also store raw logits or
// exponentials. rows/sweep.h documents the algorithm, and grpo_fast/kernels/gpu/linear.py
// derives the exponentials.
//
// Layout: hidden (T, H) and weight (V, H) are fp32 or bf16, with contiguous rows.
//
// Memory traffic: an fp32 output matrix costs 4 bytes per logit, and Positive16 exponentials cost 2
// bytes per logit. Without an output matrix, no logits are written.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "api/chunk.h"
#include "rows/sweep.h"

namespace grpo_fast {
namespace {

// Checks the tensors of the LM head, and collects them in a Head.
Head checked_head(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
                  bool tiles) {
  check_operand(hidden, "hidden"), check_operand(weight, "weight");
  check_rows(hidden, "hidden"), check_rows(weight, "weight");
  const int64_t depth = hidden.size(1), columns = weight.size(0);
  STD_TORCH_CHECK(hidden.scalar_type() == weight.scalar_type(),
                  "hidden: expected the dtype of weight");
  STD_TORCH_CHECK(depth == weight.size(1), "hidden: expected ", weight.size(1),
                  " columns as in weight, got ", depth);
  return {hidden.data_ptr(), weight.data_ptr(), hidden.stride(0), weight.stride(0), depth, columns,
          checked_vector(bias, columns, "bias"), is_fp32(weight), tiles};
}

// Checks the shape and the dtype of the optional output matrix (T, V).
void check_out(const Chunk& chunk, const std::optional<Tensor>& out, bool has_exponentials) {
  STD_TORCH_CHECK(!has_exponentials || out, "out: expected a matrix for the exponentials, got None");
  if (!out) return;
  check_rows(*out, "out");
  const bool is_int16 = out->scalar_type() == ScalarType::Short;
  const bool is_right = is_fp32(*out) || (has_exponentials && is_int16);
  STD_TORCH_CHECK(is_right && out->size(0) == chunk.rows && out->size(1) == chunk.columns,
                  "out: expected float32 (", chunk.rows, ", ", chunk.columns,
                  "), or int16 for exponentials");
}

using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Computes the statistics of every row and, if has_exponentials is set, its exponentials. The first
// five results are lse, logps, entropy, unit and target_unit, (T,) fp32 each. rows/sweep.h defines
// unit and target_unit. The last three results describe the 16-bit exponentials that dominate their
// row: their rows, columns and fp32 values, sorted by row and column.
//
// entropy is empty unless return_entropy is set. unit and target_unit are empty unless
// has_exponentials is set. out (T, V) receives raw logits in fp32, or exponentials in fp32 or
// Positive16 (int16). known_lse and known_logps are statistics of the same rows from an earlier
// call.
Outputs linear_rows(Tensor hidden, Tensor weight, std::optional<Tensor> bias, Tensor target_ids,
                    std::optional<Tensor> out, bool has_exponentials,
                    std::optional<Tensor> known_lse, std::optional<Tensor> known_logps,
                    double logit_scale, std::optional<double> softcap, double temperature,
                    bool return_entropy, bool tiles) {
  const Head head = checked_head(hidden, weight, bias, tiles);
  const LogitTransform transform{logit_scale, softcap, temperature};
  const Chunk chunk = checked_chunk(hidden.size(0), head.columns, target_ids, transform);
  check_out(chunk, out, has_exponentials);
  const bool is_known = known_lse && known_logps;
  if (is_known) {
    checked_vector(known_lse, chunk.rows, "known_lse");
    checked_vector(known_logps, chunk.rows, "known_logps");
  }
  const int64_t units = has_exponentials ? chunk.rows : 0;
  const Tensor lse = is_known ? *known_lse : empty(hidden, chunk.rows);
  const Tensor logps = is_known ? *known_logps : empty(hidden, chunk.rows);
  const Tensor entropy = empty(hidden, return_entropy ? chunk.rows : 0);
  const Tensor unit = empty(hidden, units), target_unit = empty(hidden, units);
  SweepOutputs to{};
  to.rows = {data<float>(lse), data<float>(logps), return_entropy ? data<float>(entropy) : nullptr};
  to.unit = data<float>(unit), to.target_unit = data<float>(target_unit);
  if (out && is_fp32(*out)) (has_exponentials ? to.exponentials : to.logits) = matrix<float>(*out);
  if (out && !is_fp32(*out)) to.exponentials16 = matrix<Positive16>(*out);
  std::vector<Dominant> found;
  // Select the compiled variant. With a soft cap, the entropy is always computed. It costs little
  // compared with tanh, and one fewer variant has to be compiled.
  if (chunk.rows > 0)
    found = softcap          ? Sweep<true, true>(chunk, head, to).run(is_known)
            : return_entropy ? Sweep<false, true>(chunk, head, to).run(is_known)
                             : Sweep<false, false>(chunk, head, to).run(is_known);
  const int64_t count = found.size();
  const Tensor dominant_rows = empty(hidden, count, ScalarType::Long);
  const Tensor dominant_columns = empty(hidden, count, ScalarType::Long);
  const Tensor dominant_weights = empty(hidden, count);
  for (int64_t i = 0; i < count; ++i) {
    data<int64_t>(dominant_rows)[i] = found[i].row;
    data<int64_t>(dominant_columns)[i] = found[i].column;
    data<float>(dominant_weights)[i] = found[i].weight;
  }
  return {lse,           logps,           entropy, unit, target_unit,
          dominant_rows, dominant_columns, dominant_weights};
}

}  // namespace
}  // namespace grpo_fast

STABLE_TORCH_LIBRARY(GRPO_FAST_LIBRARY, library) {
  library.def(
      "linear_rows(Tensor hidden, Tensor weight, Tensor? bias, Tensor target_ids,"
      " Tensor(a!)? out, bool has_exponentials, Tensor? known_lse, Tensor? known_logps,"
      " float logit_scale, float? softcap, float temperature, bool return_entropy,"
      " bool tiles)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(GRPO_FAST_LIBRARY, CPU, library) {
  library.impl("linear_rows", TORCH_BOX(&grpo_fast::linear_rows));
}
