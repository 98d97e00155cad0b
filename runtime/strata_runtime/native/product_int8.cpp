// The format any4_a8: int8 activations, a scale per token; values rounded to int8, a scale per row. Sums are exact, so every path gives the same bits.
// Weights lie shifted by 128 in unsigned bytes, as vpdpbusd takes them; 128 times the sum of a token's codes is taken off at the end.
#include <cmath>
#include <cstring>

#include "avx512.h"
#include "codes.h"
#include "product.h"
#include "rows.h"

namespace strata {
namespace {

constexpr int kShift = 128;
constexpr int kBlockRows = 4, kBlockTokens = 6;  // of accumulators
constexpr int kRowsDecoded = 32;
constexpr int kMostSectionTiles = 8;  // 6 tokens x 4096 bytes stay in the first-level cache
constexpr int kPadding = 64;      // bytes between rows, so that they do not meet in one set of the cache
constexpr int64_t kRowsAhead = 4;  // prefetched while one is decoded

struct Activations {
  int8_t* codes;  // [tokens, stride]: a tile's 8 runs of 64, zeros beyond the weight's columns
  float* scales;
  int32_t* sums;  // of a token's codes, times kShift
  int64_t stride;
};

constexpr float kTiny = 0x1p-126f;  // the least normal float: scales always divide

// The largest magnitude over 127. Among magnitudes as bits infinity is above all numbers and NaN above infinity.
float plain_scale_of(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t each = 0; each < count; ++each) {
    uint32_t bits;
    std::memcpy(&bits, values + each, 4);
    bits &= 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  float magnitude;
  std::memcpy(&magnitude, &largest, 4);
  return magnitude / 127.0f;
}

int8_t code_of(float value, float scale) {
  const float code = std::nearbyintf(value / scale);
  return static_cast<int8_t>(code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code);
}

#if STRATA_X86
STRATA_AVX512 float avx512_scale_of(const float* values, int64_t count) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i largest = _mm512_setzero_si512();
  for (int64_t each = 0; each < count; each += 16)
    largest = _mm512_max_epu32(largest, _mm512_and_si512(magnitude, _mm512_maskz_loadu_epi32(first_floats(count - each), values + each)));
  const uint32_t bits = _mm512_reduce_max_epu32(largest);
  float found;
  std::memcpy(&found, &bits, 4);
  return found / 127.0f;
}

STRATA_AVX512 int32_t avx512_codes_of(const float* values, int64_t count, float scale, int8_t* codes) {
  const __m512 divisor = _mm512_set1_ps(scale);
  const __m512i least = _mm512_set1_epi32(-127), most = _mm512_set1_epi32(127);
  __m512i sum = _mm512_setzero_si512();
  for (int64_t each = 0; each < count; each += 16) {
    const __mmask16 mask = first_floats(count - each);
    const __m512i found = _mm512_cvtps_epi32(_mm512_div_ps(_mm512_maskz_loadu_ps(mask, values + each), divisor));
    const __m512i code = _mm512_min_epi32(_mm512_max_epi32(found, least), most);
    sum = _mm512_add_epi32(sum, code);
    _mm_mask_storeu_epi8(codes + each, mask, _mm512_cvtepi32_epi8(code));
  }
  return _mm512_reduce_add_epi32(sum);
}
#endif

float scale_of(const float* values, int64_t count) {
#if STRATA_X86
  if (cpu_level() == Level::avx512) return avx512_scale_of(values, count);
#endif
  return plain_scale_of(values, count);
}

// Gives the sum of the codes.
int32_t codes_of(const float* values, int64_t count, float scale, int8_t* codes) {
#if STRATA_X86
  if (cpu_level() == Level::avx512) return avx512_codes_of(values, count, scale, codes);
#endif
  int32_t sum = 0;
  for (int64_t each = 0; each < count; ++each) sum += codes[each] = code_of(values[each], scale);
  return sum;
}

// A token that holds NaN or infinity keeps that as its scale, and zeros for codes: all its results are NaN.
void quantize_token(const Matrix& tokens, int64_t place, const Planes& weight, float* values, const Activations& out) {
  widen(tokens.row(place), tokens.type, tokens.columns, values);
  float scale = scale_of(values, tokens.columns);
  if (scale < kTiny) scale = kTiny;
  out.scales[place] = scale;
  int8_t* codes = out.codes + place * out.stride;
  std::memset(codes, 0, static_cast<size_t>(out.stride));
  int32_t sum = 0;
  if (std::isfinite(scale)) {
    const int64_t whole = weight.full_tiles() * kTile;  // whose order is that of the columns
    sum += codes_of(values, whole < tokens.columns ? whole : tokens.columns, scale, codes);
    const int run = whole < weight.columns ? weight.tile_bytes(weight.full_tiles()) : 0;
    for (int b = 0; b < 8; ++b) {
      const int64_t start = whole + b * run, left = tokens.columns - start;
      if (run && left > 0) sum += codes_of(values + start, left < run ? left : run, scale, codes + whole + b * 64);
    }
  }
  out.sums[place] = sum * kShift;
}

// The values of a row's codes as shifted bytes, and their scale.
float shifted_table(const Planes& weight, int64_t row, Type type, uint8_t* table) {
  float values[1 << kMostBits];
  int8_t codes[1 << kMostBits];
  const int count = 1 << weight.bits;
  widen(weight.table + row * weight.table_stride_bytes, type, count, values);
  float scale = scale_of(values, count);
  if (!(scale > 0)) scale = kTiny;
  codes_of(values, count, scale, codes);
  for (int code = 0; code < count; ++code) table[code] = static_cast<uint8_t>(codes[code] + kShift);
  return scale;
}

struct Result {
  void* out;
  int64_t stride;
  Type type;

