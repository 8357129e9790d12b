// What a run of columns is written as where gradients follow: weights
//
//   E_j = e^(z_j - s) f_j, 0 in the target's column,      f = 1 - tanh^2 (1 without a soft cap)
//
// for a shift s that may be too small: their sum is then inf, or e^20 and more. Every E is finite.
// Of those that make up more than a 16th of their row the digits that 16 bits leave out are worth
// keeping: the others' roundings are small beside the row's gradient, or cancel.
#pragma once

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "rows/statistics.h"

namespace grpo_fast {

// Sums alone, those of WriteExponentials. A NaN becomes the largest: its row then counts as high_nll from its
// target.
struct SumExponentials : Ignore {
  GRPO_FAST_INLINE static Floats floored(Floats t) {
    return floor_exponent(min(t, splat(-kExpFloor)));
  }
};

template <bool kSoftcap, class Out>
struct WriteExponentials : SumExponentials {
  static constexpr bool kFindsLargest = sizeof(Out) == 2;
  Out* out;

  explicit WriteExponentials(Out* out) : out(out) {}

  GRPO_FAST_INLINE void operator()(int64_t column, int64_t count, Floats e, Floats slope) const {
    // max drops a NaN.
    store_up_to(out + column, kSoftcap ? max(e * slope, Floats{}) : e, count);
  }
};

constexpr float kDominantShare = 1 / 16.0f;

struct Dominant {
  int64_t row, column;
  float e;       // e^(z - shift)
  float weight;  // times the slope of a soft cap
};

// Notes the weights of a run above a threshold.
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

// Found run by run, by all threads, while the sum of a row is known in part: more than need be,
// fewer at the end.
class DominantExponentials {
 public:
  explicit DominantExponentials(int64_t rows) : known_(rows) {}

  // Of the sum of a row's weights `sum` more is known; what another thread adds at the same time
  // may be lost.
  void raise(int64_t row, double sum) {
    const float known = known_[row].load(std::memory_order_relaxed);
    known_[row].store(known + static_cast<float>(sum), std::memory_order_relaxed);
  }

  // sums: of all weights of every row. What was found in the rows of `again` (ascending) is
  // forgotten.
  void settle(std::vector<double> sums, const std::vector<int64_t>& again) {
    sums_ = std::move(sums);
    for (size_t row = 0; row < sums_.size(); ++row)
      known_[row].store(static_cast<float>(sums_[row]), std::memory_order_relaxed);
    forget([&](const Dominant& x) {
      return std::binary_search(again.begin(), again.end(), x.row);
    });
  }

  // Those of one run, from column `first` of its row on, where the largest e by lane shows that
  // there may be some.
  template <bool kSoftcap>
  void note(int64_t row, int64_t first, const Columns<float>& run, const RowTransform& transform,
            float shift, Floats largest) {
    // Final sums are rounded otherwise.
    const float threshold = 0.99f * kDominantShare * known_[row].load(std::memory_order_relaxed);
    if (bits_of(largest > splat(threshold)) == 0) return;
    std::vector<Dominant> own;
    Totals totals;
    const NoteAbove<kSoftcap> note_above{{}, threshold, row, first, own};
    add_run<kSoftcap, false>(run, transform, shift, totals, note_above);
    const std::lock_guard<std::mutex> lock(mutex_);
    found_.insert(found_.end(), own.begin(), own.end());
  }

  // By row and column, after `settle` and the last note.
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
