// Storage types of vectors: fp32 and three 16-bit types. Registers contain fp32 only, so a load
// converts from the storage type, and a store converts back.
//
// Rounding: stores round to the nearest value, with ties to even. Positive16 rounds ties up.
#pragma once

#include "vec/vec.h"

namespace grpo_fast {

// The 16-bit storage types. Each struct contains only the bits of a number.
struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
// A 16-bit type for numbers from 0 to 2^30, without a sign bit and with 7 exponent bits. It has ten
// significant bits, two more than bf16. Numbers below 2^-98 are stored as 0.
struct Positive16 {
  uint16_t bits;
};
constexpr uint32_t kLeastPositive = 29u << 23;  // 2^-98, as the bits of an fp32

// ---- loads and stores of kLanes elements ----

template <class To>
GRPO_FAST_INLINE To read(const void* x) {
  To to;
  std::memcpy(&to, x, sizeof(to));
  return to;
}

typedef long long HalfRegister __attribute__((vector_size(kLanes * 2)));

// Loads kLanes 16-bit values and zero-extends them to 32 bits.
GRPO_FAST_INLINE Words load_halves(const void* x) {
#if defined(GRPO_FAST_X86)
  // Use the intrinsic, because g++ 12 compiles the portable expression to three instructions.
  return bit_cast<Words>(GRPO_FAST_X86(cvtepu16_epi32)(read<HalfRegister>(x)));
#else
  return __builtin_convertvector(read<Halves>(x), Words);
#endif
}

// Stores the lower 16 bits of every word. The upper 16 bits must be 0.
GRPO_FAST_INLINE void store_halves(void* out, Words words) {
#if defined(__AVX2__) && GRPO_FAST_LANES == 8
  const __m256i zeros = _mm256_setzero_si256();
  const __m256i packed = _mm256_packus_epi32(bit_cast<__m256i>(words), zeros);  // per 128-bit half
  const __m128i narrow = _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
  const Halves narrow = __builtin_convertvector(words, Halves);
#endif
  std::memcpy(out, &narrow, sizeof(narrow));
}

GRPO_FAST_INLINE Floats load(const float* x) {
  return read<Floats>(x);
}

GRPO_FAST_INLINE Floats load(const Bfloat16* x) {
  return bit_cast<Floats>(load_halves(x) << 16);
}

// Loads Positive16 numbers as fp32. Exponent and fraction are shifted to their places in fp32, and
// the exponent offset is added. Zeros are masked, because the offset would turn them into 2^-98.
GRPO_FAST_INLINE Floats load(const Positive16* x) {
  const Words halves = load_halves(x);
  return keep_where(halves != 0u, bit_cast<Floats>((halves << 14) + kLeastPositive));
}

GRPO_FAST_INLINE Floats load(const Float16* x) {
#if defined(GRPO_FAST_X86)
  return GRPO_FAST_X86(cvtph_ps)(read<HalfRegister>(x));
#else
  const Words halves = load_halves(x), rest = (halves & 0x7fffu) << 13;
  // After the shift, the exponent is too small by 112, so multiply by 2^112. This is also right for
  // subnormal numbers.
  const Words finite = bit_cast<Words>(bit_cast<Floats>(rest) * 0x1p112f);
  const Words size = rest >= (0x7c00u << 13) ? rest | 0x7f800000u : finite;
  return bit_cast<Floats>(size | (halves & 0x8000u) << 16);
#endif
}

GRPO_FAST_INLINE void store(float* out, Floats x) {
  std::memcpy(out, &x, sizeof(x));
}

GRPO_FAST_INLINE void store(Bfloat16* out, Floats x) {
  const Words word = bit_cast<Words>(x);
  // Adding 0x7fff plus the lowest bit that remains rounds to nearest, with ties to even.
  const Words rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  store_halves(out, x != x ? Words{} + 0x7fc0u : rounded);
}

GRPO_FAST_INLINE void store(Positive16* out, Floats x) {
  // Subtract the exponent offset, and add 0x2000, so that the shift below rounds to nearest.
  // Negative results become 0.
  const Ints above = bit_cast<Ints>(x) - static_cast<int32_t>(kLeastPositive - 0x2000u);
  store_halves(out, bit_cast<Words>((above > 0 ? above : Ints{}) >> 14));
}

GRPO_FAST_INLINE void store(Float16* out, Floats x) {
#if defined(GRPO_FAST_X86)
  const auto halves = GRPO_FAST_X86(cvtps_ph)(x, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(out, &halves, sizeof(halves));
#else
  const Words word = bit_cast<Words>(x), size = word & 0x7fffffffu;
  const Words normal = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
  // A number below 2^-14 becomes a subnormal fp16. Adding 0.5 rounds it, and the low half of the
  // sum then contains the bits of the subnormal.
  const Words small = bit_cast<Words>(bit_cast<Floats>(size) + 0.5f) - 0x3f000000u;
  Words bits = size < 0x38800000u ? small : normal;
  bits = size >= 0x477ff000u ? Words{} + 0x7c00u : bits;  // 65520 and above become infinity
  bits = size > 0x7f800000u ? Words{} + 0x7e00u : bits;
  store_halves(out, ((word >> 16) & 0x8000u) | bits);
#endif
}

// Prefetches kCount elements. The address may be past the end of the row, because a prefetch never
// faults.
template <int kCount, class T>
GRPO_FAST_INLINE void prefetch(const T* x) {
  const char* bytes = reinterpret_cast<const char*>(x);
  for (size_t line = 0; line < kCount * sizeof(T); line += 64) __builtin_prefetch(bytes + line);
}

// ---- rows of elements ----

// View of a matrix with contiguous rows. `stride` is the number of elements from row to row.
template <class T>
struct Matrix {
  T* data;
  int64_t stride;

  T* row(int64_t index) const { return data + index * stride; }
};

// Loads kLanes elements. If only `count` elements remain, the other lanes repeat the first element,
// so that they contain nothing from outside the row.
template <class T>
GRPO_FAST_INLINE Floats load_up_to(const T* x, int64_t count) {
  if (count >= kLanes) return load(x);
  T numbers[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) numbers[lane] = x[lane < count ? lane : 0];
  return load(numbers);
}

// Stores all lanes, or only the first `count` lanes if fewer than kLanes elements remain.
template <class T>
GRPO_FAST_INLINE void store_up_to(T* out, Floats x, int64_t count) {
  if (count >= kLanes) return store(out, x);
  T numbers[kLanes];
  store(numbers, x);
  for (int64_t lane = 0; lane < count; ++lane) out[lane] = numbers[lane];
}

// Loads one element and converts it to fp32.
template <class T>
GRPO_FAST_INLINE float load_one(const T* x) {
  return load_up_to(x, 1)[0];
}

// Calls body(column, count) for each vector of a row. In every call but the last, `count` is the
// constant kLanes, so the compiler can specialise the body for full vectors.
template <class Body>
GRPO_FAST_INLINE void by_vectors(int64_t columns, const Body& body) {
  int64_t column = 0;
  for (; column + kLanes <= columns; column += kLanes) body(column, kLanes);
  if (column < columns) body(column, columns - column);
}

// Adds factor * x to `sums`, element by element.
template <class T>
void add_scaled(const T* x, float factor, int64_t columns, float* sums) {
  by_vectors(columns, [&](int64_t c, int64_t count) GRPO_FAST_BODY {
    const Floats before = load_up_to(sums + c, count);
    store_up_to(sums + c, fma(load_up_to(x + c, count), factor, before), count);
  });
}

}  // namespace grpo_fast
