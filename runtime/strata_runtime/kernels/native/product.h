// Products of activations with a weight in bit-planes: what the paths of the processors offer to `product.cpp`, which chooses among them.
// out: [tokens, rows] of the activations' type, rows `out_stride` items apart.
#pragma once
#include "calls.h"

namespace strata {

// Uniform groups of inputs: value = (code - zero) * scale. scales: float16 [rows, count], zeros: bytes [rows, count], rows a stride apart.
struct Groups {
  const uint16_t* scales;
  const uint8_t* zeros;
  int64_t scale_stride, zero_stride, count, size;

  // The group of a column.
  int64_t at(int64_t column) const {
    const int64_t group = column / size;
    return group < count ? group : count - 1;  // of padding: any, it meets zeros
  }
};

// Values of `weight.table`, which is of the activations' type.
void product_float(const Matrix& tokens, const Planes& weight, void* out, int64_t out_stride, int threads);
void product_bfloat16_avx512(const Matrix& tokens, const Planes& weight, uint16_t* out, int64_t out_stride, int threads);
void product_bfloat16_avx2(const Matrix& tokens, const Planes& weight, uint16_t* out, int64_t out_stride, int threads);
void planes_decoded_avx2(const PlanesCall& call, const Planes& weight);

bool groups_bfloat16_avx512_takes(const Groups& groups);
void product_groups_bfloat16_avx512(const Matrix& tokens, const Planes& weight, const Groups& groups, uint16_t* out, int64_t out_stride, int threads);
void product_groups_bfloat16_avx2(const Matrix& tokens, const Planes& weight, const Groups& groups, uint16_t* out, int64_t out_stride, int threads);
void product_groups_float(const Matrix& tokens, const Planes& weight, const Groups& groups, void* out, int64_t out_stride, int threads);

// The format any4_a8: activations rounded to int8 per token, values to int8 per row; exact sums. See precision/plane_kernels.py.
void product_int8(const Matrix& tokens, const Planes& weight, void* out, int64_t out_stride, int threads);

}  // namespace strata
