// Token-level loss of one row. The loss functions are generated from Python.
//
// Rounding: all numbers are fp64.
#pragma once

#include "loss_functions.h"  // generated from objective/ by kernels/cpu/loss_codegen.py

namespace grpo_fast {

// The loss function and the KL estimator, as indices of the generated functions, and their
// hyperparameters.
struct LossFunction {
  int64_t objective, kl;
  bool kl_times_ratio;
  double p[4], kl_p[2];
};

// Inputs of the loss, (C,) each. Only advantages and policy_weights are required. The other
// pointers may be null.
struct RowInputs {
  const float *advantages, *policy_weights, *kl_weights, *old_logps, *ref_logps, *grad_entropy;
};

// Returns policy_weight * loss + kl_weight * KL of a row, and its derivative with respect to the
// logp. If the logp is NaN, both results are NaN. Without this rule, a comparison in the loss
// function or a weight of 0 would hide the NaN.
inline ValueAndSlope row_loss(const LossFunction& function, const RowInputs& terms, int64_t row,
                              double logp) {
  if (std::isnan(logp)) return {logp, logp};
  double log_ratio = terms.old_logps ? logp - terms.old_logps[row] : 0.0;
  // Limit the log ratio, so that the ratio stays finite.
  if (log_ratio > kLogRatioMax) log_ratio = kLogRatioMax;
  const double weight = terms.policy_weights[row];
  const double kl_weight = terms.kl_weights && terms.ref_logps ? terms.kl_weights[row] : 0;
  ValueAndSlope sum{0, 0};
  // Skip a term with weight 0, because its inputs may be NaN.
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
