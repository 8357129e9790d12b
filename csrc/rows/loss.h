// The loss of a token-level objective at one row, by the leaves that the package prints as C++.
#pragma once

#include "loss_functions.h"  // printed off objective/losses.py and kl.py by kernels/cpu/leaves.py

namespace grpo_fast {

// Which function, and its parameters.
struct LossFunction {
  int64_t objective, kl;
  bool kl_times_ratio;
  double p[4], kl_p[2];
};

// What a loss reads of every row, (C,) each; all but the first two may be null.
struct RowTerms {
  const float *advantages, *policy_weights, *kl_weights, *old_logps, *ref_logps, *grad_entropy;
};

// (policy_weight l + kl_weight KL, its derivative) at a logp; NaN where that is: comparisons inside
// a function and a weight of 0 would hide it.
inline ValueAndSlope row_loss(const LossFunction& function, const RowTerms& terms, int64_t row,
                              double logp) {
  if (std::isnan(logp)) return {logp, logp};
  double log_ratio = terms.old_logps ? logp - terms.old_logps[row] : 0.0;
  if (log_ratio > kLogRatioMax) log_ratio = kLogRatioMax;
  const double weight = terms.policy_weights[row];
  const double kl_weight = terms.kl_weights && terms.ref_logps ? terms.kl_weights[row] : 0;
  ValueAndSlope sum{0, 0};
  if (weight != 0) {
    sum = objective(function.objective, logp, log_ratio, terms.advantages[row], function.p);
    sum = {weight * sum.value, weight * sum.slope};
  }
  if (kl_weight != 0) {
    ValueAndSlope term = kl_estimator(function.kl, terms.ref_logps[row] - logp, function.kl_p);
    if (function.kl_times_ratio) {
      const double ratio = std::exp(log_ratio);
      term = {term.value * ratio, (term.slope + term.value) * ratio};
    }
    sum = {sum.value + kl_weight * term.value, sum.slope + kl_weight * term.slope};
  }
  return sum;
}

}  // namespace grpo_fast
