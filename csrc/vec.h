// The vector layer: a few operations on kLanes floats, written once with the vector extensions of GCC and clang.
//
// The compiler maps them to zmm (16 lanes), ymm (8) or 128-bit registers (4). A width above the machine's is legal and
// split by the compiler, so the 16-lane build runs, slower, on an AVX2 machine: that is how the tests cover it there.
// Built with -ffp-contract=off: one rounding is written fma(), so two instances of a template agree bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define GRPO_FAST_INLINE [[gnu::always_inline]] inline

#if !defined(GRPO_FAST_LANES)
#if defined(__AVX512F__)
#define GRPO_FAST_LANES 16
#elif defined(__AVX__)
#define GRPO_FAST_LANES 8
#else
#define GRPO_FAST_LANES 4
#endif
#endif

namespace grpo_fast {

constexpr int kLanes = GRPO_FAST_LANES;

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef double Doubles __attribute__((vector_size(kLanes * 8)));

// Storage types: only their bits matter here.
struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class To, class From>
GRPO_FAST_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

GRPO_FAST_INLINE Floats splat(float x) {
  return x - Floats{};  // x - 0 keeps every x, -0 and NaN included
}

GRPO_FAST_INLINE Ints lane_numbers() {
  Ints numbers;
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  return numbers;
}

// a where a > b, else b: a NaN in b passes through, a NaN in a is dropped.
GRPO_FAST_INLINE Floats max(Floats a, Floats b) {
#if defined(__AVX512F__) && GRPO_FAST_LANES == 16
  return bit_cast<Floats>(_mm512_max_ps(bit_cast<__m512>(a), bit_cast<__m512>(b)));
#elif defined(__AVX__) && GRPO_FAST_LANES == 8
  return bit_cast<Floats>(_mm256_max_ps(bit_cast<__m256>(a), bit_cast<__m256>(b)));  // g++ 12 misses it
#else
  return a > b ? a : b;
#endif
}

// a * b + c, rounded once where the machine has FMA.
GRPO_FAST_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__) && GRPO_FAST_LANES == 16
  return bit_cast<Floats>(_mm512_fmadd_ps(bit_cast<__m512>(a), bit_cast<__m512>(b), bit_cast<__m512>(c)));
#elif defined(__FMA__) && GRPO_FAST_LANES == 8
  return bit_cast<Floats>(_mm256_fmadd_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), bit_cast<__m256>(c)));
#elif defined(__aarch64__) && GRPO_FAST_LANES == 4
  return bit_cast<Floats>(vfmaq_f32(bit_cast<float32x4_t>(c), bit_cast<float32x4_t>(a), bit_cast<float32x4_t>(b)));
#else
  return a * b + c;
#endif
}

GRPO_FAST_INLINE Floats fma(Floats a, float b, Floats c) {
  return fma(a, splat(b), c);
}

GRPO_FAST_INLINE Floats fma(Floats a, float b, float c) {
  return fma(a, splat(b), splat(c));
}

GRPO_FAST_INLINE Floats fma(Floats a, Floats b, float c) {
  return fma(a, b, splat(c));
}

GRPO_FAST_INLINE Floats keep_where(Ints mask, Floats x) {
  return bit_cast<Floats>(bit_cast<Ints>(x) & mask);  // a select: 0 elsewhere, also for NaN and inf
}

GRPO_FAST_INLINE float max_lane(Floats x) {
  float best = x[0];
  for (int lane = 1; lane < kLanes; ++lane) best = x[lane] > best ? x[lane] : best;
  return best;
}

GRPO_FAST_INLINE Doubles widen(Floats x) {
  return __builtin_convertvector(x, Doubles);
}

