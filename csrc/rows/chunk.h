// Rows of logits, whether they exist or not, with a target and a rule each.
#pragma once

#include "rows/row_kernels.h"
#include "api/tensors.h"

namespace grpo_fast {

// What is known of the rows before their logits are looked at: target_ids (C,), and the LogitRule.
struct Chunk {
  int64_t rows, columns, stride;  // stride: of the logits, where they exist
  const int64_t* target_ids;
  double logit_scale, softcap, temperature;
  const float* temperatures;  // (C,), or null

  bool has_target(int64_t row) const { return target_ids[row] >= 0 && target_ids[row] < columns; }

  RowRule rule(int64_t row) const {
    const double t = temperatures ? temperatures[row] : temperature;
    if (softcap > 0)
      return {static_cast<float>(logit_scale / softcap), static_cast<float>(softcap / t), logit_scale / t};
    return {static_cast<float>(logit_scale / t), 0.0f, logit_scale / t};
  }
};

inline void check_rows(const Tensor& x, const char* name) {
  check_matrix(x, name, "(C, V)");
  STD_TORCH_CHECK(x.size(0) == 0 || x.size(1) > 0, name, ": expected at least one column, got none");
}

inline Chunk make_rows(int64_t rows, int64_t columns, const Tensor& target_ids, double logit_scale,
                       std::optional<double> softcap, double temperature, const std::optional<Tensor>& temperatures) {
  check_vector(target_ids, rows, ScalarType::Long, "target_ids");
  if (temperatures) check_vector(*temperatures, rows, ScalarType::Float, "temperature");
  STD_TORCH_CHECK(!softcap || *softcap > 0, "softcap: expected a positive number, got ", *softcap);
  return {rows, columns, 0, data<int64_t>(target_ids), logit_scale, softcap.value_or(0), temperature,
          temperatures ? data<float>(*temperatures) : nullptr};
}

inline Chunk make_chunk(const Tensor& logits, const Tensor& target_ids, double logit_scale,
                        std::optional<double> softcap, double temperature, const std::optional<Tensor>& temperatures) {
  check_rows(logits, "logits");
  Chunk chunk = make_rows(logits.size(0), logits.size(1), target_ids, logit_scale, softcap, temperature, temperatures);
  chunk.stride = logits.stride(0);
  return chunk;
}

}  // namespace grpo_fast
