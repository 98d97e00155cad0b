// Vectors of 8 floats: what kernels in AVX2 share.
#pragma once
#include "planes.h"

#if STRATA_X86
#include <immintrin.h>

#define STRATA_INLINE_AVX2 STRATA_AVX2 inline __attribute__((always_inline))

namespace strata {

constexpr int kFloats = 8;

STRATA_INLINE_AVX2 __m256 floats_of(__m128i bfloat16s) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bfloat16s), 16)); }
STRATA_INLINE_AVX2 __m256 floats_at(const uint16_t* items) { return floats_of(_mm_loadu_si128(reinterpret_cast<const __m128i*>(items))); }

// Of pairs of bfloat16, one behind the other.
STRATA_INLINE_AVX2 __m256 even_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
STRATA_INLINE_AVX2 __m256 odd_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u)))); }

// The bits of bfloat16 in the low halves: rounded to nearest, ties to even; NaN stays NaN.
STRATA_INLINE_AVX2 __m256i bits_of_bfloat16(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i nearest = _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 broken = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
  return _mm256_srli_epi32(_mm256_blendv_epi8(nearest, quiet, _mm256_castps_si256(broken)), 16);
}

STRATA_INLINE_AVX2 __m128i bfloat16_of(__m256 values) {
  const __m256i wide = bits_of_bfloat16(values);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(wide, wide), 0x08));
}

// Of fewer than eight: zeros beyond them, which are not stored.
STRATA_INLINE_AVX2 __m256 floats_at(const uint16_t* items, int64_t count) {
  if (count >= kFloats) return floats_at(items);
  alignas(16) uint16_t some[kFloats] = {};
  __builtin_memcpy(some, items, static_cast<size_t>(count) * 2);
  return floats_at(some);
}

STRATA_INLINE_AVX2 void store_at(uint16_t* items, int64_t count, __m256 values) {
  const __m128i found = bfloat16_of(values);
  if (count >= kFloats) return _mm_storeu_si128(reinterpret_cast<__m128i*>(items), found);
  alignas(16) uint16_t some[kFloats];
  _mm_store_si128(reinterpret_cast<__m128i*>(some), found);
  __builtin_memcpy(items, some, static_cast<size_t>(count) * 2);
}

// As bfloat16 would hold them.
STRATA_INLINE_AVX2 __m256 rounded(__m256 values) { return _mm256_castsi256_ps(_mm256_slli_epi32(bits_of_bfloat16(values), 16)); }

STRATA_INLINE_AVX2 float sum_of(__m256 values) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  const __m128 two = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// 8 x 8 numbers of 32 bits, rows for columns.
STRATA_INLINE_AVX2 void transpose(__m256i* rows) {
  __m256i next[8];
#pragma GCC unroll 4
  for (int each = 0; each < 4; ++each) {
    next[2 * each] = _mm256_unpacklo_epi32(rows[2 * each], rows[2 * each + 1]);
    next[2 * each + 1] = _mm256_unpackhi_epi32(rows[2 * each], rows[2 * each + 1]);
  }
#pragma GCC unroll 2
  for (int half = 0; half < 8; half += 4) {
    rows[half] = _mm256_unpacklo_epi64(next[half], next[half + 2]);
    rows[half + 1] = _mm256_unpackhi_epi64(next[half], next[half + 2]);
    rows[half + 2] = _mm256_unpacklo_epi64(next[half + 1], next[half + 3]);
    rows[half + 3] = _mm256_unpackhi_epi64(next[half + 1], next[half + 3]);
  }
#pragma GCC unroll 4
  for (int each = 0; each < 4; ++each) next[each] = rows[each];
#pragma GCC unroll 4
  for (int each = 0; each < 4; ++each) {
    rows[each] = _mm256_permute2x128_si256(next[each], rows[4 + each], 0x20);
    rows[4 + each] = _mm256_permute2x128_si256(next[each], rows[4 + each], 0x31);
  }
}

// e^x for x <= 0, and of those below -87, whose powers are no whole numbers any more, that of -87: 2^n of the whole part, a polynomial of the rest.
STRATA_INLINE_AVX2 __m256 exponential(__m256 x) {
  // NaN stays: of `max` the second operand is given where one is none.
  const __m256 scaled = _mm256_mul_ps(_mm256_max_ps(_mm256_set1_ps(-87.0f), x), _mm256_set1_ps(1.44269504088896341f));
  const __m256 whole = _mm256_round_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 rest = _mm256_sub_ps(scaled, whole);
  __m256 value = _mm256_set1_ps(1.5403530393381606e-4f);
  value = _mm256_fmadd_ps(value, rest, _mm256_set1_ps(1.3333558146428443e-3f));
  value = _mm256_fmadd_ps(value, rest, _mm256_set1_ps(9.6181291076284772e-3f));
  value = _mm256_fmadd_ps(value, rest, _mm256_set1_ps(5.5504108664821580e-2f));
  value = _mm256_fmadd_ps(value, rest, _mm256_set1_ps(2.4022650695910071e-1f));
  value = _mm256_fmadd_ps(value, rest, _mm256_set1_ps(6.9314718055994531e-1f));
  value = _mm256_fmadd_ps(value, rest, _mm256_set1_ps(1.0f));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(value, _mm256_castsi256_ps(power));
}

}  // namespace strata
#endif
