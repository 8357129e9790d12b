// Weights that make up more than a 16th of their row. Of these the digits that 16 bits leave out are worth keeping: the
// others' roundings are small beside the row's gradient, or cancel.
#pragma once

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "row_kernels.h"

namespace grpo_fast {

constexpr float kDominantShare = 1 / 16.0f;

struct Dominant {
  int64_t row, column;
  float e;       // e^(z - shift)
  float weight;  // times the slope of a soft cap
};

// Notes the weights of a run above a threshold.
template <bool kSoftcap>
struct NoteAbove {
  static constexpr bool kFindsLargest = false;
  float threshold;
  int64_t row, first;
  std::vector<Dominant>& found;

  GRPO_FAST_INLINE static Floats floored(Floats t) { return SumWeights::floored(t); }
  GRPO_FAST_INLINE void operator()(int64_t column, int64_t count, Floats e, Floats slope) const {
    uint32_t bits = bits_of(e > splat(threshold));
    if (count < kLanes) bits &= (1u << count) - 1;
    for (; bits; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      found.push_back({row, first + column + lane, e[lane], kSoftcap ? e[lane] * slope[lane] : e[lane]});
    }
  }
};

// Found block by block, by all threads, while the sum of a row is known in part: more than need be, fewer at the end.
class DominantWeights {
 public:
  explicit DominantWeights(int64_t rows) : known_(rows) {}

  // Of the sum of row's weights `sum` more is known. -> what is known; a sum that another thread adds may be missing.
  float raise(int64_t row, double sum) {
    const float total = known_[row].load(std::memory_order_relaxed) + static_cast<float>(sum);
    known_[row].store(total, std::memory_order_relaxed);
    return total;
  }
  float known(int64_t row) const { return known_[row].load(std::memory_order_relaxed); }

  // Forgets a row; `sum` is all of its weights'.
  void restart(int64_t row, double sum) {
    known_[row].store(static_cast<float>(sum), std::memory_order_relaxed);
    found_.erase(std::remove_if(found_.begin(), found_.end(), [&](const Dominant& x) { return x.row == row; }),
                 found_.end());
  }

  // Those of one run of columns, where the largest e by lane shows that there may be some.
  template <bool kSoftcap>
  void note(int64_t row, int64_t first, const float* x, int64_t columns, int64_t target, const RowRule& rule,
            float shift, Floats largest) {
    const float threshold = 0.99f * kDominantShare * known(row);  // final sums are rounded otherwise
    if (bits_of(largest > splat(threshold)) == 0) return;
    std::vector<Dominant> own;
    shifted_sums<kSoftcap, false>(x, columns, target, rule, shift, NoteAbove<kSoftcap>{threshold, row, first, own});
    const std::lock_guard<std::mutex> lock(mutex_);
    found_.insert(found_.end(), own.begin(), own.end());
  }

  // By row and column; sums: of all weights of every row.
  const std::vector<Dominant>& finished(const std::vector<double>& sums) {
    const auto is_small = [&](const Dominant& x) { return !(x.e > kDominantShare * sums[x.row]); };
    found_.erase(std::remove_if(found_.begin(), found_.end(), is_small), found_.end());
    std::sort(found_.begin(), found_.end(),
              [](const Dominant& a, const Dominant& b) { return a.row != b.row ? a.row < b.row : a.column < b.column; });
    return found_;
  }

 private:
  std::vector<std::atomic<float>> known_;
  std::vector<Dominant> found_;
  std::mutex mutex_;
};

}  // namespace grpo_fast
