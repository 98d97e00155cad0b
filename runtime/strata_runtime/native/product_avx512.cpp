// bfloat16 activations times bit-planes in AVX-512. A few tokens: codes are looked up in registers and multiplied there. More: some rows of the weight are
// decoded into the cache, then multiplied in blocks of 4 rows x 6 tokens of accumulators.
#include "product.h"

#if STRATA_X86
#include "avx512.h"

namespace strata {
namespace {

constexpr int kFewTokens = 4;        // multiplied straight from the planes
constexpr int kBlockRows = 4;        // of accumulators
constexpr int kBlockTokens = 6;
constexpr int kRowsDecoded = 32;     // at once: with a section of columns they stay in the second-level cache
constexpr int kSectionTiles = 4;     // 6 tokens x 2048 columns stay in the first
constexpr int kPadding = 32;         // items between rows of activations and of decoded weights, so that they do not meet in one set of the cache
constexpr int64_t kAheadBytes = 2048;  // of each plane, prefetched: 4096 would fall into the cache's set that is being read

constexpr int64_t kRowsAhead = 2;       // prefetched while one is decoded

// The order in which look-ups give columns: of each run of 64, the even groups of 8, then the odd ones. Columns beyond the weight's are zeros: they meet
// the value of code 0, which is finite.
STRATA_AVX512 void permute_token(const uint16_t* token, int64_t in_features, const Planes& weight, uint16_t* out) {
  const __m512i even = _mm512_set_epi64(13, 12, 9, 8, 5, 4, 1, 0), odd = _mm512_set_epi64(15, 14, 11, 10, 7, 6, 3, 2);
  for (int64_t tile = 0; tile < weight.tiles(); ++tile) {
    const int run = weight.tile_bytes(tile);  // columns of each of its 8 runs
    for (int b = 0; b < 8; ++b, out += 64) {
      const int64_t start = tile * kTile + b * run;
      int64_t count = in_features - start;
      count = count < 0 ? 0 : count > run ? run : count;
      const __mmask64 mask = first_bytes(count);
      const __m512i first = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask), token + start);
      const __m512i second = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask >> 32), token + start + 32);
      _mm512_store_si512(out, _mm512_permutex2var_epi64(first, even, second));
      _mm512_store_si512(out + 32, _mm512_permutex2var_epi64(first, odd, second));
    }
  }
}

STRATA_INLINE __m512 dot(__m512 sums, __m512i weights, const uint16_t* activations) {
  return _mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)_mm512_load_si512(activations));
}

// Some rows of one tile, times a few tokens.
template <int Bits, int Rows, int Tokens, int Sums>
STRATA_INLINE void multiply_tile(const __m512i planes[Rows][Bits], const Table16<Bits>* tables, const uint16_t* activations, int64_t width,
                                 __m512 sums[Rows][Tokens][Sums]) {
  __m512i codes[Rows][8];
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) transpose<Bits>(planes[row], codes[row]);
#pragma GCC unroll 8
  for (int b = 0; b < 8; ++b) {
    __m512i first[Rows], second[Rows];
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) tables[row].look_up(codes[row][b], first[row], second[row]);
#pragma GCC unroll 8
    for (int token = 0; token < Tokens; ++token) {
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) {
        __m512* sum = sums[row][token] + (2 * b) % Sums;
        sum[0] = dot(sum[0], first[row], activations + token * width + b * 64);
        sum[1] = dot(sum[1], second[row], activations + token * width + b * 64 + 32);
      }
    }
  }
}

template <int Bits, int Tokens, int Rows>
STRATA_AVX512 void few_tokens(const Planes& weight, const uint16_t* activations, uint16_t* out, int64_t out_stride, int64_t begin, int64_t end) {
  constexpr int kSums = Tokens == 1 ? 4 : 2;
  const int64_t full = weight.full_tiles(), tiles = weight.tiles(), width = tiles * kTile + kPadding;
  for (int64_t first_row = begin; first_row < end; first_row += Rows) {
    const int64_t start = first_row + Rows <= end ? first_row : end - Rows;  // the last rows perhaps twice
    Table16<Bits> tables[Rows];
    __m512 sums[Rows][Tokens][kSums];
    const uint8_t* at[Rows][Bits];
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      tables[row].load(weight.table + (start + row) * weight.table_stride_bytes);
#pragma GCC unroll 8
      for (int place = 0; place < Bits; ++place) at[row][place] = weight.planes[place] + (start + row) * weight.stride[place];
#pragma GCC unroll 8
      for (auto& each : sums[row])
#pragma GCC unroll 8
        for (auto& sum : each) sum = _mm512_setzero_ps();
    }
    __m512i planes[Rows][Bits];
    for (int64_t tile = 0; tile < full; ++tile) {
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 8
        for (int place = 0; place < Bits; ++place) {
          planes[row][place] = _mm512_loadu_si512(at[row][place] + tile * kTileBytes);
          _mm_prefetch(at[row][place] + tile * kTileBytes + kAheadBytes, _MM_HINT_T0);
        }
      multiply_tile<Bits, Rows, Tokens, kSums>(planes, tables, activations + tile * kTile, width, sums);
    }
    if (full < tiles) {
      const __mmask64 mask = first_bytes(weight.tile_bytes(full));
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 8
        for (int place = 0; place < Bits; ++place) planes[row][place] = _mm512_maskz_loadu_epi8(mask, at[row][place] + full * kTileBytes);
      multiply_tile<Bits, Rows, Tokens, kSums>(planes, tables, activations + full * kTile, width, sums);
    }
#pragma GCC unroll 8
    for (int token = 0; token < Tokens; ++token) {
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) {
        __m512 sum = _mm512_add_ps(sums[row][token][0], sums[row][token][1]);
        if constexpr (kSums == 4) sum = _mm512_add_ps(sum, _mm512_add_ps(sums[row][token][2], sums[row][token][3]));
        out[token * out_stride + start + row] = bfloat16_of_float(_mm512_reduce_add_ps(sum));
      }
    }
  }
}

