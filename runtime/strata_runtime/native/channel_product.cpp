// Products of int8 activations with int8 weights that lie as they are read, row by row (precision/native_channels.py). Activations are rounded here: with a
// scale of their own per token, or by divisors that calibration gave. Sums are exact, so every path gives the same bits.
// vpdpbusd wants one side unsigned: weights are shifted by 128 on their way, and 128 times the sum of a token's codes is taken off at the end.
#include <cmath>
#include <cstring>

#include "avx512.h"
#include "codes.h"
#include "planes.h"
#include "rows.h"

using namespace strata;

namespace {

// In the order of native_channels.py. Addresses and sizes; strides in items.
struct ChannelCall {
  int64_t tokens, token_rows, columns, token_stride, type;
  int64_t out, out_stride, threads;
  int64_t rows, codes, code_stride, scales;  // scales: float32 [rows]
  int64_t smoothing, activation_scale;       // of the tokens' type [columns] and float32 [], or 0: a scale per token
};

constexpr int kShift = 128;
constexpr int kBlockRows = 4, kBlockTokens = 6;  // of accumulators
constexpr int64_t kRowsAtOnce = 16, kTokensAtOnce = 64;
constexpr int64_t kPadding = 64;  // bytes between tokens, so that they do not meet in one set of the cache
constexpr float kTiny = 0x1p-126f;

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(address);
}

struct Weight {
  const int8_t* codes;
  int64_t rows, columns, stride;
  const float* scales;

  const int8_t* row(int64_t place) const { return codes + place * stride; }
};

struct Activations {
  int8_t* codes;  // [tokens, stride], zeros beyond the columns
  float* scales;
  int32_t* sums;  // of a token's codes, times kShift
  int64_t stride;
};

struct Result {
  void* out;
  int64_t stride;
  Type type;
};

STRATA_PLAIN float peak_of(const float* values, int64_t count) {
  uint32_t largest = 0;  // among magnitudes as bits infinity is above all numbers and NaN above infinity
  for (int64_t each = 0; each < count; ++each) {
    uint32_t bits;
    std::memcpy(&bits, values + each, 4);
    bits &= 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  float magnitude;
  std::memcpy(&magnitude, &largest, 4);
  return magnitude;
}

STRATA_PLAIN void plain_codes_of(const float* values, const float* divisors, float divisor, int64_t count, int8_t* codes) {
  for (int64_t each = 0; each < count; ++each) {
    const float code = std::nearbyintf(values[each] / (divisors ? divisors[each] : divisor));
    codes[each] = static_cast<int8_t>(code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code);
  }
}

void portable_codes_of(const float* values, const float* divisors, float divisor, int64_t count, int8_t* codes) {
  plain_codes_of(values, divisors, divisor, count, codes);
}

// Rows of the weight from `begin` to `end` with every token.
STRATA_PLAIN void plain_rows(const Weight& weight, const Activations& activations, int64_t tokens, const Result& result, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    for (int64_t token = 0; token < tokens; ++token) {
      const int8_t *codes = activations.codes + token * activations.stride, *values = weight.row(row);
      int32_t sum = 0;
      for (int64_t each = 0; each < weight.columns; ++each) sum += static_cast<int32_t>(static_cast<int16_t>(values[each]) * static_cast<int16_t>(codes[each]));
      store_at(result.out, token * result.stride + row, result.type, static_cast<float>(sum) * activations.scales[token] * weight.scales[row]);
    }
}

void portable_rows(const Weight& weight, const Activations& activations, int64_t tokens, const Result& result, int64_t begin, int64_t end) {
  plain_rows(weight, activations, tokens, result, begin, end);
}

#if STRATA_X86
STRATA_AVX2 void avx2_codes_of(const float* values, const float* divisors, float divisor, int64_t count, int8_t* codes) {
  plain_codes_of(values, divisors, divisor, count, codes);
}

STRATA_AVX2 void avx2_rows(const Weight& weight, const Activations& activations, int64_t tokens, const Result& result, int64_t begin, int64_t end) {
  plain_rows(weight, activations, tokens, result, begin, end);
}

STRATA_AVX512 void avx512_codes_of(const float* values, const float* divisors, float divisor, int64_t count, int8_t* codes) {
  const __m512 one = _mm512_set1_ps(divisor);
  for (int64_t each = 0; each < count; each += 16) {
    const __mmask16 mask = first_floats(count - each);
    const __m512 by = divisors ? _mm512_mask_loadu_ps(_mm512_set1_ps(1.0f), mask, divisors + each) : one;
    const __m512 steps = _mm512_div_ps(_mm512_maskz_loadu_ps(mask, values + each), by);
    const __m512 clipped = _mm512_max_ps(_mm512_min_ps(steps, _mm512_set1_ps(127.0f)), _mm512_set1_ps(-127.0f));
    _mm_mask_storeu_epi8(codes + each, mask, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(clipped)));
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

template <int Tokens>
STRATA_INLINE void add_step(__m512i (&found)[Tokens][kBlockRows], const int8_t* const* rows, const int8_t* activations, int64_t stride, int64_t column,
                            __mmask64 mask) {
  const __m512i shift = _mm512_set1_epi8(static_cast<char>(kShift));
  __m512i row[kBlockRows];
#pragma GCC unroll 8
  for (int place = 0; place < kBlockRows; ++place) row[place] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, rows[place] + column), shift);
#pragma GCC unroll 8
  for (int token = 0; token < Tokens; ++token) {
    const __m512i values = _mm512_load_si512(activations + token * stride + column);
#pragma GCC unroll 8
    for (int place = 0; place < kBlockRows; ++place) add_products(found[token][place], row[place], values);
  }
}

