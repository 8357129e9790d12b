// Gradient of log-probability and entropy with respect to the raw logits. Each logit is read once,
// and its gradient is written once:
//
//     d raw_j = (g (1[j = y] - p_j) - ge p_j (log p_j + H)) * dz/draw
//
// Here g and ge are the coefficients of the log-probability and of the entropy H, y is the column
// of the target, and p_j is the probability of column j.
//
// The columns may be one vocabulary shard. The lse, logp and entropy are then those of the full
// row, and the target may be in another shard.
//
// Rounding: elements are computed in fp32, except for the element of the target, which is computed
// in fp64. A 16-bit gradient is rounded once.
#pragma once

#include "rows/chunk.h"

namespace grpo_fast {

// Statistics and gradient coefficients of the rows, (C,) each. entropy and grad_entropy may be
// null.
struct Coefficients {
  const float *lse, *logps, *entropy, *grad_logps, *grad_entropy;
};

// Fills `to` with zeros.
template <class T>
void write_zeros(T* to, int64_t columns) {
  std::memset(static_cast<void*>(to), 0, columns * sizeof(T));
}

// Writes the gradient of one row. `to` may point to the logits themselves, because every vector is
// read before it is overwritten.
template <bool kSoftcap, class T>
void write_gradient(const Chunk& chunk, const Matrix<T>& logits, const Matrix<T>& to,
                    const Coefficients& at, int64_t row) {
  const Columns<T> columns = chunk.row_of(logits, row);
  const double g = at.grad_logps[row], g_entropy = at.grad_entropy ? at.grad_entropy[row] : 0;
  T* out = chunk.start(to, row);
  // Write zeros if both coefficients are 0. The row may contain NaN, and 0 * NaN is NaN.
  if (g == 0 && g_entropy == 0) return write_zeros(out, columns.count);
  const RowTransform transform = chunk.transform();
  const double logp = at.logps[row], entropy = g_entropy != 0 ? at.entropy[row] : 0;
  // The only column of a row has the probability 1 for every logit, so its gradient is exactly 0.
  if (columns.count == 1 && logp == 0) return write_zeros(out, 1);
  const bool has_target = columns.target >= 0;
  // Read the target logit now, because the loop may overwrite it.
  const float raw_target = has_target ? load_one(columns.x + columns.target) : 0;
  // If |logp| is smaller than |lse|, compute the lse as z_y - logp. lse and logp were both rounded
  // to fp32, and the smaller of them has the smaller rounding error.
  double lse = at.lse[row];
  if (has_target && std::fabs(logp) < std::fabs(lse))
    lse = final_logit<kSoftcap>(raw_target, transform) - logp;
  const float shift = static_cast<float>(lse);
  // With t = z - shift, the gradient of a column is e^t (linear t + constant). Compute the two
  // numbers `linear` and `constant` once per row. Their common factor `scale` contains e^(shift -
  // lse), which is not exactly 1, because `shift` is the lse rounded to fp32.
  const double scale = -std::exp(shift - lse) * transform.chain;
  const float constant = static_cast<float>(scale * (g + g_entropy * (entropy + (shift - lse))));
  const float linear = static_cast<float>(scale * g_entropy);
  const auto gradient = [&](Floats raw) GRPO_FAST_BODY {
    const Exponent found = exponent<kSoftcap>(raw, transform, shift);
    const Floats t = drop_negligible(found.t);
    const Floats d = exp_floored(t) * fma(t, linear, constant);
    return kSoftcap ? d * found.slope : d;
  };
  // Compute two vectors at a time to hide the latency of the exponential.
  int64_t column = 0;
  for (; column + 2 * kLanes <= columns.count; column += 2 * kLanes) {
    const Floats first = gradient(load(columns.x + column));
    const Floats second = gradient(load(columns.x + column + kLanes));
    store(out + column, first);
    store(out + column + kLanes, second);
  }
  for (; column < columns.count; column += kLanes) {
    const int64_t left = columns.count - column;
    store_up_to(out + column, gradient(load_up_to(columns.x + column, left)), left);
  }
  if (!has_target) return;
  // Compute the column of the target in fp64. g (1 - p) is computed as -g expm1(logp), which does
  // not cancel if p is close to 1.
  const double p = std::exp(logp), scaled = static_cast<double>(raw_target) * transform.inner;
  const double capped = kSoftcap ? std::tanh(scaled) : 0;
  double dz = -g * std::expm1(logp);
  if (p != 0) dz -= g_entropy * p * (logp + entropy);
  const double d = dz * transform.chain * (1 - capped * capped);
  store_up_to(out + columns.target, splat(static_cast<float>(d)), 1);
}

}  // namespace grpo_fast
