// LM head fused with log-softmax. It computes log-probabilities and exponentials from hidden
// states, without storing the logits.
//
// Names: raw_j is the raw logit of column j of a row, and z_j is its final logit. y is the column
// of the target. lse is the logarithm of the sum of e^z_j over all columns, logp is z_y - lse, and
// p_y is e^logp. f_j is the slope of the soft cap in column j, or 1 without a soft cap.
//
// Gradient: let g be the gradient of the loss with respect to logp. The gradient with respect to
// raw_j is computed from the exponential E_j = e^(z_j - s) f_j (dominant.h), where s is the shift
// of the row:
//
//     d raw_j = g unit E_j for j != y,   unit = -e^(s - lse) logit_scale / temperature
//     d raw_y = g target_unit,           target_unit = (1 - p_y) f_y logit_scale / temperature
//
// Sums: `rest` is the sum of e^(z_j - s) over all columns except y. lse is computed from `rest` and
// z_y. The entropy also needs `moment`, the sum of e^(z_j - s) (z_j - s) over the same columns.
//
// Shift: s must be known before the logits of the row are computed. The lse is unknown at this
// time, so s is first set to z_y, which costs one dot product per row. Each e^(z_j - s) is computed
// once, and is used for E_j and for the sums.
//
// Exceptions: if lse - z_y exceeds kMaxNll, the sums may overflow. The sums of such a row are
// computed again, each slice relative to its largest z_j. If exponentials are requested, every E_j
// of the row is then computed again with s = lse. Rows that contain NaN or have no target are
// computed again in the same way.
//
// Layout: a row is divided into slices of kSliceColumns columns. Each slice is summed separately.
// The sums of the slices are then joined in order.
//
// Rounding: sums are rounded as in sums.h. The bits of a row do not depend on other rows, on the
// threads, or on the requested outputs.
//
// Parallelism: threads compute different blocks of the product (gemm/multiply.h).
#pragma once

#include <numeric>

#include "gemm/head.h"
#include "rows/chunk.h"
#include "rows/dominant.h"

namespace grpo_fast {

constexpr int64_t kSliceColumns = 256;
constexpr int64_t kGroupRows = 1024;  // rows per group; their partial sums take 24 bytes per slice
constexpr double kMaxNll = 20.0;  // limit of lse - z[target] for s = z[target], in nats
static_assert(kSliceColumns % kPanel == 0 && kSliceColumns <= kRun);

// Tensors that receive the results of a sweep. At most one of the three (T, V) matrices is set.
struct SweepOutputs {
  RowOutputs rows;
  float *unit, *target_unit;  // (T,), written together with exponentials
  Matrix<float> logits, exponentials;
  Matrix<Positive16> exponentials16;

  bool has_exponentials() const { return exponentials.data || exponentials16.data; }
};

// A pass over all rows of the LM head. Without kEntropy, the entropies are undefined.
template <bool kSoftcap, bool kEntropy>
class Sweep {
 public:
  Sweep(const Chunk& chunk, const Head& head, const SweepOutputs& to)
      : chunk_(chunk), head_(head), to_(to), shifts_(chunk.rows), targets_(chunk.rows),
        dominant_(to.exponentials16.data ? chunk.rows : 0) {
    // First use z of the target as the shift s of every row.
    for (int64_t row = 0; row < chunk.rows; ++row) {
      const float raw = chunk.has_target(row) ? head.logit(row, chunk.target_ids[row]) : 0;
      shifts_[row] = static_cast<float>(final_logit<kSoftcap>(raw, chunk.transform()));
    }
  }

  // Runs all steps, and returns the dominant elements of 16-bit exponentials. With is_known, lse
  // and logps are already in the outputs.
  std::vector<Dominant> run(bool is_known) {
    // 1. Compute sums and outputs of all rows, with s = z[target].
    Rows all(chunk_.rows);
    std::iota(all.begin(), all.end(), 0);
    if (!is_known)
      each(all, true, [&](const Piece& piece) { return sum_and_store(piece, false); });
    // 2. In rows whose lse exceeds the target's z by more than kMaxNll, the sums may have
    // overflowed. Compute them again, each slice relative to its maximum.
    const Rows high_nll = high_nll_rows();
    if (!is_known)
      each(high_nll, true, [&](const Piece& piece) {
        return run_sums<kSoftcap, kEntropy>(piece.run, chunk_.transform());
      });
    // 3. Write the exponentials of these rows with s = lse. If the statistics were known, step 1
    // was skipped, so write the exponentials of all rows.
    if (!to_.has_exponentials()) return {};
    for (const int64_t row : high_nll) shifts_[row] = to_.rows.lse[row];
    if (to_.exponentials16.data) dominant_.settle(exponential_sums(), high_nll);
    each(is_known ? all : high_nll, false,
         [&](const Piece& piece) { return sum_and_store(piece, true); });
    write_units();
    return to_.exponentials16.data ? dominant_.finished() : std::vector<Dominant>{};
  }

 private:
  using Rows = std::vector<int64_t>;

