// d raw_j = (g (1[j = y] - p_j) - ge p_j (log p_j + H)) * dz/draw, read once and written once.
// The columns may be a part of the row's, with its lse, log-probability and entropy; the target
// then may be none of them.
#pragma once

#include "rows/chunk.h"

namespace grpo_fast {

// Of every row, (C,) each; the entropies may be null.
struct Coefficients {
  const float *lse, *logps, *entropy, *grad_logps, *grad_entropy;
};

template <class T>
void write_zeros(T* to, int64_t columns) {
  std::memset(static_cast<void*>(to), 0, columns * sizeof(T));
}

// Row by row; `out` may be the logits: a vector is read before it is written.
template <bool kSoftcap, class T>
void write_gradient(const Chunk& chunk, const Matrix<T>& logits, const Matrix<T>& to,
                    const Coefficients& at, int64_t row) {
  const Columns<T> columns = chunk.row_of(logits, row);
  const double g = at.grad_logps[row], g_entropy = at.grad_entropy ? at.grad_entropy[row] : 0;
  T* out = chunk.start(to, row);
  // A select, not a product: a row without coefficients may hold NaN.
  if (g == 0 && g_entropy == 0) return write_zeros(out, columns.count);
  const RowTransform transform = chunk.transform(row);
  const double logp = at.logps[row], entropy = g_entropy != 0 ? at.entropy[row] : 0;
  const bool has_target = columns.target >= 0;
  // Read before the loop may write over it.
  const float raw_target = has_target ? load_one(columns.x + columns.target) : 0;
  // lse was rounded to fp32; z_y - logp gives it back with the digits of logp, mostly the smaller.
  double lse = at.lse[row];
  if (has_target && std::fabs(logp) < std::fabs(lse))
    lse = final_logit<kSoftcap>(raw_target, transform) - logp;
  const float shift = static_cast<float>(lse);
  const double scale = -std::exp(shift - lse) * transform.chain;
  const float constant = static_cast<float>(scale * (g + g_entropy * (entropy + (shift - lse))));
  const float linear = static_cast<float>(scale * g_entropy);
  const auto gradient = [&](Floats raw) GRPO_FAST_BODY {
    const Exponent found = exponent<kSoftcap>(raw, transform, shift);
    const Floats t = floor_exponent(found.t);
    const Floats d = exp_floored(t) * fma(t, linear, constant);
    return kSoftcap ? d * found.slope : d;
  };
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
  const double p = std::exp(logp), scaled = static_cast<double>(raw_target) * transform.inner;
  const double capped = kSoftcap ? std::tanh(scaled) : 0;
  double dz = -g * std::expm1(logp);
  if (p != 0) dz -= g_entropy * p * (logp + entropy);
  const double d = dz * transform.chain * (1 - capped * capped);
  store_up_to(out + columns.target, splat(static_cast<float>(d)), 1);
}

}  // namespace grpo_fast
