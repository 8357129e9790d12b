// Products of torch's matrices by gemm.h: what gemm.cpp and the doors that need a product inside a call share.
#pragma once

#include "gemm.h"
#include "tensors.h"

namespace grpo_fast {

template <class T>
Operand<T> operand(const Tensor& x, bool transposed) {
  return {data<T>(x), x.stride(0), transposed};
}

// out (M, N), fp32 or bf16, = or += the product; adjust(block, sums, stride) may change a block before it is rounded.
template <class Kernel, class S, class T, class Adjust>
void multiply_into(const Problem<S, T>& p, const Tensor& out, bool add, const Adjust& adjust) {
  multiply<Kernel>(p, [&](const Block& block, float* sums, int64_t stride) {
    adjust(block, sums, stride);
    const auto store_to = [&](auto* to) {
      to += block.row * out.stride(0) + block.column;
      store_block(sums, stride, to, out.stride(0), block.rows, block.columns, add);
    };
    if (out.scalar_type() == ScalarType::Float)
      store_to(data<float>(out));
    else
      store_to(data<Bfloat16>(out));
  });
}

inline void check_float_matrix(const Tensor& x, const char* name) {
  check_matrix(x, name);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, name, ": expected float32");
}

// An operand as it lies in memory, or the transpose of that.
struct Factor {
  const Tensor& matrix;
  bool transposed = false;

  int64_t size(int dimension) const { return matrix.size(transposed ? 1 - dimension : dimension); }
};

// out (M, N) = a (M, K) * b (K, N), all float32 with contiguous rows; bias (N,) is added to every row, or null.
inline void multiply_into(const Factor& a, const Factor& b, const Tensor& out, const float* bias = nullptr) {
  const Problem<float, float> p{a.size(0), b.size(1), a.size(1), operand<float>(a.matrix, a.transposed),
                                operand<float>(b.matrix, b.transposed)};
  if (p.m == 0 || p.n == 0) return;
  multiply_into<Vectors>(p, out, false, [&](const Block& block, float* sums, int64_t stride) {
    if (bias) add_bias(bias, block, sums, stride);
  });
}

}  // namespace grpo_fast
