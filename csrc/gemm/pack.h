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
#include <new>
#include <tuple>
#include <type_traits>
#include <vector>

#include "vec/storage.h"

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

inline int64_t up(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

// Memory that a thread keeps from call to call, one piece for each purpose: fresh pages cost more than the packing.
enum class Purpose { kShared, kPanel, kRows, kSums, kCount };

template <class T>
T* scratch(Purpose purpose, int64_t size) {
  struct Piece {
    std::unique_ptr<void, decltype(&std::free)> memory{nullptr, &std::free};
    size_t bytes = 0;
  };
  thread_local Piece pieces[static_cast<int>(Purpose::kCount)];
  Piece& piece = pieces[static_cast<int>(purpose)];
  const size_t bytes = static_cast<size_t>(up(size * static_cast<int64_t>(sizeof(T)), 64));
  if (piece.bytes < bytes) {
    piece.memory.reset();
    piece.bytes = 0;
    piece.memory.reset(std::aligned_alloc(64, bytes));
    if (!piece.memory) throw std::bad_alloc();
    piece.bytes = bytes;
  }
  return static_cast<T*>(piece.memory.get());
}

// Memory that is read soon: pieces of `lines` cache lines, `stride` bytes apart.
struct Pieces {
  const char* start;
  int64_t stride, count, lines;

  // Asks for one of `parts` equal parts.
  void prefetch(int64_t part, int64_t parts) const {
    for (int64_t i = count * part / parts; i < count * (part + 1) / parts; ++i)
      for (int64_t line = 0; line < lines; ++line) ask_for(start + i * stride + line * 64);
  }

 private:
  // Into L2. GCC takes a function of nothing but __builtin_prefetch for one without effects, and leaves out its calls.
  static void ask_for(const char* x) {
#if defined(__x86_64__)
    asm volatile("prefetcht1 %0" : : "m"(*x));
#else
    __builtin_prefetch(x, 0, 2);
#endif
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

inline uint32_t narrowed(float x, int part) {
  return rounded_part(splat(x), part)[0];
}

// An element of an operand that its rounding would hurt, and what its rounding leaves.
struct Heavy {
  int64_t row, k;
  float rest;
};

constexpr float kHeavyShare = 1 / 16.0f;  // of the sum of squares of a column

inline float rest_of(float x) {
  return x - bit_cast<float>(narrowed(x, 0));
}

// How the rows of an operand enter a product: whole or in parts (see above), each times a number of its own.
struct Entry {
  int part = 0;
  const float* scales = nullptr;  // by row in memory, null: 1
  const float* limits = nullptr;  // by column: the rounding of larger squares is noted in `heavy`
  int64_t first_k = 0;
  std::vector<Heavy>* heavy = nullptr;

  float scale(int64_t row) const { return scales ? scales[row] : 1.0f; }
};

// The words of kLanes columns: low halves from x, high halves from next.
GRPO_FAST_INLINE Words pairs_of(Floats x, Floats next, int part) {
#if defined(__AVX512BF16__) && GRPO_FAST_LANES == 16
  if (part == 0) {
    const Words both = bit_cast<Words>(_mm512_cvtne2ps_pbh(bit_cast<__m512>(next), bit_cast<__m512>(x)));
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return bit_cast<Words>(_mm512_permutexvar_epi16(order, bit_cast<__m512i>(both)));
  }
#endif
  return (rounded_part(x, part) >> 16) | rounded_part(next, part);
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

// One row of words from two rows of numbers, `next` null after the last; columns up to a whole vector are written.
template <class S>
void pack_pair(const S* row, const S* next, int64_t columns, int64_t k, const Entry& entry, uint32_t* to) {
  const float scale = entry.scale(k), next_scale = next ? entry.scale(k + 1) : 0.0f;
  by_vectors(columns, [&](int64_t c, int64_t count) GRPO_FAST_BODY {
    const Floats x = load_up_to(row + c, count) * scale, y = next ? load_up_to(next + c, count) * next_scale : Floats{};
    store_up_to(reinterpret_cast<float*>(to) + c, bit_cast<Floats>(pairs_of(x, y, entry.part)), count);
    if (!entry.limits) return;
    const Floats limits = load_up_to(entry.limits + c, count);
    if (bits_of(max(x * x, y * y) > limits) == 0) return;
    const auto note = [&](Floats d, int64_t at) {
      each_lane(d * d > limits, count, [&](int lane) {
        entry.heavy->push_back({c + lane, entry.first_k + at, rest_of(d[lane])});
      });
    };
    note(x, k), note(y, k + 1);
  });
}

// to[k][c] = the word of column c in the rows of x that make step k; zeros from `columns` to `width`. T is the type
// that is multiplied, S the one that is stored.
template <class T, class S>
void pack_down(const S* x, int64_t stride, int64_t columns, int64_t k_left, int64_t words, int64_t width,
               const Entry& entry, uint32_t* to) {
  for (int64_t k = 0; k < words; ++k, to += width) {
    const S* row = x + k * kPerWord<T> * stride;
    const float scale = entry.scale(k * kPerWord<T>);
    if constexpr (sizeof(T) == 4) {
      if (scale == 1.0f) {
        std::memcpy(to, row, columns * sizeof(T));
      } else {
        float* out = reinterpret_cast<float*>(to);
        int64_t c = 0;
        for (; c + kLanes <= columns; c += kLanes) store(out + c, load(row + c) * scale);
        for (; c < columns; ++c) out[c] = row[c] * scale;
      }
    } else if constexpr (std::is_same_v<S, T>) {
      const S* next = k_left - k * kPerWord<T> > 1 ? row + stride : nullptr;
      int64_t c = 0;
      for (; next && c + kLanes <= columns; c += kLanes) {
        const Words both = (bit_cast<Words>(load(row + c)) >> 16) | bit_cast<Words>(load(next + c));
        std::memcpy(to + c, &both, sizeof(both));
      }
      for (; c < columns; ++c) to[c] = row[c].bits | (next ? static_cast<uint32_t>(next[c].bits) << 16 : 0u);
    } else {
      pack_pair(row, k_left - k * kPerWord<T> > 1 ? row + stride : nullptr, columns, k * kPerWord<T>, entry, to);
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
      for (; part == 0 && k + kLanes <= count; k += kLanes) store(row + k, load(x + k));
      for (; k + kLanes <= count; k += kLanes) store(row + k, bit_cast<Floats>(rounded_part(load(x + k), part)));
      for (; k < count; ++k) row[k].bits = narrowed(load_one(x + k), part) >> 16;
    }
  }
}

// Of (depth, columns) numbers, a scale per row: the limits that Entry wants.
template <class S>
void find_limits(const S* x, int64_t stride, int64_t depth, int64_t columns, const float* scales, float* limits) {
  constexpr int64_t kAhead = 8;  // rows: their pieces are too short for the machine to foresee the next
  std::fill(limits, limits + columns, 0.0f);
  for (int64_t k = 0; k < depth; ++k, x += stride) {
    const float scale = scales ? scales[k] : 1.0f;
    by_vectors(columns, [&](int64_t c, int64_t count) GRPO_FAST_BODY {
      __builtin_prefetch(x + kAhead * stride + c);
      const Floats d = load_up_to(x + c, count) * scale;
      store_up_to(limits + c, fma(d, d, load_up_to(limits + c, count)), count);
    });
  }
  for (int64_t c = 0; c < columns; ++c) limits[c] *= kHeavyShare;
}

}  // namespace grpo_fast
