// Micro-kernels of the matrix product. They compute c (rows, kPanel) = a (rows, words) * panel
// (words, kPanel), or add the product to c.
//
// The micro-kernel for fp32 exists because torch multiplies with MKL. The bits of MKL's results
// depend on the number of rows, and MKL does not use AVX-512 on AMD CPUs. It reaches half of our
// speed on a Zen 5, and up to nine tenths on a Zen 4.
//
// bf16 products with fp32 sums use the same micro-kernel with AVX512_BF16, or the AMX product
// inside torch, at::native::cpublas::brgemm. This function is not part of the stable ABI. It is
// looked up in the loaded libtorch_cpu, and may be missing.
//
// Layout: k is the dimension that is summed. A word has 32 bits and contains one fp32 element, or
// two bf16 elements with neighbouring k. A panel is a packed block of kPanel columns of b. It has
// one word for each column and each step along k.
#pragma once

#include <dlfcn.h>

#include "gemm/operand.h"

namespace grpo_fast {

constexpr int64_t kRows = 6;  // rows of a in one step
// Number of vectors of `b` in one step. The kRows * kVectors sums fill 12 of the 16 ymm registers,
// or 24 of the 32 zmm registers. The other registers hold the operands.
constexpr int64_t kVectors = kLanes == 8 ? 2 : 4;
constexpr int64_t kPanel = kVectors * kLanes;  // columns of a packed panel of b
constexpr int64_t kLineWords = 16;               // words in a cache line
constexpr int64_t kLines = kPanel / kLineWords;  // cache lines of a panel in one step of k

#if defined(__AVX512BF16__) && GRPO_FAST_LANES == 16
constexpr bool kHasDot16 = true;
GRPO_FAST_INLINE Floats dot(Bfloat16, Words a, Words b, Floats sum) {
  // This instruction multiplies the two bf16 elements of each word of a by those of b, and adds
  // both products to the fp32 sum.
  return _mm512_dpbf16_ps(sum, bit_cast<__m512bh>(a), bit_cast<__m512bh>(b));
}
#else
constexpr bool kHasDot16 = false;
GRPO_FAST_INLINE Floats dot(Bfloat16, Words a, Words b, Floats sum) {
  // Without AVX512_BF16, multiply the low halves and the high halves of the words in fp32.
  sum = fma(bit_cast<Floats>(a << 16), bit_cast<Floats>(b << 16), sum);
  return fma(bit_cast<Floats>(a & 0xffff0000u), bit_cast<Floats>(b & 0xffff0000u), sum);
}
#endif
GRPO_FAST_INLINE Floats dot(float, Words a, Words b, Floats sum) {
  return fma(bit_cast<Floats>(a), bit_cast<Floats>(b), sum);
}

// The operands of one micro-kernel call.
template <class T>
struct PanelProduct {
  const T* a;
  int64_t stride, step;  // elements of a from row to row, and from word to word of k
  const uint32_t* panel;
  int64_t words;
  float* c;
  int64_t c_stride;
  bool add;
  bool is_narrow = false;  // at most half of the panel's columns are used
  // The next packed panel, or null. It is prefetched while all `rows` rows are multiplied.
  const uint32_t* ahead = nullptr;
  int64_t rows = 0;
};

// Multiplies kCount rows of `a`, from row `first` on, by kAcross vectors of panel columns. All sums
// stay in registers during the loop over k. This is one pass over the panel.
//
// Only the first pass reads the panel from memory. Later passes read it from cache, and would leave
// memory idle. Each pass therefore prefetches a part of the next panel that is proportional to its
// number of rows. The prefetches are spread over the loop, because a core can wait for only about
// 16 cache lines at a time.
template <int kCount, int kAcross, class T>
GRPO_FAST_INLINE void multiply_rows(const PanelProduct<T>& p, int64_t first) {
  Floats sums[kCount][kAcross] = {};
  const T* a = p.a + first * p.stride;
  const uint32_t* panel = p.panel;
  const uint32_t* ahead = p.ahead;
  if (ahead) ahead += p.words * kPanel * first / p.rows;
  int64_t due = 0;  // cache lines that are due for prefetching, times p.rows
  for (int64_t k = 0; k < p.words; ++k, panel += kPanel, a += p.step) {
    if (ahead)
      for (due += kLines * kCount; due >= p.rows; due -= p.rows, ahead += kLineWords)
        prefetch_line(ahead);
    Words b[kAcross];
#pragma GCC unroll 4
    for (int v = 0; v < kAcross; ++v) b[v] = read<Words>(panel + v * kLanes);
#pragma GCC unroll 6
    for (int row = 0; row < kCount; ++row) {
      // Broadcast one word of a to all lanes.
      const Words x = Words{} + read<uint32_t>(a + row * p.stride);
#pragma GCC unroll 4
      for (int v = 0; v < kAcross; ++v) sums[row][v] = dot(T{}, x, b[v], sums[row][v]);
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kCount; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kAcross; ++v) {
      float* to = p.c + (first + row) * p.c_stride + v * kLanes;
      store(to, p.add ? load(to) + sums[row][v] : sums[row][v]);
    }
}

// Micro-kernel that uses vector registers.
struct Vectors {
  static constexpr int64_t kGroup = 1;  // the row count must be a multiple of this
  static constexpr bool kTakesDown = true;  // accepts an a that is packed with k as the row index

  // Multiplies `rows` rows of `a` by the panel. After each group of kRows rows, it calls
  // between(group, number of groups), so that the caller can prefetch its next operands.
  template <class T, class Between>
  static void multiply(const PanelProduct<T>& p, int64_t rows, const Between& between) {
    p.is_narrow ? run<kVectors / 2>(p, rows, between) : run<kVectors>(p, rows, between);
  }
  static void release() {}

 private:
  template <int kAcross, class T, class Between>
  static void run(const PanelProduct<T>& p, int64_t rows, const Between& between) {
    int64_t row = 0;
    for (; row + kRows <= rows; row += kRows) {
      multiply_rows<kRows, kAcross>(p, row);
      between(row / kRows, rows / kRows);
    }
    // Multiply the remaining rows. Their number must be a compile-time constant, so that the sums
    // stay in registers.
    switch (rows - row) {
      case 5: return multiply_rows<5, kAcross>(p, row);
      case 4: return multiply_rows<4, kAcross>(p, row);
      case 3: return multiply_rows<3, kAcross>(p, row);
      case 2: return multiply_rows<2, kAcross>(p, row);
      case 1: return multiply_rows<1, kAcross>(p, row);
    }
  }
};

// Signature of torch's AMX product c (m, n) = a (m, k) * b (k, n), with c in fp32. With `add`, the
// product is added to c. `vnni` says that the elements k and k + 1 of a column of b are neighbours
// in memory.
using Brgemm = void (*)(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc,
                        bool add, const Bfloat16* a, const uint32_t* b, float* c, bool vnni);
using Release = void (*)(bool vnni);

struct TorchKernel {
  Brgemm brgemm = nullptr;
  Release release = nullptr;  // releases the AMX tile configuration of this thread
};

// Looks up torch's AMX functions by their mangled names, once per process.
inline const TorchKernel& torch_kernel() {
  static const TorchKernel kernel = [] {
    void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return TorchKernel{};
    const char* brgemm_name = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb";
    const auto brgemm = reinterpret_cast<Brgemm>(dlsym(library, brgemm_name));
    const char* release_name = "_ZN2at6native7cpublas14brgemm_releaseEb";
    const auto release = reinterpret_cast<Release>(dlsym(library, release_name));
    return brgemm && release ? TorchKernel{brgemm, release} : TorchKernel{};
  }();
  return kernel;
}

// Micro-kernel that calls torch's brgemm, which uses AMX tiles. Every call multiplies exactly
// kGroup rows. If the number of rows varied, torch could vary the order of the sums, and the bits
// of a row would depend on the size of its block.
struct Tiles {
  static constexpr int64_t kGroup = 32;
  static constexpr bool kTakesDown = false;

  template <class Between>
  static void multiply(const PanelProduct<Bfloat16>& p, int64_t rows, const Between& between) {
    for (int64_t row = 0; row < rows; row += kGroup) {
      torch_kernel().brgemm(kGroup, kPanel, p.words * 2, p.stride, kPanel, p.c_stride, p.add,
                            p.a + row * p.stride, p.panel, p.c + row * p.c_stride, true);
      between(row / kGroup, (rows + kGroup - 1) / kGroup);
    }
  }
  static void release() { torch_kernel().release(true); }
};

}  // namespace grpo_fast
