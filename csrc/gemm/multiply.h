// Blocked matrix product a (M, K) * b (K, N) on the CPU. Each block of the result is passed to the
// caller while it is in cache.
//
// Blocking: a thread computes one block of the result at a time. It loops over slices of k, which
// have kSliceWords words, and over the panels of b, which have kPanel columns. It packs each panel,
// and then multiplies all rows of the block by this panel.
//
// Layout: micro_kernels.h documents words and panels, and pack.h documents the packing.
//
// Rounding: sums are fp32. One thread computes an element, and the order of its additions depends
// on K only. The bits of an element therefore do not depend on M, N, the block size or the number
// of threads.
//
// Parallelism: threads fetch the next block of the result from an atomic counter.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>

#include "gemm/micro_kernels.h"
#include "gemm/pack.h"

namespace grpo_fast {

// Height of a slice: the number of words along k that are summed in registers before the sum is
// added to the block. A panel of this height fills half of the L1 cache.
constexpr int64_t kSliceWords = kLanes == 8 ? 256 : 128;
constexpr int64_t kPanelWords = kSliceWords * kPanel;
constexpr int64_t kInlineFlops = 2 << 20;  // below this, waking threads costs more than it saves
// Maximum number of rows of `a` in a small product. Its blocks have fewer rows, so that all threads
// get work, and each block packs its panels of `b` itself.
constexpr int64_t kFewRows = 96;
// If `b` has at most this number of words, it is packed once for all blocks. The panels of a larger
// `b` are packed by each block.
constexpr int64_t kSharedWords = 4 << 20;

// Position and size of a block of the result.
struct Block {
  int64_t row, rows, column, columns;
};

// Description of the product a * b. The micro-kernel multiplies elements of type T, and `a` is
// stored as type S. S may be more precise than T: fp32 elements are then split into two bf16 parts,
// and Positive16 elements are rounded to bf16. If `a` is a transposed Positive16 matrix, the
// rounding errors of its heavy elements (pack.h) are added separately. This requires that `b` is
// not transposed.
template <class S, class T>
struct Problem {
  static constexpr int kParts = std::is_same_v<S, float> && !std::is_same_v<T, float> ? 2 : 1;
  int64_t m, n, k;
  Operand<S> a;
  Operand<T> b;
  const float* scales = nullptr;  // (K,), factors of the rows of a transposed a

  bool keeps_heavy() const { return std::is_same_v<S, Positive16> && a.k_down; }
  int64_t words() const { return (k + kPerWord<T> - 1) / kPerWord<T>; }
  int64_t slices() const { return std::max<int64_t>(1, (words() + kSliceWords - 1) / kSliceWords); }
  int64_t panels() const { return (n + kPanel - 1) / kPanel; }
  int64_t first_k(int64_t slice) const { return slice * kSliceWords * kPerWord<T>; }

  // Returns the part of panel `index` of b that belongs to a slice of k.
  Slice<T> panel(int64_t slice, int64_t index) const {
    const int64_t first = index * kPanel;
    return slice_of(b, slice, first, std::min(kPanel, n - first));
  }
  // Returns the part of `a` with the rows of one block and the columns of one slice of k.
  Slice<S> rows(int64_t slice, const Block& block) const {
    return slice_of(a, slice, block.row, block.rows);
  }

 private:
  template <class X>
  Slice<X> slice_of(const Operand<X>& x, int64_t slice, int64_t first, int64_t across) const {
    const int64_t from = first_k(slice);
    const int64_t count = std::min(kSliceWords, words() - slice * kSliceWords);
    const X* data = x.data + (x.k_down ? from * x.stride + first : first * x.stride + from);
    return {data, x.stride, across, std::min(count * kPerWord<T>, k - from), count, x.k_down};
  }
};

// Divides `size` elements into as few equal parts of at most `most` elements as possible. Returns
// the length of a part, rounded up to a multiple of `multiple`.
inline int64_t even_part(int64_t size, int64_t most, int64_t multiple) {
  const int64_t parts = (size + most - 1) / most;
  return up((size + parts - 1) / parts, multiple);
}

// Size and number of the blocks. The sums of a block must stay in L2. Blocks with many rows reuse a
// packed panel of `b` more often, and blocks with many columns reuse the packed rows of `a` more
// often. Every thread should get at least two blocks.
struct Blocks {
  int64_t rows, columns, across, count;

