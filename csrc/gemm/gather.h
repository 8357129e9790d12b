// Dot products and weighted sums of matrix rows that are selected by index.
//
// The hardware cannot predict which row is read next. dot_product and add_row therefore prefetch
// the next row while they read the current one.
//
// Rounding: dot_product sums in fp32 within each lane, and adds the lanes in fp64. sum_rows adds
// kRunTerms terms at a time in fp32, then adds these sums in order, and rounds a 16-bit result
// once.
#pragma once

#include <algorithm>

#include "vec/storage.h"

namespace grpo_fast {

// Number of terms that sum_rows sums before it adds their sum to the total. Short partial sums keep
// the rounding error small.
constexpr int64_t kRunTerms = 256;

// View of a matrix whose rows are read by index.
template <class T>
struct Gathered {
  const T* data;
  int64_t stride, columns;

  const T* row(int64_t index) const { return data + index * stride; }
};

// Calls body(column) for each group of four full vectors of a row, and prefetches the same columns
// of `next`, the row that is read afterwards. Returns the first column after the last group.
template <class T, class Body>
GRPO_FAST_INLINE int64_t for_each_four_vectors(const T* next, int64_t columns, const Body& body) {
  int64_t column = 0;
  for (; column + 4 * kLanes <= columns; column += 4 * kLanes) {
    prefetch<4 * kLanes>(next + column);
    body(column);
  }
  return column;
}

// Returns the dot product of `a` and `b`, and prefetches `next`, the row that is read afterwards.
// Four independent sums are computed, because with a single sum each FMA would wait for the
// previous one.
template <class T>
inline float dot_product(const T* a, const T* b, int64_t depth, const T* next) {
  Floats sums[4] = {};
  int64_t k = for_each_four_vectors(next, depth, [&](int64_t column) GRPO_FAST_BODY {
    for (int part = 0; part < 4; ++part) {
      const int64_t at = column + part * kLanes;
      sums[part] = fma(load(a + at), load(b + at), sums[part]);
    }
  });
  for (; k + kLanes <= depth; k += kLanes) sums[0] = fma(load(a + k), load(b + k), sums[0]);
  // Add up the lanes and the remaining terms in fp64.
  double total = sum_lanes(widen((sums[0] + sums[1]) + (sums[2] + sums[3])));
  for (; k < depth; ++k) total += static_cast<double>(load_one(a + k)) * load_one(b + k);
  return static_cast<float>(total);
}

// Adds factor * x to `sums`, and prefetches `next`, which is the row that the caller reads next.
template <class T>
inline void add_row(const T* x, float factor, int64_t columns, float* sums, const T* next) {
  const auto add = [&](int64_t at, int64_t count) GRPO_FAST_BODY {
    const Floats before = load_up_to(sums + at, count);
    store_up_to(sums + at, fma(load_up_to(x + at, count), splat(factor), before), count);
  };
  int64_t column = for_each_four_vectors(next, columns, [&](int64_t at) GRPO_FAST_BODY {
    for (int part = 0; part < 4; ++part) add(at + part * kLanes, kLanes);
  });
  for (; column < columns; column += kLanes) add(column, columns - column);
}

// One term of a weighted sum of rows: `factor` times row `index` of a matrix.
struct Term {
  float factor;
  int64_t index;
};

// Sums all terms for kParts vectors of columns, starting at `column`. The sums are stored in `out`,
// or added to it if `add` is set. At most `left` columns are written.
template <int kParts, class T, class Out>
GRPO_FAST_INLINE void sum_columns(const Gathered<T>& from, const Term* terms, int64_t count,
                                  int64_t column, int64_t left, Out* out, bool add) {
  Floats totals[kParts] = {};
  for (int64_t first = 0; first < count; first += kRunTerms) {
    Floats sums[kParts] = {};
    for (int64_t i = first; i < std::min(first + kRunTerms, count); ++i) {
      if (terms[i].factor == 0) continue;  // skip: 0 * inf and 0 * NaN would be NaN
      const T* row = from.row(terms[i].index) + column;
      for (int part = 0; part < kParts; ++part)
        sums[part] = fma(load_up_to(row + part * kLanes, left - part * kLanes),
                         splat(terms[i].factor), sums[part]);
    }
    for (int part = 0; part < kParts; ++part) totals[part] += sums[part];
  }
  for (int part = 0; part < kParts; ++part) {
    Out* to = out + column + part * kLanes;
    const int64_t here = left - part * kLanes;
    store_up_to(to, add ? load_up_to(to, here) + totals[part] : totals[part], here);
  }
}

// Stores the sum of all terms in `out`, or adds it to `out` if `add` is set. The terms are added in
// order, and the result is rounded once.
template <class T, class Out>
void sum_rows(const Gathered<T>& from, const Term* terms, int64_t count, Out* out, bool add) {
  constexpr int kParts = 4;
  int64_t column = 0;
  for (; column + kParts * kLanes <= from.columns; column += kParts * kLanes)
    sum_columns<kParts>(from, terms, count, column, kParts * kLanes, out, add);
  for (; column < from.columns; column += kLanes)
    sum_columns<1>(from, terms, count, column, from.columns - column, out, add);
}

}  // namespace grpo_fast
