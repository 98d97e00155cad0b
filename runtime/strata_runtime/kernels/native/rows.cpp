// See rows.h. Every function has a portable form, one in AVX2 and one in AVX-512; which one runs is asked of cpu.h at each call.
#include "rows.h"

#include "avx512.h"
#include "codes.h"
#include "planes_avx2.h"

namespace strata {
namespace {

void portable_codes(const Planes& weight, int64_t row, uint8_t* codes) {
  for (int64_t tile = 0; tile < weight.tiles(); ++tile) plain_codes(weight, row, tile, codes + tile * kTile);
}

void portable_look_up(const float* table, const uint8_t* codes, int64_t count, float* out) {
  for (int64_t each = 0; each < count; ++each) out[each] = table[codes[each]];
}

void portable_dot(const float* weights, const float* tokens, int64_t token_stride, int64_t token_count, int64_t count, float* sums) {
  for (int64_t token = 0; token < token_count; ++token) {
    const float* at = tokens + token * token_stride;
    float lanes[16] = {};
    for (int64_t column = 0; column < count; column += 16)
      for (int lane = 0; lane < 16; ++lane) lanes[lane] += weights[column + lane] * at[column + lane];
    float sum = 0;
    for (float lane : lanes) sum += lane;
    sums[token] = sum;
  }
}

#if STRATA_X86
STRATA_AVX2 void avx2_codes(const Planes& weight, int64_t row, uint8_t* codes) {
  for (int64_t tile = 0; tile < weight.tiles(); ++tile) plain_codes(weight, row, tile, codes + tile * kTile);
}

STRATA_AVX2 void avx2_look_up(const float* table, const uint8_t* codes, int64_t count, float* out) {
  for (int64_t each = 0; each < count; each += 8) {
    const __m256i places = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + each)));
    _mm256_storeu_ps(out + each, _mm256_i32gather_ps(table, places, 4));
  }
}

STRATA_AVX2 void avx2_dot(const float* weights, const float* tokens, int64_t token_stride, int64_t token_count, int64_t count, float* sums) {
  for (int64_t token = 0; token < token_count; ++token) {
    const float* at = tokens + token * token_stride;
    __m256 lanes[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t column = 0; column < count; column += 32)
      for (int part = 0; part < 4; ++part)
        lanes[part] = _mm256_fmadd_ps(_mm256_loadu_ps(weights + column + 8 * part), _mm256_loadu_ps(at + column + 8 * part), lanes[part]);
    const __m256 all = _mm256_add_ps(_mm256_add_ps(lanes[0], lanes[1]), _mm256_add_ps(lanes[2], lanes[3]));
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    const __m128 two = _mm_add_ps(half, _mm_movehl_ps(half, half));
    sums[token] = _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
}

// 16-bit values, in the columns' order.
template <int Bits>
STRATA_AVX2 void avx2_values16(const Planes& weight, int64_t row, uint16_t* out) {
  avx2::values16<Bits>(weight, row, 0, avx2::Lines(weight).count(), 0, out);
}

STRATA_AVX512 void avx512_widen(const void* from, Type type, int64_t count, float* out) {
  const uint16_t* items = static_cast<const uint16_t*>(from);
  for (int64_t each = 0; each < count; each += 16) {
    const __mmask16 mask = first_floats(count - each);
    const __m256i bits = _mm256_maskz_loadu_epi16(mask, items + each);
    const __m512 values =
        type == Type::bfloat16 ? _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)) : _mm512_cvtph_ps(bits);
    _mm512_mask_storeu_ps(out + each, mask, values);
  }
}

template <int Bits>
STRATA_AVX512 void avx512_codes(const Planes& weight, int64_t row, uint8_t* codes) {
  const __m512i meant = _mm512_set1_epi8(static_cast<char>((1 << Bits) - 1));
  for (int64_t tile = 0; tile < weight.tiles(); ++tile) {
    __m512i planes[Bits], found[8];
    const int run = weight.tile_bytes(tile);
    const __mmask64 mask = first_bytes(run);
    load_planes<Bits>(weight, row, tile, mask, planes);
    transpose<Bits>(planes, found);
    for (int b = 0; b < 8; ++b) _mm512_mask_storeu_epi8(codes + tile * kTile + b * run, mask, _mm512_and_si512(found[b], meant));
  }
}

STRATA_AVX512 void avx512_look_up(const float* table, int bits, const uint8_t* codes, int64_t count, float* out) {
  if (bits <= 5) {
    const __m512 low = _mm512_maskz_loadu_ps(first_floats(1 << bits), table);
    const __m512 high = bits == 5 ? _mm512_loadu_ps(table + 16) : low;
    for (int64_t each = 0; each < count; each += 16) {
      const __m512i places = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + each)));
      _mm512_storeu_ps(out + each, _mm512_permutex2var_ps(low, places, high));
    }
    return;
  }
  for (int64_t each = 0; each < count; each += 16) {
    const __m512i places = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + each)));
    _mm512_storeu_ps(out + each, _mm512_i32gather_ps(places, table, 4));
  }
}

