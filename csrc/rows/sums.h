// Softmax sums over a run, which consists of up to kRun neighbouring columns of a row: the sum of
// e^t and the sum of e^t * t, with t = z - shift.
//
// z_j is raw_j * inner, or with a soft cap outer * tanh(raw_j * inner).
//
// Rounding: the columns of a run are summed in fp32, and the sums of the runs are added in fp64.
// The order of the additions depends on V and on the target only, not on the thread or on other
// rows.
#pragma once

#include <algorithm>
#include <limits>

#include "vec/storage.h"

namespace grpo_fast {

constexpr int64_t kBlock = 2048;  // columns between two updates of the maximum
constexpr int64_t kRun = 512;  // columns that are summed in fp32
static_assert(kBlock % kRun == 0 && kRun % (4 * kLanes) == 0);
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The logit transform of a row, combined into two factors.
struct RowTransform {
  float inner;   // logit_scale / temperature, or logit_scale / softcap
  float outer;  // softcap / temperature; unused without a soft cap
  double chain;  // dz/draw = chain, times 1 - tanh^2 under a soft cap
};

// View of some columns of a row. `target` is the position of the target in the view. If the target
// is in other columns, this position is outside the view.
template <class T>
struct Columns {
  const T* x;
  int64_t count, target;

  Columns part(int64_t first, int64_t size) const {
    return {x + first, std::min(size, count - first), target - first};
  }
};

// Sums of each lane. `largest` is the largest e^t. It is computed only if the emitter (the callback
// of add_run) requests it with kFindsLargest.
struct Totals {
  Doubles sum = {}, moment = {};
  Floats largest = {};
};

// The exponent t = z - shift of each lane, and the slope of the soft cap.
struct Exponent {
  Floats t;  // z - shift by one FMA: exact near the shift even for a large |z|
  Floats slope;  // 1 - tanh^2 under a soft cap, else 1
};

// Computes the exponents and slopes of a vector of raw logits.
template <bool kSoftcap>
GRPO_FAST_INLINE Exponent exponent(Floats raw, const RowTransform& transform, float shift) {
  if constexpr (kSoftcap) {
    const TanhAndSlope tanh = tanh_and_slope(raw * transform.inner);
    return {fma(tanh.value, transform.outer, -shift), tanh.slope};
  }
  return {fma(raw, transform.inner, -shift), splat(1.0f)};
}

// Returns the largest raw * inner over the columns. NaN is skipped here. The sums that are computed
// later become NaN.
template <class T>
inline float largest_of(const Columns<T>& columns, float inner) {
  Floats a = splat(-kInfinity), b = a, c = a, d = a;
  const T* x = columns.x;
  int64_t left = columns.count;
  for (; left >= 4 * kLanes; left -= 4 * kLanes, x += 4 * kLanes) {
    a = max(load(x) * inner, a);
    b = max(load(x + kLanes) * inner, b);
    c = max(load(x + 2 * kLanes) * inner, c);
    d = max(load(x + 3 * kLanes) * inner, d);
  }
  for (; left > 0; left -= kLanes, x += kLanes) a = max(load_up_to(x, left) * inner, a);
  return max_lane(max(max(a, b), max(c, d)));
}

// The default emitter of add_run, which does nothing. add_run calls its emitter for every vector of
// exponentials.
struct Ignore {
  static constexpr bool kFindsLargest = false;
  GRPO_FAST_INLINE static Floats floored(Floats t) { return floor_exponent(t); }
  GRPO_FAST_INLINE void operator()(int64_t, int64_t, Floats, Floats) const {}
};

// One of the four independent sums of add_run. With a single sum, each addition would wait for the
// previous one.
template <bool kEntropy, class Emit>
struct Sums {
  Floats sum = {}, moment = {}, largest = {};

