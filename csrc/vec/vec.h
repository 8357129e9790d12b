// Operations on vectors of kLanes floats, written with the vector extensions of GCC and clang.
//
// A vector is a zmm register (16 lanes), a ymm register (8 lanes) or a 128-bit register (4 lanes).
// The compiler splits a vector that is wider than the registers of the CPU. The 16-lane code can
// therefore also be tested with AVX2.
//
// Rounding: the build uses -ffp-contract=off, so the compiler never fuses a product with an
// addition. Code that needs a single rounding calls fma(). All instances of a template therefore
// agree bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#define GRPO_FAST_INLINE [[gnu::always_inline]] inline
#define GRPO_FAST_BODY __attribute__((always_inline))  // always_inline for lambdas

#if !defined(GRPO_FAST_LANES)
#if defined(__AVX512F__)
#define GRPO_FAST_LANES 16
#elif defined(__AVX__)
#define GRPO_FAST_LANES 8
#else
#define GRPO_FAST_LANES 4
#endif
#endif

// GRPO_FAST_X86(max_ps) is the name of the x86 intrinsic for kLanes floats. The macro is undefined
// if the target has no registers of this width.
#if defined(__AVX512F__) && GRPO_FAST_LANES == 16
#define GRPO_FAST_X86(name) _mm512_##name
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && GRPO_FAST_LANES == 8
#define GRPO_FAST_X86(name) _mm256_##name
#endif

namespace grpo_fast {

constexpr int kLanes = GRPO_FAST_LANES;

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef double Doubles __attribute__((vector_size(kLanes * 8)));

template <class To, class From>
GRPO_FAST_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// Returns a vector with x in every lane. The code subtracts 0, because x - 0 keeps -0, whereas x +
// 0 would turn -0 into 0.
GRPO_FAST_INLINE Floats splat(float x) {
  return x - Floats{};
}

GRPO_FAST_INLINE Ints lane_numbers() {
  Ints numbers;
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  return numbers;
}

// Returns a where a > b, else b, for each lane. If either number is NaN, the result is b.
GRPO_FAST_INLINE Floats max(Floats a, Floats b) {
#if defined(GRPO_FAST_X86)
  return GRPO_FAST_X86(max_ps)(a, b);  // g++ 12 compiles the line below to two instructions
#else
  return a > b ? a : b;
#endif
}

// Returns a where a < b, else b, for each lane. If either number is NaN, the result is b.
GRPO_FAST_INLINE Floats min(Floats a, Floats b) {
  return a < b ? a : b;
}

// Returns a * b + c. The result is rounded once if the target has FMA, otherwise twice.
GRPO_FAST_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(GRPO_FAST_X86)
  return GRPO_FAST_X86(fmadd_ps)(a, b, c);
#else
  return a * b + c;
#endif
}

// The same for scalar b and c.
template <class B, class C>
GRPO_FAST_INLINE Floats fma(Floats a, B b, C c) {
  return fma(a, b - Floats{}, c - Floats{});
}

// Returns x where the mask is set, else 0. The bitwise AND also clears NaN and inf, for which a
// product with 0 would give NaN.
GRPO_FAST_INLINE Floats keep_where(Ints mask, Floats x) {
  return bit_cast<Floats>(bit_cast<Ints>(x) & mask);
}

// Converts a mask (the result of a comparison) to an integer whose bit i is set if lane i is true.
GRPO_FAST_INLINE uint32_t bits_of(Ints mask) {
#if defined(__AVX512F__) && GRPO_FAST_LANES == 16
  return _mm512_cmplt_epi32_mask(bit_cast<__m512i>(mask), _mm512_setzero_si512());
#elif defined(__AVX__) && GRPO_FAST_LANES == 8
  return static_cast<uint32_t>(_mm256_movemask_ps(bit_cast<Floats>(mask)));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= mask[lane] ? 1u << lane : 0u;
  return bits;
#endif
}

// Calls body(lane) for each of the first `count` lanes whose mask is true, in ascending order.
template <class Body>
inline void each_lane(Ints mask, int64_t count, const Body& body) {
  uint32_t bits = bits_of(mask) & ((1u << count) - 1u);
  for (; bits; bits &= bits - 1) body(__builtin_ctz(bits));
}

// Returns the largest lane.
GRPO_FAST_INLINE float max_lane(Floats x) {
  float best = x[0];
  for (int lane = 1; lane < kLanes; ++lane) best = x[lane] > best ? x[lane] : best;
  return best;
}

