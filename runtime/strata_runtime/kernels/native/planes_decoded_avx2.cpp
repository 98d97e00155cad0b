// Bit-planes for many tokens in AVX2: blocks of rows are brought to the layout of packed weights a tile at a time, as they are met, and multiplied as those are.
#include "dense_avx2.h"
#include "planes_avx2.h"
#include "product.h"

#if STRATA_X86
namespace strata {
namespace {

constexpr int64_t kTilePairs = kTile / 2;
constexpr int64_t kRowApart = 32;  // items between decoded rows, so that they do not meet in one set of the cache

// Blocks of bit-planes: each is brought to the layout of packed weights a tile of columns at a time, for all tokens.
template <int Bits>
STRATA_AVX2 void multiply_planes(const Planes& weight, const Dense& dense, const float* tokens, int64_t count, uint16_t* out, int64_t out_stride,
                                 int64_t begin, int64_t end) {
  thread_local Scratch sums_scratch, rows_scratch, packed_scratch;
  constexpr int64_t kRowItems = kTile + kRowApart;
  float* sums = sums_scratch.of<float>(count * kOutputs);
  uint16_t *decoded = rows_scratch.of<uint16_t>(kOutputs * kRowItems), *packed = packed_scratch.of<uint16_t>((kTilePairs + kAheadPairs) * kPairItems);
  const avx2::Lines lines(weight);
  const int64_t width = width_of(dense.columns), pairs = pairs_of(dense.columns);
  for (int64_t block = begin; block < end; ++block) {
    __builtin_memset(sums, 0, static_cast<size_t>(count) * kOutputs * sizeof(float));
    for (int64_t tile = 0; tile < weight.tiles(); ++tile) {
      const int64_t first = 2 * avx2::kRuns * tile, last = first + avx2::kRuns * lines.halves(tile);
      const int64_t held = 4 * weight.tile_bytes(tile), left = pairs - tile * kTilePairs, meant = left < held ? left : held;
      for (int64_t output = 0; output < kOutputs; ++output) {
        const int64_t row = block * kOutputs + output;
        if (row < weight.rows)
          avx2::values16<Bits>(weight, row, first, last, tile * kTile, decoded + output * kRowItems);
        else
          __builtin_memset(decoded + output * kRowItems, 0, kTile * sizeof(uint16_t));
      }
      pack_block_avx2(decoded, kRowItems, held, reinterpret_cast<uint32_t*>(packed));
      for (int64_t start = 0; start < meant; start += kSection) {
        const int64_t here = meant - start < kSection ? meant - start : kSection;
        multiply_section<Sixteen>(packed + start * kPairItems, tokens + tile * kTile + 2 * start, count, here, width, sums);
      }
    }
    store(dense, block, sums, count, out, out_stride);
  }
}

}  // namespace

// `held` above is a multiple of 8: columns are padded to 64.
void planes_decoded_avx2(const PlanesCall& call, const Planes& weight) {
  using Multiply = void (*)(const Planes&, const Dense&, const float*, int64_t, uint16_t*, int64_t, int64_t, int64_t);
  constexpr Multiply kMultiply[] = {nullptr,            multiply_planes<1>, multiply_planes<2>, multiply_planes<3>, multiply_planes<4>,
                                    multiply_planes<5>, multiply_planes<6>, multiply_planes<7>, multiply_planes<8>};
  const Dense dense(DenseCall{0, 0, 0, 0, call.rows, call.token_columns, 0, 0, 0, 0, 0});
  for_tokens(call.tokens, call.token_rows, call.token_stride, call.token_columns, call.out, call.out_stride, [&](const float* part, int64_t count, uint16_t* out) {
    parallel_for(static_cast<int>(call.threads), blocks_of(call.rows), 1,
                 [&](int64_t begin, int64_t end) { kMultiply[weight.bits](weight, dense, part, count, out, call.out_stride, begin, end); });
  });
}

}  // namespace strata
#endif
