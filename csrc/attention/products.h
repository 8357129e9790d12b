// Small matrix products for attention in fp32, with 1, 2 or 4 rows at a time.
//
// Layout: keys are stored in tiles (D, kTile) of kTile tokens, so a vector contains the same
// dimension of kLanes tokens.
//
// Rounding: a dot product sums kTermsTogether terms at a time in fp32, and adds these sums in
// order.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "vec/storage.h"

namespace grpo_fast {

constexpr int64_t kTile = 16;  // tokens; a multiple of the vector width
static_assert(kTile % kLanes == 0);
// Number of terms of a dot product that are summed before their sum is added to the total. Short
// partial sums keep the rounding error small.
constexpr int64_t kTermsTogether = 64;

inline int64_t round_up_to_tile(int64_t tokens) {
  return (tokens + kTile - 1) / kTile * kTile;
}

// Calls run(first row, count) for all rows in [begin, end), with 4, 2 or 1 rows per call. `count`
// is a compile-time constant, so that the sums of the rows stay in registers.
template <class Run>
void by_rows(int64_t begin, int64_t end, const Run& run) {
  for (; begin + 4 <= end; begin += 4) run(begin, std::integral_constant<int, 4>{});
  if (end - begin >= 2) run(begin, std::integral_constant<int, 2>{}), begin += 2;
  if (begin < end) run(begin, std::integral_constant<int, 1>{});
}

// Multiplies kRows rows of x with the kParts * kLanes tokens from token `first` on. The dot product
// of row i and token t is written to to.row(i)[t].
template <int kRows, int kParts>
GRPO_FAST_INLINE void multiply_tokens(const Matrix<const float>& x, const float* tiles,
                                      int64_t depth, int64_t first, const Matrix<float>& to) {
  // The callers choose kRows and kParts so that all of these sums fit into registers.
  Floats totals[kRows][kParts] = {};
  const float* from[kParts];
  for (int part = 0; part < kParts; ++part) {
    const int64_t token = first + part * kLanes;
    from[part] = tiles + token / kTile * kTile * depth + token % kTile;
  }
  for (int64_t begin = 0; begin < depth; begin += kTermsTogether) {
    Floats sums[kRows][kParts] = {};
    for (int64_t d = begin; d < std::min(depth, begin + kTermsTogether); ++d) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        const Floats tokens = load(from[part] + d * kTile);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i)
          sums[i][part] = fma(tokens, splat(x.row(i)[d]), sums[i][part]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) totals[i][part] += sums[i][part];
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part)
      store(to.row(i) + first + part * kLanes, totals[i][part]);
}

// Multiplies kRows rows of x with the tokens [first, end). The dot product of row i and token t is
// written to to.row(i)[t]. The range is rounded up to full vectors, so the products of a few tokens
// after `end` are written, too.
template <int kRows>
void multiply_tokens(const Matrix<const float>& x, const float* tiles, int64_t depth, int64_t first,
                     int64_t end, const Matrix<float>& to) {
  int64_t token = first / kTile * kTile;
  const int64_t whole = round_up_to_tile(end);
  // With fewer than 4 rows, process four vectors at a time instead of two. With two vectors, too
  // few independent sums would remain to hide the latency of an FMA.
  if constexpr (kRows < 4)
    for (; token + 4 * kLanes <= whole; token += 4 * kLanes)
      multiply_tokens<kRows, 4>(x, tiles, depth, token, to);
  for (; token + 2 * kLanes <= whole; token += 2 * kLanes)
    multiply_tokens<kRows, 2>(x, tiles, depth, token, to);
  for (; token < end; token += kLanes) multiply_tokens<kRows, 1>(x, tiles, depth, token, to);
}

// Weights of tokens in several rows. The weight of token t in row i is data[t * along + i *
// across].
struct Weights {
  const float* data;
  int64_t along, across;
};

// Adds the sum of weight(t, i) * x[t] over `count` tokens t to row i of `out`, for kRows rows. Only
// kParts vectors of each row are computed, from dimension d on.
template <int kRows, int kParts>
GRPO_FAST_INLINE void add_tokens(const Weights& w, const Matrix<const float>& x, int64_t count,
                                 int64_t depth, int64_t d, const Matrix<float>& out) {
  Floats sums[kRows][kParts] = {};
  const float* weights = w.data;
  for (int64_t t = 0; t < count; ++t, weights += w.along) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const float* from = x.row(t) + d + part * kLanes;
      const Floats numbers = kParts > 1 ? load(from) : load_up_to(from, depth - d);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i)
        sums[i][part] = fma(numbers, splat(weights[i * w.across]), sums[i][part]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      float* to = out.row(i) + d + part * kLanes;
      const int64_t left = depth - d - part * kLanes;
      store_up_to(to, load_up_to(to, left) + sums[i][part], left);
    }
}

// Adds the sum of weight(t, i) * x[t] over `count` tokens t to row i of `out`, for kRows rows.
template <int kRows>
void add_tokens(const Weights& w, const Matrix<const float>& x, int64_t count, int64_t depth,
                const Matrix<float>& out) {
  int64_t d = 0;
  if constexpr (kRows < 4)
    for (; d + 4 * kLanes <= depth; d += 4 * kLanes)
      add_tokens<kRows, 4>(w, x, count, depth, d, out);
  for (; d + 2 * kLanes <= depth; d += 2 * kLanes)
    add_tokens<kRows, 2>(w, x, count, depth, d, out);
  for (; d < depth; d += kLanes) add_tokens<kRows, 1>(w, x, count, depth, d, out);
}

constexpr float kUnseen = -std::numeric_limits<float>::infinity();

// Sets the scores of tokens outside [first, end) to -inf in the tiles that contain this range.
inline void hide_tokens(float* scores, int64_t first, int64_t end) {
  std::fill(scores + first / kTile * kTile, scores + first, kUnseen);
  std::fill(scores + end, scores + round_up_to_tile(end), kUnseen);
}

// Replaces each score with e^(score - largest), and returns the sum of the exponentials. `count`
// must be a multiple of the vector width. NaN stays NaN.
inline float exponentials(float* scores, int64_t count) {
  Floats most = splat(kUnseen), sums = {};
  for (int64_t at = 0; at < count; at += kLanes) most = max(load(scores + at), most);
  const float largest = max_lane(most);
  for (int64_t at = 0; at < count; at += kLanes) {
    const Floats e = exp_floored(floor_exponent(load(scores + at) - largest));
    store(scores + at, e);
    sums += e;
  }
  return static_cast<float>(sum_lanes(widen(sums)));
}

// Writes factor * x to `to`.
inline void write_scaled(const float* x, float factor, int64_t count, float* to) {
  by_vectors(count, [&](int64_t at, int64_t left) GRPO_FAST_BODY {
    store_up_to(to + at, load_up_to(x + at, left) * factor, left);
  });
}

}  // namespace grpo_fast
