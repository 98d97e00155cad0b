// What products of packed weights share in AVX2: tokens as floats, and some of them times a section of a block.
#pragma once
#include "dense.h"
#include "vectors_avx2.h"

#if STRATA_X86
namespace strata {
namespace {

constexpr int kMostTogether = 5;       // tokens whose sums of half a block are held in registers; of six the compiler keeps some on the stack
constexpr int kWhole = 2;              // tokens whose sums of a whole block are; of three likewise
constexpr int64_t kTokensAtOnce = 96;  // they stay in the second-level cache
constexpr int64_t kSection = 128;      // pairs of columns: of 32 outputs, and with 5 tokens, they stay in the first-level cache
constexpr int64_t kBlocksAtOnce = 4;   // a thread's least work
constexpr int64_t kAheadPairs = 16;    // what is brought near

}  // namespace

inline constexpr int64_t kFloatsApart = 16;  // between tokens, so that they do not meet in one set of the cache

inline int64_t width_of(int64_t columns) { return 2 * pairs_of(columns) + kFloatsApart; }

// Rows of tokens as floats, zeros beyond their columns; kept until the thread's next call. All kinds of products share this memory.
STRATA_AVX2 inline const float* widened(const uint16_t* tokens, int64_t count, int64_t columns, int64_t stride) {
  thread_local Scratch scratch;
  const int64_t width = width_of(columns);
  float* out = scratch.of<float>(count * width);
  for (int64_t token = 0; token < count; ++token) {
    const uint16_t* from = tokens + token * stride;
    float* to = out + token * width;
    int64_t column = 0;
    for (; column + kFloats <= columns; column += kFloats)
      _mm256_storeu_ps(to + column, floats_at(from + column));
    for (; column < columns; ++column) to[column] = float_of_bfloat16(from[column]);
    __builtin_memset(to + columns, 0, static_cast<size_t>(width - columns) * sizeof(float));
  }
  return out;
}

namespace {

// Eight outputs' pairs of columns as they were packed. `place`: of a pair's four vectors; those of the second half of a block lie `kHalf` items on.
struct Sixteen {
  using Item = uint16_t;
  static constexpr int64_t kHalf = kOutputs;

  STRATA_INLINE_AVX2 static __m256i pairs(const Item* at, int place) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(at + 16 * place)); }
  STRATA_INLINE_AVX2 static __m256 even(const Item* at, int place) { return even_of(pairs(at, place)); }
  STRATA_INLINE_AVX2 static __m256 odd(const Item* at, int place) { return odd_of(pairs(at, place)); }
};

// Some tokens times a section of a block, or of a half of it, added to sums [token][32]. Column after column in one order, whatever the number of tokens:
// what comes out for a token does not depend on those beside it.
template <class Weights, int Tokens, int Vectors>
STRATA_AVX2 void section(const typename Weights::Item* at, const float* tokens, int64_t pairs, int64_t width, float* sums) {
  __m256 found[Tokens][Vectors];
#pragma GCC unroll 8
  for (int token = 0; token < Tokens; ++token)
#pragma GCC unroll 4
    for (int each = 0; each < Vectors; ++each) found[token][each] = _mm256_load_ps(sums + token * kOutputs + each * kFloats);
  for (int64_t pair = 0; pair < pairs; ++pair, at += kPairItems) {
    __m256 column[Vectors];
    for (size_t byte = 0; byte < kPairItems * sizeof(*at); byte += 64)
      _mm_prefetch(reinterpret_cast<const char*>(at + kAheadPairs * kPairItems) + byte, _MM_HINT_T0);
#pragma GCC unroll 4
    for (int each = 0; each < Vectors; ++each) column[each] = Weights::even(at, each);
#pragma GCC unroll 8
    for (int token = 0; token < Tokens; ++token) {
      const __m256 value = _mm256_broadcast_ss(tokens + token * width + 2 * pair);
#pragma GCC unroll 4
      for (int each = 0; each < Vectors; ++each) found[token][each] = _mm256_fmadd_ps(column[each], value, found[token][each]);
    }
#pragma GCC unroll 4
    for (int each = 0; each < Vectors; ++each) column[each] = Weights::odd(at, each);
#pragma GCC unroll 8
    for (int token = 0; token < Tokens; ++token) {
      const __m256 value = _mm256_broadcast_ss(tokens + token * width + 2 * pair + 1);
#pragma GCC unroll 4
      for (int each = 0; each < Vectors; ++each) found[token][each] = _mm256_fmadd_ps(column[each], value, found[token][each]);
    }
  }
#pragma GCC unroll 8
  for (int token = 0; token < Tokens; ++token)
#pragma GCC unroll 4
    for (int each = 0; each < Vectors; ++each) _mm256_store_ps(sums + token * kOutputs + each * kFloats, found[token][each]);
}

template <class Weights>
using Section = void (*)(const typename Weights::Item*, const float*, int64_t, int64_t, float*);
template <class Weights>
constexpr Section<Weights> kWholes[] = {nullptr, section<Weights, 1, 4>, section<Weights, 2, 4>};
template <class Weights>
constexpr Section<Weights> kHalves[] = {nullptr, nullptr, nullptr, section<Weights, 3, 2>, section<Weights, 4, 2>, section<Weights, 5, 2>};

// A section of a block times all tokens, added to sums.
template <class Weights>
void multiply_section(const typename Weights::Item* at, const float* tokens, int64_t count, int64_t pairs, int64_t width, float* sums) {
  const int64_t groups = (count + kMostTogether - 1) / kMostTogether;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = count * group / groups, taken = count * (group + 1) / groups - first;
    const float* part = tokens + first * width;
    float* found = sums + first * kOutputs;
    if (taken <= kWhole) {
      kWholes<Weights>[taken](at, part, pairs, width, found);
    } else {
      kHalves<Weights>[taken](at, part, pairs, width, found);
      kHalves<Weights>[taken](at + Weights::kHalf, part, pairs, width, found + kOutputs / 2);
    }
  }
}

STRATA_AVX2 void store(const Dense& dense, int64_t block, const float* sums, int64_t count, uint16_t* out, int64_t out_stride) {
  for (int64_t row = block * kOutputs; row < dense.rows && row < (block + 1) * kOutputs; row += kFloats) {
    const int64_t here = dense.rows - row < kFloats ? dense.rows - row : kFloats;
    const __m256 bias = dense.bias ? floats_at(dense.bias + row, here) : _mm256_setzero_ps();
    const __m256 scale = dense.scales ? floats_at(dense.scales + row, here) : _mm256_set1_ps(1.0f);
    for (int64_t token = 0; token < count; ++token) {
      const __m256 sum = _mm256_load_ps(sums + token * kOutputs + row % kOutputs);
      store_at(out + token * out_stride + row, here, _mm256_add_ps(_mm256_mul_ps(sum, scale), bias));
    }
  }
}

// run(tokens as floats, how many, where their results go) for as many at a time as stay in the cache.
template <class Run>
void for_tokens(int64_t tokens, int64_t rows, int64_t stride, int64_t columns, int64_t out, int64_t out_stride, const Run& run) {
  for (int64_t first = 0; first < rows; first += kTokensAtOnce) {
    const int64_t count = rows - first < kTokensAtOnce ? rows - first : kTokensAtOnce;
    const float* part = widened(reinterpret_cast<const uint16_t*>(tokens) + first * stride, count, columns, stride);
    run(part, count, reinterpret_cast<uint16_t*>(out) + first * out_stride);
  }
}

}  // namespace
}  // namespace strata
#endif