// 4 rows x Tokens: sums [token][kRowsAtOnce].
template <int Tokens>
STRATA_AVX512 void block(const int8_t* const* rows, const int8_t* activations, int64_t columns, int64_t stride, int32_t* sums) {
  __m512i found[Tokens][kBlockRows];
#pragma GCC unroll 8
  for (auto& each : found)
#pragma GCC unroll 8
    for (auto& sum : each) sum = _mm512_setzero_si512();
  int64_t column = 0;
  for (; column + 64 <= columns; column += 64) add_step<Tokens>(found, rows, activations, stride, column, ~__mmask64{0});
  if (column < columns) add_step<Tokens>(found, rows, activations, stride, column, first_bytes(columns - column));
#pragma GCC unroll 8
  for (int token = 0; token < Tokens; ++token)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(sums + token * kRowsAtOnce), sums_of(found[token][0], found[token][1], found[token][2], found[token][3]));
}

using Block = void (*)(const int8_t* const*, const int8_t*, int64_t, int64_t, int32_t*);
constexpr Block kBlocks[] = {nullptr, block<1>, block<2>, block<3>, block<4>, block<5>, block<6>};

// Sums [token][kRowsAtOnce] of `rows` neighbouring rows to results.
STRATA_AVX512 void store_rows(const Result& result, const Activations& activations, int64_t tokens, int64_t row, int64_t rows, const int32_t* sums,
                              const float* scales) {
  const __mmask16 mask = first_floats(rows);
  const __m512 of_rows = _mm512_maskz_loadu_ps(mask, scales + row);
  for (int64_t token = 0; token < tokens; ++token) {
    const __m512i sum = _mm512_sub_epi32(_mm512_load_si512(sums + token * kRowsAtOnce), _mm512_set1_epi32(activations.sums[token]));
    const __m512 values = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(activations.scales[token])), of_rows);
    const int64_t place = token * result.stride + row;
    if (result.type == Type::float32)
      _mm512_mask_storeu_ps(static_cast<float*>(result.out) + place, mask, values);
    else
      _mm256_mask_storeu_epi16(static_cast<uint16_t*>(result.out) + place, mask,
                               result.type == Type::bfloat16 ? bfloat16_of(values) : _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
}

STRATA_AVX512 void avx512_rows(const Weight& weight, const Activations& activations, int64_t tokens, const Result& result, int64_t begin, int64_t end) {
  alignas(64) int32_t sums[kTokensAtOnce * kRowsAtOnce];
  const int64_t groups = (tokens + kBlockTokens - 1) / kBlockTokens;
  for (int64_t row = begin; row < end; row += kRowsAtOnce) {
    const int64_t count = end - row < kRowsAtOnce ? end - row : kRowsAtOnce;
    for (int64_t some = 0; some < count; some += kBlockRows) {
      const int8_t* rows[kBlockRows];  // rows beyond the last repeat it: not stored
      for (int64_t place = 0; place < kBlockRows; ++place) rows[place] = weight.row(row + (some + place < count ? some + place : count - 1));
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = tokens * group / groups, in_group = tokens * (group + 1) / groups - first;
        kBlocks[in_group](rows, activations.codes + first * activations.stride, weight.columns, activations.stride, sums + first * kRowsAtOnce + some);
      }
    }
    store_rows(result, activations, tokens, row, count, sums, weight.scales);
  }
}
#endif

