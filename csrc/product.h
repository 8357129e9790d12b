// fp32 products of whole matrices inside another door: gemm.h as gemm.cpp calls it, so the same bits.
#pragma once

#include "gemm.h"
#include "tensors.h"

namespace grpo_fast {

inline void check_float_matrix(const Tensor& x, const char* name) {
  check_matrix(x, name);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, name, ": expected float32");
}

// An operand as it lies in memory, or the transpose of that.
struct Factor {
  const Tensor& matrix;
  bool transposed = false;

  int64_t size(int dimension) const { return matrix.size(transposed ? 1 - dimension : dimension); }
  Operand<float> operand() const { return {data<float>(matrix), matrix.stride(0), transposed}; }
};

// out (M, N) = a (M, K) * b (K, N), all float32 with contiguous rows; bias (N,) is added to every row, or null.
inline void multiply_into(const Factor& a, const Factor& b, const Tensor& out, const float* bias = nullptr) {
  const Problem<float, float> p{a.size(0), b.size(1), a.size(1), a.operand(), b.operand()};
  if (p.m == 0 || p.n == 0) return;
  float* to = data<float>(out);
  const int64_t stride = out.stride(0);
  multiply<Vectors>(p, [&](const Block& block, float* sums, int64_t sums_stride) {
    if (bias)
      for (int64_t row = 0; row < block.rows; ++row)
        add_scaled(bias + block.column, 1.0f, block.columns, sums + row * sums_stride);
    store_block(sums, sums_stride, to + block.row * stride + block.column, stride, block.rows, block.columns, false);
  });
}

}  // namespace grpo_fast