  // The raw logits of one row in one slice of kSliceColumns columns.
  struct Piece {
    int64_t row, column;
    Columns<float> run;
  };

  // Computes the logits of the given rows, and calls sum_of(piece) for every slice of every row. If
  // `joins` is set, the statistics of the rows are computed from the results of sum_of.
  template <class SumOf>
  void each(const Rows& rows, bool joins, const SumOf& sum_of) {
    const int64_t slices = (chunk_.columns + kSliceColumns - 1) / kSliceColumns;
    const int64_t all = rows.size();
    std::vector<PartialSums> sums(std::min(kGroupRows, all) * slices);
    for (int64_t first = 0; first < all; first += kGroupRows) {
      const int64_t *group = rows.data() + first, count = std::min(kGroupRows, all - first);
      const auto finish = [&](const Block& block, float* logits, int64_t stride) {
        for (int64_t i = block.row; i < block.row + block.rows; ++i, logits += stride) {
          const int64_t row = group[i], target = chunk_.target_ids[row] - block.column;
          const bool is_here = target >= 0 && target < block.columns;
          if (is_here) targets_[row] = logits[target];
          const Columns<float> run{logits, block.columns, is_here ? target : -1};
          sums[i * slices + block.column / kSliceColumns] = sum_of({row, block.column, run});
        }
      };
      head_.multiply(group, count, kSliceColumns, finish);
      for (int64_t i = 0; joins && i < count; ++i) {
        const double z = final_logit<kSoftcap>(targets_[group[i]], chunk_.transform());
        const double* z_target = chunk_.has_target(group[i]) ? &z : nullptr;
        to_.rows.put(group[i], finished(joined(sums.data() + i * slices, slices), z_target));
      }
    }
  }

  // Returns the sums of one slice relative to the shift of its row. Also stores the logits or the
  // exponentials of the slice if they are requested. has_sum means that the sum of the full row is
  // already known.
  PartialSums sum_and_store(const Piece& piece, bool has_sum) {
    const int64_t row = piece.row, column = piece.column;
    const Columns<float>& run = piece.run;
    const RowTransform transform = chunk_.transform();
    const float shift = shifts_[row];
    Totals totals;
    const auto add = [&](const auto& emit) GRPO_FAST_BODY {
      add_run<kSoftcap, kEntropy>(run, transform, shift, totals, emit);
      return partial(shift, totals);
    };
    if (to_.logits.data)
      std::memcpy(to_.logits.row(row) + column, run.x, run.count * sizeof(float));
    if (!to_.has_exponentials()) return add(SumExponentials{});
    if (to_.exponentials.data)
      return add(WriteExponentials<kSoftcap, float>(to_.exponentials.row(row) + column));
    Positive16* to = to_.exponentials16.row(row) + column;
    const auto sums = add(WriteExponentials<kSoftcap, Positive16>(to));
    if (!has_sum) dominant_.raise(row, sums.rest);
    dominant_.note<kSoftcap>(row, column, run, transform, shift, totals.largest);
    return sums;
  }

  // Returns the rows that have no target, contain NaN, or have lse - s > kMaxNll. The condition is
  // the negation of lse - s <= kMaxNll, so that it is true for NaN.
  Rows high_nll_rows() const {
    Rows high_nll;
    for (int64_t row = 0; row < chunk_.rows; ++row) {
      const double distance = static_cast<double>(to_.rows.lse[row]) - shifts_[row];
      if (!chunk_.has_target(row) || !(distance <= kMaxNll)) high_nll.push_back(row);
    }
    return high_nll;
  }

  // Returns (1 - p_y) e^(lse - s) for each row. It is the sum of the row's exponentials without the
  // target, computed from the row's statistics.
  std::vector<double> exponential_sums() const {
    std::vector<double> sums(chunk_.rows);
    for (int64_t row = 0; row < chunk_.rows; ++row) {
      const double lse = to_.rows.lse[row], logp = to_.rows.logps[row];
      sums[row] = -std::expm1(logp) * std::exp(lse - shifts_[row]);
    }
    return sums;
  }

  // Writes the factors that turn exponentials into gradients of the raw logits.
  void write_units() const {
    for (int64_t row = 0; row < chunk_.rows; ++row) {
      const RowTransform transform = chunk_.transform();
      const double scaled = static_cast<double>(targets_[row]) * transform.inner;
      const double capped = kSoftcap ? std::tanh(scaled) : 0, lse = to_.rows.lse[row];
      const double one_minus_p = -std::expm1(to_.rows.logps[row]);
      to_.unit[row] = static_cast<float>(-std::exp(shifts_[row] - lse) * transform.chain);
      const double slope = one_minus_p * (1 - capped * capped) * transform.chain;
      to_.target_unit[row] = static_cast<float>(slope);
    }
  }

  const Chunk& chunk_;
  const Head& head_;
  const SweepOutputs& to_;
  std::vector<float> shifts_;   // s of every row
  std::vector<float> targets_;  // raw logits of the targets, from the product
  DominantExponentials dominant_;  // used for Positive16 only
};

}  // namespace grpo_fast
