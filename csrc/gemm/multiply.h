// Blocked matrix product on the host. Blocks of a (M, K) * b (K, N) are passed to the caller while
// in cache.
//
// Blocking: threads take blocks of the result. A block loops over k in slices of kSliceWords words,
// and over panels of b that are kPanel columns wide. A panel is packed, then multiplied by all rows
// of the block. Layout: see micro_kernels.h for words and panels, pack.h for the packing. Rounding:
// fp32. One thread sums an element, in an order that depends on K only. Its bits do not depend on
// M, N, the block size or the number of threads. Parallel: over blocks of the result, through an
// atomic counter.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>

#include "gemm/micro_kernels.h"
#include "gemm/pack.h"

namespace grpo_fast {

// Words of k between two additions to the block's sums. A panel of them takes half of the L1 cache.
constexpr int64_t kSliceWords = kLanes == 8 ? 256 : 128;
constexpr int64_t kPanelWords = kSliceWords * kPanel;
constexpr int64_t kInlineFlops = 2 << 20;  // below this, waking threads costs more than it saves
// For so few rows of a, blocks may be shorter, and each block packs its panels itself.
constexpr int64_t kFewRows = 96;
// Up to this size, b is packed once for all blocks.
constexpr int64_t kSharedWords = 4 << 20;

// A block of the result.
struct Block {
  int64_t row, rows, column, columns;
};

// A product. T is the type that is multiplied. S is the storage type of a: T, or a type with more
// digits, which is split (fp32) or rounded (Positive16). In a transposed Positive16 a, heavy
// elements keep their digits (pack.h); b must not be transposed then.
template <class S, class T>
struct Problem {
  static constexpr int kParts = std::is_same_v<S, float> && !std::is_same_v<T, float> ? 2 : 1;
  int64_t m, n, k;
  Operand<S> a;
  Operand<T> b;
  const float* scales = nullptr;  // (K,) factors of a transposed a

  bool keeps_heavy() const { return std::is_same_v<S, Positive16> && a.k_down; }
  int64_t words() const { return (k + kPerWord<T> - 1) / kPerWord<T>; }
  int64_t slices() const { return std::max<int64_t>(1, (words() + kSliceWords - 1) / kSliceWords); }
  int64_t panels() const { return (n + kPanel - 1) / kPanel; }
  int64_t first_k(int64_t slice) const { return slice * kSliceWords * kPerWord<T>; }

  // Panel `index` of b in a slice of k.
  Slice<T> panel(int64_t slice, int64_t index) const {
    const int64_t first = index * kPanel;
    return slice_of(b, slice, first, std::min(kPanel, n - first));
  }
  // The rows of a block in a slice of k.
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

// Divides `size` into equal parts of at most `most`, rounded up to a multiple.
inline int64_t even_part(int64_t size, int64_t most, int64_t multiple) {
  const int64_t parts = (size + most - 1) / most;
  return up((size + parts - 1) / parts, multiple);
}

// The block size. The sums of a block must stay in L2. A packed operand is reused more if the
// opposite side of the block is long, and every thread should get two blocks.
struct Blocks {
  int64_t rows, columns, across, count;

