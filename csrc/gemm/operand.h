// Operands of the matrix product: matrix views, slices along k, prefetching and scratch memory.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "vec/storage.h"

namespace grpo_fast {

// Number of elements of type T in a word. A word has 32 bits and contains one fp32 element, or two
// bf16 elements with neighbouring k.
template <class T>
constexpr int64_t kPerWord = 4 / sizeof(T);

// Returns `size`, rounded up to a multiple of `multiple`.
inline int64_t up(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

// View of a matrix with contiguous rows.
template <class T>
struct Operand {
  const T* data;
  int64_t stride;
  bool k_down;  // true: k is the row index (transposed); false: k is the column index
};

// Prefetches a cache line into L2. This is inline assembly, because GCC regards a function that only
// calls __builtin_prefetch as free of side effects, and removes its calls.
inline void prefetch_line(const void* x) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(x)));
#else
  __builtin_prefetch(x, 0, 2);
#endif
}

// The part of an operand that belongs to a range of k. `depth` is the number of elements along k,
// and `words` is the number of words that contain them. The last word may be incomplete. `across`
// is the size of the other dimension: the number of rows, or of columns if k is the row index.
template <class T>
struct Slice {
  const T* data = nullptr;
  int64_t stride = 0, across = 0, depth = 0, words = 0;
  bool k_down = false;

  // Divides the slice into `parts` equal parts, and prefetches one of them into L2.
  void prefetch(int64_t part, int64_t parts) const {
    if (data == nullptr) return;
    const int64_t rows = k_down ? depth : across, columns = k_down ? across : depth;
    const int64_t bytes = columns * static_cast<int64_t>(sizeof(T));
    for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row)
      for (int64_t byte = 0; byte < bytes; byte += 64)
        prefetch_line(reinterpret_cast<const char*>(data + row * stride) + byte);
  }
};

// Purposes of scratch memory. Each thread has one allocation for each purpose and reuses it in
// later calls, because page faults on fresh memory would take longer than the packing.
enum class Purpose { kShared, kPanel, kRows, kSums, kCount };

// Returns thread-local memory for `size` elements, aligned to 64 bytes. The next call with the same
// `Purpose` may reuse or free this memory.
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
