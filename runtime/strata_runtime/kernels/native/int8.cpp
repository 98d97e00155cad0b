// Tokens to int8: see int8.h.
#include "int8.h"

#include <cmath>
#include <cstring>

#include "avx512.h"
#include "codes.h"
#include "rows.h"

namespace strata {
namespace {

STRATA_PLAIN int32_t plain_codes_of(const float* values, const float* divisors, float divisor, int64_t count, int8_t* codes) {
  int32_t sum = 0;
  for (int64_t each = 0; each < count; ++each) {
    const float code = std::nearbyintf(values[each] / (divisors ? divisors[each] : divisor));
    codes[each] = static_cast<int8_t>(code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code);
    sum += codes[each];
  }
  return sum;
}

int32_t portable_codes_of(const float* values, const float* divisors, float divisor, int64_t count, int8_t* codes) {
  return plain_codes_of(values, divisors, divisor, count, codes);
}

float portable_peak_of(const float* values, int64_t count) {
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

#if STRATA_X86
STRATA_AVX2 int32_t avx2_codes_of(const float* values, const float* divisors, float divisor, int64_t count, int8_t* codes) {
  return plain_codes_of(values, divisors, divisor, count, codes);
}

STRATA_AVX512 int32_t avx512_codes_of(const float* values, const float* divisors, float divisor, int64_t count, int8_t* codes) {
  const __m512 one = _mm512_set1_ps(divisor);
  __m512i sum = _mm512_setzero_si512();
  for (int64_t each = 0; each < count; each += 16) {
    const __mmask16 mask = first_floats(count - each);
    const __m512 by = divisors ? _mm512_mask_loadu_ps(_mm512_set1_ps(1.0f), mask, divisors + each) : one;
    const __m512 steps = _mm512_div_ps(_mm512_maskz_loadu_ps(mask, values + each), by);
    const __m512i code = _mm512_cvtps_epi32(_mm512_max_ps(_mm512_min_ps(steps, _mm512_set1_ps(127.0f)), _mm512_set1_ps(-127.0f)));
    sum = _mm512_add_epi32(sum, code);
    _mm_mask_storeu_epi8(codes + each, mask, _mm512_cvtepi32_epi8(code));
  }
  return _mm512_reduce_add_epi32(sum);
}

STRATA_AVX512 float avx512_peak_of(const float* values, int64_t count) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i largest = _mm512_setzero_si512();
  for (int64_t each = 0; each < count; each += 16)
    largest = _mm512_max_epu32(largest, _mm512_and_si512(magnitude, _mm512_maskz_loadu_epi32(first_floats(count - each), values + each)));
  const uint32_t bits = _mm512_reduce_max_epu32(largest);
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}
#endif

// values, codes: as many as columns, to work in.
void round_token(const Matrix& tokens, int64_t token, const Runs& runs, const Divisors& known, float* values, int8_t* codes, const Activations& out) {
  widen(tokens.row(token), tokens.type, tokens.columns, values);
  const float peak = peak_of(values, tokens.columns);
  float scale = known.of_columns ? known.scale : peak / 127.0f;
  if (!known.of_columns && scale < kTiny) scale = kTiny;
  int32_t sum = 0;
  if (std::isfinite(peak)) {
    sum = codes_of(values, known.of_columns, scale, tokens.columns, codes);
  } else {
    scale = NAN;
    std::memset(codes, 0, static_cast<size_t>(tokens.columns));
  }
  out.scales[token] = scale;
  out.sums[token] = sum * kShift;
  const int64_t group = token / kGroupTokens, step = out.in_group(group) * kRun;
  int8_t* to = out.run(group, 0) + token % kGroupTokens * kRun;
  for (int64_t run = 0; run < runs.count; ++run, to += step) {
    const int64_t length = runs.length(run);
    if (length == kRun) {
      std::memcpy(to, codes + runs.start(run), kRun);
    } else {
      std::memset(to, 0, kRun);
      std::memcpy(to, codes + runs.start(run), static_cast<size_t>(length));
    }
  }
}

}  // namespace

float peak_of(const float* values, int64_t count) {
#if STRATA_X86
  if (cpu_level() == Level::avx512) return avx512_peak_of(values, count);
#endif
  return portable_peak_of(values, count);
}

int32_t codes_of(const float* values, const float* divisors, float divisor, int64_t count, int8_t* codes) {
#if STRATA_X86
  const Level level = cpu_level();
  if (level == Level::avx512) return avx512_codes_of(values, divisors, divisor, count, codes);
  if (level == Level::avx2) return avx2_codes_of(values, divisors, divisor, count, codes);
#endif
  return portable_codes_of(values, divisors, divisor, count, codes);
}

Activations rounded(const Matrix& tokens, const Runs& runs, const Divisors& known, int threads) {
  thread_local Scratch codes_scratch, scales_scratch, sums_scratch;
  const Activations out{codes_scratch.of<int8_t>(tokens.rows * runs.count * kRun), scales_scratch.of<float>(tokens.rows),
                        sums_scratch.of<int32_t>(tokens.rows), tokens.rows, runs.count};
  parallel_for(tokens.rows < 16 ? 1 : threads, tokens.rows, 1, [&](int64_t begin, int64_t end) {
    thread_local Scratch values_scratch, codes_of_token;
    float* values = values_scratch.of<float>(tokens.columns);
    int8_t* codes = codes_of_token.of<int8_t>(tokens.columns);
    for (int64_t token = begin; token < end; ++token) round_token(tokens, token, runs, known, values, codes, out);
  });
  return out;
}

}  // namespace strata
