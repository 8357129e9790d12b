// lse, log-probability of the target, and entropy of one row.
//
// All three are computed from sums over the columns without the target. `rest` is the sum of their
// exponentials, and e_y is the exponential of the target. If the probability of the target is close
// to 1, log1p(rest / e_y) is accurate, but log(1 + rest / e_y) would lose all digits.
//
// Rounding: sums are rounded as in sums.h. Results are fp64.
#pragma once

#include <cmath>

#include "rows/sums.h"

namespace grpo_fast {

// The lse, the log-probability of the target and the entropy of one row.
struct RowStatistics {
  double lse, logp, entropy;
};

// Sums over a part of the columns of a row, without the target. With t = z - shift, `rest` is the
// sum of e^t, and `moment` is the sum of e^t * t.
struct PartialSums {
  float shift;
  double rest, moment;
};

// Computes the final logit z of one element in fp64. It is used for the target, because an error in
// its z appears unchanged in its logp.
template <bool kSoftcap>
inline double final_logit(float raw, const RowTransform& transform) {
  const double scaled = static_cast<double>(raw) * transform.inner;
  return kSoftcap ? transform.outer * std::tanh(scaled) : scaled;
}

// Adds the lanes of the totals.
inline PartialSums partial(float shift, const Totals& totals) {
  return {shift, sum_lanes(totals.sum), sum_lanes(totals.moment)};
}

// Adds the target to the sums, and computes the statistics. For a row without a target, z_target is
// null, and the logp is NaN.
inline RowStatistics finished(const PartialSums& sums, const double* z_target) {
  const double t = z_target ? *z_target - sums.shift : 0;
  const double e = z_target ? std::exp(t) : 0, total = sums.rest + e, log_total = std::log(total);
  RowStatistics row;
  row.lse = sums.shift + log_total;
  row.logp = !z_target        ? std::numeric_limits<double>::quiet_NaN()
             : e >= sums.rest ? 0.0 - std::log1p(sums.rest / e)
                              : t - log_total;
  // Set e * t to its limit 0 if the target's logit is -inf, because 0 * -inf is NaN.
  const double entropy = log_total - (sums.moment + (e == 0 ? 0 : e * t)) / total;
  // If no other id has a probability, the entropy is exactly 0, and the difference is rounding.
  const bool is_certain = z_target && sums.rest == 0 && e > 0;
  row.entropy = entropy < 0 || is_certain ? 0 : entropy;
  return row;
}

// Returns the shift of a row, which is subtracted from its logits before exponentials are computed.
// The shift is the value of z in the column where raw * inner is largest. The shift is finite even
// if all columns are -inf, because -inf - (-inf) would be NaN.
template <bool kSoftcap>
inline float shift_of(float largest, const RowTransform& transform) {
  if (largest == -kInfinity)
    return kSoftcap ? -transform.outer : std::numeric_limits<float>::lowest();
  return kSoftcap ? transform.outer * std::tanh(largest) : largest;
}

// Computes the statistics of a stored row, which is read from memory once. The kBlock columns of a
// block stay in L1 between the search for their maximum and the computation of their exponentials.
// Without kEntropy, the entropy is undefined.
template <bool kSoftcap, bool kEntropy, class T>
RowStatistics row_statistics(const Columns<T>& row, const RowTransform& transform) {
  float largest = -kInfinity, shift = shift_of<kSoftcap>(largest, transform);
  Totals totals;
  for (int64_t start = 0; start < row.count; start += kBlock) {
    const Columns<T> block = row.part(start, kBlock);
    const float found = largest_of(block, transform.inner);
    // Rescale the sums to the new maximum. The moment is the sum of e^(z - shift) (z - shift). Add
    // sum * (old shift - new shift) first, which corrects the factor z - shift, and then rescale
    // the exponentials.
    if (found > largest) {
      largest = found;
      const float next = shift_of<kSoftcap>(largest, transform);
      const double change = static_cast<double>(shift) - next, factor = std::exp(change);
      if constexpr (kEntropy) totals.moment = (totals.moment + totals.sum * change) * factor;
      totals.sum = totals.sum * factor;
      shift = next;
    }
    for (int64_t run = 0; run < block.count; run += kRun)
      add_run<kSoftcap, kEntropy>(block.part(run, kRun), transform, shift, totals);
  }
  if (row.target < 0) return finished(partial(shift, totals), nullptr);
  const double z_target = final_logit<kSoftcap>(load_one(row.x + row.target), transform);
  return finished(partial(shift, totals), &z_target);
}

// Returns the sums over a run (a few neighbouring columns), relative to their maximum.
template <bool kSoftcap, bool kEntropy>
PartialSums run_sums(const Columns<float>& run, const RowTransform& transform) {
  const float shift = shift_of<kSoftcap>(largest_of(run, transform.inner), transform);
  Totals totals;
  add_run<kSoftcap, kEntropy>(run, transform, shift, totals);
  return partial(shift, totals);
}

// Adds the sums of all runs of a row, in order. The result is relative to the largest shift.
inline PartialSums joined(const PartialSums* runs, int64_t count) {
  PartialSums all{std::numeric_limits<float>::lowest(), 0, 0};
  for (int64_t i = 0; i < count; ++i) all.shift = std::max(all.shift, runs[i].shift);
  for (int64_t i = 0; i < count; ++i) {
    const double change = static_cast<double>(runs[i].shift) - all.shift;
    const double factor = change == 0 ? 1 : std::exp(change);
    all.rest += runs[i].rest * factor;
    all.moment += (runs[i].moment + runs[i].rest * change) * factor;
  }
  return all;
}

}  // namespace grpo_fast
