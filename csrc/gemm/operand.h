// Operands of the matrix product: where they lie, and what of them is read next.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "vec/storage.h"

namespace grpo_fast {

// A word is an fp32, or a pair of bf16 of neighbouring k.
template <class T>
constexpr int64_t kPerWord = 4 / sizeof(T);

inline int64_t up(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

// A matrix as it lies in memory, neighbours in a row.
template <class T>
struct Operand {
  const T* data;
  int64_t stride;
  bool k_down;  // k goes from row to row, else along the rows
};

// What lies under `words` words of k, of which `depth` elements exist, and some rows or columns.
template <class T>
struct Slice {
  const T* data = nullptr;
  int64_t stride = 0, across = 0, depth = 0, words = 0;
  bool k_down = false;

  // Asks for one of `parts` equal parts, into L2.
  void prefetch(int64_t part, int64_t parts) const {
    if (data == nullptr) return;
    const int64_t rows = k_down ? depth : across, columns = k_down ? across : depth;
    const int64_t bytes = columns * static_cast<int64_t>(sizeof(T));
    for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row)
      for (int64_t byte = 0; byte < bytes; byte += 64)
        ask_for(reinterpret_cast<const char*>(data + row * stride) + byte);
  }

 private:
  // GCC takes a function of nothing but __builtin_prefetch for one without effects, and leaves out
  // its calls.
  static void ask_for(const char* x) {
#if defined(__x86_64__)
    asm volatile("prefetcht1 %0" : : "m"(*x));
#else
    __builtin_prefetch(x, 0, 2);
#endif
  }
};

// Memory that a thread keeps from call to call, one piece for each purpose: fresh pages cost more
// than the packing.
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

}  // namespace grpo_fast