  template <class P>
  Blocks(const P& p, int64_t group, int64_t threads, int64_t fixed_columns, bool is_packed) {
    const int64_t least_rows = p.m <= kFewRows && !fixed_columns ? 32 : kFewRows;
    const bool packs_cheaply = is_packed || p.b.k_down;  // otherwise blocks get few columns
    // If b has few columns, the sums of a block take little space in L2, so allow more packed rows.
    const int64_t packed_rows = p.n > 256 ? 96 : (32 << 10) / kSliceWords;
    int64_t most_rows = p.a.k_down ? packed_rows : packs_cheaply ? 256 : 512;
    int64_t most_columns = !packs_cheaply ? 128 : p.a.k_down ? 1024 : 512;
    if (fixed_columns) most_rows = 256, most_columns = fixed_columns;
    // Halve the longer side until there are enough blocks for all threads.
    for (;;) {
      rows = even_part(p.m, most_rows, std::max(group, kRows));
      columns = fixed_columns ? fixed_columns : even_part(p.n, most_columns, kPanel);
      across = (p.n + columns - 1) / columns;
      count = (p.m + rows - 1) / rows * across;
      const bool narrow = fixed_columns || most_columns <= kPanel, low = most_rows <= least_rows;
      if (count >= 2 * threads || (narrow && low)) return;
      (!narrow && (low || most_columns >= most_rows) ? most_columns : most_rows) /= 2;
    }
  }

  Block at(int64_t i, int64_t m, int64_t n) const {
    const int64_t row = i / across * rows, column = i % across * columns;
    return {row, std::min(rows, m - row), column, std::min(columns, n - column)};
  }
};

// Packs one panel of b into words.
template <class T>
void pack_panel(const Slice<T>& x, uint32_t* to) {
  x.k_down ? pack_down<T>(x, kPanel, {}, to) : pack_transposed(x, kPanel, to, kPanel);
}

// The work of one thread and its scratch memory. The thread computes blocks of the product one
// after another.
template <class Kernel, class S, class T>
struct Worker {
  static constexpr int kParts = Problem<S, T>::kParts;
  const Problem<S, T>& p;
  const Blocks& blocks;
  const uint32_t* shared;  // all packed panels of b, or null if each block packs them
  int64_t height = up(blocks.rows, std::max<int64_t>(kLanes, Kernel::kGroup));
  int64_t part_words = height * kSliceWords;
  uint32_t* panel = scratch<uint32_t>(Purpose::kPanel, kPanelWords);
  uint32_t* packed_rows = scratch<uint32_t>(Purpose::kRows, (kParts + 1) * part_words);
  float* sums = scratch<float>(Purpose::kSums, height * blocks.columns);
  std::vector<Heavy> heavy = {};
  std::vector<float> limits = {};  // per result row; an element with a larger square is heavy

  // Computes the sums of `block` over all slices of k. In the last slice, it prefetches the first
  // operands of `after`, the block that this thread computes next.
  void sum(const Block& block, const Block& after) {
    if (p.keeps_heavy()) {
      limits.resize(block.rows);
      Slice<S> all = p.rows(0, block);
      all.depth = p.k;
      find_limits(all, p.scales, limits.data());
    }
    for (int64_t slice = 0; slice < p.slices(); ++slice) {
      const bool is_last = slice + 1 == p.slices();
      sum_slice(block, slice, is_last ? after : block, is_last ? 0 : slice + 1, after);
    }
    // Correct the sums for the rounding of the heavy elements of `a`: add each rounding error times
    // its row of b, in fp32.
    for (const Heavy& at : heavy)
      add_scaled(p.b.data + at.k * p.b.stride + block.column, at.rest, block.columns,
                 sums + at.row * blocks.columns);
    heavy.clear();
  }

  // Adds the products of one slice of k to the sums of `block`, and prefetches the operands of the
  // next step. The next step computes slice `slice_then` of block `then`. `after` is the block that
  // this thread computes after `block`.
  void sum_slice(const Block& block, int64_t slice, const Block& then, int64_t slice_then,
                 const Block& after) {
    PanelProduct<T> product{};
    product.words = p.panel(slice, 0).words, product.c_stride = blocks.columns;
    product.rows = block.rows;
    const T* rows[kParts];
    for (int part = 0; part < kParts; ++part)
      rows[part] = rows_of(block, slice, part, &product);
    const int64_t first = block.column / kPanel, count = (block.columns + kPanel - 1) / kPanel;
    // Prefetch the rows that are read next. They usually belong to the next slice. But if heavy
    // elements are recorded, find_limits first reads all slices of the next block, so prefetch one
    // of those slices in each step.
    const Slice<S> rows_then = p.keeps_heavy() ? p.rows(slice, after) : p.rows(slice_then, then);
    for (int64_t i = 0; i < count; ++i) {
      if (!shared) pack_panel(p.panel(slice, first + i), panel);
      product.panel = shared ? shared + (slice * p.panels() + first + i) * kPanelWords : panel;
      const bool is_last = i + 1 == count;
      const int64_t next_slice = is_last ? slice_then : slice;
      const int64_t next = is_last ? then.column / kPanel : first + i + 1;
      product.ahead = shared ? shared + (next_slice * p.panels() + next) * kPanelWords : nullptr;
      const Slice<T> panel_then = shared ? Slice<T>{} : p.panel(next_slice, next);
      product.c = sums + i * kPanel;
      product.is_narrow = block.columns - i * kPanel <= kPanel / 2;
      for (int part = 0; part < kParts; ++part) {
        // The first part of the first slice overwrites the sums, because they are uninitialised.
        // All later parts are added to them.
        product.a = rows[part], product.add = slice + part > 0;
        Kernel::multiply(product, block.rows, [&](int64_t done, int64_t all) {
          if (part) return;
          panel_then.prefetch(done, all);
          rows_then.prefetch(i * all + done, count * all);
        });
      }
    }
  }