STRATA_AVX512 void avx512_dot(const float* weights, const float* tokens, int64_t token_stride, int64_t token_count, int64_t count, float* sums) {
  for (int64_t token = 0; token < token_count; ++token) {
    const float* at = tokens + token * token_stride;
    __m512 lanes[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t column = 0; column < count; column += 64)
      for (int part = 0; part < 4; ++part)
        lanes[part] = _mm512_fmadd_ps(_mm512_loadu_ps(weights + column + 16 * part), _mm512_loadu_ps(at + column + 16 * part), lanes[part]);
    sums[token] = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(lanes[0], lanes[1]), _mm512_add_ps(lanes[2], lanes[3])));
  }
}

// 16-bit values, in the columns' order.
template <int Bits>
STRATA_AVX512 void avx512_values16(const Planes& weight, int64_t row, uint16_t* out) {
  Table16<Bits> table;
  table.load(weight.table + row * weight.table_stride_bytes);
  for (int64_t tile = 0; tile < weight.tiles(); ++tile) {
    __m512i planes[Bits], codes[8];
    const int run = weight.tile_bytes(tile);
    load_planes<Bits>(weight, row, tile, first_bytes(run), planes);
    transpose<Bits>(planes, codes);
    for (int b = 0; b < 8; ++b) {
      __m512i first, second, front, back;
      table.look_up(codes[b], first, second);
      reorder(order_of(Bits).places, first, second, front, back);
      uint16_t* at = out + tile * kTile + b * run;
      _mm512_mask_storeu_epi16(at, static_cast<__mmask32>(first_bytes(run)), front);
      _mm512_mask_storeu_epi16(at + 32, static_cast<__mmask32>(first_bytes(run) >> 32), back);
    }
  }
}

using Codes = void (*)(const Planes&, int64_t, uint8_t*);
using Values = void (*)(const Planes&, int64_t, uint16_t*);
constexpr Values kValues16Avx2[] = {nullptr,          avx2_values16<1>, avx2_values16<2>, avx2_values16<3>, avx2_values16<4>,
                                    avx2_values16<5>, avx2_values16<6>, avx2_values16<7>, avx2_values16<8>};
constexpr Codes kCodes[] = {nullptr,         nullptr,         avx512_codes<2>, avx512_codes<3>, avx512_codes<4>,
                            avx512_codes<5>, avx512_codes<6>, avx512_codes<7>, avx512_codes<8>};
constexpr Values kValues16[] = {nullptr,            nullptr,            avx512_values16<2>, avx512_values16<3>, avx512_values16<4>,
                                avx512_values16<5>, avx512_values16<6>, avx512_values16<7>, avx512_values16<8>};
#endif

template <class Item>
void copy_from_table(const Planes& weight, int64_t row, const uint8_t* codes, Item* out) {
  const Item* table = reinterpret_cast<const Item*>(weight.table + row * weight.table_stride_bytes);
  for (int64_t column = 0; column < weight.columns; ++column) out[column] = table[codes[column]];
}

}  // namespace

void decode_codes(const Planes& weight, int64_t row, uint8_t* codes) {
#if STRATA_X86
  const Level level = cpu_level();
  if (level == Level::avx512 && weight.bits >= 2) return kCodes[weight.bits](weight, row, codes);
  if (level >= Level::avx2) return avx2_codes(weight, row, codes);
#endif
  portable_codes(weight, row, codes);
}

void look_up(const float* table, int bits, const uint8_t* codes, int64_t count, float* out) {
#if STRATA_X86
  const Level level = cpu_level();
  if (level == Level::avx512) return avx512_look_up(table, bits, codes, count, out);
  if (level == Level::avx2) return avx2_look_up(table, codes, count, out);
#endif
  (void)bits;
  portable_look_up(table, codes, count, out);
}

void widen(const void* from, Type type, int64_t count, float* out) {
#if STRATA_X86
  if (type != Type::float32 && cpu_level() == Level::avx512) return avx512_widen(from, type, count, out);
#endif
  for (int64_t each = 0; each < count; ++each) out[each] = value_at(from, each, type);
}

void dot_products(const float* weights, const float* tokens, int64_t token_stride, int64_t token_count, int64_t count, float* sums) {
#if STRATA_X86
  const Level level = cpu_level();
  if (level == Level::avx512) return avx512_dot(weights, tokens, token_stride, token_count, count, sums);
  if (level == Level::avx2) return avx2_dot(weights, tokens, token_stride, token_count, count, sums);
#endif
  portable_dot(weights, tokens, token_stride, token_count, count, sums);
}

void decode_values(const Planes& weight, int64_t row, Type type, uint8_t* codes, void* out) {
#if STRATA_X86
  const Level level = cpu_level();
  if (type != Type::float32 && level == Level::avx512 && weight.bits >= 2) return kValues16[weight.bits](weight, row, static_cast<uint16_t*>(out));
  if (type != Type::float32 && level >= Level::avx2) return kValues16Avx2[weight.bits](weight, row, static_cast<uint16_t*>(out));
#endif
  decode_codes(weight, row, codes);
  if (type == Type::float32)
    look_up(reinterpret_cast<const float*>(weight.table + row * weight.table_stride_bytes), weight.bits, codes, weight.columns, static_cast<float*>(out));
  else
    copy_from_table(weight, row, codes, static_cast<uint16_t*>(out));
}

}  // namespace strata
