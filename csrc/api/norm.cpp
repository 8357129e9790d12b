// RMSNorm of a model's rows, fp32: y = w * x * r with r = 1 / sqrt(mean(x^2) + eps), and its
// gradients, each in one pass over the rows. Grad is that of y:
//   dx = r * (w * grad - x * r^2 * mean(w * grad * x)),   dw = sum over the rows of grad * x * r
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "api/tensors.h"
#include "rows/chunk.h"

namespace grpo_fast {
namespace {

constexpr int64_t kBlocks = 64;  // parts of dw, whatever the number of threads: the same bits

// x in the first `count` lanes, 0 in the others.
GRPO_FAST_INLINE Floats first(Floats x, int64_t count) {
  return count < kLanes ? keep_where(lane_numbers() < static_cast<int32_t>(count), x) : x;
}

void forward(const float* x, const float* w, float eps, int64_t columns, float* y, float* r) {
  Floats sums{};
  by_vectors(columns, [&](int64_t j, int64_t count) GRPO_FAST_BODY {
    const Floats numbers = first(load_up_to(x + j, count), count);
    sums = fma(numbers, numbers, sums);
  });
  const double mean = sum_lanes(widen(sums)) / static_cast<double>(columns);
  *r = static_cast<float>(1 / std::sqrt(mean + eps));
  by_vectors(columns, [&](int64_t j, int64_t count) GRPO_FAST_BODY {
    store_up_to(y + j, load_up_to(w + j, count) * (load_up_to(x + j, count) * *r), count);
  });
}

// Adds this row's part to dw.
void backward(const float* grad, const float* x, const float* w, float r, int64_t columns,
              float* dx, float* dw) {
  Floats sums{};
  by_vectors(columns, [&](int64_t j, int64_t count) GRPO_FAST_BODY {
    const Floats product = load_up_to(grad + j, count) * load_up_to(x + j, count);
    sums = fma(first(product, count), load_up_to(w + j, count), sums);
    store_up_to(dw + j, fma(product, r, load_up_to(dw + j, count)), count);
  });
  const double mean = sum_lanes(widen(sums)) / static_cast<double>(columns);
  const float back = static_cast<float>(-mean * r * r * r);
  by_vectors(columns, [&](int64_t j, int64_t count) GRPO_FAST_BODY {
    const Floats up = load_up_to(w + j, count) * load_up_to(grad + j, count);
    store_up_to(dx + j, fma(load_up_to(x + j, count), back, up * r), count);
  });
}

Matrix<const float> rows_of(const Tensor& x, const char* name) {
  check_matrix(x, name);
  STD_TORCH_CHECK(is_fp32(x), name, ": expected float32");
  return {data<const float>(x), x.stride(0)};
}

// x (T, H), weight (H,) -> y (T, H), r (T,)
std::tuple<Tensor, Tensor> rms_norm(Tensor x, Tensor weight, double eps) {
  const int64_t rows = x.size(0), columns = x.size(1);
  const Matrix<const float> from = rows_of(x, "x");
  const float* w = checked_vector<float>(weight, columns, "weight");
  const Tensor y = torch::stable::new_empty(x, {rows, columns}), r = empty(x, rows);
  float *to = data<float>(y), *scales = data<float>(r);
  for_each_row(rows, columns, [&](int64_t i) {
    forward(from.row(i), w, static_cast<float>(eps), columns, to + i * columns, scales + i);
  });
  return {y, r};
}

// -> dx (T, H), dw (H,)
std::tuple<Tensor, Tensor> rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor r) {
  const int64_t rows = x.size(0), columns = x.size(1);
  const Matrix<const float> up = rows_of(grad, "grad"), from = rows_of(x, "x");
  STD_TORCH_CHECK(grad.size(0) == rows && grad.size(1) == columns, "grad: expected the shape of x");
  const float *w = checked_vector<float>(weight, columns, "weight"),
              *scales = checked_vector<float>(r, rows, "r");
  const Tensor dx = torch::stable::new_empty(x, {rows, columns}), dw = empty(x, columns);
  const int64_t step = std::max<int64_t>(1, (rows + kBlocks - 1) / kBlocks);
  const int64_t blocks = (rows + step - 1) / step;
  std::vector<float> parts(static_cast<size_t>(blocks * columns));
  for_each_row(blocks, step * columns, [&](int64_t block) {
    for (int64_t i = block * step; i < std::min(rows, (block + 1) * step); ++i)
      backward(up.row(i), from.row(i), w, scales[i], columns, data<float>(dx) + i * columns,
               parts.data() + block * columns);
  });
  for (int64_t j = 0; j < columns; ++j) {
    double sum = 0;
    for (int64_t block = 0; block < blocks; ++block) sum += parts[block * columns + j];
    data<float>(dw)[j] = static_cast<float>(sum);
  }
  return {dx, dw};
}

}  // namespace
}  // namespace grpo_fast

STABLE_TORCH_LIBRARY(grpo_fast_norm, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)");
  library.def(
      "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor r) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(grpo_fast_norm, CPU, library) {
  library.impl("rms_norm", TORCH_BOX(&grpo_fast::rms_norm));
  library.impl("rms_norm_backward", TORCH_BOX(&grpo_fast::rms_norm_backward));
}
