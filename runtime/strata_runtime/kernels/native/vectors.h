// Vectors of 16 floats: what kernels in AVX-512 share beside bit-planes.
#pragma once
#include "avx512.h"

#if STRATA_X86
namespace strata {

constexpr int kLanes = 16;

STRATA_INLINE __m512 floats_at(const uint16_t* items, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, items)), 16));
}

STRATA_INLINE void store_at(uint16_t* items, __mmask16 mask, __m512 values) { _mm256_mask_storeu_epi16(items, mask, bfloat16_of(values)); }

// Products of pairs of bfloat16, added to sums.
STRATA_INLINE __m512 multiplied(__m512 sum, __m512i left, __m512i right) { return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right); }

// Two neighbouring items, in every lane.
STRATA_INLINE __m512i pair_at(const uint16_t* items) {
  int32_t pair;
  __builtin_memcpy(&pair, items, 4);
  return _mm512_set1_epi32(pair);
}

// As bfloat16 would hold them.
STRATA_INLINE __m512 rounded(__m512 values) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bfloat16_of(values)), 16)); }

// e^x for x <= 0: 2^n of the whole part, a polynomial of the rest.
STRATA_INLINE __m512 exponential(__m512 x) {
  const __m512 scaled = _mm512_mul_ps(_mm512_max_ps(x, _mm512_set1_ps(-104.0f)), _mm512_set1_ps(1.44269504088896341f));
  const __m512 whole = _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(scaled, whole);
  __m512 value = _mm512_set1_ps(1.5403530393381606e-4f);
  value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(1.3333558146428443e-3f));
  value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(9.6181291076284772e-3f));
  value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(5.5504108664821580e-2f));
  value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(2.4022650695910071e-1f));
  value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(6.9314718055994531e-1f));
  value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(value, whole);
}

}  // namespace strata
#endif
