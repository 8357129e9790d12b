// Products with rows of a matrix that are named one by one, where they are in memory. While a row is
// read the next one is asked for: its place follows from nothing that the machine could foresee.
#pragma once

#include <algorithm>

#include "vec/storage.h"

namespace grpo_fast {

constexpr int64_t kRunTerms = 256;  // terms summed in fp32 before their sum is added to the others

template <class T>
struct Gathered {
  const T* data;
  int64_t stride, columns;

  const T* row(int64_t index) const { return data + index * stride; }
};

// body(column) for the whole vectors of two rows, four at a time; asks for the same of `next`.
template <class T, class Body>
GRPO_FAST_INLINE int64_t for_each_four_vectors(const T* next, int64_t columns, const Body& body) {
  int64_t column = 0;
  for (; column + 4 * kLanes <= columns; column += 4 * kLanes) {
    prefetch<4 * kLanes>(next + column);
    body(column);
  }
  return column;
}

// Four chains of fp32 sums hide each other's latency.
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
  double total = sum_lanes(widen((sums[0] + sums[1]) + (sums[2] + sums[3])));
  for (; k < depth; ++k) total += static_cast<double>(load_one(a + k)) * load_one(b + k);
  return static_cast<float>(total);
}

// sums += factor * x
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

// factor * the row `index` of a matrix.
struct Term {
  float factor;
  int64_t index;
};

// kParts vectors of a sum of terms from `column` on, of which `left` numbers exist.
template <int kParts, class T, class Out>
GRPO_FAST_INLINE void sum_columns(const Gathered<T>& from, const Term* terms, int64_t count,
                                  int64_t column, int64_t left, Out* out, bool add) {
  Floats totals[kParts] = {};
  for (int64_t first = 0; first < count; first += kRunTerms) {
    Floats sums[kParts] = {};
    for (int64_t i = first; i < std::min(first + kRunTerms, count); ++i) {
      if (terms[i].factor == 0) continue;  // nothing, also of inf and NaN
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

// out = or += the sum of some terms, in their order, rounded once.
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
