// Products in float32 for every type of activations and level of processor: a row is decoded into the cache once and multiplied by all tokens. Also weights
// of groups, whose values are (code - zero) * scale.
#include "product.h"
#include "rows.h"

namespace strata {
namespace {

// The tokens as floats, zeros beyond their columns: [tokens, columns of the weight].
float* widened(const Matrix& tokens, int64_t columns, Scratch& scratch) {
  float* out = scratch.of<float>(tokens.rows * columns);
  for (int64_t row = 0; row < tokens.rows; ++row) {
    float* at = out + row * columns;
    widen(tokens.row(row), tokens.type, tokens.columns, at);
    for (int64_t column = tokens.columns; column < columns; ++column) at[column] = 0;
  }
  return out;
}

template <class Decode>
void product(const Matrix& tokens, const Planes& weight, void* out, int64_t out_stride, int threads, const Decode& decode) {
  thread_local Scratch token_scratch;
  const float* activations = widened(tokens, weight.columns, token_scratch);
  parallel_for(threads, weight.rows, 16, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch, code_scratch, sum_scratch;
    float* values = scratch.of<float>(weight.columns);
    uint8_t* codes = code_scratch.of<uint8_t>(weight.columns);
    float* sums = sum_scratch.of<float>(tokens.rows);
    for (int64_t row = begin; row < end; ++row) {
      decode_codes(weight, row, codes);
      decode(row, codes, values);
      dot_products(values, activations, weight.columns, tokens.rows, weight.columns, sums);
      for (int64_t token = 0; token < tokens.rows; ++token) store_at(out, token * out_stride + row, tokens.type, sums[token]);
    }
  });
}

}  // namespace

void product_float(const Matrix& tokens, const Planes& weight, void* out, int64_t out_stride, int threads) {
  product(tokens, weight, out, out_stride, threads, [&](int64_t row, const uint8_t* codes, float* values) {
    float table[1 << kMostBits];
    widen(weight.table + row * weight.table_stride_bytes, tokens.type, int64_t{1} << weight.bits, table);
    look_up(table, weight.bits, codes, weight.columns, values);
  });
}

void product_groups_float(const Matrix& tokens, const Planes& weight, const Groups& groups, void* out, int64_t out_stride, int threads) {
  product(tokens, weight, out, out_stride, threads, [&](int64_t row, const uint8_t* codes, float* values) {
    for (int64_t group = 0, start = 0; start < weight.columns; ++group, start += groups.size) {
      const int64_t end = start + groups.size < weight.columns ? start + groups.size : weight.columns;
      const int64_t place = group < groups.count ? group : groups.count - 1;  // padding: times zero
      const float scale = float_of_float16(groups.scales[row * groups.scale_stride + place]);
      const int zero = groups.zeros[row * groups.zero_stride + place];
      for (int64_t column = start; column < end; ++column) values[column] = static_cast<float>(codes[column] - zero) * scale;
    }
  });
}

}  // namespace strata
