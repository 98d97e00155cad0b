// What products of int8 activations with int8 weights share, whichever way the weight is stored: tokens rounded to int8, and where results go. Sums are
// exact, so every path gives the same bits.
#pragma once
#include "planes.h"

namespace strata {

constexpr int kRun = 64;        // columns: a vector of bytes
constexpr int kGroupTokens = 4;  // multiplied at once
constexpr int64_t kRowsAtOnce = 48;  // of a weight, whose results are stored together
constexpr int kShift = 128;     // vpdpbusd wants one side unsigned: weights are shifted by it, and the tokens' sums take it off
constexpr float kTiny = 0x1p-126f;  // the least normal float: scales always divide

// Which columns a run holds. The last tile of bit-planes has 8 runs of fewer; else runs follow each other, and only the last is cut.
struct Runs {
  int64_t columns;        // of the tokens
  int64_t count, full;    // full: those that follow each other
  int64_t short_columns;  // of each of the others

  static Runs of(const Planes& weight, int64_t columns) {
    const int64_t full = weight.full_tiles();
    return {columns, weight.tiles() * 8, full * 8, full < weight.tiles() ? weight.tile_bytes(full) : 0};
  }
  static Runs of(int64_t columns) { return {columns, (columns + kRun - 1) / kRun, (columns + kRun - 1) / kRun, 0}; }

  int64_t start(int64_t run) const { return run < full ? run * kRun : full * kRun + (run - full) * short_columns; }
  int64_t length(int64_t run) const {
    const int64_t most = run < full ? kRun : short_columns, left = columns - start(run);
    return left < 0 ? 0 : left < most ? left : most;
  }
};

// Tokens in groups of four, the last perhaps of fewer. Of each run of columns a group's codes lie behind each other, so that a product reads one stream.
struct Activations {
  int8_t* codes;  // zeros beyond the columns
  float* scales;
  int32_t* sums;  // of a token's codes, times kShift
  int64_t tokens, runs;

  int64_t groups() const { return (tokens + kGroupTokens - 1) / kGroupTokens; }
  int64_t in_group(int64_t group) const {
    const int64_t left = tokens - group * kGroupTokens;
    return left < kGroupTokens ? left : kGroupTokens;
  }
  int8_t* run(int64_t group, int64_t place) const { return codes + (group * kGroupTokens * runs + place * in_group(group)) * kRun; }
};

// Divides tokens by their own scale, the largest magnitude over 127, unless divisors are known: of each column, and the scale of what comes of it.
// A token that holds NaN or infinity gets the scale NaN and zeros for codes: all its results are NaN. Kept until the thread's next call.
struct Divisors {
  const float* of_columns;  // or null
  float scale;
};
Activations rounded(const Matrix& tokens, const Runs& runs, const Divisors& known, int threads);

// The largest magnitude; infinity if one is infinite, NaN if one is NaN.
float peak_of(const float* values, int64_t count);

// Values over `divisors`, or all over `divisor`, to the nearest of -127..127, ties to even; gives the sum of the codes.
int32_t codes_of(const float* values, const float* divisors, float divisor, int64_t count, int8_t* codes);

struct Result {
  void* out;
  int64_t stride;
  Type type;
};

// Rows of four bits in planes, with tables of the result's type.
void int8_rows_avx2(const Planes& weight, const Activations& activations, const Result& result, int64_t begin, int64_t end);

// A row of the weight, codes in the order of the runs, with every token. Inlined, for each level of processor to compile anew.
inline __attribute__((always_inline)) void plain_row(const int8_t* codes, int64_t count, float scale, const Activations& activations, const Result& result,
                                                     int64_t row) {
  for (int64_t token = 0; token < activations.tokens; ++token) {
    const int64_t group = token / kGroupTokens;
    int32_t sum = 0;
    for (int64_t start = 0; start < count; start += kRun) {
      const int8_t* at = activations.run(group, start / kRun) + token % kGroupTokens * kRun;
      const int64_t length = count - start < kRun ? count - start : kRun;
      for (int64_t each = 0; each < length; ++each) sum += static_cast<int32_t>(static_cast<int16_t>(codes[start + each]) * static_cast<int16_t>(at[each]));
    }
    store_at(result.out, token * result.stride + row, result.type, static_cast<float>(sum) * activations.scales[token] * scale);
  }
}

}  // namespace strata