  void store(int64_t token, int64_t row, int32_t sum, float row_scale, const Activations& activations) const {
    store_at(out, token * stride + row, type, static_cast<float>(sum - activations.sums[token]) * activations.scales[token] * row_scale);
  }
};

STRATA_PLAIN void plain_rows(const Planes& weight, const Activations& activations, int64_t tokens, const Result& result, int64_t begin, int64_t end) {
  thread_local Scratch scratch;
  uint8_t* values = scratch.of<uint8_t>(weight.columns + activations.stride);
  uint8_t* placed = values + weight.columns;
  for (int64_t row = begin; row < end; ++row) {
    uint8_t table[1 << kMostBits];
    const float scale = shifted_table(weight, row, result.type, table);
    decode_codes(weight, row, values);
    for (int64_t tile = 0; tile < weight.tiles(); ++tile)
      for (int b = 0; b < 8; ++b)
        for (int byte = 0, run = weight.tile_bytes(tile); byte < 64; ++byte)
          placed[tile * kTile + b * 64 + byte] = byte < run ? table[values[tile * kTile + b * run + byte]] : 0;
    for (int64_t token = 0; token < tokens; ++token) {
      const int8_t* codes = activations.codes + token * activations.stride;
      int32_t sum = 0;
      for (int64_t each = 0; each < weight.tiles() * kTile; ++each) sum += static_cast<int32_t>(placed[each]) * codes[each];
      result.store(token, row, sum, scale, activations);
    }
  }
}

void portable_rows(const Planes& weight, const Activations& activations, int64_t tokens, const Result& result, int64_t begin, int64_t end) {
  plain_rows(weight, activations, tokens, result, begin, end);
}

#if STRATA_X86
STRATA_AVX2 void avx2_rows(const Planes& weight, const Activations& activations, int64_t tokens, const Result& result, int64_t begin, int64_t end) {
  plain_rows(weight, activations, tokens, result, begin, end);
}

// `shifted_table` of four bits: 16 values in one vector.
STRATA_AVX512 float shifted_table4(const Planes& weight, int64_t row, Type type, uint8_t* table) {
  const uint8_t* at = weight.table + row * weight.table_stride_bytes;
  __m512 values;
  if (type == Type::float32)
    values = _mm512_loadu_ps(at);
  else if (type == Type::bfloat16)
    values = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))), 16));
  else
    values = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  float scale = _mm512_reduce_max_ps(_mm512_abs_ps(values)) / 127.0f;
  if (!(scale > 0)) scale = kTiny;
  const __m512i codes = _mm512_cvtps_epi32(_mm512_div_ps(values, _mm512_set1_ps(scale)));
  const __m512i clipped = _mm512_min_epi32(_mm512_max_epi32(codes, _mm512_set1_epi32(-127)), _mm512_set1_epi32(127));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(table), _mm512_cvtepi32_epi8(_mm512_add_epi32(clipped, _mm512_set1_epi32(kShift))));
  return scale;
}

