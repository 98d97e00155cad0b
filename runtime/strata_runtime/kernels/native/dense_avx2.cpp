// The products of dense.cpp in AVX2: weights are widened in registers as they are read; products, which are exact, and sums are float32.
#include "dense_avx2.h"

#if STRATA_X86
namespace strata {
namespace {

struct Eight {
  using Item = int8_t;
  static constexpr int64_t kHalf = 8;

  STRATA_INLINE_AVX2 static __m256i pairs(const Item* at, int place) {
    const Item* from = at + place % 2 * 32 + place / 2 * kHalf;
    const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)), second = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + 16));
    return _mm256_cvtepi8_epi16(_mm_unpacklo_epi64(first, second));
  }
  STRATA_INLINE_AVX2 static __m256 even(const Item* at, int place) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs(at, place), 16), 16));
  }
  STRATA_INLINE_AVX2 static __m256 odd(const Item* at, int place) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(pairs(at, place), 16)); }
};

// A section of int8 as bfloat16, which holds each of them exactly, for many tokens; few take it as it is read.
STRATA_AVX2 const uint16_t* widened(const int8_t* at, int64_t pairs) {
  thread_local Scratch scratch;
  uint16_t* out = scratch.of<uint16_t>((kSection + kAheadPairs) * kPairItems);
  for (int64_t pair = 0; pair < pairs; ++pair)
    for (int place = 0; place < 4; ++place) {
      const __m256i even = _mm256_castps_si256(Eight::even(at + pair * kPairItems, place)), odd = _mm256_castps_si256(Eight::odd(at + pair * kPairItems, place));
      _mm256_store_si256(reinterpret_cast<__m256i*>(out + pair * kPairItems + 16 * place), _mm256_or_si256(_mm256_srli_epi32(even, 16), odd));
    }
  return out;
}

template <class Weights>
void multiply(const Dense& dense, const float* tokens, int64_t count, uint16_t* out, int64_t out_stride, int64_t begin, int64_t end) {
  thread_local Scratch scratch;
  using Item = typename Weights::Item;
  float* sums = scratch.of<float>(count * kOutputs);
  const int64_t width = width_of(dense.columns), pairs = pairs_of(dense.columns);
  for (int64_t block = begin; block < end; ++block) {
    const Item* weights = static_cast<const Item*>(dense.packed) + block * pairs * kPairItems;
    __builtin_memset(sums, 0, static_cast<size_t>(count) * kOutputs * sizeof(float));
    for (int64_t start = 0; start < pairs; start += kSection) {
      const int64_t here = pairs - start < kSection ? pairs - start : kSection;
      const Item* at = weights + start * kPairItems;
      if constexpr (sizeof(Item) == 1) {
        if (count > kMostTogether) {
          multiply_section<Sixteen>(widened(at, here), tokens + 2 * start, count, here, width, sums);
          continue;
        }
      }
      multiply_section<Weights>(at, tokens + 2 * start, count, here, width, sums);
    }
    store(dense, block, sums, count, out, out_stride);
  }
}

}  // namespace

// Pairs as numbers of 32 bits, eight rows for eight columns at a time: each line is read and written whole.
STRATA_AVX2 int64_t pack_block_avx2(const uint16_t* weights, int64_t stride, int64_t pairs, uint32_t* out) {
  int64_t pair = 0;
  for (; pair + 8 <= pairs; pair += 8)
    for (int output = 0; output < kOutputs; output += 8) {
      __m256i rows[8];
#pragma GCC unroll 8
      for (int row = 0; row < 8; ++row)
        rows[row] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + (output + row) * stride + 2 * pair));
      transpose(rows);
#pragma GCC unroll 8
      for (int each = 0; each < 8; ++each) _mm256_store_si256(reinterpret_cast<__m256i*>(out + (pair + each) * kOutputs + output), rows[each]);
    }
  return pair;
}

void dense_avx2(const DenseCall& call) {
  const Dense dense(call);
  for_tokens(call.tokens, call.token_rows, call.token_stride, dense.columns, call.out, call.out_stride, [&](const float* part, int64_t count, uint16_t* out) {
    parallel_for(static_cast<int>(call.threads), blocks_of(dense.rows), kBlocksAtOnce,
                 [&](int64_t begin, int64_t end) { (dense.scales ? multiply<Eight> : multiply<Sixteen>)(dense, part, count, out, call.out_stride, begin, end); });
  });
}

}  // namespace strata
#endif