void codes_of(const float* values, const float* divisors, float divisor, int64_t count, int8_t* codes) {
#if STRATA_X86
  const Level level = cpu_level();
  if (level == Level::avx512) return avx512_codes_of(values, divisors, divisor, count, codes);
  if (level == Level::avx2) return avx2_codes_of(values, divisors, divisor, count, codes);
#endif
  portable_codes_of(values, divisors, divisor, count, codes);
}

// A token that holds NaN or infinity gets a scale that is not finite, and zeros for codes: all its results are NaN.
void round_token(const ChannelCall& call, const float* divisors, const Matrix& tokens, int64_t place, float* values, const Activations& out) {
  widen(tokens.row(place), tokens.type, tokens.columns, values);
  const float peak = peak_of(values, tokens.columns);
  float scale = divisors ? *pointer<const float>(call.activation_scale) : peak / 127.0f;
  if (!divisors && scale < kTiny) scale = kTiny;
  if (!std::isfinite(peak)) scale = NAN;
  out.scales[place] = scale;
  int8_t* codes = out.codes + place * out.stride;
  std::memset(codes, 0, static_cast<size_t>(out.stride));
  if (std::isfinite(peak)) codes_of(values, divisors, scale, tokens.columns, codes);
  int32_t sum = 0;
  for (int64_t each = 0; each < out.stride; ++each) sum += codes[each];
  out.sums[place] = sum * kShift;
}

void product(const ChannelCall& call, const float* divisors, const Matrix& tokens, const Result& result) {
  thread_local Scratch codes_scratch, scales_scratch, sums_scratch;
  const int threads = static_cast<int>(call.threads);
  const int64_t stride = (call.columns + 63) / 64 * 64 + kPadding;
  const Activations activations{codes_scratch.of<int8_t>(tokens.rows * stride), scales_scratch.of<float>(tokens.rows),
                                sums_scratch.of<int32_t>(tokens.rows), stride};
  parallel_for(tokens.rows < 16 ? 1 : threads, tokens.rows, 1, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    float* values = scratch.of<float>(tokens.columns);
    for (int64_t token = begin; token < end; ++token) round_token(call, divisors, tokens, token, values, activations);
  });
  const Weight weight{pointer<const int8_t>(call.codes), call.rows, call.columns, call.code_stride, pointer<const float>(call.scales)};
  parallel_for(threads, weight.rows, kRowsAtOnce, [&](int64_t begin, int64_t end) {
#if STRATA_X86
    const Level level = cpu_level();
    if (level == Level::avx512) return avx512_rows(weight, activations, tokens.rows, result, begin, end);
    if (level == Level::avx2) return avx2_rows(weight, activations, tokens.rows, result, begin, end);
#endif
    portable_rows(weight, activations, tokens.rows, result, begin, end);
  });
}

}  // namespace

// tokens [M, K] x int8 rows with a scale each -> out [M, N]; some tokens at a time, whose codes stay in the cache.
STRATA_API void strata_channel_linear(const ChannelCall* call) {
  const Type type = static_cast<Type>(call->type);
  thread_local Scratch scratch;
  float* divisors = call->smoothing ? scratch.of<float>(call->columns) : nullptr;
  if (divisors) {
    widen(pointer<const void>(call->smoothing), type, call->columns, divisors);
    const float scale = *pointer<const float>(call->activation_scale);
    for (int64_t each = 0; each < call->columns; ++each) divisors[each] *= scale;
  }
  for (int64_t first = 0; first < call->token_rows; first += kTokensAtOnce) {
    Matrix tokens{pointer<const void>(call->tokens), call->token_rows, call->columns, call->token_stride, type};
    tokens.data = tokens.row(first);
    tokens.rows = call->token_rows - first < kTokensAtOnce ? call->token_rows - first : kTokensAtOnce;
    product(*call, divisors, tokens, {pointer<uint8_t>(call->out) + first * call->out_stride * item_bytes(type), call->out_stride, type});
  }
}
