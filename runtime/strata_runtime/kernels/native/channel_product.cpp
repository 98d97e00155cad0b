// Products of int8 activations with int8 weights that lie as they are read, row by row (kernels/native_channels.py). Activations are rounded here: with a
// scale of their own per token, or by divisors that calibration gave.
#include <algorithm>

#include "calls.h"
#include "int8.h"
#include "int8_avx2.h"
#include "int8_avx512.h"
#include "rows.h"

using namespace strata;

namespace {

constexpr int64_t kTokensAtOnce = 64;

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

void portable_rows(const Weight& weight, const Activations& activations, const Result& result, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) plain_row(weight.row(row), weight.columns, weight.scales[row], activations, result, row);
}

#if STRATA_X86
class StoredRowsAvx2 {
 public:
  explicit StoredRowsAvx2(const Weight& weight) : weight_(weight) {}
  int64_t columns() const { return weight_.columns; }
  void load(int64_t row, int64_t count, const int8_t** codes, float* scales) const {
    for (int64_t each = 0; each < count; ++each) codes[each] = weight_.row(row + each);
    std::copy_n(weight_.scales + row, count, scales);
  }

 private:
  const Weight& weight_;
};

void avx2_rows(const Weight& weight, const Activations& activations, const Result& result, int64_t begin, int64_t end) {
  StoredRowsAvx2 source(weight);
  multiply_rows_avx2(source, activations, result, begin, end);
}

constexpr int64_t kAheadBytes = 2048;  // prefetched, of a weight that is read once

// Rows as they lie, shifted on their way.
class StoredRows {
 public:
  // Of six rows; the next six are fetched while the tokens pass, each group a part of their columns.
  struct Columns {
    static constexpr bool kMayBeCut = true;
    const int8_t* rows[kGroupRows];
    __mmask64 last_mask;
    int64_t next, count;     // bytes from a row to the one fetched meanwhile; of these columns
    int64_t fetched, shift;  // where the part begins; it is at most 2^-shift of the columns

    void before(int64_t part, int64_t parts) {
      fetched = next + count * part / parts;
      shift = parts > 1 ? 64 - __builtin_clzll(static_cast<uint64_t>(parts) - 1) : 0;
    }

    STRATA_INLINE __m512i load(int row, int64_t column, __mmask64 mask) const {
      _mm_prefetch(rows[row] + fetched + (column >> shift), _MM_HINT_T0);
      return shifted(_mm512_maskz_loadu_epi8(mask, rows[row] + column));
    }
  };

  explicit StoredRows(const Weight& weight) : weight_(weight) {}

  void start(int64_t row, int64_t count, float* scales) {
    row_ = row;
    count_ = count;
    std::copy_n(weight_.scales + row, count, scales);
  }

  STRATA_AVX512 Columns section(int64_t first_run, int64_t last_run) const {
    Columns found{};  // rows beyond the last repeat it
    for (int64_t each = 0; each < kGroupRows; ++each) found.rows[each] = weight_.row(row_ + (each < count_ ? each : count_ - 1)) + first_run * kRun;
    found.last_mask = first_bytes(weight_.columns - (last_run - 1) * kRun);
    found.next = kGroupRows * weight_.stride;
    found.count = (last_run - first_run) * kRun;
    return found;
  }

  // From two places half of a thread's rows apart: memory gives two streams faster than one.
  template <int Tokens>
  STRATA_AVX512 void few(const Activations& activations, const Result& result, int64_t begin, int64_t end) const {
    const int64_t half = (end - begin + 1) / 2, middle = begin + half;
    for (int64_t first = begin; first < middle; first += kRowsAtOnce) {
      const int64_t second = first + half, rows = middle - first < kRowsAtOnce ? middle - first : kRowsAtOnce;
      int32_t sums[2][Tokens * kRowsAtOnce];
      for (int64_t some = 0; some < rows; some += 4) {
        __m512i found[4][2][Tokens];
        for (int64_t each = 0; each < 4; ++each) {  // rows beyond the last repeat it: not stored
          const int64_t row = some + each < rows ? some + each : rows - 1;
          multiply_two(weight_.row(first + row), weight_.row(second + row < end ? second + row : end - 1), activations.codes, found[each]);
        }
        for (int place = 0; place < 2; ++place) store_four<Tokens>(found[0] + place, 2, sums[place] + some);
      }
      store_rows(result, activations, first, rows, sums[0], weight_.scales + first);
      store_rows(result, activations, second, second + rows < end ? rows : end - second, sums[1], weight_.scales + second);
    }
  }

