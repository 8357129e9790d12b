// Packs operands into the words that the micro-kernels read. There is one word for each lane and
// each step of k.
//
// Rounding: for bf16 products, operands that are more precise than bf16 are rounded here. An fp32
// element is split into two bf16 parts, the rounded number and its rounding error. A Positive16
// element becomes one bf16. An element is heavy if it makes up a large part of its column. The
// rounding errors of heavy Positive16 elements are recorded, and multiplied in fp32 later.
#pragma once

#include <type_traits>
#include <utility>
#include <vector>

#include "gemm/operand.h"

namespace grpo_fast {

// A heavy element of `a`: its position, and the error of rounding it to bf16.
struct Heavy {
  int64_t row, k;
  float rest;
};

// An element is heavy if its square exceeds this share of the sum of squares of its column.
constexpr float kHeavyShare = 1 / 16.0f;

// Options for packing: the bf16 part to write (of the two), the factors of the elements, and the
// list that receives heavy elements.
struct Entry {
  int part = 0;
  const float* scales = nullptr;  // one factor per k; null: 1
  // One limit for each column, or null. An element is heavy if its square exceeds the limit.
  const float* limits = nullptr;
  int64_t first_k = 0;
  std::vector<Heavy>* heavy = nullptr;

  float scale(int64_t k) const { return scales ? scales[k] : 1.0f; }
};

// ---- single words and vectors of words ----

// Returns the word that contains the fp32 at x.
inline uint32_t word(const float* x, int64_t) {
  return bit_cast<uint32_t>(*x);
}

// Returns the word that contains the bf16 elements x[0] and x[1]. If only one element is left, the
// upper half of the word is 0.
inline uint32_t word(const Bfloat16* x, int64_t left) {
  return x->bits | (left > 1 ? static_cast<uint32_t>(x[1].bits) << 16 : 0u);
}

// Rounds x to bf16, and returns the result in the upper half of each word. Adding 0x7fff plus the
// lowest bit that remains rounds to nearest, with ties to even.
GRPO_FAST_INLINE Words rounded(Floats x) {
  const Words bits = bit_cast<Words>(x);
  const Words nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  return x != x ? Words{} + 0x7fc00000u : nearest;
}

// Returns one of the two bf16 parts of x. Part 0 is x rounded to bf16. Part 1 is the rounding error
// of part 0, also rounded to bf16.
GRPO_FAST_INLINE Words rounded(Floats x, int part) {
  const Words first = rounded(x);
  return part == 0 ? first : rounded(x - bit_cast<Floats>(first));
}

// Returns the error of rounding x to bf16.
inline float rest_of(float x) {
  return x - bit_cast<float>(rounded(splat(x))[0]);
}

// Rounds two vectors to bf16, and packs them into one word for each lane. The lower half of a word
// comes from `x`, and the upper half from `next`. `part` selects one of the two bf16 parts, as in
// rounded().
GRPO_FAST_INLINE Words pairs_of(Floats x, Floats next, int part) {
#if defined(__AVX512BF16__) && GRPO_FAST_LANES == 16
  if (part == 0) {
    const auto both = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(next, x));
    // cvtne2ps writes all of x before all of next. Interleave them, because a word contains an
    // element of x and an element of next.
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9,
                                           24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
                                           16, 0);
    return bit_cast<Words>(_mm512_permutexvar_epi16(order, both));
  }
#endif
  return (rounded(x, part) >> 16) | rounded(next, part);
}

// ---- slices ----

// One step of a transpose, which exchanges blocks of kStep lanes between row a and row b = a +
// kStep. Returns the new row a, or with kOdd the new row b.
template <int kStep, bool kOdd, int... kLane>
GRPO_FAST_INLINE Words paired(Words a, Words b, std::integer_sequence<int, kLane...>) {
  constexpr int kFirst = kOdd ? kStep : 0;
  constexpr Words order{static_cast<uint32_t>(
      kFirst + ((kLane & kStep) ? kLanes + kLane - kStep : kLane))...};
  return __builtin_shuffle(a, b, order);
}

// One step of a transpose in registers, which exchanges blocks of kStep lanes between rows that are
// kStep apart.
template <int kStep>
GRPO_FAST_INLINE void transpose_pairs(Words* rows) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & kStep) continue;
    const Words a = rows[i], b = rows[i + kStep];
    rows[i] = paired<kStep, false>(a, b, lanes), rows[i + kStep] = paired<kStep, true>(a, b, lanes);
  }
}

// Transposes a square of kLanes x kLanes words in registers, in log2(kLanes) steps.
GRPO_FAST_INLINE void transpose_square(const uint32_t* from, int64_t from_stride, uint32_t* to,
                                       int64_t to_stride) {
  Words rows[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) rows[i] = read<Words>(from + i * from_stride);
  transpose_pairs<1>(rows);
  transpose_pairs<2>(rows);
  if constexpr (kLanes > 4) transpose_pairs<4>(rows);
  if constexpr (kLanes > 8) transpose_pairs<8>(rows);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) std::memcpy(to + i * to_stride, &rows[i], sizeof(Words));
}

