// Rows of a weight decoded to values, for every level of processor. Columns keep their order.
#pragma once
#include "planes.h"

namespace strata {

// Codes of the columns in their order, a byte each.
void decode_codes(const Planes& weight, int64_t row, uint8_t* codes);

// out[i] = table[codes[i]].
void look_up(const float* table, int bits, const uint8_t* codes, int64_t count, float* out);

// A row's values of `type` (that of the table), `columns` of them; `codes`: as many bytes to work in.
void decode_values(const Planes& weight, int64_t row, Type type, uint8_t* codes, void* out);

// `count` values of any type as floats.
void widen(const void* from, Type type, int64_t count, float* out);

// The sums of the products of `count` floats (a multiple of 64) with each of some tokens.
void dot_products(const float* weights, const float* tokens, int64_t token_stride, int64_t token_count, int64_t count, float* sums);

}  // namespace strata
