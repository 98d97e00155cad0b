// int8 activations times rows of a weight in AVX2: what the kernels of bit-planes and of channels share. Two rows meet up to four tokens at a time. Bytes are
// multiplied as the weight's magnitude, which is unsigned, by the token's code with the weight's sign: two products of at most 128 x 127 fit 16 bits.
#pragma once
#include "int8.h"
#include "vectors_avx2.h"

#if STRATA_X86
namespace strata {

constexpr int kTogether = 2;           // rows
constexpr int64_t kRowsNear = 4;       // they stay in the cache while the tokens pass
constexpr int64_t kRowAheadBytes = 4096;  // brought near

// A run of columns of two rows with a group of tokens.
template <int Tokens>
STRATA_INLINE_AVX2 void add_run(const int8_t* const* rows, const int8_t* activations, __m256i (&sums)[kTogether][Tokens]) {
#pragma GCC unroll 2
  for (int half = 0; half < kRun; half += 32)
#pragma GCC unroll 2
    for (int row = 0; row < kTogether; ++row) {
      const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[row] + half)), magnitudes = _mm256_abs_epi8(codes);
#pragma GCC unroll 4
      for (int token = 0; token < Tokens; ++token) {
        const __m256i signed_codes = _mm256_sign_epi8(_mm256_load_si256(reinterpret_cast<const __m256i*>(activations + token * kRun + half)), codes);
        const __m256i pairs = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes, signed_codes), _mm256_set1_epi16(1));
        sums[row][token] = _mm256_add_epi32(sums[row][token], pairs);
      }
    }
}

STRATA_INLINE_AVX2 __m128i halves_of(__m256i sums) { return _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1)); }

// Sums of two rows of some columns with a group of tokens: found[row], a token in each lane.
template <int Tokens>
STRATA_AVX2 void multiply_pair(const int8_t* first, const int8_t* second, int64_t columns, const int8_t* activations, __m128i* found) {
  __m256i sums[kTogether][Tokens];
#pragma GCC unroll 2
  for (auto& row : sums)
#pragma GCC unroll 4
    for (auto& sum : row) sum = _mm256_setzero_si256();
  int64_t column = 0;
  for (; column + kRun <= columns; column += kRun) {
    const int8_t* rows[kTogether] = {first + column, second + column};
    for (const int8_t* row : rows) _mm_prefetch(row + kRowAheadBytes, _MM_HINT_T0);
    add_run<Tokens>(rows, activations + column * Tokens, sums);
  }
  if (column < columns) {
    alignas(32) int8_t last[kTogether][kRun] = {};
    __builtin_memcpy(last[0], first + column, static_cast<size_t>(columns - column));
    __builtin_memcpy(last[1], second + column, static_cast<size_t>(columns - column));
    const int8_t* rows[kTogether] = {last[0], last[1]};
    add_run<Tokens>(rows, activations + column * Tokens, sums);
  }
#pragma GCC unroll 2
  for (int row = 0; row < kTogether; ++row) {
    __m128i parts[kGroupTokens];
#pragma GCC unroll 4
    for (int token = 0; token < kGroupTokens; ++token) parts[token] = token < Tokens ? halves_of(sums[row][token < Tokens ? token : 0]) : _mm_setzero_si128();
    found[row] = _mm_hadd_epi32(_mm_hadd_epi32(parts[0], parts[1]), _mm_hadd_epi32(parts[2], parts[3]));
  }
}

// Of a source: columns(), and load(row, count, codes, scales): where the codes of up to four rows lie, in the order of the activations' runs, and their scales.
template <class Source>
STRATA_AVX2 void multiply_rows_avx2(Source& source, const Activations& activations, const Result& result, int64_t begin, int64_t end) {
  using Pair = void (*)(const int8_t*, const int8_t*, int64_t, const int8_t*, __m128i*);
  constexpr Pair kPairs[] = {nullptr, multiply_pair<1>, multiply_pair<2>, multiply_pair<3>, multiply_pair<4>};
  for (int64_t row = begin; row < end; row += kRowsNear) {
    const int64_t count = end - row < kRowsNear ? end - row : kRowsNear;
    const int8_t* codes[kRowsNear];
    float scales[kRowsNear];
    source.load(row, count, codes, scales);
    for (int64_t group = 0; group < activations.groups(); ++group) {
      const int64_t first = group * kGroupTokens, taken = activations.in_group(group);
      for (int64_t each = 0; each < count; each += kTogether) {
        const int64_t other = each + 1 < count ? each + 1 : each;
        __m128i sums[kTogether];
        kPairs[taken](codes[each], codes[other], source.columns(), activations.run(group, 0), sums);
        for (int64_t place = each; place <= other; ++place) {
          alignas(16) float values[kGroupTokens];
          _mm_store_ps(values, _mm_cvtepi32_ps(sums[place - each]));
          for (int64_t token = 0; token < taken; ++token)
            store_at(result.out, (first + token) * result.stride + row + place, result.type, values[token] * activations.scales[first + token] * scales[place]);
        }
      }
    }
  }
}

}  // namespace strata
#endif
