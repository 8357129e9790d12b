// Formulas of elementwise layers, for one row at a time. `grad` is the gradient with respect to y.
// T is the storage type, fp32 or bf16. Numbers are computed in fp32, and rounded when they are
// stored.
//
//     RMSNorm   y = w x r, r = 1 / sqrt(mean(x^2) + eps)
//               dx = r (w grad - x r^2 mean(w grad x)),   dw = sum over the rows of grad x r
//     SwiGLU    y = g s u, s = 1 / (1 + e^-g)
//               dg = grad u s (1 + g (1 - s)),   du = grad g s
//     rotary    y = x cos + (-x_high, x_low) sin, for the halves (x_low, x_high) of a head
//               dx = grad cos + (grad_high sin_high, -grad_low sin_low)
//
// Rounding: sums over a row are fp32 in each lane, and fp64 across lanes.
#pragma once

#include <cmath>

#include "vec/storage.h"

namespace grpo_fast {

// Returns x in the first `count` lanes, and 0 in the other lanes.
GRPO_FAST_INLINE Floats first(Floats x, int64_t count) {
  return count < kLanes ? keep_where(lane_numbers() < static_cast<int32_t>(count), x) : x;
}

// Computes the RMSNorm of one row, and stores its factor r for the backward pass.
template <class T>
void norm_row(const float* x, const float* w, float eps, int64_t columns, T* y, float* r) {
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

// Computes dx of one row of RMSNorm, and adds the row's term to dw.
template <class T>
void norm_row_backward(const T* grad, const float* x, const float* w, float r, int64_t columns,
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

// sigmoid(x), and 1 - sigmoid(x) without cancellation.
struct Sigmoid {
  Floats value, rest;
};

GRPO_FAST_INLINE Sigmoid sigmoid(Floats x) {
  // Compute both results from e^-|x|, because e^-x may overflow.
  const Floats size = bit_cast<Floats>(bit_cast<Ints>(x) & INT32_MAX);
  const Floats a = exp_floored(floor_exponent(-size)), large = 1.0f / (1.0f + a), small = a * large;
  const Ints is_negative = x < splat(0);
  return {is_negative ? small : large, is_negative ? large : small};
}

// Computes y = silu(gate) * up for one row.
template <class T>
void swiglu_row(const T* gate, const T* up, int64_t columns, T* y) {
  by_vectors(columns, [&](int64_t j, int64_t count) GRPO_FAST_BODY {
    const Floats g = load_up_to(gate + j, count);
    store_up_to(y + j, g * sigmoid(g).value * load_up_to(up + j, count), count);
  });
}

// Computes the gradients of gate and up for one row of SwiGLU.
template <class T>
void swiglu_row_backward(const T* grad, const T* gate, const T* up, int64_t columns, T* dgate,
                         T* dup) {
  by_vectors(columns, [&](int64_t j, int64_t count) GRPO_FAST_BODY {
    const Floats d = load_up_to(grad + j, count), g = load_up_to(gate + j, count);
    const Sigmoid s = sigmoid(g);
    store_up_to(dup + j, d * (g * s.value), count);
    const Floats slope = s.value * fma(g, s.rest, 1.0f);
    store_up_to(dgate + j, d * load_up_to(up + j, count) * slope, count);
  });
}

// Rotates pairs of columns, each of which consists of a column of the first half and its partner in
// the second half. With kInverse, x is the gradient with respect to the rotated columns, and y
// receives the gradient with respect to the original columns.
template <bool kInverse>
inline void rotate(const float* x, const float* cosines, const float* sines, int64_t half,
                   float* y) {
  by_vectors(half, [&](int64_t j, int64_t count) GRPO_FAST_BODY {
    const auto at = [&](const float* row) GRPO_FAST_BODY { return load_up_to(row + j, count); };
    const Floats low = at(x), high = at(x + half), sin = at(sines), sin_high = at(sines + half);
    const Floats cos = low * at(cosines), cos_high = high * at(cosines + half);
    store_up_to(y + j, kInverse ? fma(high, sin_high, cos) : fma(-high, sin, cos), count);
    store_up_to(y + half + j, kInverse ? fma(-low, sin, cos_high) : fma(low, sin_high, cos_high),
                count);
  });
}

}  // namespace grpo_fast
