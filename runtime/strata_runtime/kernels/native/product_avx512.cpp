// bfloat16 activations times bit-planes in AVX-512. A few tokens: codes are looked up in registers and multiplied there. More: some rows of the weight are
// decoded into the cache, then multiplied in blocks of 4 rows x 6 tokens of accumulators.
#include "product.h"

#if STRATA_X86
#include "blocks_avx512.h"

namespace strata {
namespace {

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
      const uint8_t* table = weight.table + (start + row) * weight.table_stride_bytes;
      tables[row].load(table);
      for (int byte = 0; byte < (2 << Bits); byte += 64) _mm_prefetch(table + 2 * Rows * weight.table_stride_bytes + byte, _MM_HINT_T0);
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

constexpr int64_t kMostBytesOfFew = 49152;  // of four tokens: they stay in the first-level cache while row after row meets them

bool are_few(const Planes& weight, int64_t tokens) {
  return tokens <= kFewTokens && (tokens < kFewTokens || tokens * weight.columns * int64_t{sizeof(uint16_t)} <= kMostBytesOfFew);
}

template <int Bits>
void product(const Planes& weight, const uint16_t* activations, int64_t tokens, uint16_t* out, int64_t out_stride, int threads) {
  using Few = void (*)(const Planes&, const uint16_t*, uint16_t*, int64_t, int64_t, int64_t);
  constexpr int kRows = Bits <= 6 ? 2 : 1;  // at once, as many as the registers take
  constexpr Few kFew[] = {nullptr, few_tokens<Bits, 1, kRows>, few_tokens<Bits, 2, kRows>, few_tokens<Bits, 3, 1>, few_tokens<Bits, 4, 1>};
  constexpr Few kFewOfOneRow[] = {nullptr, few_tokens<Bits, 1, 1>, few_tokens<Bits, 2, 1>, few_tokens<Bits, 3, 1>, few_tokens<Bits, 4, 1>};
  parallel_for(threads, weight.rows, kRowsDecoded, [&](int64_t begin, int64_t end) {
    if (are_few(weight, tokens))
      (weight.rows < kRows ? kFewOfOneRow : kFew)[tokens](weight, activations, out, out_stride, begin, end);
    else
      many_tokens(weight, activations, tokens, out, out_stride, begin, end,
                  [&](int64_t row, int64_t tile, int64_t last, uint16_t* decoded) { decode_row<Bits>(weight, row, tile, last, decoded); });
  });
}

}  // namespace

void product_bfloat16_avx512(const Matrix& tokens, const Planes& weight, uint16_t* out, int64_t out_stride, int threads) {
  const uint16_t* activations = permuted(tokens, weight, threads);
  using Product = void (*)(const Planes&, const uint16_t*, int64_t, uint16_t*, int64_t, int);
  constexpr Product kProducts[] = {nullptr,    nullptr,    product<2>, product<3>, product<4>,
                                   product<5>, product<6>, product<7>, product<8>};
  kProducts[weight.bits](weight, activations, tokens.rows, out, out_stride, threads);
}

}  // namespace strata
#endif
