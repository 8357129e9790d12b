// One row of logits at a time: row_statistics (lse, logp, entropy) and write_row_gradient.
//
// z_j = raw_j * inner, or outer * tanh(raw_j * inner) under a soft cap. Blocks of kBlock columns stay in L1 between the
// maximum and the exponentials, so memory is read once; sums are fp32 in a run of columns and fp64 across; the order
// of additions depends on V and the target only, never on the thread or the neighbouring rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "vec/storage.h"

namespace grpo_fast {

constexpr int64_t kBlock = 2048;  // columns between two looks at the maximum
constexpr int64_t kRun = 512;     // columns summed in fp32 before the sum is widened
static_assert(kBlock % kRun == 0 && kRun % (4 * kLanes) == 0);

struct RowRule {
  float inner;   // logit_scale / temperature, or logit_scale / softcap
  float outer;   // softcap / temperature; not read without a soft cap
  double chain;  // dz/draw = chain, times 1 - tanh^2 under a soft cap
};

struct RowStatistics {
  double lse;
  double logp;
  double entropy;
};

struct RowCoefficients {
  double lse;
  double logp;
  double entropy;  // 0 where grad_entropy is 0
  double grad_logp;
  double grad_entropy;
};

// z of one element in fp64: for the target, whose logit enters logp undamped.
template <bool kSoftcap>
inline double final_logit(float raw, const RowRule& rule) {
  const double scaled = static_cast<double>(raw) * rule.inner;
  return kSoftcap ? rule.outer * std::tanh(scaled) : scaled;
}

struct Exponent {
  Floats t;      // z - shift; one FMA, so a large |z| near the shift loses nothing
  Floats slope;  // 1 - tanh^2 under a soft cap, else 1
};

template <bool kSoftcap>
GRPO_FAST_INLINE Exponent exponent(Floats raw, const RowRule& rule, float shift) {
  if constexpr (kSoftcap) {
    const TanhAndSlope bent = tanh_and_slope(raw * rule.inner);
    return {fma(bent.value, rule.outer, -shift), bent.slope};
  }
  return {fma(raw, rule.inner, -shift), splat(1.0f)};
}

// The largest raw * inner of a block. A NaN is skipped here and shows in the sums.
template <class T>
inline float block_max(const T* x, int64_t columns, float inner) {
  Floats a = splat(-std::numeric_limits<float>::infinity()), b = a, c = a, d = a;
  int64_t column = 0;
  for (; column + 4 * kLanes <= columns; column += 4 * kLanes) {
    a = max(load(x + column) * inner, a);
    b = max(load(x + column + kLanes) * inner, b);
    c = max(load(x + column + 2 * kLanes) * inner, c);
    d = max(load(x + column + 3 * kLanes) * inner, d);
  }
  for (; column < columns; column += kLanes) a = max(load_up_to(x + column, columns - column) * inner, a);
  return max_lane(max(max(a, b), max(c, d)));
}

template <bool kEntropy, bool kLargest>
struct Sums {
  Floats sum = {}, moment = {}, largest = {};

