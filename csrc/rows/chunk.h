// Rows of logits with a target and a logit transform each, and the loop that distributes rows to
// threads.
//
// The logits may be stored, or computed block by block and never stored.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>

#include "rows/statistics.h"

namespace grpo_fast {

// C rows of V columns, or rows of unequal length, stored one after another in a vector of V
// numbers.
struct Chunk {
  int64_t rows, columns;
  const int64_t* target_ids;                 // (C,)
  double logit_scale, softcap, temperature;  // softcap 0: none
  const float* temperatures;  // (C,) or null, overrides `temperature`
  const int64_t* offsets = nullptr;  // (C + 1,) bounds of ragged rows

  int64_t width(int64_t row) const { return offsets ? offsets[row + 1] - offsets[row] : columns; }

  bool has_target(int64_t row) const {
    return target_ids[row] >= 0 && target_ids[row] < width(row);
  }

  // Folds scale, soft cap and temperature into two factors.
  RowTransform transform(int64_t row) const {
    const double t = temperatures ? temperatures[row] : temperature, scale = logit_scale / t;
    if (softcap == 0) return {static_cast<float>(scale), 0.0f, scale};
    return {static_cast<float>(logit_scale / softcap), static_cast<float>(softcap / t), scale};
  }

  template <class T>
  // The first number of a row.
  T* start(const Matrix<T>& numbers, int64_t row) const {
    return offsets ? numbers.data + offsets[row] : numbers.row(row);
  }

  // The columns of a row and its target.
  template <class T>
  Columns<T> row_of(const Matrix<T>& logits, int64_t row) const {
    return {start(logits, row), width(row), has_target(row) ? target_ids[row] : -1};
  }
};

// Outputs of a row's statistics, (C,) each; entropy may be null.
struct RowOutputs {
  float *lse, *logps, *entropy;

  void put(int64_t row, const RowStatistics& found) const {
    lse[row] = static_cast<float>(found.lse);
    logps[row] = static_cast<float>(found.logp);
    if (entropy) entropy[row] = static_cast<float>(found.entropy);
  }
};

constexpr int64_t kGrain = 16384;  // elements per task of a thread
constexpr int64_t kInline = 65536;  // below this, waking threads costs more than it saves

// Calls body(row) for each row, in parallel. `numbers` is the approximate length of a row. One
// thread computes a row, so results do not depend on the number of threads.
template <class F>
void for_each_row(int64_t rows, int64_t numbers, const F& body) {
  const int64_t columns = std::max<int64_t>(1, numbers);
  const bool is_small = rows * columns <= kInline;
  const int64_t step = is_small ? rows : std::max<int64_t>(1, kGrain / columns);
  std::atomic<int64_t> next{0};
  // Rows whose coefficients are 0 cost almost nothing, so static shares would leave threads idle.
  const auto work = [&](int64_t, int64_t) {
    for (int64_t begin; (begin = next.fetch_add(step)) < rows;)
      for (int64_t row = begin; row < std::min(begin + step, rows); ++row) body(row);
  };
  if (is_small) return work(0, 1);
  const int64_t threads = torch::stable::get_num_threads();
  torch::stable::parallel_for(0, std::min(threads, (rows + step - 1) / step), 1, work);
}

// The same for the rows of a chunk.
template <class F>
void for_each_row(const Chunk& chunk, const F& body) {
  const int64_t rows = std::max<int64_t>(1, chunk.rows);
  for_each_row(chunk.rows, chunk.offsets ? chunk.columns / rows : chunk.columns, body);
}

}  // namespace grpo_fast
