// Checks of the tensors that Python passes. The operators read memory only after these checks.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>
#include <optional>
#include <string>

#include "vec/storage.h"

namespace grpo_fast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The dtype of a tensor with elements of the C++ type T, and the name of the dtype in messages.
struct Dtype {
  ScalarType type;
  const char* name;
};
template <class T>
constexpr Dtype kDtype = {};
template <>
constexpr Dtype kDtype<float> = {ScalarType::Float, "float32"};
template <>
constexpr Dtype kDtype<Bfloat16> = {ScalarType::BFloat16, "bfloat16"};
template <>
constexpr Dtype kDtype<Float16> = {ScalarType::Half, "float16"};
template <>
constexpr Dtype kDtype<double> = {ScalarType::Double, "float64"};
template <>
constexpr Dtype kDtype<int32_t> = {ScalarType::Int, "int32"};
template <>
constexpr Dtype kDtype<int64_t> = {ScalarType::Long, "int64"};

// Returns the data of a tensor as T*, without checking the dtype.
template <class T>
T* data(const Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}

// Returns an uninitialised vector of `size` elements.
inline Tensor empty(const Tensor& like, int64_t size, ScalarType dtype = ScalarType::Float) {
  return torch::stable::new_empty(like, {size}, dtype);
}

inline bool is_fp32(const Tensor& x) {
  return x.scalar_type() == ScalarType::Float;
}

// Checks that x is a CPU matrix with a contiguous last dimension.
inline void check_matrix(const Tensor& x, const char* name, const char* shape = "a matrix") {
  STD_TORCH_CHECK(x.is_cpu(), name, ": expected a CPU tensor");
  STD_TORCH_CHECK(x.dim() == 2, name, ": expected ", shape, ", got ", x.dim(), " dimensions");
  STD_TORCH_CHECK(x.size(1) <= 1 || x.stride(1) == 1, name,
                  ": expected a contiguous last dimension, got stride ", x.stride(1));
}

// Checks that x is a matrix with at least one column. A matrix without rows needs no columns.
inline void check_rows(const Tensor& x, const char* name) {
  check_matrix(x, name, "(C, V)");
  STD_TORCH_CHECK(x.size(0) == 0 || x.size(1) > 0, name,
                  ": expected at least one column, got none");
}

// Checks that x, an operand of a matrix product, is an fp32 or bf16 matrix.
inline void check_operand(const Tensor& x, const char* name) {
  check_matrix(x, name);
  STD_TORCH_CHECK(is_fp32(x) || x.scalar_type() == ScalarType::BFloat16, name,
                  ": expected float32 or bfloat16");
}

// Formats a shape for an error message, for example as (2, 3).
inline std::string shape_text(std::initializer_list<int64_t> shape) {
  std::string words;
  for (const int64_t size : shape) words += (words.empty() ? "(" : ", ") + std::to_string(size);
  return words + ")";
}

// Checks that x is an fp32 tensor of this shape with a contiguous last dimension.
inline void check(const Tensor& x, const char* name, std::initializer_list<int64_t> shape) {
  STD_TORCH_CHECK(x.is_cpu() && is_fp32(x), name, ": expected a float32 tensor on the CPU");
  bool is_same = x.dim() == static_cast<int64_t>(shape.size());
  int64_t axis = 0;
  for (const int64_t size : shape) is_same = is_same && x.size(axis) == size, ++axis;
  STD_TORCH_CHECK(is_same, name, ": expected ", shape_text(shape));
  STD_TORCH_CHECK(x.stride(-1) == 1 || x.size(-1) == 1, name, ": expected a contiguous last axis");
}

// Checks that x has the shape (rows, columns).
inline void check_shape(const Tensor& x, const char* name, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(x.size(0) == rows && x.size(1) == columns, name, ": expected (", rows, ", ",
                  columns, "), got (", x.size(0), ", ", x.size(1), ")");
}

// Calls run(T{}), where T is the C++ type of the elements of x. Raises an error unless T is one of
// `Types`.
template <class... Types, class F>
void with_type(const Tensor& x, const char* name, const F& run) {
  // The fold over || runs the first type whose dtype is that of x, and then stops.
  if (((x.scalar_type() == kDtype<Types>.type && (run(Types{}), true)) || ...)) return;
  std::string expected;
  for (const char* type : {kDtype<Types>.name...})
    expected += (expected.empty() ? "" : ", ") + std::string(type);
  expected.replace(expected.rfind(","), 1, " or");
  STD_TORCH_CHECK(false, name, ": expected ", expected);
}

// Checks that x is a contiguous CPU vector with one value of type T per row, and returns its data.
template <class T>
const T* checked_vector(const Tensor& x, int64_t rows, const char* name) {
  STD_TORCH_CHECK(x.is_cpu(), name, ": expected a CPU tensor");
  STD_TORCH_CHECK(x.dim() == 1 && x.size(0) == rows, name, ": expected one value for each of ",
                  rows, " rows");
  STD_TORCH_CHECK(x.scalar_type() == kDtype<T>.type, name, ": expected ", kDtype<T>.name);
  STD_TORCH_CHECK(x.is_contiguous(), name, ": expected a contiguous tensor");
  return data<T>(x);
}

// Checks an optional fp32 vector with one value per row and returns its data, or null for None.
inline const float* checked_vector(const std::optional<Tensor>& x, int64_t rows, const char* name) {
  return x ? checked_vector<float>(*x, rows, name) : nullptr;
}

// Checks that x contains `count` indices from 0 to end - 1, and returns its data.
inline const int64_t* checked_indices(const Tensor& x, int64_t count, int64_t end,
                                      const char* name) {
  const int64_t* found = checked_vector<int64_t>(x, count, name);
  for (int64_t i = 0; i < count; ++i)
    STD_TORCH_CHECK(found[i] >= 0 && found[i] < end, name, ": expected indices from 0 to ", end - 1,
                    ", got ", found[i]);
  return found;
}

// Checks the bounds of consecutive ranges, and returns their data. The first bound must be 0, the
// last bound must be `end`, and the bounds must never decrease.
template <class T>
const T* checked_offsets(const Tensor& x, int64_t end, const char* name) {
  const int64_t count = x.dim() == 1 ? x.size(0) : 0;
  const T* found = checked_vector<T>(x, count, name);
  bool rises = count > 0 && found[0] == 0 && found[count - 1] == end;
  for (int64_t i = 1; i < count; ++i) rises &= found[i - 1] <= found[i];
  STD_TORCH_CHECK(rises, name, ": expected numbers that never decrease, from 0 to ", end);
  return found;
}

}  // namespace grpo_fast
