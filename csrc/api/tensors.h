// Tensors as they come from Python: what must hold of them before their memory is read.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstring>
#include <optional>

namespace grpo_fast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
T* data(const Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}

// Rows of a matrix, one after another.
template <class T>
void copy_rows(const T* from, int64_t stride, const int64_t* index, int64_t count, int64_t columns, T* to) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * columns, from + index[i] * stride, columns * sizeof(T));
}

inline void check_matrix(const Tensor& x, const char* name, const char* shape = "a matrix") {
  STD_TORCH_CHECK(x.is_cpu(), name, ": expected a CPU tensor");
  STD_TORCH_CHECK(x.dim() == 2, name, ": expected ", shape, ", got ", x.dim(), " dimensions");
  STD_TORCH_CHECK(x.size(1) <= 1 || x.stride(1) == 1, name, ": expected a contiguous last dimension, got stride ",
                  x.stride(1));
}

// Of a product: fp32 or bf16.
inline void check_operand(const Tensor& x, const char* name) {
  check_matrix(x, name);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16, name,
                  ": expected float32 or bfloat16");
}

inline void check_vector(const Tensor& x, int64_t rows, ScalarType dtype, const char* name) {
  STD_TORCH_CHECK(x.is_cpu(), name, ": expected a CPU tensor");
  STD_TORCH_CHECK(x.dim() == 1 && x.size(0) == rows, name, ": expected one value for each of ", rows, " rows");
  STD_TORCH_CHECK(x.scalar_type() == dtype, name, ": expected ", dtype == ScalarType::Long ? "int64" : "float32");
  STD_TORCH_CHECK(x.is_contiguous(), name, ": expected a contiguous tensor");
}

inline const float* optional_vector(const std::optional<Tensor>& x, int64_t rows, const char* name) {
  if (!x) return nullptr;
  check_vector(*x, rows, ScalarType::Float, name);
  return data<float>(*x);
}

}  // namespace grpo_fast
