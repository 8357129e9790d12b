// a (M, K) bf16 times b (N, K) bf16 transposed -> (M, N) fp32, on CPUs with AMX.
//
// torch.mm rounds a bf16 product to bf16 on the CPU, which moves logps by 1e-2. The tile product here is torch's own
// at::native::cpublas::brgemm, looked up in the loaded libtorch_cpu: it is not part of the stable ABI, so it may be
// absent, and then the op says so. It wants its second operand with pairs of k interleaved (VNNI): [K/2][kTileN][2].
// Every call has the same shape, edges padded with zeros, so a row's bits do not depend on M.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

namespace grpo_fast {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kTileM = 128;  // rows of a per call: with kTileN columns, 32 KB of fp32 sums
constexpr int64_t kTileN = 64;   // columns of the result per packed panel: K * 128 bytes, in L2 up to K = 8192

// c (m, n) fp32 += or = a (m, k) * b (k, n); the trailing bool says that b is in VNNI order. c10::BFloat16 is 2 bytes.
using Brgemm = void (*)(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                        const uint16_t* a, const uint16_t* b, float* c, bool vnni);
using Release = void (*)(bool vnni);

struct MicroKernel {
  Brgemm brgemm;
  Release release;  // gives the AMX tiles of this thread back
};

MicroKernel torch_kernel() {
  static const MicroKernel kernel = [] {
    void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return MicroKernel{nullptr, nullptr};
    const auto brgemm = reinterpret_cast<Brgemm>(
        dlsym(library, "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"));
    const auto release = reinterpret_cast<Release>(dlsym(library, "_ZN2at6native7cpublas14brgemm_releaseEb"));
    return brgemm && release ? MicroKernel{brgemm, release} : MicroKernel{nullptr, nullptr};
  }();
  return kernel;
}

float widen(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

// Stands in for brgemm where there is no AMX, so that packing and tiling can be tested there.
void emulated_brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                     const uint16_t* a, const uint16_t* b, float* c, bool) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      float sum = add ? c[i * ldc + j] : 0.0f;
      for (int64_t q = 0; q < k; ++q) sum += widen(a[i * lda + q]) * widen(b[(q / 2) * ldb * 2 + j * 2 + q % 2]);
      c[i * ldc + j] = sum;
    }
}

// rows of b (N, K) from n0 on -> panel [K/2][kTileN][2], zeros past N: a transposition of 32-bit pairs.
void pack_panel(const uint16_t* b, int64_t stride, int64_t rows, int64_t k, uint32_t* panel) {
  for (int64_t n = 0; n < kTileN; ++n) {
    if (n >= rows) {
      for (int64_t pair = 0; pair < k / 2; ++pair) panel[pair * kTileN + n] = 0;
      continue;
    }
    for (int64_t pair = 0; pair < k / 2; ++pair)
      std::memcpy(panel + pair * kTileN + n, b + n * stride + 2 * pair, sizeof(uint32_t));
  }
}

struct Problem {
  int64_t m, n, k, stride_a, stride_b;
  const uint16_t *a, *b;
  const uint16_t* last_rows;  // the rows of a past the last whole tile, padded to kTileM: (kTileM, K)
  float* c;                   // (M, N) contiguous
};

void multiply_panel(const Problem& p, int64_t n0, const MicroKernel& kernel, uint32_t* panel, float* tile) {
  const int64_t columns = std::min(kTileN, p.n - n0);
  pack_panel(p.b + n0 * p.stride_b, p.stride_b, columns, p.k, panel);
  const auto* packed = reinterpret_cast<const uint16_t*>(panel);
  for (int64_t m0 = 0; m0 < p.m; m0 += kTileM) {
    const int64_t rows = std::min(kTileM, p.m - m0);
    const bool whole = rows == kTileM;
    const uint16_t* a = whole ? p.a + m0 * p.stride_a : p.last_rows;
    kernel.brgemm(kTileM, kTileN, p.k, whole ? p.stride_a : p.k, kTileN, kTileN, false, a, packed, tile, true);
    for (int64_t i = 0; i < rows; ++i)
      std::memcpy(p.c + (m0 + i) * p.n + n0, tile + i * kTileN, columns * sizeof(float));
  }
}

void check_operand(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.is_cpu() && x.dim() == 2, name, ": expected a matrix on the CPU");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16, name, ": expected bfloat16");
  STD_TORCH_CHECK(x.size(1) <= 1 || x.stride(1) == 1, name, ": expected a contiguous last dimension");
}

bool has_brgemm() {
  return torch_kernel().brgemm != nullptr;
}

Tensor mm_bf16_fp32(Tensor a, Tensor b, bool emulate) {
  check_operand(a, "a");
  check_operand(b, "b");
  STD_TORCH_CHECK(a.size(1) == b.size(1), "b: expected K = ", a.size(1), " columns as in a, got ", b.size(1));
  STD_TORCH_CHECK(a.size(1) > 0 && a.size(1) % 2 == 0, "a: expected an even K above 0, got ", a.size(1));
  const MicroKernel kernel = emulate ? MicroKernel{emulated_brgemm, [](bool) {}} : torch_kernel();
  STD_TORCH_CHECK(kernel.brgemm != nullptr, "mm_bf16_fp32: this torch exports no bf16 brgemm");
  Problem p{a.size(0), b.size(0), a.size(1), a.stride(0), b.stride(0), nullptr, nullptr, nullptr, nullptr};
  Tensor c = torch::stable::new_empty(a, {p.m, p.n}, ScalarType::Float);
  p.a = static_cast<const uint16_t*>(a.data_ptr());
  p.b = static_cast<const uint16_t*>(b.data_ptr());
  p.c = static_cast<float*>(c.data_ptr());
  std::vector<uint16_t> last_rows(p.m % kTileM ? kTileM * p.k : 0);
  for (int64_t i = p.m - p.m % kTileM, row = 0; i < p.m; ++i, ++row)
    std::memcpy(last_rows.data() + row * p.k, p.a + i * p.stride_a, p.k * sizeof(uint16_t));
  p.last_rows = last_rows.data();
  const int64_t panels = (p.n + kTileN - 1) / kTileN;
  const int64_t workers = p.m == 0 ? 0 : std::min<int64_t>(torch::stable::get_num_threads(), panels);
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    std::vector<uint32_t> panel(p.k / 2 * kTileN);
    std::vector<float> tile(kTileM * kTileN);
    for (int64_t i; (i = next.fetch_add(1)) < panels;)
      multiply_panel(p, i * kTileN, kernel, panel.data(), tile.data());
    kernel.release(true);
  });
  return c;
}

}  // namespace
}  // namespace grpo_fast

STABLE_TORCH_LIBRARY(grpo_fast_gemm_bf16, library) {
  library.def("has_brgemm() -> bool");
  library.def("mm_bf16_fp32(Tensor a, Tensor b, bool emulate) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(grpo_fast_gemm_bf16, CompositeExplicitAutograd, library) {
  library.impl("has_brgemm", TORCH_BOX(&grpo_fast::has_brgemm));
}

STABLE_TORCH_LIBRARY_IMPL(grpo_fast_gemm_bf16, CPU, library) {
  library.impl("mm_bf16_fp32", TORCH_BOX(&grpo_fast::mm_bf16_fp32));
}
