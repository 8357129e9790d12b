// Divergences between rows of student logits and rows of teacher logits.
//
// For each logit j, a generated function returns value_j, which is its contribution to the
// divergence D, and slope_j. D and its gradient with respect to the student's logits z are
//
//     D = sum_j value_j,    dD/dz_j = slope_j - p_j center,    center = sum_k slope_k
//
// where p_j is the student's probability. One thread processes a row in three passes. The first
// pass computes the lse of the student and of the teacher. The second pass computes values and
// slopes, and stores the slopes in the gradient buffer. The third pass computes slope - center p.
// The row stays in L2, so the memory traffic is 12 bytes per pair of logits: one read of each logit
// and one write of the gradient.
//
// For the most likely token of the student, the gradient is computed as (1 - p) slope - p (center -
// slope), where center - slope is summed without this token. If the student is almost certain,
// slope - center p would lose all digits by cancellation.
//
// Layout: both rows are fp32 logits.
//
// Rounding: kRun neighbouring columns are summed in fp32, and these sums are added in fp64.
//
// Parallelism: the caller distributes rows to threads.
#pragma once

#include "loss_functions.h"  // generated from objective/ by kernels/cpu/loss_codegen.py
#include "rows/gradient.h"

namespace grpo_fast {

// One row of raw logits of the student or of the teacher. Its functions compute the lse of the row
// and log-probabilities z - lse.
struct DivergenceSide {
  const float* x;
  int64_t count;
  RowTransform transform;
  bool is_capped;
  int64_t top = 0;  // column of the largest logit
  float shift = 0, rest = 0;  // lse = shift + rest: two fp32 keep digits that one would round away

  // Returns z - shift, where z is the final logit. While lse() runs, `shift` is the largest z.
  // Afterwards, it is the fp32 part of the lse.
  GRPO_FAST_INLINE Floats below(Floats raw) const {
    return is_capped ? exponent<true>(raw, transform, shift).t
                     : exponent<false>(raw, transform, shift).t;
  }
  // Returns the log-probabilities z - lse.
  GRPO_FAST_INLINE Floats logp(Floats raw) const { return below(raw) - rest; }

  // Returns 1 - tanh^2 under a soft cap, else 1.
  GRPO_FAST_INLINE Floats tanh_slope(Floats raw) const {
    return is_capped ? tanh_and_slope(raw * transform.inner).slope : splat(1.0f);
  }

  // Stores lse as an fp32 number (`shift`) and its rounding error (`rest`).
  void set(double lse) {
    const bool is_empty = lse == -std::numeric_limits<double>::infinity();
    shift = is_empty ? 0 : static_cast<float>(lse);
    rest = is_empty ? 0 : static_cast<float>(lse - shift);
  }

  // Stores the column of the largest logit in `top`. If several columns are equally large, this is
  // the first of them.
  void find_top() {
    const float largest = largest_of(Columns<float>{x, count, -1}, transform.inner);
    for (int64_t c = 0; c < count; c += kLanes) {
      const Floats scaled = load_up_to(x + c, count - c) * transform.inner;
      const uint32_t hits = bits_of(scaled == splat(largest));
      if (hits) {
        top = c + __builtin_ctz(hits);
        return;
      }
    }
  }

  // Returns the lse. The largest term is left out of the sum and added with log1p, so the result is
  // accurate even if one logit has nearly all of the probability.
  double lse() {
    shift = 0;
    const float high = below(splat(x[top]))[0];
    if (high == -kInfinity) return high;
    shift = high;
    const Floats own = below(splat(x[top]));  // z - shift at the top: the rounding error of shift
    double sum = 0;
    const Ints lanes = lane_numbers();
    for (int64_t start = 0; start < count; start += kRun) {
      const int64_t end = std::min(start + kRun, count);
      Floats lane_sums = {};
      by_vectors(end - start, [&](int64_t c, int64_t n) GRPO_FAST_BODY {
        const Ints at = lanes + static_cast<int32_t>(start + c);
        Floats e = exp_floored(floor_exponent(below(load_up_to(x + start + c, n)) - own));
        e = keep_where((at != static_cast<int32_t>(top)) & (lanes < static_cast<int32_t>(n)), e);
        lane_sums += e;
      });
      sum += sum_lanes(widen(lane_sums));
    }
    return static_cast<double>(high) + own[0] + std::log1p(sum);
  }
};

// Results of one row: the divergence D, the sum of the slopes (`center`), and the lse of the
// student and of the teacher.
struct DivergenceSums {
  double value, center, lse, teacher_lse;
};

// Computes the divergence of one row and its gradient. kKind selects the divergence.
template <int kKind>
class DivergenceRow {
 public:
  DivergenceRow(DivergenceSide student, DivergenceSide teacher, float beta)
      : p_(student), q_(teacher), beta_(splat(beta)) {
    p_.find_top();
    q_.find_top();
  }