GRPO_FAST_INLINE Doubles widen(Floats x) {
  return __builtin_convertvector(x, Doubles);
}

// Adds the upper half of the lanes to the lower half, again and again, until one lane remains.
// Returns this lane.
template <int kCount>
GRPO_FAST_INLINE double sum_of(const double* lanes) {
  if constexpr (kCount == 1) {
    return *lanes;
  } else {
    typedef double Half __attribute__((vector_size(kCount / 2 * 8)));
    Half low, high;
    std::memcpy(&low, lanes, sizeof(Half));
    std::memcpy(&high, lanes + kCount / 2, sizeof(Half));
    low += high;
    return sum_of<kCount / 2>(reinterpret_cast<const double*>(&low));
  }
}

// Returns the sum of all lanes, added in a fixed pairwise order. The additions use vectors of half
// the width, because a loop over the lanes would make up a fifth of the time of a pass without
// gradient.
GRPO_FAST_INLINE double sum_lanes(Doubles x) {
  return sum_of<kLanes>(reinterpret_cast<const double*>(&x));
}

// ---- transcendental functions ----

// The smallest argument of exp_floored. There, the result is 0: the rounded binary exponent is
// -127, so the bits of the scale factor are all 0.
constexpr float kExpFloor = -88.0f;

// Returns max(kExpFloor, x) as an argument for exp_floored. NaN is kept. -inf becomes finite, so
// that a later product 0 * x is 0 instead of NaN.
GRPO_FAST_INLINE Floats floor_exponent(Floats x) {
  return max(splat(kExpFloor), x);
}

// Exponentials below this number become 0 in gradients. Their products would be denormal numbers,
// with which a CPU computes many times more slowly.
constexpr float kNegligible = 0x1p-98f;

// Returns floor_exponent(x), but kExpFloor where e^x is below kNegligible. NaN is kept.
GRPO_FAST_INLINE Floats drop_negligible(Floats x) {
  constexpr float kLeast = -67.92842f;  // ln kNegligible
  return x < splat(kLeast) ? splat(kExpFloor) : x;
}

// Returns e^x for kExpFloor <= x <= 88. The relative error is at most 1e-7, and the result is
// exactly 0 below -87.7.
//
// Write x as n ln 2 + f. e^f is approximated by a minimax polynomial of degree 6 (Remez, error
// 3e-9), and 2^n is built from its exponent bits.
GRPO_FAST_INLINE Floats exp_floored(Floats x) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = fma(x, 1.44269504088896341f, kRounder);
  const Floats n = shifted - kRounder;
  Floats f = fma(n, -0.693359375f, x);  // exact even without FMA, because the constant has 10 bits
  f = fma(n, 2.12194440054690583e-4f, f);
  Floats p = fma(f, 0.0013814540579915047f, 0.00836874544620514f);
  p = fma(p, f, 0.04166838899254799f);
  p = fma(p, f, 0.1666652113199234f);
  p = fma(p, f, 0.4999999403953552f);
  p = fma(p, f, 1.0f);
  p = fma(p, f, 1.0f);
  return p * bit_cast<Floats>((bit_cast<Ints>(shifted) + 127) << 23);
}

// Value and derivative of tanh.
struct TanhAndSlope {
  Floats value;
  Floats slope;  // 1 - tanh^2, without cancellation
};

// Computes tanh with a relative error of 2e-7, and its derivative. Both are finite unless x is NaN.
GRPO_FAST_INLINE TanhAndSlope tanh_and_slope(Floats x) {
  const Ints sign = bit_cast<Ints>(x) & INT32_MIN;
  const Floats size = bit_cast<Floats>(bit_cast<Ints>(x) & INT32_MAX);
  const Floats a = exp_floored(floor_exponent(size * -2.0f));
  const Floats q = 1.0f / (1.0f + a);
  const Floats square = x * x;
  // For |x| < 0.6, use a polynomial (error 3e-9), because 1 - a would lose digits to cancellation.
  Floats p = fma(square, -0.005905868485569954f, 0.02080538496375084f);
  p = fma(p, square, -0.053786683827638626f);
  p = fma(p, square, 0.13331958651542664f);
  p = fma(p, square, -0.33333298563957214f);
  const Floats small = fma(size, square * p, size);
  const Floats value = size < splat(0.6f) ? small : (1.0f - a) * q;
  return {bit_cast<Floats>(bit_cast<Ints>(value) | sign), 4.0f * a * (q * q)};
}

}  // namespace grpo_fast
