// hidden -> log-probabilities and weights, without logits: the head's product with the softmax in
// its epilogue. The gradient of sum g * logp is, with the weights E of dominant.h,
//
//   d raw_j = g unit E_j,              unit = -e^(s - lse) logit_scale / temperature
//   d raw_y = g target_unit,           target_unit = (1 - p_y) f_y logit_scale / temperature
//
// s must be known before the row is: s = z[target], one dot product per row (lse - s = -logp), so
// that one exponential serves the weight and the sum. Rows with -logp > kFar, with NaN or without a
// target are summed again relative to their maximum, and weighed again with s = lse. A row's
// statistics are those of slices of kSliceColumns columns, joined in their order: its bits do not
// depend on the other rows, on the threads, or on what is stored.
#pragma once

#include <numeric>

#include "gemm/head.h"
#include "rows/chunk.h"
#include "rows/dominant.h"

namespace grpo_fast {

constexpr int64_t kSliceColumns = 256;
constexpr int64_t kGroupRows = 1024;  // at a time: their partial sums take 24 bytes per slice
constexpr double kFar = 20.0;         // nats between z[target] and lse
static_assert(kSliceColumns % kPanel == 0 && kSliceColumns <= kRun);

// Where a sweep's results go. At most one of the matrices (T, V) is there.
struct SweepOutputs {
  RowOutputs rows;
  float *unit, *target_unit;  // (T,), where weights are
  Matrix<float> logits, weights;
  Matrix<Positive16> narrow;  // weights

  bool has_weights() const { return weights.data || narrow.data; }
};

// Without kEntropy the entropies mean nothing.
template <bool kSoftcap, bool kEntropy>
class Sweep {
 public:
  Sweep(const Chunk& chunk, const Head& head, const SweepOutputs& to)
      : chunk_(chunk), head_(head), to_(to), shifts_(chunk.rows), targets_(chunk.rows),
        dominant_(to.narrow.data ? chunk.rows : 0) {
    for (int64_t row = 0; row < chunk.rows; ++row) {
      const float raw = chunk.has_target(row) ? head.logit(row, chunk.target_ids[row]) : 0;
      shifts_[row] = static_cast<float>(final_logit<kSoftcap>(raw, chunk.rule(row)));
    }
  }

  // is_known: lse and logps are there already. -> the weights in 16 bits that dominate their row.
  std::vector<Dominant> run(bool is_known) {
    Rows all(chunk_.rows);
    std::iota(all.begin(), all.end(), 0);
    if (!is_known)
      each(all, true, [&](const Piece& piece) { return weighed(piece, false); });
    const Rows far = far_rows();
    if (!is_known)
      each(far, true, [&](const Piece& piece) {
        return run_sums<kSoftcap, kEntropy>(piece.run, chunk_.rule(piece.row));
      });
    if (!to_.has_weights()) return {};
    for (const int64_t row : far) shifts_[row] = to_.rows.lse[row];
    if (to_.narrow.data) dominant_.settle(weight_sums(), far);
    each(is_known ? all : far, false, [&](const Piece& piece) { return weighed(piece, true); });
    write_units();
    return to_.narrow.data ? dominant_.finished() : std::vector<Dominant>{};
  }

 private:
  using Rows = std::vector<int64_t>;

  // Raw logits of one row from column `column` on.
  struct Piece {
    int64_t row, column;
    Columns<float> run;
  };

  // sum_of(piece) for every slice of some rows; joins: statistics of the rows from the sums.
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
        const double z = final_logit<kSoftcap>(targets_[group[i]], chunk_.rule(group[i]));
        const double* z_target = chunk_.has_target(group[i]) ? &z : nullptr;
        to_.rows.put(group[i], finished(joined(sums.data() + i * slices, slices), z_target));
      }
    }
  }

  // Sums relative to the row's shift, and what goes to the matrix. has_sum: the row's is known.
  PartialSums weighed(const Piece& piece, bool has_sum) {
    const int64_t row = piece.row, column = piece.column;
    const Columns<float>& run = piece.run;
    const RowRule rule = chunk_.rule(row);
    const float shift = shifts_[row];
    Totals totals;
    const auto add = [&](const auto& emit) GRPO_FAST_BODY {
      add_run<kSoftcap, kEntropy>(run, rule, shift, totals, emit);
      return partial(shift, totals);
    };
    if (to_.logits.data)
      std::memcpy(to_.logits.row(row) + column, run.x, run.count * sizeof(float));
    if (!to_.has_weights()) return add(SumWeights{});
    if (to_.weights.data) return add(WriteWeights<kSoftcap, float>(to_.weights.row(row) + column));
    const auto sums = add(WriteWeights<kSoftcap, Positive16>(to_.narrow.row(row) + column));
    if (!has_sum) dominant_.raise(row, sums.rest);
    dominant_.note<kSoftcap>(row, column, run, rule, shift, totals.largest);
    return sums;
  }

  Rows far_rows() const {
    Rows far;
    for (int64_t row = 0; row < chunk_.rows; ++row) {
      const double distance = static_cast<double>(to_.rows.lse[row]) - shifts_[row];
      if (!chunk_.has_target(row) || !(distance <= kFar)) far.push_back(row);
    }
    return far;
  }

  // Of the weights of every row, from its statistics.
  std::vector<double> weight_sums() const {
    std::vector<double> sums(chunk_.rows);
    for (int64_t row = 0; row < chunk_.rows; ++row) {
      const double lse = to_.rows.lse[row], logp = to_.rows.logps[row];
      sums[row] = -std::expm1(logp) * std::exp(lse - shifts_[row]);
    }
    return sums;
  }

  void write_units() const {
    for (int64_t row = 0; row < chunk_.rows; ++row) {
      const RowRule rule = chunk_.rule(row);
      const double scaled = static_cast<double>(targets_[row]) * rule.inner;
      const double bent = kSoftcap ? std::tanh(scaled) : 0, lse = to_.rows.lse[row];
      const double miss = -std::expm1(to_.rows.logps[row]);
      to_.unit[row] = static_cast<float>(-std::exp(shifts_[row] - lse) * rule.chain);
      to_.target_unit[row] = static_cast<float>(miss * (1 - bent * bent) * rule.chain);
    }
  }

  const Chunk& chunk_;
  const Head& head_;
  const SweepOutputs& to_;
  std::vector<float> shifts_;   // s of every row
  std::vector<float> targets_;  // raw logits of the targets, of the product
  DominantWeights dominant_;    // where the weights are Positive16
};

}  // namespace grpo_fast
