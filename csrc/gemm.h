// Blocked matrix product on the host: out block = a (M, K) * b (K, N), handed to the caller while its sums are in cache.
//
// fp32 by a micro-kernel of our own: torch's CPU build multiplies through MKL, which reaches half of an AMD core. bf16
// with fp32 sums by the same kernel on AVX512_BF16, or by the tile product inside torch, at::native::cpublas::brgemm
// (AMX), looked up in the loaded libtorch_cpu: it is not part of the stable ABI, so it may be absent.
//
// Work is handed out in blocks of the result. A block walks through k in slices of kSliceWords words: a panel of b is
// packed, kPanel columns wide; under it go the rows of a. An element of the result is summed by one thread, in an order
// that depends on K only: its bits do not depend on M, N, the blocks or the number of threads.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <type_traits>

#include "pack.h"

namespace grpo_fast {

constexpr int64_t kRows = 6;                       // of a in the micro-kernel
constexpr int64_t kVectors = kLanes == 8 ? 2 : 4;  // of b: with kRows, 12 sums in 16 ymm, 24 in 32 zmm registers
constexpr int64_t kPanel = kVectors * kLanes;      // columns of a packed panel of b
constexpr int64_t kSliceWords = 128;               // of k between two additions to the block's sums
constexpr int64_t kInlineFlops = 8 << 20;          // below this, waking other threads costs more than they give
constexpr int64_t kSharedWords = 4 << 20;          // of b that are packed once for all blocks

// ---- micro-kernels: c (rows, kPanel) = or += a (rows, words) * panel (words, kPanel) ----

#if defined(__AVX512BF16__) && GRPO_FAST_LANES == 16
constexpr bool kHasDot16 = true;
GRPO_FAST_INLINE Floats dot(Bfloat16, Words a, Words b, Floats sum) {
  return bit_cast<Floats>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(a), bit_cast<__m512bh>(b)));
}
#else
constexpr bool kHasDot16 = false;
GRPO_FAST_INLINE Floats dot(Bfloat16, Words a, Words b, Floats sum) {
  sum = fma(bit_cast<Floats>(a << 16), bit_cast<Floats>(b << 16), sum);
  return fma(bit_cast<Floats>(a & 0xffff0000u), bit_cast<Floats>(b & 0xffff0000u), sum);
}
#endif
GRPO_FAST_INLINE Floats dot(float, Words a, Words b, Floats sum) {
  return fma(bit_cast<Floats>(a), bit_cast<Floats>(b), sum);
}

template <class T>
struct PanelProduct {
  const T* a;
  int64_t stride;  // elements between two rows of a
  const uint32_t* panel;
  int64_t words;
  float* c;
  int64_t c_stride;
  bool add;
};