 private:
  template <int Tokens>
  STRATA_AVX512 __attribute__((noinline)) void multiply_two(const int8_t* first, const int8_t* second, const int8_t* activations,
                                                            __m512i (*sums)[Tokens]) const {
    constexpr int kAtOnce = Tokens > 2 ? 1 : 2;  // runs, with sums of their own
    __m512i found[kAtOnce][2][Tokens];
#pragma GCC unroll 4
    for (auto& part : found)
#pragma GCC unroll 2
      for (auto& row : part)
#pragma GCC unroll 8
        for (auto& sum : row) sum = _mm512_setzero_si512();
    int64_t column = 0;
    for (; column + kAtOnce * kRun <= weight_.columns; column += kAtOnce * kRun) {
#pragma GCC unroll 4
      for (int part = 0; part < kAtOnce; ++part) {
        const int64_t at = column + part * kRun;
        _mm_prefetch(first + at + kAheadBytes, _MM_HINT_T1);
        _mm_prefetch(second + at + kAheadBytes, _MM_HINT_T1);
        add_tokens<Tokens>(found[part][0], shifted(_mm512_loadu_si512(first + at)), activations + at * Tokens);
        add_tokens<Tokens>(found[part][1], shifted(_mm512_loadu_si512(second + at)), activations + at * Tokens);
      }
    }
    for (; column < weight_.columns; column += kRun) {
      const __mmask64 mask = first_bytes(weight_.columns - column);
      add_tokens<Tokens>(found[0][0], shifted(_mm512_maskz_loadu_epi8(mask, first + column)), activations + column * Tokens);
      add_tokens<Tokens>(found[0][1], shifted(_mm512_maskz_loadu_epi8(mask, second + column)), activations + column * Tokens);
    }
#pragma GCC unroll 2
    for (int row = 0; row < 2; ++row)
#pragma GCC unroll 8
      for (int token = 0; token < Tokens; ++token)
        sums[row][token] = kAtOnce == 1 ? found[0][row][token] : _mm512_add_epi32(found[0][row][token], found[kAtOnce - 1][row][token]);
  }

  STRATA_INLINE static __m512i shifted(__m512i codes) { return _mm512_xor_si512(codes, _mm512_set1_epi8(static_cast<char>(kShift))); }

  const Weight& weight_;
  int64_t row_ = 0, count_ = 0;
};

void avx512_rows(const Weight& weight, const Activations& activations, const Result& result, int64_t begin, int64_t end) {
  StoredRows source(weight);
  multiply_rows(source, activations, result, begin, end);
}
#endif

void product(const ChannelCall& call, const Divisors& known, const Matrix& tokens, const Result& result) {
  const int threads = static_cast<int>(call.threads);
  const Activations activations = rounded(tokens, Runs::of(call.columns), known, threads);
  const Weight weight{pointer<const int8_t>(call.codes), call.rows, call.columns, call.code_stride, pointer<const float>(call.scales)};
  parallel_for(threads, weight.rows, kRowsAtOnce, [&](int64_t begin, int64_t end) {
#if STRATA_X86
    const Level level = cpu_level();
    if (level == Level::avx512) return avx512_rows(weight, activations, result, begin, end);
    if (level == Level::avx2) return avx2_rows(weight, activations, result, begin, end);
#endif
    portable_rows(weight, activations, result, begin, end);
  });
}

}  // namespace

// tokens [M, K] x int8 rows with a scale each -> out [M, N]; some tokens at a time, whose codes stay in the cache.
STRATA_API void strata_channel_linear(const ChannelCall* call) {
  const Type type = static_cast<Type>(call->type);
  thread_local Scratch scratch;
  Divisors known{nullptr, 0};
  if (call->smoothing) {
    float* divisors = scratch.of<float>(call->columns);
    widen(pointer<const void>(call->smoothing), type, call->columns, divisors);
    known = {divisors, *pointer<const float>(call->activation_scale)};
    for (int64_t each = 0; each < call->columns; ++each) divisors[each] *= known.scale;
  }
  for (int64_t first = 0; first < call->token_rows; first += kTokensAtOnce) {
    Matrix tokens{pointer<const void>(call->tokens), call->token_rows, call->columns, call->token_stride, type};
    tokens.data = tokens.row(first);
    tokens.rows = call->token_rows - first < kTokensAtOnce ? call->token_rows - first : kTokensAtOnce;
    product(*call, known, tokens, {pointer<uint8_t>(call->out) + first * call->out_stride * item_bytes(type), call->out_stride, type});
  }
}