// Transposes a slice whose column index is k. Word k of row r becomes to[k * to_stride + r]. Rows
// from x.across to `width` are filled with zeros.
template <class T>
void pack_transposed(const Slice<T>& x, int64_t width, uint32_t* to, int64_t to_stride) {
  const int64_t whole = x.depth / kPerWord<T> / kLanes * kLanes;  // in words
  int64_t row = 0;
  for (; row + kLanes <= x.across && x.stride % kPerWord<T> == 0; row += kLanes)
    for (int64_t k = 0; k < whole; k += kLanes)
      transpose_square(reinterpret_cast<const uint32_t*>(x.data + row * x.stride) + k,
                       x.stride / kPerWord<T>, to + k * to_stride + row, to_stride);
  // Pack the remaining rows and words one at a time.
  for (int64_t r = 0; r < width; ++r)
    for (int64_t k = r < row ? whole : 0; k < x.words; ++k) {
      const int64_t at = k * kPerWord<T>;
      to[k * to_stride + r] = r < x.across ? word(x.data + r * x.stride + at, x.depth - at) : 0u;
    }
}

// Packs one row k of a slice whose row index is k, into one word for each column. The word contains
// the element of row k and, for bf16, also the element of row k + 1. Heavy elements are added to
// the list of `entry`.
template <class T, class S>
void pack_words(const Slice<S>& x, int64_t k, const Entry& entry, uint32_t* to) {
  const S *row = x.data + k * x.stride, *next = k + 1 < x.depth ? row + x.stride : nullptr;
  const float scale = entry.scale(k), next_scale = next ? entry.scale(k + 1) : 0.0f;
  by_vectors(x.across, [&](int64_t c, int64_t count) GRPO_FAST_BODY {
    const auto put = [&](auto words) {
      store_up_to(reinterpret_cast<float*>(to) + c, bit_cast<Floats>(words), count);
    };
    const Floats a = load_up_to(row + c, count);
    if constexpr (sizeof(T) == 4) return put(a * scale);
    const Floats b = next ? load_up_to(next + c, count) : Floats{};
    if constexpr (std::is_same_v<S, T>) return put(bit_cast<Words>(a) >> 16 | bit_cast<Words>(b));
    const Floats first = a * scale, second = b * next_scale;
    put(pairs_of(first, second, entry.part));
    if (!entry.limits) return;
    const Floats limits = load_up_to(entry.limits + c, count);
    // Heavy elements are rare, so usually no lane exceeds its limit.
    if (bits_of(max(first * first, second * second) > limits) == 0) return;
    const auto note = [&](Floats d, int64_t at) {
      each_lane(d * d > limits, count, [&](int lane) {
        entry.heavy->push_back({c + lane, entry.first_k + at, rest_of(d[lane])});
      });
    };
    note(first, k), note(second, k + 1);
  });
}

// Packs a slice whose row index is k. The word of column c and row k becomes to[k][c]. Columns from
// x.across to `width` are filled with zeros. Elements are stored as S and multiplied as T.
template <class T, class S>
void pack_down(const Slice<S>& x, int64_t width, const Entry& entry, uint32_t* to) {
  for (int64_t k = 0; k < x.words; ++k, to += width) {
    pack_words<T>(x, k * kPerWord<T>, entry, to);
    std::fill(to + x.across, to + width, 0u);
  }
}

// Packs a slice whose column index is k. Word k of row r becomes to[r][k]. Rows from x.across to
// `height` are filled with zeros. `part` selects one of the two bf16 parts of an fp32 element.
template <class T, class S>
void pack_along(const Slice<S>& x, int64_t height, int part, uint32_t* to, int64_t to_stride) {
  for (int64_t r = 0; r < height; ++r, to += to_stride) {
    T* row = reinterpret_cast<T*>(to);
    std::memset(to, 0, x.words * sizeof(uint32_t));
    if (r >= x.across) continue;
    const S* from = x.data + r * x.stride;
    if constexpr (std::is_same_v<S, T>)
      std::memcpy(row, from, x.depth * sizeof(T));
    else
      by_vectors(x.depth, [&](int64_t k, int64_t count) GRPO_FAST_BODY {
        const Floats all = load_up_to(from + k, count);
        store_up_to(row + k, part ? bit_cast<Floats>(rounded(all, part)) : all, count);
      });
  }
}

// Computes the limit of each column, which is kHeavyShare times the sum of squares of the column.
// An element whose square exceeds the limit is heavy.
template <class S>
void find_limits(const Slice<S>& x, const float* scales, float* limits) {
  // Number of rows to prefetch ahead. The rows are too short for the hardware prefetcher.
  constexpr int64_t kAhead = 8;
  std::fill(limits, limits + x.across, 0.0f);
  for (int64_t k = 0; k < x.depth; ++k) {
    const S* row = x.data + k * x.stride;
    const float scale = scales ? scales[k] : 1.0f;
    by_vectors(x.across, [&](int64_t c, int64_t count) GRPO_FAST_BODY {
      __builtin_prefetch(row + kAhead * x.stride + c);
      const Floats d = load_up_to(row + c, count) * scale;
      store_up_to(limits + c, fma(d, d, load_up_to(limits + c, count)), count);
    });
  }
  for (int64_t c = 0; c < x.across; ++c) limits[c] *= kHeavyShare;
}

}  // namespace grpo_fast