template <int kCount, class T>
GRPO_FAST_INLINE void multiply_rows(const PanelProduct<T>& p, int64_t first) {
  Floats sums[kCount][kVectors] = {};
  const T* a = p.a + first * p.stride;
  const uint32_t* panel = p.panel;
  for (int64_t k = 0; k < p.words; ++k, panel += kPanel, a += kPerWord<T>) {
    Words b[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) std::memcpy(&b[v], panel + v * kLanes, sizeof(Words));
#pragma GCC unroll 6
    for (int row = 0; row < kCount; ++row) {
      uint32_t x;
      std::memcpy(&x, a + row * p.stride, sizeof(x));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[row][v] = dot(T{}, Words{} + x, b[v], sums[row][v]);
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kCount; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* to = p.c + (first + row) * p.c_stride + v * kLanes;
      store(to, p.add ? load(to) + sums[row][v] : sums[row][v]);
    }
}

struct Vectors {
  static constexpr int64_t kGroup = 1;  // rows come in multiples of this

  // between(part, parts) is called after each part of the rows.
  template <class T, class Between>
  static void multiply(const PanelProduct<T>& p, int64_t rows, const Between& between) {
    int64_t row = 0;
    for (; row + kRows <= rows; row += kRows) {
      multiply_rows<kRows>(p, row);
      between(row / kRows, rows / kRows);
    }
    switch (rows - row) {
      case 5: return multiply_rows<5>(p, row);
      case 4: return multiply_rows<4>(p, row);
      case 3: return multiply_rows<3>(p, row);
      case 2: return multiply_rows<2>(p, row);
      case 1: return multiply_rows<1>(p, row);
    }
  }
  static void release() {}
};

// c (m, n) fp32 += or = a (m, k) * b (k, n); the trailing bool says that b is in VNNI order. c10::BFloat16 is 2 bytes.
using Brgemm = void (*)(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                        const Bfloat16* a, const uint32_t* b, float* c, bool vnni);
using Release = void (*)(bool vnni);

struct TorchKernel {
  Brgemm brgemm;
  Release release;  // gives the AMX tiles of this thread back
};

inline const TorchKernel& torch_kernel() {
  static const TorchKernel kernel = [] {
    void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return TorchKernel{nullptr, nullptr};
    const auto brgemm = reinterpret_cast<Brgemm>(
        dlsym(library, "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"));
    const auto release = reinterpret_cast<Release>(dlsym(library, "_ZN2at6native7cpublas14brgemm_releaseEb"));
    return brgemm && release ? TorchKernel{brgemm, release} : TorchKernel{nullptr, nullptr};
  }();
  return kernel;
}

// AMX tiles, by way of torch. Every call has the same shape, so that a row's bits do not depend on the block's.
struct Tiles {
  static constexpr int64_t kGroup = 32;

  template <class Between>
  static void multiply(const PanelProduct<Bfloat16>& p, int64_t rows, const Between& between) {
    for (int64_t row = 0; row < rows; row += kGroup) {
      torch_kernel().brgemm(kGroup, kPanel, p.words * 2, p.stride, kPanel, p.c_stride, p.add, p.a + row * p.stride,
                            p.panel, p.c + row * p.c_stride, true);
      between(row / kGroup, (rows + kGroup - 1) / kGroup);
    }
  }
  static void release() { torch_kernel().release(true); }
};

// ---- blocks ----

// T: what is multiplied; S: what a is stored in.
template <class S, class T>
struct Problem {
  int64_t m, n, k;
  Operand<S> a;
  Operand<T> b;
  int parts = 1;                      // of an fp32 a that is multiplied as bf16: 2 keep 16 of its 24 bits
  const float* scales = nullptr;      // (K,): rows of a transposed a are multiplied by these first
  bool keeps_heavy = false;           // with parts = 1 and b (K, N): elements that dominate a sum keep both parts,
  const float* thresholds = nullptr;  // (M,): in a row of a above these; in a column of a transposed a, see pack.h

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
  for (const Heavy& at : heavy) {
    const T* b = p.b.data + at.k * p.b.stride + block.column;
    for (int64_t c = 0; c < block.columns; ++c) sums[at.row * stride + c] += at.rest * load_one(b + c);
  }
  heavy.clear();
}

// finish(block, sums, stride) is called once for every block, by the thread that summed it. fixed_columns: blocks have
// this many columns (a multiple of kPanel) whatever the sizes and the threads.
template <class Kernel, class S, class T, class Finish>
void multiply(const Problem<S, T>& p, const Finish& finish, int64_t fixed_columns = 0) {
  const double flops = 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
  const int64_t threads = flops < kInlineFlops ? 1 : torch::stable::get_num_threads();
  const Blocks blocks(p, Kernel::kGroup, threads, fixed_columns);
  const int64_t panel_words = kSliceWords * kPanel, panels = p.panels(), slices = p.slices();
  const bool is_shared = blocks.count > blocks.across && slices * panels * panel_words <= kSharedWords;
  uint32_t* const shared = scratch<uint32_t>(Purpose::kShared, is_shared ? slices * panels * panel_words : 0);
  const auto in_parallel = [&](int64_t count, const auto& body) {
    std::atomic<int64_t> next{0};
    torch::stable::parallel_for(0, std::min(threads, count), 1, [&](int64_t, int64_t) { body(next); });
  };
  if (is_shared)
    in_parallel(slices * panels, [&](std::atomic<int64_t>& next) {
      for (int64_t i; (i = next.fetch_add(1)) < slices * panels;)
        pack_panel(p, i / panels, i % panels, shared + i * panel_words);
    });
  in_parallel(blocks.count, [&](std::atomic<int64_t>& next) {
    const int64_t height = up(blocks.rows, std::max<int64_t>(kLanes, Kernel::kGroup));
    uint32_t* const own = scratch<uint32_t>(Purpose::kPanel, panel_words);
    uint32_t* const packed_rows = scratch<uint32_t>(Purpose::kRows, (p.parts + 1) * height * kSliceWords);
    float* const sums = scratch<float>(Purpose::kSums, height * blocks.columns);
    std::vector<Heavy> heavy;
    std::vector<int64_t> heavy_counts;
    std::vector<float> limits(p.keeps_heavy && p.a.transposed ? blocks.rows : 0);
    for (int64_t i = next.fetch_add(1), following; i < blocks.count; i = following) {
      following = next.fetch_add(1);  // known early: its first operands are asked for during the last of this block
      const Block block = blocks.at(i, p.m, p.n), after = blocks.at(std::min(following, blocks.count - 1), p.m, p.n);
      heavy_counts.assign(block.rows, 0);
      if constexpr (std::is_same_v<S, float>)
        if (p.keeps_heavy && p.a.transposed)
          find_limits(p.a.data + block.row, p.a.stride, p.k, block.rows, p.scales, limits.data());
      for (int64_t slice = 0; slice < slices; ++slice) {
        const bool is_last = slice + 1 == slices;
        const int64_t slice_after = is_last ? 0 : slice + 1, panel_count = (block.columns + kPanel - 1) / kPanel;
        const Block& then = is_last ? after : block;
        const Pieces rows_after = p.row_pieces(slice_after, then.row, then.rows);
        if constexpr (std::is_same_v<S, float>)
          if (p.keeps_heavy && !p.a.transposed)
            find_heavy_in_rows(p.a.data + block.row * p.a.stride + p.first_k(slice), p.a.stride, block.rows,
                       std::min(p.slice_words(slice) * kPerWord<T>, p.k - p.first_k(slice)),
                       p.thresholds + block.row, p.first_k(slice), heavy_counts, heavy);
        Rows<T> rows[2];
        for (int part = 0; part < p.parts; ++part)
          rows[part] = rows_of(p, block, Kernel::kGroup, slice,
                               {part, p.scales ? p.scales + p.first_k(slice) : nullptr,
                                limits.empty() ? nullptr : limits.data(), p.first_k(slice), &heavy},
                               {packed_rows + (part + 1) * height * kSliceWords, packed_rows});
        for (int64_t c = 0; c < panel_count; ++c) {
          const int64_t panel = block.column / kPanel + c;
          if (!is_shared) pack_panel(p, slice, panel, own);
          const uint32_t* packed = is_shared ? shared + (slice * panels + panel) * panel_words : own;
          const Pieces panel_after = is_shared             ? Pieces{}
                                     : c + 1 < panel_count ? p.panel_pieces(slice, panel + 1)
                                                           : p.panel_pieces(slice_after, then.column / kPanel);
          for (int part = 0; part < p.parts; ++part)
            Kernel::multiply(
                PanelProduct<T>{rows[part].data, rows[part].stride, packed, p.slice_words(slice),
                                sums + c * kPanel, blocks.columns, slice + part > 0},
                block.rows, [&](int64_t i, int64_t count) {
                  if (part) return;
                  panel_after.prefetch(i, count);
                  rows_after.prefetch(c * count + i, panel_count * count);
                });
        }
      }
      add_heavy(p, block, heavy, sums, blocks.columns);
      finish(block, sums, blocks.columns);
    }
    Kernel::release();
  });
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