  template <class P>
  Blocks(const P& p, int64_t group, int64_t threads, int64_t fixed_columns, bool is_packed) {
    const int64_t least_rows = p.m <= kFewRows && !fixed_columns ? 32 : kFewRows;
    const bool packs_cheaply = is_packed || p.b.k_down;  // else b's side is kept short
    // With few columns the sums are small, which leaves room for more packed rows.
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

// Packs one panel of b.
template <class T>
void pack_panel(const Slice<T>& x, uint32_t* to) {
  x.k_down ? pack_down<T>(x, kPanel, {}, to) : pack_transposed(x, kPanel, to, kPanel);
}

// The state with which a thread computes one block after another.
template <class Kernel, class S, class T>
struct Worker {
  static constexpr int kParts = Problem<S, T>::kParts;
  const Problem<S, T>& p;
  const Blocks& blocks;
  const uint32_t* shared;  // all panels of b if packed once, or null
  int64_t height = up(blocks.rows, std::max<int64_t>(kLanes, Kernel::kGroup));
  int64_t part_words = height * kSliceWords;
  uint32_t* panel = scratch<uint32_t>(Purpose::kPanel, kPanelWords);
  uint32_t* packed_rows = scratch<uint32_t>(Purpose::kRows, (kParts + 1) * part_words);
  float* sums = scratch<float>(Purpose::kSums, height * blocks.columns);
  std::vector<Heavy> heavy = {};
  std::vector<float> limits = {};  // by row of the result: squares above it are heavy

  // Computes the sums of a block. The first operands of the block `after` are prefetched during the
  // last slice.
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
    // Add the rounding errors of heavy elements: one row of b each, in fp32.
    for (const Heavy& at : heavy)
      add_scaled(p.b.data + at.k * p.b.stride + block.column, at.rest, block.columns,
                 sums + at.row * blocks.columns);
    heavy.clear();
  }

  // Adds one slice of k to the sums. `then` and `slice_then` come next and are prefetched.
  void sum_slice(const Block& block, int64_t slice, const Block& then, int64_t slice_then,
                 const Block& after) {
    PanelProduct<T> product{};
    product.words = p.panel(slice, 0).words, product.c_stride = blocks.columns;
    const T* rows[kParts];
    for (int part = 0; part < kParts; ++part)
      rows[part] = rows_of(block, slice, part, &product);
    const int64_t first = block.column / kPanel, count = (block.columns + kPanel - 1) / kPanel;
    // The limits of the next block need all slices of its rows, so those are prefetched.
    const Slice<S> rows_then = p.keeps_heavy() ? p.rows(slice, after) : p.rows(slice_then, then);
    for (int64_t i = 0; i < count; ++i) {
      if (!shared) pack_panel(p.panel(slice, first + i), panel);
      product.panel = shared ? shared + (slice * p.panels() + first + i) * kPanelWords : panel;
      const Slice<T> panel_then = shared          ? Slice<T>{}
                                  : i + 1 < count ? p.panel(slice, first + i + 1)
                                                  : p.panel(slice_then, then.column / kPanel);
      product.c = sums + i * kPanel;
      product.is_narrow = block.columns - i * kPanel <= kPanel / 2;
      for (int part = 0; part < kParts; ++part) {
        // The first part of the first slice overwrites the sums, so they need not be cleared.
        product.a = rows[part], product.add = slice + part > 0;
        Kernel::multiply(product, block.rows, [&](int64_t done, int64_t all) {
          if (part) return;
          panel_then.prefetch(done, all);
          rows_then.prefetch(i * all + done, count * all);
        });
      }
    }
  }

  // Returns one slice of a, in place if its layout allows it, otherwise packed.
  const T* rows_of(const Block& block, int64_t slice, int part, PanelProduct<T>* product) {
    const Slice<S> x = p.rows(slice, block);
    uint32_t* to = packed_rows + (part + 1) * part_words;
    product->stride = kSliceWords * kPerWord<T>, product->step = kPerWord<T>;
    if (!x.k_down) {
      if constexpr (std::is_same_v<S, T>)
        // In place only if no row or word is incomplete: reading beyond the end of a row could meet
        // NaN.
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
      // AMX needs rows along k: pack words first, then transpose them.
      pack_down<T>(x, width, entry, packed_rows);
      const auto* words = reinterpret_cast<const float*>(packed_rows);
      const Slice<float> down{words, width, x.words, block.rows, block.rows};
      pack_transposed(down, x.words, to, kSliceWords);
    }
    return reinterpret_cast<const T*>(to);
  }
};

// Runs body(counter) on several threads. They take tasks from the counter, so that fast threads
// take more.
template <class Body>
void in_parallel(int64_t threads, int64_t count, const Body& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t, int64_t) { body(next); };
  torch::stable::parallel_for(0, std::min(threads, count), 1, work);
}

// Packs all panels of b, slice by slice, kPanelWords each.
template <class S, class T>
void pack_panels(const Problem<S, T>& p, int64_t threads, uint32_t* to) {
  const int64_t panels = p.slices() * p.panels();
  in_parallel(threads, panels, [&](std::atomic<int64_t>& next) {
    for (int64_t i; (i = next.fetch_add(1)) < panels;)
      pack_panel(p.panel(i / p.panels(), i % p.panels()), to + i * kPanelWords);
  });
}

// Computes the product. finish(block, sums, stride) is called once for every block, by the thread
// that summed it. fixed_columns: blocks have this many columns (a multiple of kPanel), for any size
// and number of threads. packed: panels of b from pack_panels; b's data is then not read.
template <class Kernel, class S, class T, class Finish>
void multiply(const Problem<S, T>& p, const Finish& finish, int64_t fixed_columns = 0,
              const uint32_t* packed = nullptr) {
  const double flops = 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n * p.k);
  const int64_t threads = flops < kInlineFlops ? 1 : torch::stable::get_num_threads();
  const int64_t words = p.slices() * p.panels() * kPanelWords;
  const bool packs_once = !packed && p.m > kFewRows && words <= kSharedWords;
  const Blocks blocks(p, Kernel::kGroup, threads, fixed_columns, packed || packs_once);
  if (packs_once) {
    // This thread also becomes a worker below, which uses scratch memory of other purposes.
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