// Some tiles of a row of four bits to shifted bytes.
STRATA_AVX512 void decode_tiles(const Planes& weight, int64_t row, int64_t first_tile, int64_t last_tile, __m512i table, uint8_t* out) {
  for (int64_t tile = first_tile; tile < last_tile; ++tile) {
    __m512i planes[4], codes[8];
    const __mmask64 mask = first_bytes(weight.tile_bytes(tile));
#pragma GCC unroll 8
    for (int place = 0; place < 4; ++place) {
      const uint8_t* at = weight.planes[place] + row * weight.stride[place] + tile * kTileBytes;
      planes[place] = _mm512_maskz_loadu_epi8(mask, at);
      _mm_prefetch(at + kRowsAhead * weight.stride[place], _MM_HINT_T0);
    }
    transpose<4>(planes, codes);
    for (int b = 0; b < 8; ++b, out += 64) _mm512_store_si512(out, _mm512_permutexvar_epi8(codes[b], table));
  }
}

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

// 4 rows x Tokens, adding to sums [token][row].
template <int Tokens>
STRATA_AVX512 void block(const uint8_t* weights, const int8_t* activations, int64_t width, int64_t stride, int32_t* sums) {
  __m512i found[Tokens][kBlockRows];
#pragma GCC unroll 8
  for (auto& each : found)
#pragma GCC unroll 8
    for (auto& sum : each) sum = _mm512_setzero_si512();
  for (int64_t column = 0; column < width; column += 64) {
    __m512i row[kBlockRows];
#pragma GCC unroll 8
    for (int place = 0; place < kBlockRows; ++place) row[place] = _mm512_load_si512(weights + place * (width + kPadding) + column);
#pragma GCC unroll 8
    for (int token = 0; token < Tokens; ++token) {
      const __m512i values = _mm512_load_si512(activations + token * stride + column);
#pragma GCC unroll 8
      for (int place = 0; place < kBlockRows; ++place) add_products(found[token][place], row[place], values);
    }
  }
#pragma GCC unroll 8
  for (int token = 0; token < Tokens; ++token) {
    __m128i* at = reinterpret_cast<__m128i*>(sums + token * kRowsDecoded);
    _mm_store_si128(at, _mm_add_epi32(_mm_load_si128(at), sums_of(found[token][0], found[token][1], found[token][2], found[token][3])));
  }
}

using Block = void (*)(const uint8_t*, const int8_t*, int64_t, int64_t, int32_t*);
constexpr Block kBlocks[] = {nullptr, block<1>, block<2>, block<3>, block<4>, block<5>, block<6>};

STRATA_AVX512 void store_rows(const Result& result, const Activations& activations, int64_t tokens, int64_t row, int64_t rows, const int32_t* sums,
                              const float* scales) {
  for (int64_t token = 0; token < tokens; ++token) {
    if (result.type != Type::bfloat16) {
      for (int64_t each = 0; each < rows; ++each) result.store(token, row + each, sums[token * kRowsDecoded + each], scales[each], activations);
      continue;
    }
    const __m512i shift = _mm512_set1_epi32(activations.sums[token]);
    const __m512 scale = _mm512_set1_ps(activations.scales[token]);
    for (int64_t each = 0; each < rows; each += 16) {
      const __mmask16 mask = first_floats(rows - each);
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(sums + token * kRowsDecoded + each), shift));
      const __m512 values = _mm512_mul_ps(_mm512_mul_ps(sum, scale), _mm512_maskz_loadu_ps(mask, scales + each));
      _mm256_mask_storeu_epi16(static_cast<uint16_t*>(result.out) + token * result.stride + row + each, mask, bfloat16_of(values));
    }
  }
}

