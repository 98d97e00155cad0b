// int8 activations times rows of a weight in AVX-512 VNNI: what the kernels of bit-planes and of channels share. Up to four tokens: as memory gives rows
// fastest. More: six rows stay in the first-level cache while the tokens pass, four at a time in one stream; 24 sums stay in registers.
#pragma once
#include "avx512.h"
#include "int8.h"

#if STRATA_X86
namespace strata {

constexpr int kGroupRows = 6;
constexpr int64_t kMostTiles = 8;  // of 512 columns, multiplied at once: of 6 rows and 4 tokens they stay in the first-level cache
constexpr int64_t kMostBytesOfFew = 32768;  // of tokens that pass row by row: they stay in the first-level cache

STRATA_INLINE __m128i sums_of(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// vpdpbusd, spelled out: around the intrinsic GCC 12 keeps the sums in memory, at a third of the speed.
STRATA_INLINE void add_products(__m512i& sums, __m512i weights, __m512i activations) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(activations));
}

// A run of columns of one row with a group of tokens.
template <int Tokens>
STRATA_INLINE void add_tokens(__m512i (&sums)[Tokens], __m512i weights, const int8_t* activations) {
#pragma GCC unroll 8
  for (int token = 0; token < Tokens; ++token) add_products(sums[token], weights, _mm512_load_si512(activations + token * kRun));
}

// Two sums of each of two tokens, the first in the lower half.
STRATA_INLINE void store_pairs(int32_t* first, int32_t* second, __m128i sums, bool add) {
  __m128i *low = reinterpret_cast<__m128i*>(first), *high = reinterpret_cast<__m128i*>(second);
  if (add) sums = _mm_add_epi32(sums, _mm_unpacklo_epi64(_mm_loadl_epi64(low), _mm_loadl_epi64(high)));
  _mm_storel_epi64(low, sums);
  _mm_storel_epi64(high, _mm_unpackhi_epi64(sums, sums));
}

template <int Tokens, class Columns>
STRATA_INLINE void add_run(__m512i (&found)[kGroupRows][Tokens], const Columns& rows, const int8_t* activations, int64_t column, __mmask64 mask) {
  __m512i values[Tokens];
#pragma GCC unroll 8
  for (int token = 0; token < Tokens; ++token) values[token] = _mm512_load_si512(activations + Tokens * column + token * kRun);
#pragma GCC unroll 8
  for (int place = 0; place < kGroupRows; ++place) {
    const __m512i row = rows.load(place, column, mask);
#pragma GCC unroll 8
    for (int token = 0; token < Tokens; ++token) add_products(found[place][token], row, values[token]);
  }
}

// Sums [token][kRowsAtOnce] of six rows x Tokens over runs of columns, or added to them. Not inlined: GCC 12 would keep the sums in memory.
template <int Tokens, class Columns>
STRATA_AVX512 __attribute__((noinline)) void multiply_group(const Columns& rows, const int8_t* activations, int64_t runs, int32_t* sums, bool add) {
  __m512i found[kGroupRows][Tokens];
#pragma GCC unroll 8
  for (auto& each : found)
#pragma GCC unroll 8
    for (auto& sum : each) sum = _mm512_setzero_si512();
  const int64_t end = runs * kRun, whole = Columns::kMayBeCut && ~rows.last_mask ? end - kRun : end;
  for (int64_t column = 0; column < whole; column += kRun) add_run<Tokens>(found, rows, activations, column, ~__mmask64{0});
  if (Columns::kMayBeCut && whole < end) add_run<Tokens>(found, rows, activations, whole, rows.last_mask);
#pragma GCC unroll 8
  for (int token = 0; token < Tokens; ++token) {
    __m128i* at = reinterpret_cast<__m128i*>(sums + token * kRowsAtOnce);
    const __m128i four = sums_of(found[0][token], found[1][token], found[2][token], found[3][token]);
    _mm_storeu_si128(at, add ? _mm_add_epi32(_mm_loadu_si128(at), four) : four);
  }
#pragma GCC unroll 8
  for (int token = 0; token < Tokens; token += 2) {
    const int other = token + 1 < Tokens ? token + 1 : token;
    store_pairs(sums + token * kRowsAtOnce + 4, sums + other * kRowsAtOnce + 4,
                sums_of(found[4][token], found[5][token], found[4][other], found[5][other]), add);
  }
}

