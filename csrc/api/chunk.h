// A chunk from the arguments that the operators of rows have in common.
#pragma once

#include "api/tensors.h"
#include "rows/chunk.h"

namespace grpo_fast {

struct Rule {
  double logit_scale;
  std::optional<double> softcap;
  double temperature;
  std::optional<Tensor> temperatures;  // (C,), before `temperature`
};

inline Chunk checked_chunk(int64_t rows, int64_t columns, const Tensor& target_ids,
                           const Rule& rule) {
  const auto* ids = checked_vector<int64_t>(target_ids, rows, "target_ids");
  const float* temperatures = checked_vector(rule.temperatures, rows, "temperature");
  STD_TORCH_CHECK(!rule.softcap || *rule.softcap > 0, "softcap: expected a positive number, got ",
                  *rule.softcap);
  const double softcap = rule.softcap.value_or(0);
  return {rows, columns, ids, rule.logit_scale, softcap, rule.temperature, temperatures};
}

template <class T>
Matrix<T> matrix(const Tensor& x) {
  return {data<T>(x), x.stride(0)};
}

}  // namespace grpo_fast
