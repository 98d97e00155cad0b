// Blocks of tokens times rows of bfloat16 in AVX-512: what the kernels of centroids and of groups share.
#pragma once
#include "avx512.h"

#if STRATA_X86
namespace strata {

constexpr int kFewTokens = 4;     // of groups: multiplied straight from the planes
constexpr int kBlockRows = 4;     // of accumulators
constexpr int kBlockTokens = 6;
constexpr int kRowsDecoded = 32;  // at once: with a section of columns they stay in the second-level cache
constexpr int kSectionTiles = 4;  // 6 tokens x 2048 columns stay in the first
constexpr int64_t kLine = 32;      // items of a vector
constexpr int kPadding = 32;      // items between rows of activations and of decoded weights, so that they do not meet in one set of the cache
constexpr int64_t kAheadBytes = 3072;  // of each plane, prefetched: 4096 would fall into the cache's set that is being read
constexpr int64_t kRowsAhead = 2;      // prefetched while one is decoded

// A token in the order of look-ups, each 32 columns `step` items behind those before. Columns beyond the weight's are zeros: they meet the value of code 0,
// which is finite.
STRATA_AVX512 inline void permute_token(const uint16_t* token, int64_t in_features, const Planes& weight, uint16_t* out, int64_t step) {
  const Order& order = order_of(weight.bits);
  for (int64_t tile = 0; tile < weight.tiles(); ++tile) {
    const int run = weight.tile_bytes(tile);  // columns of each of its 8 runs
    for (int b = 0; b < 8; ++b, out += 2 * step) {
      const int64_t start = tile * kTile + b * run;
      int64_t count = in_features - start;
      count = count < 0 ? 0 : count > run ? run : count;
      const __mmask64 mask = first_bytes(count);
      const __m512i first = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask), token + start);
      const __m512i second = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask >> 32), token + start + 32);
      __m512i front, back;
      reorder(order.columns, first, second, front, back);
      _mm512_store_si512(out, front);
      _mm512_store_si512(out + step, back);
    }
  }
}

STRATA_INLINE __m512 dot(__m512 sums, __m512i weights, const uint16_t* activations) {
  return _mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)_mm512_load_si512(activations));
}

// The sums of four vectors.
STRATA_INLINE __m128 sums_of(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
                                   _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// 4 rows x Tokens, adding to sums [token][row].
template <int Tokens>
STRATA_AVX512 void block(const uint16_t* weights, const uint16_t* activations, int64_t width, int64_t stride, float* sums, int64_t sums_stride) {
  __m512 found[Tokens][kBlockRows];
#pragma GCC unroll 8
  for (auto& each : found)
#pragma GCC unroll 8
    for (auto& sum : each) sum = _mm512_setzero_ps();
  for (int64_t column = 0; column < width; column += 32) {
    __m512i row[kBlockRows];
#pragma GCC unroll 8
    for (int place = 0; place < kBlockRows; ++place) row[place] = _mm512_load_si512(weights + place * (width + kPadding) + column);
#pragma GCC unroll 8
    for (int token = 0; token < Tokens; ++token) {
      const __m512i values = _mm512_load_si512(activations + token * stride + column);
#pragma GCC unroll 8
      for (int place = 0; place < kBlockRows; ++place)
        found[token][place] = _mm512_dpbf16_ps(found[token][place], (__m512bh)row[place], (__m512bh)values);
    }
  }
#pragma GCC unroll 8
  for (int token = 0; token < Tokens; ++token) {
    float* at = sums + token * sums_stride;
    _mm_store_ps(at, _mm_add_ps(_mm_load_ps(at), sums_of(found[token][0], found[token][1], found[token][2], found[token][3])));
  }
}

using Block = void (*)(const uint16_t*, const uint16_t*, int64_t, int64_t, float*, int64_t);
constexpr Block kBlocks[] = {nullptr, block<1>, block<2>, block<3>, block<4>, block<5>, block<6>};

// decode(row, first tile, last tile, out): some tiles of a row to bfloat16 in the order of `permute_token`.
template <class Decode>
STRATA_AVX512 void many_tokens(const Planes& weight, const uint16_t* activations, int64_t tokens, uint16_t* out, int64_t out_stride, int64_t begin,
                               int64_t end, const Decode& decode) {
  thread_local Scratch scratch, sums_scratch;
  const int64_t tiles = weight.tiles(), stride = tiles * kTile + kPadding;
  uint16_t* decoded = scratch.of<uint16_t>(kRowsDecoded * (kSectionTiles * kTile + kPadding));
  float* sums = sums_scratch.of<float>(tokens * kRowsDecoded);
  const int64_t groups = (tokens + kBlockTokens - 1) / kBlockTokens;
  for (int64_t row = begin; row < end; row += kRowsDecoded) {
    const int64_t rows = end - row < kRowsDecoded ? end - row : kRowsDecoded;
    __builtin_memset(sums, 0, static_cast<size_t>(tokens) * kRowsDecoded * sizeof(float));
    for (int64_t tile = 0; tile < tiles; tile += kSectionTiles) {
      const int64_t last = tile + kSectionTiles < tiles ? tile + kSectionTiles : tiles, width = (last - tile) * kTile;
      for (int64_t each = 0; each < rows; ++each) decode(row + each, tile, last, decoded + each * (width + kPadding));
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = tokens * group / groups, count = tokens * (group + 1) / groups - first;
        for (int64_t each = 0; each < rows; each += kBlockRows) {  // rows beyond the last hold what was there: not stored
          if (group == 0) prefetch_next(weight, row, each, kRowsDecoded, last, kSectionTiles);
          kBlocks[count](decoded + each * (width + kPadding), activations + first * stride + tile * kTile, width, stride, sums + first * kRowsDecoded + each,
                         kRowsDecoded);
        }
      }
    }
    for (int64_t token = 0; token < tokens; ++token)
      for (int64_t each = 0; each < rows; each += 16)
        _mm256_mask_storeu_epi16(out + token * out_stride + row + each, first_floats(rows - each),
                                 bfloat16_of(_mm512_load_ps(sums + token * kRowsDecoded + each)));
  }
}

// All tokens of a call in the order of look-ups, rows `kPadding` apart; kept until the thread's next call.
inline const uint16_t* permuted(const Matrix& tokens, const Planes& weight, int threads) {
  thread_local Scratch scratch;
  const int64_t width = weight.tiles() * kTile + kPadding;
  uint16_t* out = scratch.of<uint16_t>(tokens.rows * width);
  parallel_for(tokens.rows < 16 ? 1 : threads, tokens.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
      permute_token(reinterpret_cast<const uint16_t*>(tokens.row(token)), tokens.columns, weight, out + token * width, kLine);
  });
  return out;
}

}  // namespace strata
#endif
