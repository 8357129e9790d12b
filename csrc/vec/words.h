// Functions that the formulas in loss_functions.h call, as scalars in fp64 and as vectors. Both
// versions of a function return the same numbers up to rounding.
#pragma once

#include <cmath>
#include <cstdint>

#include "vec/vec.h"

namespace grpo_fast {

// The results of a formula.
struct ValueAndSlope {
  double value, slope;
};
struct VectorPair {
  Floats value, slope;
};

// Scalar functions. If an argument is NaN, the result is NaN, as in torch.
inline double where(bool condition, double a, double b) { return condition ? a : b; }
inline bool where(bool condition, bool a, bool b) { return condition ? a : b; }
inline double clamp(double x, double low, double high) {
  return x < low ? low : x > high ? high : x;
}
inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double expm1_minus(double x) { return std::expm1(x) - x; }

// Returns a in the lanes where the condition is true, else b.
GRPO_FAST_INLINE Floats where(Ints condition, Floats a, Floats b) {
  return condition ? a : b;
}

// Limits x to [low, high]. NaN is kept.
GRPO_FAST_INLINE Floats clamp(Floats x, Floats low, Floats high) {
  return x < low ? low : x > high ? high : x;
}

// Returns |x|.
GRPO_FAST_INLINE Floats magnitude(Floats x) {
  return bit_cast<Floats>(bit_cast<Ints>(x) & INT32_MAX);
}

// Returns e^x - 1 for kExpFloor <= x <= 0, without cancellation. With x = n ln 2 + f as in
// exp_floored, it is 2^n (e^f - 1) + (2^n - 1).
GRPO_FAST_INLINE Floats expm1_floored(Floats x) {
  constexpr float kRounder = 12582912.0f;
  const Floats shifted = fma(x, 1.44269504088896341f, kRounder);
  const Floats n = shifted - kRounder;
  Floats f = fma(n, -0.693359375f, x);
  f = fma(n, 2.12194440054690583e-4f, f);
  Floats p = fma(f, 0.00019841270f, 0.0013888889f);  // Taylor series for |f| <= 0.347, error 1e-8
  p = fma(p, f, 0.0083333333f);
  p = fma(p, f, 0.041666667f);
  p = fma(p, f, 0.16666667f);
  p = fma(p, f, 0.5f);
  const Floats scale = bit_cast<Floats>((bit_cast<Ints>(shifted) + 127) << 23);
  return fma(scale, fma(f * f, p, f), scale - 1.0f);
}

// Returns e^x - 1 - x for |x| <= 0.5 from its Taylor series, with a relative error of 5e-8.
GRPO_FAST_INLINE Floats expm1_minus(Floats x) {
  Floats p = fma(x, 2.4801587e-5f, 1.9841270e-4f);
  p = fma(p, x, 1.3888889e-3f);
  p = fma(p, x, 8.3333333e-3f);
  p = fma(p, x, 4.1666667e-2f);
  p = fma(p, x, 1.6666667e-1f);
  p = fma(p, x, 0.5f);
  return x * x * p;
}

// Returns log(1 + x) for -1 < x <= 1, to within two units in the last place. 1 + x is split into
// 2^k (1 + f), and the rounding error of 1 + x is added to f. The polynomial comes from logf of the
// Cephes library.
GRPO_FAST_INLINE Floats log1p_above(Floats x) {
  const Floats y = x < splat(-0.99999994f) ? splat(-0.99999994f) : x, v = 1.0f + y;
  const Floats lost = y - (v - 1.0f);
  const Ints k = (bit_cast<Ints>(v) - 0x3f3504f3) >> 23;
  Floats f = bit_cast<Floats>(bit_cast<Ints>(v) - (k << 23)) - 1.0f;
  f = fma(lost, bit_cast<Floats>((127 - k) << 23), f);
  Floats p = fma(f, 7.0376836292e-2f, -1.1514610310e-1f);
  p = fma(p, f, 1.1676998740e-1f);
  p = fma(p, f, -1.2420140846e-1f);
  p = fma(p, f, 1.4249322787e-1f);
  p = fma(p, f, -1.6668057665e-1f);
  p = fma(p, f, 2.0000714765e-1f);
  p = fma(p, f, -2.4999993993e-1f);
  p = fma(p, f, 3.3333331174e-1f);
  const Floats n = __builtin_convertvector(k, Floats), square = f * f;
  Floats low = fma(f * square, p, n * -2.12194440e-4f);
  low = fma(square, -0.5f, low);
  return fma(n, 0.693359375f, low + f);
}

}  // namespace grpo_fast