  GRPO_FAST_INLINE void add(Floats t, Floats e) {
    sum += e;
    if constexpr (kEntropy) moment = fma(e, t, moment);
    if constexpr (kLargest) largest = max(e, largest);
  }
};

// What the sums of a run do besides: nothing.
struct Ignore {
  static constexpr bool kFindsLargest = false;
  GRPO_FAST_INLINE static Floats floored(Floats t) { return floor_exponent(t); }
  GRPO_FAST_INLINE void operator()(int64_t, int64_t, Floats, Floats) const {}
};

// Four vectors that the end of the row or the target runs through: what does not count is left out of the sums.
template <class T, bool kSoftcap, bool kEntropy, class Emit>
inline void add_ragged(const T* x, int64_t begin, int64_t columns, int64_t target, const RowRule& rule, float shift,
                       Sums<kEntropy, Emit::kFindsLargest> (&sums)[4], const Emit& emit) {
  const Ints lanes = lane_numbers();
  for (int part = 0; part < 4 && part * kLanes < columns; ++part) {
    const Ints here = lanes + part * kLanes;
    const Ints counted = (here < static_cast<int32_t>(std::min<int64_t>(columns, 4 * kLanes))) &
                         (here != static_cast<int32_t>(target));
    const int64_t column = begin + part * kLanes, left = columns - part * kLanes;
    const Exponent found = exponent<kSoftcap>(load_up_to(x + column, left), rule, shift);
    const Floats t = Emit::floored(found.t), e = keep_where(counted, exp_floored(t));
    sums[part].add(keep_where(counted, t), e);
    emit(column, left, e, found.slope);
  }
}

// sum += e^t and moment += e^t * t over a run of at most kRun columns, t = z - shift, without the target.
// emit(column, count, e^t, slope) sees every vector, with 0 for e^t in the target's lane. -> the largest e^t by lane,
// where somebody asks for it.
template <class T, bool kSoftcap, bool kEntropy, class Emit = Ignore>
inline Floats add_run(const T* x, int64_t columns, int64_t target, const RowRule& rule, float shift, Doubles& sum,
                      Doubles& moment, const Emit& emit = {}) {
  constexpr int64_t kStep = 4 * kLanes;
  using Lanes = Sums<kEntropy, Emit::kFindsLargest>;
  Lanes sums[4];  // four chains of additions hide each other's latency
  const auto add_whole = [&](int64_t begin, int64_t end) GRPO_FAST_BODY {
    Lanes a = sums[0], b = sums[1], c = sums[2], d = sums[3];
    const auto add = [&](Lanes& to, int64_t column) GRPO_FAST_BODY {
      const Exponent found = exponent<kSoftcap>(load(x + column), rule, shift);
      const Floats t = Emit::floored(found.t), e = exp_floored(t);
      to.add(t, e);
      emit(column, kLanes, e, found.slope);
    };
    for (int64_t column = begin; column < end; column += kStep) {
      prefetch<kStep>(x + column + kBlock);  // the next block's maximum would otherwise wait for memory
      add(a, column), add(b, column + kLanes), add(c, column + 2 * kLanes), add(d, column + 3 * kLanes);
    }
    sums[0] = a, sums[1] = b, sums[2] = c, sums[3] = d;
  };
  const int64_t whole = columns / kStep * kStep;
  const int64_t odd = target >= 0 && target < whole ? target / kStep * kStep : whole;  // the step with the target
  add_whole(0, odd);
  if (odd < whole) {
    add_ragged<T, kSoftcap, kEntropy>(x, odd, kStep, target - odd, rule, shift, sums, emit);
    add_whole(odd + kStep, whole);
  }
  if (whole < columns) {
    const int64_t tail_target = target >= whole && target < columns ? target - whole : -1;
    add_ragged<T, kSoftcap, kEntropy>(x, whole, columns - whole, tail_target, rule, shift, sums, emit);
  }
  sum += widen((sums[0].sum + sums[1].sum) + (sums[2].sum + sums[3].sum));
  if constexpr (kEntropy) moment += widen((sums[0].moment + sums[1].moment) + (sums[2].moment + sums[3].moment));
  return max(max(sums[0].largest, sums[1].largest), max(sums[2].largest, sums[3].largest));
}

// Sums over some columns of a row but the target's: rest = sum e^t and moment = sum e^t * t, t = z - shift.
struct PartialSums {
  float shift;
  double rest;
  double moment;
};

template <bool kEntropy>
RowStatistics finished(const PartialSums& sums, bool has_target, double z_target) {
  const double t = has_target ? z_target - sums.shift : 0;
  const double e = has_target ? std::exp(t) : 0, total = sums.rest + e;
  RowStatistics row;
  row.lse = sums.shift + std::log(total);
  row.logp = has_target ? (e >= sums.rest ? 0.0 - std::log1p(sums.rest / e) : t - std::log(total))
                        : std::numeric_limits<double>::quiet_NaN();
  row.entropy = 0;
  if constexpr (kEntropy) {
    const double mean = (sums.moment + (e == 0 ? 0 : e * t)) / total;
    const double entropy = std::log(total) - mean;
    row.entropy = entropy < 0 ? 0 : entropy;
  }
  return row;
}

// The target stays out of the sum: where p -> 1, log1p(rest / e_y) keeps the digits that 1 + rest would round away.
template <class T, bool kSoftcap, bool kEntropy>
RowStatistics row_statistics(const T* x, int64_t columns, int64_t target, const RowRule& rule) {
  // The running maximum is finite from the start, so that -inf - shift is -inf and never NaN.
  float best = -std::numeric_limits<float>::infinity();
  float shift = kSoftcap ? -rule.outer : std::numeric_limits<float>::lowest();
  Doubles sum = {}, moment = {};
  for (int64_t start = 0; start < columns; start += kBlock) {
    const int64_t size = std::min(kBlock, columns - start);
    const float found = block_max(x + start, size, rule.inner);
    if (found > best) {
      best = found;
      const float next = kSoftcap ? rule.outer * std::tanh(best) : best;
      const double change = static_cast<double>(shift) - next, factor = std::exp(change);
      if constexpr (kEntropy) moment = (moment + sum * change) * factor;
      sum = sum * factor;
      shift = next;
    }
    for (int64_t run = start; run < start + size; run += kRun)
      add_run<T, kSoftcap, kEntropy>(x + run, std::min(kRun, start + size - run), target - run, rule, shift, sum,
                                     moment);
  }
  const bool has_target = target >= 0 && target < columns;
  const double z_target = has_target ? final_logit<kSoftcap>(load_one(x + target), rule) : 0;
  return finished<kEntropy>({shift, sum_lanes(sum), kEntropy ? sum_lanes(moment) : 0}, has_target, z_target);
}

// Of at most kRun columns, relative to their own maximum; target: its place among them, or -1.
template <bool kSoftcap, bool kEntropy>
PartialSums slice_sums(const float* x, int64_t columns, int64_t target, const RowRule& rule) {
  const float best = block_max(x, columns, rule.inner);
  const float lowest = kSoftcap ? -rule.outer : std::numeric_limits<float>::lowest();
  const float shift = best == -std::numeric_limits<float>::infinity() ? lowest
                      : kSoftcap                                      ? rule.outer * std::tanh(best)
                                                                      : best;
  Doubles sum = {}, moment = {};
  add_run<float, kSoftcap, kEntropy>(x, columns, target, rule, shift, sum, moment);
  return {shift, sum_lanes(sum), kEntropy ? sum_lanes(moment) : 0};
}

// The sums of a whole row from those of its slices, in their order.
template <bool kEntropy>
PartialSums joined(const PartialSums* slices, int64_t count) {
  PartialSums all{std::numeric_limits<float>::lowest(), 0, 0};
  for (int64_t i = 0; i < count; ++i) all.shift = std::max(all.shift, slices[i].shift);
  for (int64_t i = 0; i < count; ++i) {
    const double change = static_cast<double>(slices[i].shift) - all.shift, factor = change == 0 ? 1 : std::exp(change);
    all.rest += slices[i].rest * factor;
    if constexpr (kEntropy) all.moment += (slices[i].moment + slices[i].rest * change) * factor;
  }
  return all;
}

// Weights: e^(z_j - shift) * dz_j/draw_j / chain, 0 in the target's column; finite whatever the row holds.
template <bool kSoftcap, class Out>
struct WriteWeights {
  static constexpr bool kFindsLargest = sizeof(Out) == 2;
  Out* out;