// Some tiles of a row to bfloat16 in the order of `permute_token`.
template <int Bits>
STRATA_AVX512 void decode_row(const Planes& weight, int64_t row, int64_t first_tile, int64_t last_tile, uint16_t* out) {
  Table16<Bits> table;
  table.load(weight.table + row * weight.table_stride_bytes);
  for (int64_t tile = first_tile; tile < last_tile; ++tile) {
    __m512i planes[Bits], codes[8];
    const __mmask64 mask = first_bytes(weight.tile_bytes(tile));
#pragma GCC unroll 8
    for (int place = 0; place < Bits; ++place) {
      const uint8_t* at = weight.planes[place] + row * weight.stride[place] + tile * kTileBytes;
      planes[place] = _mm512_maskz_loadu_epi8(mask, at);
      _mm_prefetch(at + kRowsAhead * weight.stride[place], _MM_HINT_T0);
    }
    transpose<Bits>(planes, codes);
#pragma GCC unroll 8
    for (int b = 0; b < 8; ++b, out += 64) {
      __m512i first, second;
      table.look_up(codes[b], first, second);
      _mm512_store_si512(out, first);
      _mm512_store_si512(out + 32, second);
    }
  }
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

template <int Bits>
STRATA_AVX512 void many_tokens(const Planes& weight, const uint16_t* activations, int64_t tokens, uint16_t* out, int64_t out_stride, int64_t begin,
                               int64_t end) {
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
      for (int64_t each = 0; each < rows; ++each) decode_row<Bits>(weight, row + each, tile, last, decoded + each * (width + kPadding));
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = tokens * group / groups, count = tokens * (group + 1) / groups - first;
        for (int64_t each = 0; each < rows; each += kBlockRows)  // rows beyond the last hold what was there: not stored
          kBlocks[count](decoded + each * (width + kPadding), activations + first * stride + tile * kTile, width, stride, sums + first * kRowsDecoded + each,
                         kRowsDecoded);
      }
    }
    for (int64_t token = 0; token < tokens; ++token)
      for (int64_t each = 0; each < rows; ++each) out[token * out_stride + row + each] = bfloat16_of_float(sums[token * kRowsDecoded + each]);
  }
}

template <int Bits>
void product(const Planes& weight, const uint16_t* activations, int64_t tokens, uint16_t* out, int64_t out_stride, int threads) {
  using Few = void (*)(const Planes&, const uint16_t*, uint16_t*, int64_t, int64_t, int64_t);
  constexpr int kRows = Bits <= 6 ? 2 : 1;  // as many as the registers take
  constexpr Few kFew[] = {nullptr, few_tokens<Bits, 1, kRows>, few_tokens<Bits, 2, kRows>, few_tokens<Bits, 3, 1>, few_tokens<Bits, 4, 1>};
  parallel_for(threads, weight.rows, kRowsDecoded, [&](int64_t begin, int64_t end) {
    if (tokens <= kFewTokens)
      kFew[tokens](weight, activations, out, out_stride, begin, end);
    else
      many_tokens<Bits>(weight, activations, tokens, out, out_stride, begin, end);
  });
}

}  // namespace

void product_bfloat16_avx512(const Matrix& tokens, const Planes& weight, uint16_t* out, int64_t out_stride, int threads) {
  thread_local Scratch scratch;
  const int64_t width = weight.tiles() * kTile + kPadding;
  uint16_t* activations = scratch.of<uint16_t>(tokens.rows * width);
  parallel_for(tokens.rows < 16 ? 1 : threads, tokens.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
      permute_token(reinterpret_cast<const uint16_t*>(tokens.row(token)), tokens.columns, weight, activations + token * width);
  });
  using Product = void (*)(const Planes&, const uint16_t*, int64_t, uint16_t*, int64_t, int);
  constexpr Product kProducts[] = {nullptr,    nullptr,    product<2>, product<3>, product<4>,
                                   product<5>, product<6>, product<7>, product<8>};
  kProducts[weight.bits](weight, activations, tokens.rows, out, out_stride, threads);
}

}  // namespace strata
#endif
