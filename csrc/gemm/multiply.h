// Blocked matrix product on the host: blocks of a (M, K) * b (K, N), handed to the caller while they are in cache.
//
// Work is handed out in blocks of the result. A block walks through k in slices of kSliceWords words: a panel of b is
// packed, kPanel columns wide; under it go the rows of a. An element of the result is summed by one thread, in an order
// that depends on K only: its bits do not depend on M, N, the blocks or the number of threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <type_traits>

#include "gemm/micro_kernels.h"

namespace grpo_fast {

constexpr int64_t kSliceWords = 128;  // of k between two additions to the block's sums
constexpr int64_t kPanelWords = kSliceWords * kPanel;
constexpr int64_t kInlineFlops = 2 << 20;  // below this, waking other threads costs more than they give
constexpr int64_t kSharedWords = 4 << 20;  // of b that are packed once for all blocks

// T: what is multiplied; S: what a is stored in, T or a type with more digits that is rounded to T while it is packed.
template <class S, class T>
struct Problem {
  int64_t m, n, k;
  Operand<S> a;
  Operand<T> b;
  int parts = 1;                      // of an a with more digits than T: 2 keep 16 of them
  const float* scales = nullptr;      // (K,): rows of a transposed a are multiplied by these first
  bool keeps_heavy = false;           // of a transposed a, b (K, N): elements that dominate a sum keep both, see pack.h

  int64_t words() const { return (k + kPerWord<T> - 1) / kPerWord<T>; }
  int64_t slices() const { return std::max<int64_t>(1, (words() + kSliceWords - 1) / kSliceWords); }
  int64_t panels() const { return (n + kPanel - 1) / kPanel; }
  int64_t first_k(int64_t slice) const { return slice * kSliceWords * kPerWord<T>; }
  int64_t slice_words(int64_t slice) const { return std::min(kSliceWords, words() - slice * kSliceWords); }

  // What lies under a slice of k and `across` rows or columns from `first` on.
  template <class X>
  Pieces pieces(const Operand<X>& x, bool k_down, int64_t slice, int64_t first, int64_t across) const {
    const int64_t depth = std::min(slice_words(slice) * kPerWord<T>, k - first_k(slice)), size = sizeof(X);
    const X* start = x.data + (k_down ? first_k(slice) * x.stride + first : first * x.stride + first_k(slice));
    return {reinterpret_cast<const char*>(start), x.stride * size, k_down ? depth : across,
            ((k_down ? across : depth) * size + 63) / 64};
  }
  Pieces panel_pieces(int64_t slice, int64_t panel) const {
    return pieces(b, !b.transposed, slice, panel * kPanel, std::min(kPanel, n - panel * kPanel));
  }
  Pieces row_pieces(int64_t slice, int64_t first, int64_t rows) const {
    return pieces(a, a.transposed, slice, first, rows);
  }
};

// `size` in equal parts of at most `most`, in multiples.
inline int64_t evened(int64_t size, int64_t most, int64_t multiple) {
  const int64_t parts = (size + most - 1) / most;
  return up((size + parts - 1) / parts, multiple);
}

struct Block {
  int64_t row, rows, column, columns;
};

// Rows of a and columns of b in a block of the result, whose sums stay in L2. A packed operand wants the other side of
// the block to be long; every thread wants two blocks.
struct Blocks {
  int64_t rows, columns, across, count;

  template <class P>
  Blocks(const P& p, int64_t group, int64_t threads, int64_t fixed_columns) {
    int64_t most_rows = p.a.transposed ? 96 : p.b.transposed ? 512 : 256;
    int64_t most_columns = p.b.transposed ? 128 : p.a.transposed ? 1024 : 512;
    if (fixed_columns) most_rows = 256, most_columns = fixed_columns;
    for (;;) {
      rows = evened(p.m, most_rows, std::max(group, kRows));
      columns = fixed_columns ? fixed_columns : evened(p.n, most_columns, kPanel);
      across = (p.n + columns - 1) / columns;
      count = (p.m + rows - 1) / rows * across;
      const bool narrow = fixed_columns || most_columns <= kPanel, low = most_rows <= 96;
      if (count >= 2 * threads || (narrow && low)) return;
      (!narrow && (low || most_columns >= most_rows) ? most_columns : most_rows) /= 2;
    }
  }

