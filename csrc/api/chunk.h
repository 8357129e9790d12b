// Argument checks of the operators on rows of logits. They return a Chunk (rows/chunk.h).
#pragma once

#include "api/tensors.h"
#include "rows/chunk.h"

namespace grpo_fast {

// The logit transform, as Python passes it.
struct LogitTransform {
  double logit_scale;
  std::optional<double> softcap;
  double temperature;
};

// Checks the targets and the logit transform of a (rows, columns) matrix of logits.
inline Chunk checked_chunk(int64_t rows, int64_t columns, const Tensor& target_ids,
                           const LogitTransform& transform) {
  const auto* ids = checked_vector<int64_t>(target_ids, rows, "target_ids");
  STD_TORCH_CHECK(!transform.softcap || *transform.softcap > 0,
                  "softcap: expected a positive number, got ", *transform.softcap);
  const double softcap = transform.softcap.value_or(0);
  return {rows, columns, ids, transform.logit_scale, softcap, transform.temperature};
}

// Checks rows of unequal length, which are stored one after another in a vector of `numbers`
// logits. `offsets` contains the bounds of the rows, and `places` contains the position of each
// target in its row.
inline Chunk checked_ragged(int64_t numbers, const Tensor& offsets, const Tensor& places,
                            const LogitTransform& transform) {
  const int64_t* found = checked_offsets<int64_t>(offsets, numbers, "offsets");
  Chunk chunk = checked_chunk(offsets.size(0) - 1, numbers, places, transform);
  chunk.offsets = found;
  return chunk;
}

template <class T>
Matrix<T> matrix(const Tensor& x) {
  return {data<T>(x), x.stride(0)};
}

}  // namespace grpo_fast
