// Operators of elementwise layers: RMSNorm, SwiGLU and rotary embeddings, forward and backward.
// Each operator reads and writes its tensors once. rows/layers.h has the formulas.
//
// Layout: inputs may have any row stride, and outputs are contiguous. All tensors are fp32, except
// that the tensors of SwiGLU, the output of RMSNorm and the gradient of this output may be bf16.
//
// Parallelism: threads compute different rows. dw of RMSNorm is summed in at most kBlocks blocks of
// rows.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "api/tensors.h"
#include "rows/chunk.h"
#include "rows/layers.h"

namespace grpo_fast {
namespace {

// Maximum number of partial sums of dw. It does not depend on the number of threads, so the bits of
// dw do not depend on it either.
constexpr int64_t kBlocks = 64;

// Checks that x is a matrix with elements of type T, and returns a view of x.
template <class T = float>
Matrix<const T> rows_of(const Tensor& x, const char* name) {
  check_matrix(x, name);
  STD_TORCH_CHECK(x.scalar_type() == kDtype<T>.type, name, ": expected ", kDtype<T>.name);
  return {data<const T>(x), x.stride(0)};
}

// Checks that x is a (rows, columns) matrix with elements of type T, and returns a view of x.
template <class T = float>
Matrix<const T> like(const Tensor& x, const char* name, int64_t rows, int64_t columns) {
  const Matrix<const T> numbers = rows_of<T>(x, name);
  check_shape(x, name, rows, columns);
  return numbers;
}

// Returns y (T, H), the RMSNorm of x (T, H) with weight (H,), and the factor r of each row, (T,),
// which the backward pass needs. With `narrow`, y is bf16.
std::tuple<Tensor, Tensor> rms_norm(Tensor x, Tensor weight, double eps, bool narrow) {
  const int64_t rows = x.size(0), columns = x.size(1);
  const Matrix<const float> from = rows_of(x, "x");
  const float* w = checked_vector<float>(weight, columns, "weight");
  const ScalarType dtype = narrow ? ScalarType::BFloat16 : ScalarType::Float;
  const Tensor y = torch::stable::new_empty(x, {rows, columns}, dtype), r = empty(x, rows);
  float* scales = data<float>(r);
  with_type<float, Bfloat16>(y, "y", [&](auto stored) {
    auto* to = data<decltype(stored)>(y);
    for_each_row(rows, columns, [&](int64_t i) {
      norm_row(from.row(i), w, static_cast<float>(eps), columns, to + i * columns, scales + i);
    });
  });
  return {y, r};
}

// Returns dx (T, H) and dw (H,) of RMSNorm. grad is fp32 or bf16.
std::tuple<Tensor, Tensor> rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor r) {
  const int64_t rows = x.size(0), columns = x.size(1);
  const Matrix<const float> from = rows_of(x, "x");
  const float *w = checked_vector<float>(weight, columns, "weight"),
              *scales = checked_vector<float>(r, rows, "r");
  const Tensor dx = torch::stable::new_empty(x, {rows, columns}), dw = empty(x, columns);
  const int64_t step = std::max<int64_t>(1, (rows + kBlocks - 1) / kBlocks);
  const int64_t blocks = (rows + step - 1) / step;
  std::vector<float> parts(static_cast<size_t>(blocks * columns));
  with_type<float, Bfloat16>(grad, "grad", [&](auto stored) {
    const auto up = like<decltype(stored)>(grad, "grad", rows, columns);
    for_each_row(blocks, step * columns, [&](int64_t block) {
      for (int64_t i = block * step; i < std::min(rows, (block + 1) * step); ++i)
        norm_row_backward(up.row(i), from.row(i), w, scales[i], columns,
                          data<float>(dx) + i * columns, parts.data() + block * columns);
    });
  });
  // Add the partial sums of the blocks in order, in fp64.
  for (int64_t j = 0; j < columns; ++j) {
    double sum = 0;
    for (int64_t block = 0; block < blocks; ++block) sum += parts[block * columns + j];
    data<float>(dw)[j] = static_cast<float>(sum);
  }
  return {dx, dw};
}

// Returns silu(gate) * up for gate and up (T, F), both in fp32 or both in bf16.
Tensor swiglu(Tensor gate, Tensor up) {
  const int64_t rows = gate.size(0), columns = gate.size(1);
  const Tensor y = torch::stable::new_empty(gate, {rows, columns});
  with_type<float, Bfloat16>(gate, "gate", [&](auto stored) {
    using T = decltype(stored);
    const Matrix<const T> g = rows_of<T>(gate, "gate"), u = like<T>(up, "up", rows, columns);
    for_each_row(rows, columns, [&](int64_t i) {
      swiglu_row(g.row(i), u.row(i), columns, data<T>(y) + i * columns);
    });
  });
  return y;
}

// Returns dgate (T, F) and dup (T, F) of SwiGLU.
std::tuple<Tensor, Tensor> swiglu_backward(Tensor grad, Tensor gate, Tensor up) {
  const int64_t rows = gate.size(0), columns = gate.size(1);
  const Tensor dgate = torch::stable::new_empty(gate, {rows, columns});
  const Tensor dup = torch::stable::new_empty(gate, {rows, columns});
  with_type<float, Bfloat16>(gate, "gate", [&](auto stored) {
    using T = decltype(stored);
    const Matrix<const T> d = like<T>(grad, "grad", rows, columns), g = rows_of<T>(gate, "gate"),
                          u = like<T>(up, "up", rows, columns);
    for_each_row(rows, columns, [&](int64_t i) {
      swiglu_row_backward(d.row(i), g.row(i), u.row(i), columns, data<T>(dgate) + i * columns,
                          data<T>(dup) + i * columns);
    });
  });
  return {dgate, dup};
}

// Returns x (T, heads, D) rotated by the given angles. The result is contiguous.
Tensor rotated(const Tensor& x, const char* name, const Matrix<const float>& cosines,
               const Matrix<const float>& sines, int64_t rows, int64_t width, bool inverse) {
  STD_TORCH_CHECK(x.is_cpu() && is_fp32(x) && x.dim() == 3 && x.size(0) == rows &&
                      x.size(2) == width && x.stride(2) == 1,
                  name, ": expected (", rows, ", heads, ", width, "), float32 on a CPU");
  const int64_t heads = x.size(1);
  const Tensor y = torch::stable::new_empty(x, {rows, heads, width});
  for_each_row(rows, heads * width, [&](int64_t t) {
    for (int64_t h = 0; h < heads; ++h) {
      const float* from = data<const float>(x) + t * x.stride(0) + h * x.stride(1);
      float* to = data<float>(y) + (t * heads + h) * width;
      (inverse ? rotate<true> : rotate<false>)(from, cosines.row(t), sines.row(t), width / 2, to);
    }
  });
  return y;
}

// Rotates q (T, heads, D) and k (T, key heads, D) by the angles of cos and sin (T, D). With
// `inverse`, q and k are the gradients of rotated tensors, and the results are the gradients of the
// original tensors.
std::tuple<Tensor, Tensor> rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, bool inverse) {
  const int64_t rows = cos.size(0), width = cos.size(1);
  STD_TORCH_CHECK(width % 2 == 0, "cos: expected an even number of columns, got ", width);
  const Matrix<const float> c = rows_of(cos, "cos"), s = like(sin, "sin", rows, width);
  return {rotated(q, "q", c, s, rows, width, inverse), rotated(k, "k", c, s, rows, width, inverse)};
}

}  // namespace
}  // namespace grpo_fast

STABLE_TORCH_LIBRARY(GRPO_FAST_LIBRARY, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps, bool narrow) -> (Tensor, Tensor)");
  library.def(
      "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor r) -> (Tensor, Tensor)");
  library.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  library.def("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  library.def(
      "rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, bool inverse) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(GRPO_FAST_LIBRARY, CPU, library) {
  library.impl("rms_norm", TORCH_BOX(&grpo_fast::rms_norm));
  library.impl("rms_norm_backward", TORCH_BOX(&grpo_fast::rms_norm_backward));
  library.impl("swiglu", TORCH_BOX(&grpo_fast::swiglu));
  library.impl("swiglu_backward", TORCH_BOX(&grpo_fast::swiglu_backward));
  library.impl("rotary", TORCH_BOX(&grpo_fast::rotary));
}