  Block at(int64_t i, int64_t m, int64_t n) const {
    const int64_t row = i / across * rows, column = i % across * columns;
    return {row, std::min(rows, m - row), column, std::min(columns, n - column)};
  }
};

template <class S, class T>
void pack_panel(const Problem<S, T>& p, int64_t slice, int64_t panel, uint32_t* to) {
  const int64_t k = p.first_k(slice), first = panel * kPanel, columns = std::min(kPanel, p.n - first);
  if (p.b.transposed)
    pack_transposed(p.b.data + first * p.b.stride + k, p.b.stride, columns, p.k - k, p.slice_words(slice), kPanel, to,
                    kPanel);
  else
    pack_down<T>(p.b.data + k * p.b.stride + first, p.b.stride, columns, p.k - k, p.slice_words(slice), kPanel, {}, to);
}

// Rows of one slice of a, `stride` elements apart.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;
};

// As they lie in memory, or packed into to[0]; to[1] is for the way there.
template <class S, class T>
Rows<T> rows_of(const Problem<S, T>& p, const Block& block, int64_t group, int64_t slice, const Entry& entry,
                uint32_t* const (&to)[2]) {
  const int64_t k = p.first_k(slice), words = p.slice_words(slice), left = p.k - k;
  if (!p.a.transposed) {
    const S* x = p.a.data + block.row * p.a.stride + k;
    if constexpr (std::is_same_v<S, T>)
      if (block.rows % group == 0 && left >= words * kPerWord<T>) return {x, p.a.stride};
    pack_along<T>(x, p.a.stride, block.rows, left, words, up(block.rows, group), entry.part, to[0], kSliceWords);
  } else {
    // k runs down the columns of memory: words of neighbouring k first, then the transposition.
    const int64_t width = up(block.rows, kLanes);
    pack_down<T>(p.a.data + k * p.a.stride + block.row, p.a.stride, block.rows, left, words, width, entry, to[1]);
    pack_transposed(reinterpret_cast<const float*>(to[1]), width, words, block.rows, block.rows, words,
                    to[0], kSliceWords);
  }
  return {reinterpret_cast<const T*>(to[0]), kSliceWords * kPerWord<T>};
}

template <class S, class T>
void add_heavy(const Problem<S, T>& p, const Block& block, std::vector<Heavy>& heavy, float* sums, int64_t stride) {
  for (const Heavy& at : heavy)
    add_scaled(p.b.data + at.k * p.b.stride + block.column, at.rest, block.columns, sums + at.row * stride);
  heavy.clear();
}

// What a thread needs to sum blocks, one after another.
template <class Kernel, class S, class T>
struct Worker {
  const Problem<S, T>& p;
  const Blocks& blocks;
  const uint32_t* shared;  // all panels of b packed, or null
  int64_t height = up(blocks.rows, std::max<int64_t>(kLanes, Kernel::kGroup));
  uint32_t* panel = scratch<uint32_t>(Purpose::kPanel, kPanelWords);
  uint32_t* packed_rows = scratch<uint32_t>(Purpose::kRows, (p.parts + 1) * height * kSliceWords);
  float* sums = scratch<float>(Purpose::kSums, height * blocks.columns);
  std::vector<Heavy> heavy = {};
  std::vector<float> limits = {};          // of each row of the result, where a is transposed

  // after: the block that comes next, whose first operands are asked for during the last slice of this one.
  void sum(const Block& block, const Block& after) {
    if constexpr (!std::is_same_v<S, T>)
      if (p.keeps_heavy) {
        limits.resize(block.rows);
        find_limits(p.a.data + block.row, p.a.stride, p.k, block.rows, p.scales, limits.data());
      }
    for (int64_t slice = 0; slice < p.slices(); ++slice) {
      const bool is_last = slice + 1 == p.slices();
      sum_slice(block, slice, is_last ? after : block, is_last ? 0 : slice + 1, after);
    }
    add_heavy(p, block, heavy, sums, blocks.columns);
  }