// Pairwise, in fixed order.
GRPO_FAST_INLINE double sum_lanes(Doubles x) {
  double lanes[kLanes];
  std::memcpy(lanes, &x, sizeof(lanes));
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// ---- memory: fp32, bf16 and fp16 in, fp32 in registers, round to nearest even out ----

GRPO_FAST_INLINE float load_one(const float* x) {
  return *x;
}

GRPO_FAST_INLINE float load_one(const Bfloat16* x) {
  return bit_cast<float>(static_cast<uint32_t>(x->bits) << 16);
}

GRPO_FAST_INLINE float load_one(const Float16* x) {
  const uint32_t sign = (x->bits & 0x8000u) << 16, rest = x->bits & 0x7fffu;
  if (rest >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | (rest << 13));
  // Shifted into place the exponent is short by 112; the product repairs it, subnormals included.
  return bit_cast<float>(bit_cast<uint32_t>(bit_cast<float>(rest << 13) * 0x1p112f) | sign);
}

GRPO_FAST_INLINE void store_one(float* out, float x) {
  *out = x;
}

GRPO_FAST_INLINE void store_one(Bfloat16* out, float x) {
  const uint32_t word = bit_cast<uint32_t>(x);
  out->bits = x != x ? 0x7fc0u : static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

GRPO_FAST_INLINE void store_one(Float16* out, float x) {
  const uint32_t word = bit_cast<uint32_t>(x), sign = (word >> 16) & 0x8000u, size = word & 0x7fffffffu;
  uint32_t bits;
  if (size > 0x7f800000u)
    bits = 0x7e00u;
  else if (size >= 0x477ff000u)  // 65520 and above round to infinity
    bits = 0x7c00u;
  else if (size < 0x38800000u)  // below 2^-14: adding 0.5 leaves the subnormal's bits in the low half
    bits = bit_cast<uint32_t>(bit_cast<float>(size) + 0.5f) - 0x3f000000u;
  else
    bits = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
  out->bits = static_cast<uint16_t>(sign | bits);
}

GRPO_FAST_INLINE Floats load(const float* x) {
  Floats values;
  std::memcpy(&values, x, sizeof(values));
  return values;
}

GRPO_FAST_INLINE Floats load(const Bfloat16* x) {
  Halves halves;
  std::memcpy(&halves, x, sizeof(halves));
#if defined(__AVX512F__) && GRPO_FAST_LANES == 16
  const Words words = bit_cast<Words>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(halves)));  // g++ 12: three steps
#elif defined(__AVX2__) && GRPO_FAST_LANES == 8
  const Words words = bit_cast<Words>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(halves)));
#else
  const Words words = __builtin_convertvector(halves, Words);
#endif
  return bit_cast<Floats>(words << 16);
}

GRPO_FAST_INLINE void store(float* out, Floats x) {
  std::memcpy(out, &x, sizeof(x));
}

GRPO_FAST_INLINE void store(Bfloat16* out, Floats x) {
  const Words word = bit_cast<Words>(x);
  const Words rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  const Words halves = x != x ? Words{} + 0x7fc0u : rounded;
#if defined(__AVX2__) && GRPO_FAST_LANES == 8
  const __m256i packed = _mm256_packus_epi32(bit_cast<__m256i>(halves), _mm256_setzero_si256());  // per 128-bit half
  const __m128i joined = _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  std::memcpy(out, &joined, sizeof(joined));
#else
  const Halves narrow = __builtin_convertvector(halves, Halves);
  std::memcpy(out, &narrow, sizeof(narrow));
#endif
}

#if defined(__AVX512F__) && GRPO_FAST_LANES == 16
GRPO_FAST_INLINE Floats load(const Float16* x) {
  return bit_cast<Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))));
}
GRPO_FAST_INLINE void store(Float16* out, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtps_ph(bit_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__) && GRPO_FAST_LANES == 8
GRPO_FAST_INLINE Floats load(const Float16* x) {
  return bit_cast<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}
GRPO_FAST_INLINE void store(Float16* out, Floats x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(bit_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT));
}
#else
GRPO_FAST_INLINE Floats load(const Float16* x) {
  Floats values;
  for (int lane = 0; lane < kLanes; ++lane) values[lane] = load_one(x + lane);
  return values;
}
GRPO_FAST_INLINE void store(Float16* out, Floats x) {
  for (int lane = 0; lane < kLanes; ++lane) store_one(out + lane, x[lane]);
}
#endif

