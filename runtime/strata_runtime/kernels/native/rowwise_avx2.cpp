// The rows of rowwise.cpp in AVX2.
#include <cmath>

#include "rowwise.h"
#include "vectors_avx2.h"

#if STRATA_X86
namespace strata {
namespace {

STRATA_AVX2 void normalize(const NormCall& call, int64_t row) {
  const uint16_t *from = pointer<const uint16_t>(call.rows_at) + row * call.stride, *weight = pointer<const uint16_t>(call.weight);
  uint16_t* to = pointer<uint16_t>(call.out) + row * call.width;
  __m256 squares[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
  for (int64_t column = 0; column < call.width; column += kFloats) {
    const __m256 values = floats_at(from + column, call.width - column);
    __m256& sum = squares[column / kFloats % 4];
    sum = _mm256_fmadd_ps(values, values, sum);
  }
  const float sum = sum_of(_mm256_add_ps(_mm256_add_ps(squares[0], squares[1]), _mm256_add_ps(squares[2], squares[3])));
  const __m256 scale = _mm256_set1_ps(1.0f / std::sqrt(sum / static_cast<float>(call.width) + static_cast<float>(call.epsilon)));
  for (int64_t column = 0; column < call.width; column += kFloats) {
    const int64_t left = call.width - column;
    const __m256 values = rounded(_mm256_mul_ps(floats_at(from + column, left), scale));
    store_at(to + column, left, _mm256_mul_ps(floats_at(weight + column, left), values));
  }
}

// A row's two halves: (a cos - b sin, b cos + a sin), each product rounded.
STRATA_AVX2 void rotate(uint16_t* items, const uint16_t* cos, const uint16_t* sin, int64_t width) {
  const int64_t half = width / 2;
  for (int64_t column = 0; column < half; column += kFloats) {
    const int64_t left = half - column;
    uint16_t *low = items + column, *high = low + half;
    const __m256 a = floats_at(low, left), b = floats_at(high, left);
    const auto times = [&](__m256 value, const uint16_t* table, int64_t at) STRATA_AVX2 {
      return rounded(_mm256_mul_ps(value, floats_at(table + at, left)));
    };
    store_at(low, left, _mm256_sub_ps(times(a, cos, column), times(b, sin, column)));
    store_at(high, left, _mm256_add_ps(times(b, cos, half + column), times(a, sin, half + column)));
  }
}

// x / (1 + e^-x), rounded, times the other.
STRATA_AVX2 void gate(const GateCall& call, int64_t row) {
  const uint16_t *from = pointer<const uint16_t>(call.gate) + row * call.gate_stride, *up = pointer<const uint16_t>(call.up) + row * call.up_stride;
  uint16_t* to = pointer<uint16_t>(call.out) + row * call.width;
  const __m256 one = _mm256_set1_ps(1.0f);
  for (int64_t column = 0; column < call.width; column += kFloats) {
    const int64_t left = call.width - column;
    const __m256 x = floats_at(from + column, left);
    const __m256 small = exponential(_mm256_or_ps(x, _mm256_set1_ps(-0.0f)));  // e^-|x|
    const __m256 below = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ);
    const __m256 silu = _mm256_div_ps(_mm256_blendv_ps(x, _mm256_mul_ps(x, small), below), _mm256_add_ps(one, small));
    store_at(to + column, left, _mm256_mul_ps(rounded(silu), floats_at(up + column, left)));
  }
}

STRATA_AVX2 void add(const uint16_t* left, const uint16_t* right, int64_t right_stride, int64_t rows, int64_t width, uint16_t* out) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < width; column += kFloats) {
      const int64_t count = width - column;
      store_at(out + row * width + column, count,
               _mm256_add_ps(floats_at(left + row * width + column, count), floats_at(right + row * right_stride + column, count)));
    }
}

}  // namespace

const Rowwise kRowwiseAvx2{normalize, rotate, gate, add};

}  // namespace strata
#endif
