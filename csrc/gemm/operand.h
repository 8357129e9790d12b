// Operands of the matrix product: matrices, slices of k, prefetching and scratch memory.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "vec/storage.h"

namespace grpo_fast {

// Elements per 32-bit word. A word is an fp32, or a pair of bf16 with neighbouring k.
template <class T>
constexpr int64_t kPerWord = 4 / sizeof(T);

// Rounds up to a multiple.
inline int64_t up(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

// A matrix whose rows are contiguous.
template <class T>
struct Operand {
  const T* data;
  int64_t stride;
  bool k_down;  // true: k is the row index (transposed); false: the column index
};

// A part of an operand: `words` words of k (of which `depth` elements exist) times `across` rows or
// columns.
template <class T>
struct Slice {
  const T* data = nullptr;
  int64_t stride = 0, across = 0, depth = 0, words = 0;
  bool k_down = false;

  // Prefetches one of `parts` equal parts into L2.
  void prefetch(int64_t part, int64_t parts) const {
    if (data == nullptr) return;
    const int64_t rows = k_down ? depth : across, columns = k_down ? across : depth;
    const int64_t bytes = columns * static_cast<int64_t>(sizeof(T));
    for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row)
      for (int64_t byte = 0; byte < bytes; byte += 64)
        ask_for(reinterpret_cast<const char*>(data + row * stride) + byte);
  }

 private:
  // Inline assembly: GCC treats a function that only calls __builtin_prefetch as free of side
  // effects and removes its calls.
  static void ask_for(const char* x) {
#if defined(__x86_64__)
    asm volatile("prefetcht1 %0" : : "m"(*x));
#else
    __builtin_prefetch(x, 0, 2);
#endif
  }
};

// Thread-local memory that is reused across calls, one allocation per purpose. Fresh pages would
// cost more than the packing.
enum class Purpose { kShared, kPanel, kRows, kSums, kCount };

// Returns thread-local memory for a purpose, 64-byte aligned.
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

}  // namespace grpo_fast