// Sums [token][kRowsAtOnce] of neighbouring rows to results; scales: of the rows.
STRATA_AVX512 inline void store_rows(const Result& result, const Activations& activations, int64_t row, int64_t rows, const int32_t* sums,
                                     const float* scales) {
  for (int64_t token = 0; token < activations.tokens; ++token) {
    const __m512i shift = _mm512_set1_epi32(activations.sums[token]);
    const __m512 scale = _mm512_set1_ps(activations.scales[token]);
    for (int64_t each = 0; each < rows; each += 16) {
      const __mmask16 mask = first_floats(rows - each);
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(sums + token * kRowsAtOnce + each), shift));
      const __m512 values = _mm512_mul_ps(_mm512_mul_ps(sum, scale), _mm512_maskz_loadu_ps(mask, scales + each));
      const int64_t place = token * result.stride + row + each;
      if (result.type == Type::float32)
        _mm512_mask_storeu_ps(static_cast<float*>(result.out) + place, mask, values);
      else
        _mm256_mask_storeu_epi16(static_cast<uint16_t*>(result.out) + place, mask,
                                 result.type == Type::bfloat16 ? bfloat16_of(values) : _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
  }
}

// Rows from `begin` to `end` with every token, six at a time. Of a source:
// start(row, count, scales): the next rows, at most six; gives their scales
// section(first run, last run): runs of their columns; rows beyond the count may hold anything. Of these columns:
// - load(row, column, mask): 64 shifted bytes
// - kMayBeCut: whether the last run may have fewer than 64 columns, those of `last_mask`
// - before(part, parts): called before each group of tokens, that what follows may be brought near meanwhile
template <class Source>
STRATA_AVX512 void many_tokens(Source& source, const Activations& activations, const Result& result, int64_t begin, int64_t end) {
  thread_local Scratch scratch;
  int32_t* sums = scratch.of<int32_t>(activations.tokens * kRowsAtOnce);
  const int64_t tiles = (activations.runs + 7) / 8, sections = (tiles + kMostTiles - 1) / kMostTiles, section = (tiles + sections - 1) / sections * 8;
  for (int64_t stored = begin; stored < end; stored += kRowsAtOnce) {
    const int64_t rows = end - stored < kRowsAtOnce ? end - stored : kRowsAtOnce;
    float scales[kRowsAtOnce];
    for (int64_t some = 0; some < rows; some += kGroupRows) {
      source.start(stored + some, rows - some < kGroupRows ? rows - some : kGroupRows, scales + some);
      for (int64_t run = 0; run < activations.runs; run += section) {
        const int64_t last = run + section < activations.runs ? run + section : activations.runs;
        auto&& columns = source.section(run, last);
        for (int64_t group = 0; group < activations.groups(); ++group) {
          const int8_t* codes = activations.run(group, run);
          int32_t* to = sums + group * kGroupTokens * kRowsAtOnce + some;
          columns.before(group, activations.groups());
          switch (activations.in_group(group)) {
            case 1: multiply_group<1>(columns, codes, last - run, to, run > 0); break;
            case 2: multiply_group<2>(columns, codes, last - run, to, run > 0); break;
            case 3: multiply_group<3>(columns, codes, last - run, to, run > 0); break;
            default: multiply_group<4>(columns, codes, last - run, to, run > 0);
          }
        }
      }
    }
    store_rows(result, activations, stored, rows, sums, scales);
  }
}

// few<Tokens>(activations, result, begin, end) of a source: the same with one group of tokens, in whatever order of rows memory gives them fastest.
template <class Source>
void multiply_rows(Source& source, const Activations& activations, const Result& result, int64_t begin, int64_t end) {
  if (activations.tokens > 1 && activations.tokens * activations.runs * kRun > kMostBytesOfFew) return many_tokens(source, activations, result, begin, end);
  switch (activations.tokens) {
    case 1: return source.template few<1>(activations, result, begin, end);
    case 2: return source.template few<2>(activations, result, begin, end);
    case 3: return source.template few<3>(activations, result, begin, end);
    case 4: return source.template few<4>(activations, result, begin, end);
    default: return many_tokens(source, activations, result, begin, end);
  }
}

// Four rows' sums, added up, to [token][kRowsAtOnce].
template <int Tokens>
STRATA_INLINE void store_four(const __m512i (*found)[Tokens], int64_t apart, int32_t* sums) {
#pragma GCC unroll 8
  for (int token = 0; token < Tokens; ++token)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(sums + token * kRowsAtOnce),
                     sums_of(found[0][token], found[apart][token], found[2 * apart][token], found[3 * apart][token]));
}

}  // namespace strata
#endif