  void sum_slice(const Block& block, int64_t slice, const Block& then, int64_t slice_then, const Block& after) {
    Rows<T> rows[2];
    for (int part = 0; part < p.parts; ++part) {
      const float* scales = p.scales ? p.scales + p.first_k(slice) : nullptr;
      const Entry entry{part, scales, limits.empty() ? nullptr : limits.data(), p.first_k(slice), &heavy};
      rows[part] = rows_of(p, block, Kernel::kGroup, slice, entry,
                           {packed_rows + (part + 1) * height * kSliceWords, packed_rows});
    }
    const int64_t first = block.column / kPanel, count = (block.columns + kPanel - 1) / kPanel;
    Pieces rows_then = p.row_pieces(slice_then, then.row, then.rows);
    if (p.keeps_heavy) rows_then = p.row_pieces(slice, after.row, after.rows);
    for (int64_t i = 0; i < count; ++i) {
      if (!shared) pack_panel(p, slice, first + i, panel);
      const uint32_t* packed = shared ? shared + (slice * p.panels() + first + i) * kPanelWords : panel;
      const Pieces panel_then = shared          ? Pieces{}
                                : i + 1 < count ? p.panel_pieces(slice, first + i + 1)
                                                : p.panel_pieces(slice_then, then.column / kPanel);
      for (int part = 0; part < p.parts; ++part) {
        const PanelProduct<T> product{rows[part].data,      rows[part].stride, packed,          p.slice_words(slice),
                                      sums + i * kPanel, blocks.columns,    slice + part > 0};
        Kernel::multiply(product, block.rows, [&](int64_t done, int64_t all) {
          if (part) return;
          panel_then.prefetch(done, all);
          rows_then.prefetch(i * all + done, count * all);
        });
      }
    }
  }
};

// finish(block, sums, stride) is called once for every block, by the thread that summed it. fixed_columns: blocks have
// this many columns (a multiple of kPanel) whatever the sizes and the threads.
template <class Kernel, class S, class T, class Finish>
void multiply(const Problem<S, T>& p, const Finish& finish, int64_t fixed_columns = 0) {
  const double flops = 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
  const int64_t threads = flops < kInlineFlops ? 1 : torch::stable::get_num_threads();
  const auto in_parallel = [&](int64_t count, const auto& body) {
    std::atomic<int64_t> next{0};
    torch::stable::parallel_for(0, std::min(threads, count), 1, [&](int64_t, int64_t) { body(next); });
  };
  const Blocks blocks(p, Kernel::kGroup, threads, fixed_columns);
  const int64_t panels = p.slices() * p.panels();
  uint32_t* shared = nullptr;
  if (blocks.count > blocks.across && panels * kPanelWords <= kSharedWords) {
    shared = scratch<uint32_t>(Purpose::kShared, panels * kPanelWords);
    in_parallel(panels, [&](std::atomic<int64_t>& next) {
      for (int64_t i; (i = next.fetch_add(1)) < panels;)
        pack_panel(p, i / p.panels(), i % p.panels(), shared + i * kPanelWords);
    });
  }
  in_parallel(blocks.count, [&](std::atomic<int64_t>& next) {
    Worker<Kernel, S, T> worker{p, blocks, shared};
    for (int64_t i = next.fetch_add(1), following; i < blocks.count; i = following) {
      following = next.fetch_add(1);
      const Block block = blocks.at(i, p.m, p.n);
      worker.sum(block, following < blocks.count ? blocks.at(following, p.m, p.n) : block);
      finish(block, worker.sums, blocks.columns);
    }
    Kernel::release();
  });
}

// bias (N,) to every row of a block.
inline void add_bias(const float* bias, const Block& block, float* sums, int64_t stride) {
  for (int64_t row = 0; row < block.rows; ++row)
    add_scaled(bias + block.column, 1.0f, block.columns, sums + row * stride);
}

template <class Out>
void store_block(const float* sums, int64_t stride, Out* out, int64_t out_stride, int64_t rows, int64_t columns,
                 bool add) {
  for (int64_t row = 0; row < rows; ++row, sums += stride, out += out_stride) {
    int64_t column = 0;
    for (; column + kLanes <= columns; column += kLanes)
      store(out + column, add ? load(out + column) + load(sums + column) : load(sums + column));
    for (; column < columns; ++column)
      store_one(out + column, add ? load_one(out + column) + sums[column] : sums[column]);
  }
}

}  // namespace grpo_fast
