// Numbers as they lie in memory: fp32, and three kinds of 16 bits. In registers they are fp32; what goes out is rounded to
// nearest, ties to even (of Positive16: up).
#pragma once

#include <cstddef>

#include "vec/vec.h"

namespace grpo_fast {

// Storage types: only their bits matter here.
struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
// A number from 0 to 2^30 with ten binary digits, two more than bf16 has: no sign, and 7 bits of exponent. What is
// smaller than 2^-98 is 0.
struct Positive16 {
  uint16_t bits;
};
constexpr uint32_t kLeastPositive = 29u << 23;  // 2^-98 as fp32

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

GRPO_FAST_INLINE float load_one(const Positive16* x) {
  return x->bits ? bit_cast<float>((static_cast<uint32_t>(x->bits) << 14) + kLeastPositive) : 0.0f;
}

GRPO_FAST_INLINE void store_one(float* out, float x) {
  *out = x;
}

GRPO_FAST_INLINE void store_one(Positive16* out, float x) {
  const int32_t above = bit_cast<int32_t>(x) - static_cast<int32_t>(kLeastPositive - 0x2000u);  // ties go up
  out->bits = static_cast<uint16_t>((above > 0 ? above : 0) >> 14);
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

// kLanes numbers of 16 bits.
GRPO_FAST_INLINE Words load_halves(const void* x) {
  Halves halves;
  std::memcpy(&halves, x, sizeof(halves));
#if defined(__AVX512F__) && GRPO_FAST_LANES == 16
  return bit_cast<Words>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(halves)));  // g++ 12: three steps
#elif defined(__AVX2__) && GRPO_FAST_LANES == 8
  return bit_cast<Words>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(halves)));
#else
  return __builtin_convertvector(halves, Words);
#endif
}

// The lower halves of words whose upper halves are 0.
GRPO_FAST_INLINE void store_halves(void* out, Words words) {
#if defined(__AVX2__) && GRPO_FAST_LANES == 8
  const __m256i packed = _mm256_packus_epi32(bit_cast<__m256i>(words), _mm256_setzero_si256());  // per 128-bit half
  const __m128i joined = _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  std::memcpy(out, &joined, sizeof(joined));
#else
  const Halves narrow = __builtin_convertvector(words, Halves);
  std::memcpy(out, &narrow, sizeof(narrow));
#endif
}

GRPO_FAST_INLINE Floats load(const Bfloat16* x) {
  return bit_cast<Floats>(load_halves(x) << 16);
}

GRPO_FAST_INLINE Floats load(const Positive16* x) {
  const Words halves = load_halves(x);
  return keep_where(halves != 0u, bit_cast<Floats>((halves << 14) + kLeastPositive));
}

GRPO_FAST_INLINE void store(float* out, Floats x) {
  std::memcpy(out, &x, sizeof(x));
}

GRPO_FAST_INLINE void store(Bfloat16* out, Floats x) {
  const Words word = bit_cast<Words>(x);
  const Words rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  store_halves(out, x != x ? Words{} + 0x7fc0u : rounded);
}

GRPO_FAST_INLINE void store(Positive16* out, Floats x) {
  const Ints above = bit_cast<Ints>(x) - static_cast<int32_t>(kLeastPositive - 0x2000u);
  store_halves(out, bit_cast<Words>((above > 0 ? above : Ints{}) >> 14));
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

template <class T>
GRPO_FAST_INLINE void store_up_to(T* out, Floats x, int64_t count) {
  count >= kLanes ? store(out, x) : store_tail(out, x, count);
}

// body(column, count) for each vector of a row; count is a constant in all but the last.
template <class Body>
GRPO_FAST_INLINE void by_vectors(int64_t columns, const Body& body) {
  int64_t column = 0;
  for (; column + kLanes <= columns; column += kLanes) body(column, kLanes);
  if (column < columns) body(column, columns - column);
}

// sums += factor * x
template <class T>
void add_scaled(const T* x, float factor, int64_t columns, float* sums) {
  by_vectors(columns, [&](int64_t c, int64_t count) GRPO_FAST_BODY {
    store_up_to(sums + c, fma(load_up_to(x + c, count), factor, load_up_to(sums + c, count)), count);
  });
}

}  // namespace grpo_fast
