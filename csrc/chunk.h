// What the doors have in common: rows of logits with a target and a rule each, and checks of what comes from Python.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>

#include "row_kernels.h"

namespace grpo_fast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// What is known of the rows before their logits are looked at: target_ids (C,), and the LogitRule.
struct Chunk {
  int64_t rows, columns, stride;  // stride: of the logits, where they exist
  const int64_t* target_ids;
  double logit_scale, softcap, temperature;
  const float* temperatures;  // (C,), or null

  RowRule rule(int64_t row) const {
    const double t = temperatures ? temperatures[row] : temperature;
    if (softcap > 0)
      return {static_cast<float>(logit_scale / softcap), static_cast<float>(softcap / t), logit_scale / t};
    return {static_cast<float>(logit_scale / t), 0.0f, logit_scale / t};
  }
};

template <class T>
T* data(const Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}

inline void check_matrix(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.is_cpu(), name, ": expected a CPU tensor");
  STD_TORCH_CHECK(x.dim() == 2, name, ": expected (C, V), got ", x.dim(), " dimensions");
  STD_TORCH_CHECK(x.size(1) <= 1 || x.stride(1) == 1, name, ": expected a contiguous last dimension, got stride ",
                  x.stride(1));
  STD_TORCH_CHECK(x.size(0) == 0 || x.size(1) > 0, name, ": expected at least one column, got none");
}

inline void check_vector(const Tensor& x, int64_t rows, ScalarType dtype, const char* name) {
  STD_TORCH_CHECK(x.is_cpu(), name, ": expected a CPU tensor");
  STD_TORCH_CHECK(x.dim() == 1 && x.size(0) == rows, name, ": expected one value for each of ", rows, " rows");
  STD_TORCH_CHECK(x.scalar_type() == dtype, name, ": expected ", dtype == ScalarType::Long ? "int64" : "float32");
  STD_TORCH_CHECK(x.is_contiguous(), name, ": expected a contiguous tensor");
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
  check_matrix(logits, "logits");
  Chunk chunk = make_rows(logits.size(0), logits.size(1), target_ids, logit_scale, softcap, temperature, temperatures);
  chunk.stride = logits.stride(0);
  return chunk;
}

// What is known of every row, (C,) each; entropy may be null.
struct RowOutputs {
  float *lse, *logps, *entropy;
};

}  // namespace grpo_fast