  double lse() { return p_.lse(); }
  double teacher_lse() { return q_.lse(); }

  // Computes the sums of the row from the lse of student and teacher. Unless `slopes` is null, the
  // slopes are written to it. It may be the memory of the teacher's row.
  DivergenceSums sums(double lse, double teacher_lse, float* slopes) {
    p_.set(lse);
    q_.set(teacher_lse);
    const Ints lanes = lane_numbers();
    // Compute the slope at the student's most likely token first, because the loop below may
    // overwrite the teacher's row.
    of_top_ = terms(splat(p_.x[p_.top]), splat(q_.x[p_.top])).slope[0];
    lp_top_ = p_.logp(splat(p_.x[p_.top]))[0];
    raw_top_ = p_.x[p_.top];
    double value = 0, others = 0;
    for (int64_t start = 0; start < p_.count; start += kRun) {
      Floats values = {}, sum = {};
      by_vectors(std::min(kRun, p_.count - start), [&](int64_t c, int64_t n) GRPO_FAST_BODY {
        const int64_t column = start + c;
        const Ints is_one = lanes < static_cast<int32_t>(n);
        const VectorPair of = terms(load_up_to(p_.x + column, n), load_up_to(q_.x + column, n));
        const Ints counts = is_one & (lanes != static_cast<int32_t>(p_.top - column));
        values += keep_where(is_one, of.value);
        sum += keep_where(counts, of.slope);
        if (slopes) store_up_to(slopes + column, of.slope, n);
      });
      value += sum_lanes(widen(values));
      others += sum_lanes(widen(sum));
    }
    return {value, others + of_top_, lse, teacher_lse};
  }

  // Replaces the slopes in `out` with the gradient of weight * D with respect to the raw logits,
  // where D is the divergence.
  void write(float* out, double center, double weight) const {
    const double factor = weight * p_.transform.chain;
    const float scale = static_cast<float>(factor), c = static_cast<float>(center);
    by_vectors(p_.count, [&](int64_t column, int64_t n) GRPO_FAST_BODY {
      const Floats raw = load_up_to(p_.x + column, n);
      const Floats p = exp_floored(floor_exponent(p_.logp(raw)));
      const Floats d = fma(p, -c, load_up_to(out + column, n)) * scale;
      store_up_to(out + column, d * p_.tanh_slope(raw), n);
    });
    const double lp = lp_top_, tanh_slope = p_.tanh_slope(splat(raw_top_))[0];
    const double d = -std::expm1(lp) * of_top_ - std::exp(lp) * (center - of_top_);
    out[p_.top] = static_cast<float>(d * factor * tanh_slope);
  }

 private:
  // Returns value_j and slope_j of the divergence for one vector of logits. If both
  // log-probabilities are -inf, their difference is taken as 0.
  GRPO_FAST_INLINE VectorPair terms(Floats raw, Floats raw_teacher) const {
    const Floats lp = p_.logp(raw), lq = q_.logp(raw_teacher);
    const Floats d = keep_where(lp != lq, lp - lq);
    return divergence<kKind>(exp_floored(floor_exponent(lp)), exp_floored(floor_exponent(lq)), d,
                             expm1_floored(floor_exponent(-magnitude(d))), beta_);
  }

  DivergenceSide p_, q_;
  Floats beta_;
  float of_top_ = 0, lp_top_ = 0, raw_top_ = 0;
};

}  // namespace grpo_fast
