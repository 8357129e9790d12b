// Rows of logits with their targets and logit transforms, and the loop that distributes rows to
// threads. The fused LM head also uses them, but computes its logits block by block without storing
// them.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>

#include "rows/statistics.h"

namespace grpo_fast {

// Description of C rows with V logits each. With `offsets`, the rows have unequal lengths. They are
// stored one after another in a vector, and V is the length of this vector.
struct Chunk {
  int64_t rows, columns;
  const int64_t* target_ids;                 // (C,)
  double logit_scale, softcap, temperature;  // softcap 0 means none
  const int64_t* offsets = nullptr;  // (C + 1,) bounds of ragged rows, or null

  int64_t width(int64_t row) const { return offsets ? offsets[row + 1] - offsets[row] : columns; }

  bool has_target(int64_t row) const {
    return target_ids[row] >= 0 && target_ids[row] < width(row);
  }

  // Returns the logit transform with scale, soft cap and temperature combined into two factors.
  RowTransform transform() const {
    const double scale = logit_scale / temperature;
    if (softcap == 0) return {static_cast<float>(scale), 0.0f, scale};
    const double outer = softcap / temperature;
    return {static_cast<float>(logit_scale / softcap), static_cast<float>(outer), scale};
  }

  // Returns a pointer to the first element of a row.
  template <class T>
  T* start(const Matrix<T>& numbers, int64_t row) const {
    return offsets ? numbers.data + offsets[row] : numbers.row(row);
  }

  // Returns a view of a row with the position of its target, or -1 if the row has no target.
  template <class T>
  Columns<T> row_of(const Matrix<T>& logits, int64_t row) const {
    return {start(logits, row), width(row), has_target(row) ? target_ids[row] : -1};
  }
};

// Destinations for the statistics of the rows, (C,) each. entropy may be null.
struct RowOutputs {
  float *lse, *logps, *entropy;

  void put(int64_t row, const RowStatistics& found) const {
    lse[row] = static_cast<float>(found.lse);
    logps[row] = static_cast<float>(found.logp);
    if (entropy) entropy[row] = static_cast<float>(found.entropy);
  }
};

// Computes and stores the statistics of one row.
template <bool kSoftcap, bool kEntropy, class T>
void write_statistics(const Chunk& chunk, const Matrix<T>& logits, int64_t row,
                      const RowOutputs& to) {
  to.put(row, row_statistics<kSoftcap, kEntropy>(chunk.row_of(logits, row), chunk.transform()));
}

constexpr int64_t kGrain = 16384;  // elements per task of a thread
constexpr int64_t kInline = 65536;  // below this, waking threads costs more than it saves

// Calls body(row) for each row, in parallel. `numbers` is the approximate number of elements that
// one call of body processes. A row is computed by one thread, so the results do not depend on the
// number of threads.
template <class F>
void for_each_row(int64_t rows, int64_t numbers, const F& body) {
  const int64_t columns = std::max<int64_t>(1, numbers);
  const bool is_small = rows * columns <= kInline;
  const int64_t step = is_small ? rows : std::max<int64_t>(1, kGrain / columns);
  std::atomic<int64_t> next{0};
  // Threads fetch rows from a counter. Rows with coefficient 0 take almost no time, so some threads
  // would be idle if each thread had a fixed range of rows.
  const auto work = [&](int64_t, int64_t) {
    for (int64_t begin; (begin = next.fetch_add(step)) < rows;)
      for (int64_t row = begin; row < std::min(begin + step, rows); ++row) body(row);
  };
  if (is_small) return work(0, 1);
  const int64_t threads = torch::stable::get_num_threads();
  torch::stable::parallel_for(0, std::min(threads, (rows + step - 1) / step), 1, work);
}

// Calls body(row) for each row of a chunk, in parallel.
template <class F>
void for_each_row(const Chunk& chunk, const F& body) {
  const int64_t rows = std::max<int64_t>(1, chunk.rows);
  for_each_row(chunk.rows, chunk.offsets ? chunk.columns / rows : chunk.columns, body);
}

}  // namespace grpo_fast