  GRPO_FAST_INLINE void add(Floats t, Floats e) {
    sum += e;
    if constexpr (kEntropy) moment = fma(e, t, moment);
    if constexpr (Emit::kFindsLargest) largest = max(e, largest);
  }
};

// Adds up to four vectors of columns to the sums. These vectors reach the end of the row or contain
// the target. Masks exclude the lanes after the end and the lane of the target.
template <bool kSoftcap, class T, class Sum, class Emit>
inline void add_ragged(const Columns<T>& columns, int64_t first, const RowTransform& transform,
                       float shift, Sum (&sums)[4], const Emit& emit) {
  const Ints lanes = lane_numbers();
  for (int part = 0; part < 4 && part * kLanes < columns.count; ++part) {
    const Ints here = lanes + part * kLanes;
    const int32_t count = static_cast<int32_t>(std::min<int64_t>(columns.count, 4 * kLanes));
    const Ints counted = (here < count) & (here != static_cast<int32_t>(columns.target));
    const int64_t left = columns.count - part * kLanes;
    const Floats raw = load_up_to(columns.x + part * kLanes, left);
    const Exponent found = exponent<kSoftcap>(raw, transform, shift);
    const Floats t = Emit::floored(found.t), e = keep_where(counted, exp_floored(t));
    sums[part].add(keep_where(counted, t), e);
    emit(first + part * kLanes, left, e, found.slope);
  }
}

// Adds a run of at most kRun columns to the totals, leaving out the target. Calls emit(column,
// count, e^t, slope) for every vector, where e^t is 0 in the lane of the target.
template <bool kSoftcap, bool kEntropy, class T, class Emit = Ignore>
GRPO_FAST_INLINE void add_run(const Columns<T>& run, const RowTransform& transform, float shift,
                              Totals& totals, const Emit& emit = {}) {
  constexpr int64_t kStep = 4 * kLanes;
  using Lanes = Sums<kEntropy, Emit>;
  Lanes sums[4];  // four chains hide the latency of additions
  const auto add_whole = [&](int64_t begin, int64_t end) GRPO_FAST_BODY {
    // Use local copies, so that the compiler keeps the sums in registers.
    Lanes a = sums[0], b = sums[1], c = sums[2], d = sums[3];
    const auto add = [&](Lanes& to, int64_t column) GRPO_FAST_BODY {
      const Exponent found = exponent<kSoftcap>(load(run.x + column), transform, shift);
      const Floats t = Emit::floored(found.t), e = exp_floored(t);
      to.add(t, e);
      emit(column, kLanes, e, found.slope);
    };
    for (int64_t column = begin; column < end; column += kStep) {
      // Prefetch the same columns of the next block. Otherwise, the search for the maximum of that
      // block would wait for memory.
      prefetch<kStep>(run.x + column + kBlock);
      add(a, column), add(b, column + kLanes);
      add(c, column + 2 * kLanes), add(d, column + 3 * kLanes);
    }
    sums[0] = a, sums[1] = b, sums[2] = c, sums[3] = d;
  };
  const auto add_part = [&](int64_t first, int64_t size) {
    add_ragged<kSoftcap>(run.part(first, size), first, transform, shift, sums, emit);
  };
  const int64_t whole = run.count / kStep * kStep, target = run.target;
  // Add the kStep columns that contain the target separately, because only they need masks.
  const int64_t odd = target >= 0 && target < whole ? target / kStep * kStep : whole;
  add_whole(0, odd);
  if (odd < whole) {
    add_part(odd, kStep);
    add_whole(odd + kStep, whole);
  }
  if (whole < run.count) add_part(whole, kStep);
  totals.sum += widen((sums[0].sum + sums[1].sum) + (sums[2].sum + sums[3].sum));
  if constexpr (kEntropy)
    totals.moment += widen((sums[0].moment + sums[1].moment) + (sums[2].moment + sums[3].moment));
  totals.largest =
      max(max(sums[0].largest, sums[1].largest), max(sums[2].largest, sums[3].largest));
}

}  // namespace grpo_fast