// Asks for kCount elements from x on; an address past the end of the row is harmless.
template <int kCount, class T>
GRPO_FAST_INLINE void prefetch(const T* x) {
  const char* bytes = reinterpret_cast<const char*>(x);
  for (size_t line = 0; line < kCount * sizeof(T); line += 64) __builtin_prefetch(bytes + line);
}

// The last 1 .. kLanes - 1 elements of a row; the lanes past them repeat the first.
template <class T>
GRPO_FAST_INLINE Floats load_tail(const T* x, int64_t count) {
  Floats values = splat(load_one(x));
  for (int64_t lane = 1; lane < count; ++lane) values[lane] = load_one(x + lane);
  return values;
}

template <class T>
GRPO_FAST_INLINE Floats load_up_to(const T* x, int64_t count) {
  return count >= kLanes ? load(x) : load_tail(x, count);
}

template <class T>
GRPO_FAST_INLINE void store_tail(T* out, Floats x, int64_t count) {
  for (int64_t lane = 0; lane < count; ++lane) store_one(out + lane, x[lane]);
}

// ---- functions ----

// exp below this is 0 here: there the rounded exponent is -127, whose scale factor has all bits clear.
constexpr float kExpFloor = -88.0f;

// The argument exp_floored takes: NaN stays NaN, -inf becomes finite (so that 0 * x is 0 later).
GRPO_FAST_INLINE Floats floor_exponent(Floats x) {
  return max(splat(kExpFloor), x);
}

// e^x for kExpFloor <= x <= 88: relative error at most 1e-7, exactly 0 below -87.7.
// x = n ln 2 + f, e^f by a minimax polynomial of degree 6 (3e-9; fitted by Remez exchange), 2^n from exponent bits.
GRPO_FAST_INLINE Floats exp_floored(Floats x) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Floats shifted = fma(x, 1.44269504088896341f, kRounder);
  const Floats n = shifted - kRounder;
  Floats f = fma(n, -0.693359375f, x);  // n times these 10 bits is exact, also without FMA
  f = fma(n, 2.12194440054690583e-4f, f);
  Floats p = fma(f, 0.0013814540579915047f, 0.00836874544620514f);
  p = fma(p, f, 0.04166838899254799f);
  p = fma(p, f, 0.1666652113199234f);
  p = fma(p, f, 0.4999999403953552f);
  p = fma(p, f, 1.0f);
  p = fma(p, f, 1.0f);
  return p * bit_cast<Floats>((bit_cast<Ints>(shifted) + 127) << 23);
}

struct TanhAndSlope {
  Floats value;
  Floats slope;  // 1 - tanh^2, without its cancellation
};

// tanh to 2e-7 relative, both outputs finite for every x but NaN.
GRPO_FAST_INLINE TanhAndSlope tanh_and_slope(Floats x) {
  const Ints sign = bit_cast<Ints>(x) & INT32_MIN;
  const Floats size = bit_cast<Floats>(bit_cast<Ints>(x) & INT32_MAX);
  const Floats a = exp_floored(floor_exponent(size * -2.0f));
  const Floats q = 1.0f / (1.0f + a);
  const Floats square = x * x;
  Floats p = fma(square, -0.005905868485569954f, 0.02080538496375084f);  // minimax on |x| < 0.6: 3e-9
  p = fma(p, square, -0.053786683827638626f);
  p = fma(p, square, 0.13331958651542664f);
  p = fma(p, square, -0.33333298563957214f);
  const Floats small = fma(size, square * p, size);
  const Floats value = size < splat(0.6f) ? small : (1.0f - a) * q;
  return {bit_cast<Floats>(bit_cast<Ints>(value) | sign), 4.0f * a * (q * q)};
}

}  // namespace grpo_fast