  // A NaN becomes the largest: its row then counts as far from its target.
  GRPO_FAST_INLINE static Floats floored(Floats t) { return floor_exponent(min(t, splat(-kExpFloor))); }
  GRPO_FAST_INLINE void operator()(int64_t column, int64_t count, Floats e, Floats slope) const {
    store_up_to(out + column, kSoftcap ? max(e * slope, Floats{}) : e, count);  // max drops a NaN
  }
};

// Nothing is written, and the sums are those of WriteWeights.
struct SumWeights : Ignore {
  GRPO_FAST_INLINE static Floats floored(Floats t) { return WriteWeights<false, float>::floored(t); }
};

// Of at most kRun columns, relative to a shift that may be too small: `rest` is then inf, or e^20 and more.
template <bool kSoftcap, bool kEntropy, class Emit>
PartialSums shifted_sums(const float* x, int64_t columns, int64_t target, const RowRule& rule, float shift,
                         const Emit& emit, Floats* largest = nullptr) {
  Doubles sum = {}, moment = {};
  const Floats found = add_run<float, kSoftcap, kEntropy>(x, columns, target, rule, shift, sum, moment, emit);
  if (largest) *largest = found;
  return {shift, sum_lanes(sum), kEntropy ? sum_lanes(moment) : 0};
}

// d raw_j = (g (1[j = y] - p_j) - ge p_j (log p_j + H)) * dz/draw, read once and written once. `out` may be `x`, or
// start at the same byte with smaller elements: a vector is read before it is written, and writing never overtakes.
template <class In, class Out, bool kSoftcap, bool kEntropy>
void write_row_gradient(const In* x, Out* out, int64_t columns, int64_t target, const RowRule& rule,
                        const RowCoefficients& row) {
  const bool has_target = target >= 0 && target < columns;
  const float raw_target = has_target ? load_one(x + target) : 0;
  // lse arrives rounded to fp32; z_y - logp gives it back with the digits of logp, which is mostly the smaller.
  double lse = row.lse;
  if (has_target && std::fabs(row.logp) < std::fabs(lse)) lse = final_logit<kSoftcap>(raw_target, rule) - row.logp;
  const float shift = static_cast<float>(lse);
  const double scale = -std::exp(shift - lse) * rule.chain;
  const float constant =
      static_cast<float>(scale * (row.grad_logp + row.grad_entropy * (row.entropy + (shift - lse))));
  const float linear = static_cast<float>(scale * row.grad_entropy);
  const auto gradient = [&](Floats raw) GRPO_FAST_BODY {
    const Exponent found = exponent<kSoftcap>(raw, rule, shift);
    const Floats t = floor_exponent(found.t);
    Floats d = exp_floored(t);
    if constexpr (kEntropy)
      d = d * fma(t, linear, constant);
    else
      d = d * constant;
    if constexpr (kSoftcap) d = d * found.slope;
    return d;
  };
  int64_t column = 0;
  for (; column + 2 * kLanes <= columns; column += 2 * kLanes) {
    const Floats first = gradient(load(x + column)), second = gradient(load(x + column + kLanes));
    store(out + column, first);
    store(out + column + kLanes, second);
  }
  for (; column + kLanes <= columns; column += kLanes) store(out + column, gradient(load(x + column)));
  if (column < columns) {
    const int64_t count = columns - column;
    store_tail(out + column, gradient(load_tail(x + column, count)), count);
  }
  if (!has_target) return;
  const double p = std::exp(row.logp), bent = std::tanh(static_cast<double>(raw_target) * rule.inner);
  double dz = -row.grad_logp * std::expm1(row.logp);
  if (kEntropy && p != 0) dz -= row.grad_entropy * p * (row.logp + row.entropy);
  store_one(out + target, static_cast<float>(dz * rule.chain * (kSoftcap ? 1 - bent * bent : 1.0)));
}

}  // namespace grpo_fast
