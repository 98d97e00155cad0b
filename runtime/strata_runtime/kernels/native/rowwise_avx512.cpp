// The rows of rowwise.cpp in AVX-512.
#include <cmath>

#include "rowwise.h"
#include "vectors.h"

#if STRATA_X86
namespace strata {
namespace {

STRATA_AVX512 void normalize(const NormCall& call, int64_t row) {
  const uint16_t *from = pointer<const uint16_t>(call.rows_at) + row * call.stride, *weight = pointer<const uint16_t>(call.weight);
  uint16_t* to = pointer<uint16_t>(call.out) + row * call.width;
  __m512 squares[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int64_t column = 0; column < call.width; column += kLanes) {
    const __m512 values = floats_at(from + column, first_floats(call.width - column));
    __m512& sum = squares[column / kLanes % 4];
    sum = _mm512_fmadd_ps(values, values, sum);
  }
  const float sum = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(squares[0], squares[1]), _mm512_add_ps(squares[2], squares[3])));
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(sum / static_cast<float>(call.width) + static_cast<float>(call.epsilon)));
  for (int64_t column = 0; column < call.width; column += kLanes) {
    const __mmask16 mask = first_floats(call.width - column);
    const __m512 values = rounded(_mm512_mul_ps(floats_at(from + column, mask), scale));
    store_at(to + column, mask, _mm512_mul_ps(floats_at(weight + column, mask), values));
  }
}

// A row's two halves: (a cos - b sin, b cos + a sin), each product rounded.
STRATA_AVX512 void rotate(uint16_t* items, const uint16_t* cos, const uint16_t* sin, int64_t width) {
  const int64_t half = width / 2;
  for (int64_t column = 0; column < half; column += kLanes) {
    const __mmask16 mask = first_floats(half - column);
    uint16_t *low = items + column, *high = low + half;
    const __m512 a = floats_at(low, mask), b = floats_at(high, mask);
    const auto times = [&](__m512 value, const uint16_t* table, int64_t at) STRATA_AVX512 {
      return rounded(_mm512_mul_ps(value, floats_at(table + at, mask)));
    };
    store_at(low, mask, _mm512_sub_ps(times(a, cos, column), times(b, sin, column)));
    store_at(high, mask, _mm512_add_ps(times(b, cos, half + column), times(a, sin, half + column)));
  }
}

// x / (1 + e^-x), rounded, times the other.
STRATA_AVX512 void gate(const GateCall& call, int64_t row) {
  const uint16_t *from = pointer<const uint16_t>(call.gate) + row * call.gate_stride, *up = pointer<const uint16_t>(call.up) + row * call.up_stride;
  uint16_t* to = pointer<uint16_t>(call.out) + row * call.width;
  const __m512 one = _mm512_set1_ps(1.0f);
  for (int64_t column = 0; column < call.width; column += kLanes) {
    const __mmask16 mask = first_floats(call.width - column);
    const __m512 x = floats_at(from + column, mask);
    const __m512 small = exponential(_mm512_or_ps(x, _mm512_set1_ps(-0.0f)));  // e^-|x|
    const __mmask16 below = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    const __m512 silu = _mm512_div_ps(_mm512_mask_mul_ps(x, below, x, small), _mm512_add_ps(one, small));
    store_at(to + column, mask, _mm512_mul_ps(rounded(silu), floats_at(up + column, mask)));
  }
}
STRATA_AVX512 void add(const uint16_t* left, const uint16_t* right, int64_t right_stride, int64_t rows, int64_t width, uint16_t* out) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < width; column += kLanes) {
      const __mmask16 mask = first_floats(width - column);
      store_at(out + row * width + column, mask, _mm512_add_ps(floats_at(left + row * width + column, mask), floats_at(right + row * right_stride + column, mask)));
    }
}

}  // namespace

const Rowwise kRowwiseAvx512{normalize, rotate, gate, add};

}  // namespace strata
#endif
