// Operands of the matrix product as its micro-kernel reads them: packed into words, one per lane and step of k.
//
// A word is an fp32, or a pair of bf16 of neighbouring k. fp32 operands can be multiplied by bf16 ones: each number is
// then rounded to bf16 (part 0), and where that is too little what is left of it is rounded as well (part 1).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "vec.h"

namespace grpo_fast {

template <class T>
constexpr int64_t kPerWord = 4 / sizeof(T);

// A matrix as it lies in memory, neighbours in a row. Transposed: its rows are the columns of the operand.
template <class T>
struct Operand {
  const T* data;
  int64_t stride;
  bool transposed;
};

template <class T>
using Buffer = std::unique_ptr<T, decltype(&std::free)>;

template <class T>
Buffer<T> buffer(int64_t size) {
  const size_t bytes = (std::max<int64_t>(size, 1) * sizeof(T) + 63) / 64 * 64;
  return {static_cast<T*>(std::aligned_alloc(64, bytes)), &std::free};
}

inline int64_t up(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

// Memory that is read soon: pieces of `lines` cache lines, `stride` bytes apart.
struct Pieces {
  const char* start = nullptr;
  int64_t stride = 0, count = 0, lines = 0;

  // Asks for one of `parts` equal parts.
  void prefetch(int64_t part, int64_t parts) const {
    for (int64_t i = count * part / parts; i < count * (part + 1) / parts; ++i)
      for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(start + i * stride + line * 64, 0, 2);
  }
};

// ---- one word, one vector of words ----

inline uint32_t word(const float* x, int64_t, int64_t) {
  return bit_cast<uint32_t>(*x);
}

// x and the element `next` further, or 0 where only one is left.
inline uint32_t word(const Bfloat16* x, int64_t next, int64_t left) {
  return x->bits | (left > 1 ? static_cast<uint32_t>(x[next].bits) << 16 : 0u);
}

// x rounded to bf16, whose bits are the upper half of an fp32's.
GRPO_FAST_INLINE Words rounded(Floats x) {
  const Words bits = bit_cast<Words>(x);
  const Words nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  return x != x ? Words{} + 0x7fc00000u : nearest;
}

GRPO_FAST_INLINE Words rounded_part(Floats x, int part) {
  const Words first = rounded(x);
  return part == 0 ? first : rounded(x - bit_cast<Floats>(first));
}

GRPO_FAST_INLINE Words pairs(const Bfloat16* x, const Bfloat16* next, int) {
  return (bit_cast<Words>(load(x)) >> 16) | bit_cast<Words>(load(next));
}

GRPO_FAST_INLINE Words pairs(const float* x, const float* next, int part) {
  return (rounded_part(load(x), part) >> 16) | rounded_part(load(next), part);
}

inline uint32_t narrowed(float x, int part) {
  return rounded_part(splat(x), part)[0];
}

inline uint32_t pair(const Bfloat16* x, const Bfloat16* next, int) {
  return x->bits | (next ? static_cast<uint32_t>(next->bits) << 16 : 0u);
}

inline uint32_t pair(const float* x, const float* next, int part) {
  return narrowed(*x, part) >> 16 | (next ? narrowed(*next, part) : 0u);
}

// ---- matrices ----

// kLanes x kLanes words, transposed.
GRPO_FAST_INLINE void transpose_square(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
  Words rows[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) std::memcpy(&rows[i], from + i * from_stride, sizeof(Words));
#pragma GCC unroll 4
  for (int step = 1; step < kLanes; step *= 2) {
    Words even, odd;  // lanes of (a, b) that make the first and the second row of a pair whose rows are `step` apart
#pragma GCC unroll 16
    for (int lane = 0; lane < kLanes; ++lane) {
      even[lane] = lane & step ? kLanes + lane - step : lane;
      odd[lane] = lane & step ? kLanes + lane : lane + step;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & step) continue;
      const Words a = rows[i], b = rows[i + step];
      rows[i] = __builtin_shuffle(a, b, even);
      rows[i + step] = __builtin_shuffle(a, b, odd);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) std::memcpy(to + i * to_stride, &rows[i], sizeof(Words));
}

// to[k][r] = word k of row r of x, for `words` words of `rows` rows, zeros up to `width` rows. Of k_left elements: the
// last word may be half.
template <class T>
void pack_transposed(const T* x, int64_t stride, int64_t rows, int64_t k_left, int64_t words, int64_t width,
                     uint32_t* to, int64_t to_stride) {
  const int64_t whole = std::min(words, k_left / kPerWord<T>) / kLanes * kLanes;
  int64_t row = 0;
  for (; row + kLanes <= rows && stride % kPerWord<T> == 0; row += kLanes)
    for (int64_t k = 0; k < whole; k += kLanes)
      transpose_square(reinterpret_cast<const uint32_t*>(x + row * stride) + k, stride / kPerWord<T>,
                       to + k * to_stride + row, to_stride);
  for (int64_t r = 0; r < width; ++r)
    for (int64_t k = r < row ? whole : 0; k < words; ++k)
      to[k * to_stride + r] = r < rows ? word(x + r * stride + k * kPerWord<T>, 1, k_left - k * kPerWord<T>) : 0u;
}

// to[k][c] = the word of column c in the rows of x that make step k; zeros from `columns` to `width`. T is the type
// that is multiplied, S the one that is stored.
template <class T, class S>
void pack_down(const S* x, int64_t stride, int64_t columns, int64_t k_left, int64_t words, int64_t width, int part,
               uint32_t* to) {
  for (int64_t k = 0; k < words; ++k, to += width) {
    const S* row = x + k * kPerWord<T> * stride;
    if constexpr (sizeof(T) == 4) {
      std::memcpy(to, row, columns * sizeof(T));
    } else {
      const S* next = k_left - k * kPerWord<T> > 1 ? row + stride : nullptr;
      int64_t c = 0;
      for (; next && c + kLanes <= columns; c += kLanes) {
        const Words both = pairs(row + c, next + c, part);
        std::memcpy(to + c, &both, sizeof(both));
      }
      for (; c < columns; ++c) to[c] = pair(row + c, next ? next + c : nullptr, part);
    }
    std::fill(to + columns, to + width, 0u);
  }
}

// to[r][k] = word k of row r of x, rows `to_stride` words apart; zeros from `rows` to `height`.
template <class T, class S>
void pack_along(const S* x, int64_t stride, int64_t rows, int64_t k_left, int64_t words, int64_t height, int part,
                uint32_t* to, int64_t to_stride) {
  const int64_t count = std::min(words * kPerWord<T>, k_left);
  for (int64_t r = 0; r < height; ++r, x += stride, to += to_stride) {
    T* row = reinterpret_cast<T*>(to);
    std::memset(to, 0, words * sizeof(uint32_t));
    if (r >= rows) continue;
    if constexpr (std::is_same_v<S, T>) {
      std::memcpy(row, x, count * sizeof(T));
    } else {
      int64_t k = 0;
      for (; k + kLanes <= count; k += kLanes) store(row + k, bit_cast<Floats>(rounded_part(load(x + k), part)));
      for (; k < count; ++k) row[k].bits = narrowed(x[k], part) >> 16;
    }
  }
}

}  // namespace grpo_fast