  // Returns the rows of a block in one slice of k, in a layout that the micro-kernel can read, and
  // sets the strides of `product`. The rows are packed, unless they can be read in place.
  const T* rows_of(const Block& block, int64_t slice, int part, PanelProduct<T>* product) {
    const Slice<S> x = p.rows(slice, block);
    uint32_t* to = packed_rows + (part + 1) * part_words;
    product->stride = kSliceWords * kPerWord<T>, product->step = kPerWord<T>;
    if (!x.k_down) {
      if constexpr (std::is_same_v<S, T>)
        // Read in place only if the rows fill whole groups, and k fills whole words. Otherwise, a
        // read past the end could return NaN.
        if (block.rows % Kernel::kGroup == 0 && x.depth == x.words * kPerWord<T>) {
          product->stride = x.stride;
          return x.data;
        }
      pack_along<T>(x, up(block.rows, Kernel::kGroup), part, to, kSliceWords);
      return reinterpret_cast<const T*>(to);
    }
    const int64_t from = p.first_k(slice), width = up(block.rows, kLanes);
    const float* scales = p.scales ? p.scales + from : nullptr;
    const Entry entry{part, scales, limits.empty() ? nullptr : limits.data(), from, &heavy};
    if constexpr (Kernel::kTakesDown) {
      pack_down<T>(x, width, entry, to);
      product->stride = kPerWord<T>, product->step = width * kPerWord<T>;
    } else {
      // Pack the words and then transpose them, because AMX needs rows in which k is contiguous.
      pack_down<T>(x, width, entry, packed_rows);
      const auto* words = reinterpret_cast<const float*>(packed_rows);
      const Slice<float> down{words, width, x.words, block.rows, block.rows};
      pack_transposed(down, x.words, to, kSliceWords);
    }
    return reinterpret_cast<const T*>(to);
  }
};

// Runs body(counter) on several threads. Each thread fetches the number of its next task from the
// counter, so that faster threads do more tasks.
template <class Body>
void in_parallel(int64_t threads, int64_t count, const Body& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t, int64_t) { body(next); };
  torch::stable::parallel_for(0, std::min(threads, count), 1, work);
}

// Packs all panels of b, one slice of k at a time. A packed panel has kPanelWords words.
template <class S, class T>
void pack_panels(const Problem<S, T>& p, int64_t threads, uint32_t* to) {
  const int64_t panels = p.slices() * p.panels();
  in_parallel(threads, panels, [&](std::atomic<int64_t>& next) {
    for (int64_t i; (i = next.fetch_add(1)) < panels;)
      pack_panel(p.panel(i / p.panels(), i % p.panels()), to + i * kPanelWords);
  });
}

// Computes the product. The thread that computed a block then calls finish(block, sums, stride).
//
// fixed_columns: number of columns of every block, a multiple of kPanel. It then does not depend on
// the size of the product or the number of threads. If it is 0, the struct Blocks chooses the
// number.
//
// packed: panels of b from pack_panels, or null. If panels are given, the data of b is not read.
template <class Kernel, class S, class T, class Finish>
void multiply(const Problem<S, T>& p, const Finish& finish, int64_t fixed_columns = 0,
              const uint32_t* packed = nullptr) {
  const double flops = 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n * p.k);
  const int64_t threads = flops < kInlineFlops ? 1 : torch::stable::get_num_threads();
  const int64_t words = p.slices() * p.panels() * kPanelWords;
  const bool packs_once = !packed && p.m > kFewRows && words <= kSharedWords;
  const Blocks blocks(p, Kernel::kGroup, threads, fixed_columns, packed || packs_once);
  if (packs_once) {
    // Keep the shared panels in a separate buffer (kShared). This thread also works as a worker
    // below, and a worker's buffers must not overwrite the panels.
    uint32_t* shared = scratch<uint32_t>(Purpose::kShared, words);
    pack_panels(p, threads, shared);
    packed = shared;
  }
  in_parallel(threads, blocks.count, [&](std::atomic<int64_t>& next) {
    Worker<Kernel, S, T> worker{p, blocks, packed};
    for (int64_t i = next.fetch_add(1), following; i < blocks.count; i = following) {
      following = next.fetch_add(1);
      const Block block = blocks.at(i, p.m, p.n);
      worker.sum(block, following < blocks.count ? blocks.at(following, p.m, p.n) : block);
      finish(block, worker.sums, blocks.columns);
    }
    Kernel::release();
  });
}

}  // namespace grpo_fast