STRATA_AVX512 void avx512_rows(const Planes& weight, const Activations& activations, int64_t tokens, const Result& result, int64_t begin, int64_t end) {
  thread_local Scratch scratch, sums_scratch;
  const int64_t tiles = weight.tiles(), groups = (tokens + kBlockTokens - 1) / kBlockTokens;
  const int64_t sections = (tiles + kMostSectionTiles - 1) / kMostSectionTiles, section = (tiles + sections - 1) / sections;
  uint8_t* decoded = scratch.of<uint8_t>(kRowsDecoded * (section * kTile + kPadding));
  int32_t* sums = sums_scratch.of<int32_t>(tokens * kRowsDecoded);
  for (int64_t row = begin; row < end; row += kRowsDecoded) {
    const int64_t rows = end - row < kRowsDecoded ? end - row : kRowsDecoded;
    float scales[kRowsDecoded];
    alignas(64) uint8_t tables[kRowsDecoded][16];
    for (int64_t each = 0; each < rows; ++each) scales[each] = shifted_table4(weight, row + each, result.type, tables[each]);
    std::memset(sums, 0, static_cast<size_t>(tokens) * kRowsDecoded * sizeof(int32_t));
    for (int64_t tile = 0; tile < tiles; tile += section) {
      const int64_t last = tile + section < tiles ? tile + section : tiles, width = (last - tile) * kTile;
      for (int64_t each = 0; each < rows; ++each) {
        const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(tables[each])));
        decode_tiles(weight, row + each, tile, last, table, decoded + each * (width + kPadding));
      }
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = tokens * group / groups, count = tokens * (group + 1) / groups - first;
        for (int64_t each = 0; each < rows; each += kBlockRows) {  // rows beyond the last hold what was there: not stored
          if (group == 0) prefetch_next(weight, row, each, kRowsDecoded, last, section);
          kBlocks[count](decoded + each * (width + kPadding), activations.codes + first * activations.stride + tile * kTile, width, activations.stride,
                         sums + first * kRowsDecoded + each);
        }
      }
    }
    store_rows(result, activations, tokens, row, rows, sums, scales);
  }
}
#endif

}  // namespace

void product_int8(const Matrix& tokens, const Planes& weight, void* out, int64_t out_stride, int threads) {
  thread_local Scratch codes_scratch, scales_scratch, sums_scratch;
  const int64_t stride = weight.tiles() * kTile + kPadding;
  const Activations activations{codes_scratch.of<int8_t>(tokens.rows * stride), scales_scratch.of<float>(tokens.rows),
                                sums_scratch.of<int32_t>(tokens.rows), stride};
  parallel_for(tokens.rows < 16 ? 1 : threads, tokens.rows, 1, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    float* values = scratch.of<float>(tokens.columns);
    for (int64_t token = begin; token < end; ++token) quantize_token(tokens, token, weight, values, activations);
  });
  const Result result{out, out_stride, tokens.type};
  parallel_for(threads, weight.rows, kRowsDecoded, [&](int64_t begin, int64_t end) {
#if STRATA_X86
    const Level level = cpu_level();
    if (level == Level::avx512 && weight.bits == 4) return avx512_rows(weight, activations, tokens.rows, result, begin, end);
    if (level >= Level::avx2) return avx2_rows(weight, activations, tokens.rows, result, begin, end);
#endif
    portable_rows(weight, activations, tokens.rows, result, begin, end);
  });
}

}  // namespace strata
