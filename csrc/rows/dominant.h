// Exponentials E of the logits z of a row, which are stored for the gradient GEMMs:
//
//     E_j = e^(z_j - s) f_j, and 0 in the target's column,    f = 1 - tanh^2 (1 without a soft cap)
//
// The number s is an estimate of the row's lse (sweep.h). If it is too small, the sum of the row
// may overflow, but every E is finite, because its exponent is clamped.
//
// An element of a Positive16 matrix is dominant if it exceeds 1/16 of the sum of its row. Dominant
// elements are also recorded in fp32, because their rounding errors may be large compared with the
// gradient of the row. The rounding errors of smaller elements are small, or cancel.
#pragma once

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "rows/statistics.h"

namespace grpo_fast {

// An emitter (a callback of add_run, see sums.h) that stores nothing. It clamps the exponents on
// both sides. A NaN becomes the largest exponent. The -logp of its row then exceeds kMaxNll, and
// the row is computed again.
struct SumExponentials : Ignore {
  GRPO_FAST_INLINE static Floats floored(Floats t) {
    return floor_exponent(min(t, splat(-kExpFloor)));
  }
};

// Callback for add_run that stores the exponentials in the output matrix.
template <bool kSoftcap, class Out>
struct WriteExponentials : SumExponentials {
  static constexpr bool kFindsLargest = sizeof(Out) == 2;
  Out* out;

  explicit WriteExponentials(Out* out) : out(out) {}

  GRPO_FAST_INLINE void operator()(int64_t column, int64_t count, Floats e, Floats slope) const {
    // With a soft cap, e * slope may be NaN. max() returns 0 for NaN, so every stored exponential
    // is finite.
    Floats weight = kSoftcap ? max(e * slope, Floats{}) : e;
    // A Positive16 matrix does not contain such small numbers.
    if constexpr (sizeof(Out) != 2) weight = keep_where(weight >= splat(kNegligible), weight);
    store_up_to(out + column, weight, count);
  }
};

// An element is dominant if it exceeds this share of the sum of its row.
constexpr float kDominantShare = 1 / 16.0f;

// A dominant element of the matrix of exponentials.
struct Dominant {
  int64_t row, column;
  float e;       // e^(z - shift)
  float weight;  // e times the slope of the soft cap
};

// An emitter (a callback of add_run) that records the exponentials above a threshold.
template <bool kSoftcap>
struct NoteAbove : SumExponentials {
  float threshold;
  int64_t row, first;
  std::vector<Dominant>& found;

  GRPO_FAST_INLINE void operator()(int64_t column, int64_t count, Floats e, Floats slope) const {
    each_lane(e > splat(threshold), std::min<int64_t>(count, kLanes), [&](int lane) {
      const float weight = kSoftcap ? e[lane] * slope[lane] : e[lane];
      found.push_back({row, first + column + lane, e[lane], weight});
    });
  }
};

// Collects the dominant elements of all rows. While they are recorded, the sums of the rows are
// incomplete and too small, so too many elements are recorded. finished() removes the elements
// below the final threshold.
class DominantExponentials {
 public:
  explicit DominantExponentials(int64_t rows) : known_(rows) {}

  // Adds `sum` to the incomplete sum of a row. If two threads do this at the same time, one
  // addition may be lost. The threshold is then lower, and too many elements are recorded.
  void raise(int64_t row, double sum) {
    const float known = known_[row].load(std::memory_order_relaxed);
    known_[row].store(known + static_cast<float>(sum), std::memory_order_relaxed);
  }

  // Sets the final sums of the rows. `again` lists the rows that are computed a second time, in
  // ascending order. Their recorded elements are dropped here, because the second computation
  // records them again.
  void settle(std::vector<double> sums, const std::vector<int64_t>& again) {
    sums_ = std::move(sums);
    for (size_t row = 0; row < sums_.size(); ++row)
      known_[row].store(static_cast<float>(sums_[row]), std::memory_order_relaxed);
    forget([&](const Dominant& x) {
      return std::binary_search(again.begin(), again.end(), x.row);
    });
  }

  // Records the dominant elements of a run, which is a range of columns that starts at `first`.
  // `largest` is the largest exponential of each lane. If no lane exceeds the threshold, nothing is
  // done.
  template <bool kSoftcap>
  void note(int64_t row, int64_t first, const Columns<float>& run, const RowTransform& transform,
            float shift, Floats largest) {
    // Use a threshold that is 1% too low, because the final sums are rounded differently.
    // finished() then compares each recorded element with the exact threshold.
    const float threshold = 0.99f * kDominantShare * known_[row].load(std::memory_order_relaxed);
    if (bits_of(largest > splat(threshold)) == 0) return;
    std::vector<Dominant> own;
    Totals totals;
    const NoteAbove<kSoftcap> note_above{{}, threshold, row, first, own};
    add_run<kSoftcap, false>(run, transform, shift, totals, note_above);
    const std::lock_guard<std::mutex> lock(mutex_);
    found_.insert(found_.end(), own.begin(), own.end());
  }

  // Returns the elements sorted by row and column. Call it after `settle` and the last `note`.
  const std::vector<Dominant>& finished() {
    forget([&](const Dominant& x) { return !(x.e > kDominantShare * sums_[x.row]); });
    std::sort(found_.begin(), found_.end(), [](const Dominant& a, const Dominant& b) {
      return a.row != b.row ? a.row < b.row : a.column < b.column;
    });
    return found_;
  }

 private:
  template <class Test>
  void forget(const Test& test) {
    found_.erase(std::remove_if(found_.begin(), found_.end(), test), found_.end());
  }

  std::vector<std::atomic<float>> known_;
  std::vector<double> sums_;
  std::vector<Dominant> found_;
  std::mutex mutex_;
};

}  // namespace grpo_fast
