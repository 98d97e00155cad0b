// The products of dense.cpp in AVX-512 with BF16.
#include "blocks_avx512.h"
#include "dense.h"
#include "vectors.h"

#if STRATA_X86
namespace strata {
namespace {

constexpr int64_t kLineBytes = 64;
constexpr int64_t kTokensAtOnce = 128;  // they stay in the second-level cache
constexpr int64_t kSection = 128;       // pairs of columns: as bfloat16 of 32 outputs, and with 12 tokens, they stay in the first-level cache
constexpr int64_t kBlocksAtOnce = 4;    // a thread's least work
constexpr int64_t kTokensOfTwo = 4;     // whose sums of two blocks are held in registers
constexpr int64_t kAheadOfTwo = 2048;   // of each of two blocks that are read at once: what is brought near

// Rows of tokens, zeros beyond their columns, apart from each other in the cache; kept until the thread's next call.
int64_t width_of(int64_t columns) { return 2 * pairs_of(columns) + kPadding; }

const uint16_t* aligned(const uint16_t* tokens, int64_t count, int64_t columns, int64_t stride) {
  thread_local Scratch scratch;
  const int64_t width = width_of(columns);
  uint16_t* out = scratch.of<uint16_t>(count * width);
  for (int64_t token = 0; token < count; ++token) {
    __builtin_memcpy(out + token * width, tokens + token * stride, static_cast<size_t>(columns) * 2);
    __builtin_memset(out + token * width + columns, 0, static_cast<size_t>(width - columns) * 2);
  }
  return out;
}

// A pair's 32 outputs, as they were packed.
struct Sixteen {
  using Item = uint16_t;
  static constexpr int64_t kMostTogether = 12;  // tokens whose sums are held in registers

  STRATA_INLINE void read(const Item* at, __m512i& first, __m512i& second) const {
    first = _mm512_load_si512(at);
    second = _mm512_load_si512(at + kOutputs);
  }
};

// The same of int8 as bfloat16, which holds each of them exactly: the bytes of magnitudes are looked up, signs put back. Unpacking takes them in the order of
// `place_of`. It is mostly the work of other ports than multiplying.
struct Eight {
  using Item = int8_t;
  static constexpr int64_t kMostTogether = 8;  // the table takes registers
  __m512i low[2], high[2];

  STRATA_INLINE Eight() {
    alignas(64) static const struct Table {
      uint8_t low[128], high[128];
      Table() {
        for (int value = 0; value < 128; ++value) {
          const uint16_t bits = bfloat16_of_float(static_cast<float>(value));
          low[value] = static_cast<uint8_t>(bits);
          high[value] = static_cast<uint8_t>(bits >> 8);
        }
      }
    } table;
    for (int half = 0; half < 2; ++half) {
      low[half] = _mm512_loadu_si512(table.low + 64 * half);
      high[half] = _mm512_loadu_si512(table.high + 64 * half);
    }
  }

  STRATA_INLINE void read(const Item* at, __m512i& first, __m512i& second) const {
    const __m512i all = _mm512_load_si512(at), sizes = _mm512_abs_epi8(all), sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i low_bytes = _mm512_permutex2var_epi8(low[0], sizes, low[1]);
    const __m512i high_bytes = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(high[0], sizes, high[1]), all, sign, 0xF8);  // a | (b & c)
    first = _mm512_unpacklo_epi8(low_bytes, high_bytes);
    second = _mm512_unpackhi_epi8(low_bytes, high_bytes);
  }
};

// Some tokens times a section of a block, added to sums [token][32]. `Lines` of what is read next are brought near for each pair. Pair after pair in one
// order, whatever the number of tokens: what comes out for a token does not depend on those beside it.
template <class Weights, int Tokens, int Lines>
STRATA_AVX512 void section(const void* weights, const uint8_t* ahead, const uint16_t* tokens, int64_t pairs, int64_t width, float* sums) {
  const Weights reader;
  const typename Weights::Item* at = static_cast<const typename Weights::Item*>(weights);
  __m512 found[Tokens][2];
#pragma GCC unroll 16
  for (int token = 0; token < Tokens; ++token) {
    found[token][0] = _mm512_load_ps(sums + token * kOutputs);
    found[token][1] = _mm512_load_ps(sums + token * kOutputs + 16);
  }
  for (int64_t pair = 0; pair < pairs; ++pair) {
    __m512i first, second;
    reader.read(at + pair * kPairItems, first, second);
#pragma GCC unroll 2
    for (int line = 0; line < Lines; ++line) _mm_prefetch(ahead + (pair * Lines + line) * kLineBytes, _MM_HINT_T1);
#pragma GCC unroll 16
    for (int token = 0; token < Tokens; ++token) {
      const __m512i values = pair_at(tokens + token * width + 2 * pair);
      found[token][0] = multiplied(found[token][0], first, values);
      found[token][1] = multiplied(found[token][1], second, values);
    }
  }
#pragma GCC unroll 16
  for (int token = 0; token < Tokens; ++token) {
    _mm512_store_ps(sums + token * kOutputs, found[token][0]);
    _mm512_store_ps(sums + token * kOutputs + 16, found[token][1]);
  }
}

using Section = void (*)(const void*, const uint8_t*, const uint16_t*, int64_t, int64_t, float*);
template <class Weights, int Lines>
constexpr Section kSections[] = {nullptr,
                                 section<Weights, 1, Lines>,
                                 section<Weights, 2, Lines>,
                                 section<Weights, 3, Lines>,
                                 section<Weights, 4, Lines>,
                                 section<Weights, 5, Lines>,
                                 section<Weights, 6, Lines>,
                                 section<Weights, 7, Lines>,
                                 section<Weights, 8, Lines>,
                                 section<Weights, 9, Lines>,
                                 section<Weights, 10, Lines>,
                                 section<Weights, 11, Lines>,
                                 section<Weights, 12, Lines>};

// The same of two blocks at once, for few tokens: one alone leaves a processor waiting for sums, and reading one stream of two that its memory would give.
template <class Weights, int Tokens>
STRATA_AVX512 void two_sections(const uint8_t* weights, int64_t apart, const uint16_t* tokens, int64_t pairs, int64_t width, float* sums) {
  const Weights reader;
  using Item = typename Weights::Item;
  constexpr int kLines = sizeof(Item);
  __m512 found[2][Tokens][2];
  const auto each = [&](const auto& body) STRATA_AVX512 {
#pragma GCC unroll 2
    for (int block = 0; block < 2; ++block)
#pragma GCC unroll 8
      for (int token = 0; token < Tokens; ++token)
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) body(found[block][token][half], sums + (block * Tokens + token) * kOutputs + 16 * half);
  };
  each([](__m512& sum, const float* at) STRATA_AVX512 { sum = _mm512_load_ps(at); });
  for (int64_t pair = 0; pair < pairs; ++pair) {
    __m512i read[2][2];
#pragma GCC unroll 2
    for (int block = 0; block < 2; ++block) {
      const uint8_t* at = weights + block * apart + pair * kLines * kLineBytes;
      reader.read(reinterpret_cast<const Item*>(at), read[block][0], read[block][1]);
#pragma GCC unroll 2
      for (int line = 0; line < kLines; ++line) _mm_prefetch(at + kAheadOfTwo + line * kLineBytes, _MM_HINT_T1);
    }
#pragma GCC unroll 8
    for (int token = 0; token < Tokens; ++token) {
      const __m512i values = pair_at(tokens + token * width + 2 * pair);
#pragma GCC unroll 2
      for (int block = 0; block < 2; ++block) {
        found[block][token][0] = multiplied(found[block][token][0], read[block][0], values);
        found[block][token][1] = multiplied(found[block][token][1], read[block][1], values);
      }
    }
  }
  each([](const __m512& sum, float* at) STRATA_AVX512 { _mm512_store_ps(at, sum); });
}

using TwoSections = void (*)(const uint8_t*, int64_t, const uint16_t*, int64_t, int64_t, float*);
template <class Weights>
constexpr TwoSections kTwoSections[] = {nullptr, two_sections<Weights, 1>, two_sections<Weights, 2>, two_sections<Weights, 3>, two_sections<Weights, 4>};

STRATA_AVX512 void store(const Dense& dense, int64_t block, const float* sums, int64_t count, uint16_t* out, int64_t out_stride) {
  for (int half = 0; half < 2; ++half) {
    const int64_t row = block * kOutputs + 16 * half;
    if (row >= dense.rows) return;
    const __mmask16 mask = first_floats(dense.rows - row);
    const __m512 bias = dense.bias ? floats_at(dense.bias + row, mask) : _mm512_setzero_ps();
    const __m512 scale = dense.scales ? floats_at(dense.scales + row, mask) : _mm512_set1_ps(1.0f);
    for (int64_t token = 0; token < count; ++token) {
      const __m512 sum = _mm512_load_ps(sums + token * kOutputs + 16 * half);
      _mm256_mask_storeu_epi16(out + token * out_stride + row, mask, bfloat16_of(_mm512_add_ps(_mm512_mul_ps(sum, scale), bias)));
    }
  }
}

// What is read next is brought near by the first group, if there are more and the weight has two lines for a pair by the first two.
template <class Weights>
const Section* sections_of(int64_t group, int64_t groups) {
  if (groups == 1) return kSections<Weights, sizeof(typename Weights::Item)>;
  return group < static_cast<int64_t>(sizeof(typename Weights::Item)) ? kSections<Weights, 1> : kSections<Weights, 0>;
}

// A section of a block times all tokens, added to sums.
template <class Weights>
STRATA_AVX512 void multiply_section(const void* at, const uint8_t* next, const uint16_t* tokens, int64_t count, int64_t pairs, int64_t width, float* sums) {
  const int64_t groups = (count + Weights::kMostTogether - 1) / Weights::kMostTogether;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = count * group / groups, taken = count * (group + 1) / groups - first;
    sections_of<Weights>(group, groups)[taken](at, next + group * pairs * kLineBytes, tokens + first * width, pairs, width, sums + first * kOutputs);
  }
}

// A section of int8 as bfloat16, for all groups of tokens; a single one takes it as it is read.
STRATA_AVX512 const uint16_t* widened(const uint8_t* at, int64_t pairs) {
  thread_local Scratch scratch;
  uint16_t* out = scratch.of<uint16_t>(kSection * kPairItems);
  const Eight reader;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    __m512i first, second;
    reader.read(reinterpret_cast<const int8_t*>(at) + pair * kPairItems, first, second);
    _mm512_store_si512(out + pair * kPairItems, first);
    _mm512_store_si512(out + pair * kPairItems + kOutputs, second);
  }
  return out;
}

// Few tokens times all blocks but the last of an odd number; gives the first one that is left.
template <class Weights>
STRATA_AVX512 int64_t multiply_few(const Dense& dense, const uint16_t* tokens, int64_t count, uint16_t* out, int64_t out_stride, int64_t begin, int64_t end) {
  alignas(64) float sums[2 * kTokensOfTwo * kOutputs];
  constexpr int64_t kPairBytes = kPairItems * sizeof(typename Weights::Item);
  const int64_t width = width_of(dense.columns), pairs = pairs_of(dense.columns), half = (end - begin) / 2;
  for (int64_t block = begin; block < begin + half; ++block) {
    const uint8_t* weights = static_cast<const uint8_t*>(dense.packed) + block * pairs * kPairBytes;
    __builtin_memset(sums, 0, sizeof(sums));
    for (int64_t start = 0; start < pairs; start += kSection) {
      const int64_t here = pairs - start < kSection ? pairs - start : kSection;
      kTwoSections<Weights>[count](weights + start * kPairBytes, half * pairs * kPairBytes, tokens + 2 * start, here, width, sums);
    }
    store(dense, block, sums, count, out, out_stride);
    store(dense, block + half, sums + count * kOutputs, count, out, out_stride);
  }
  return begin + 2 * half;
}

template <class Weights>
STRATA_AVX512 void multiply(const Dense& dense, const uint16_t* tokens, int64_t count, uint16_t* out, int64_t out_stride, int64_t begin, int64_t end) {
  thread_local Scratch scratch;
  constexpr int64_t kPairBytes = kPairItems * sizeof(typename Weights::Item);
  float* sums = scratch.of<float>(count * kOutputs);
  const int64_t width = width_of(dense.columns), pairs = pairs_of(dense.columns);
  if (count <= kTokensOfTwo) begin = multiply_few<Weights>(dense, tokens, count, out, out_stride, begin, end);
  for (int64_t block = begin; block < end; ++block) {
    const uint8_t* weights = static_cast<const uint8_t*>(dense.packed) + block * pairs * kPairBytes;
    __builtin_memset(sums, 0, static_cast<size_t>(count) * kOutputs * sizeof(float));
    for (int64_t start = 0; start < pairs; start += kSection) {
      const int64_t here = pairs - start < kSection ? pairs - start : kSection;
      const uint8_t *at = weights + start * kPairBytes, *next = at + here * kPairBytes;
      if (dense.scales && count > Weights::kMostTogether)
        multiply_section<Sixteen>(widened(at, here), next, tokens + 2 * start, count, here, width, sums);
      else
        multiply_section<Weights>(at, next, tokens + 2 * start, count, here, width, sums);
    }
    store(dense, block, sums, count, out, out_stride);
  }
}

}  // namespace

void dense_avx512(const DenseCall& call) {
  const Dense dense(call);
  for (int64_t first = 0; first < call.token_rows; first += kTokensAtOnce) {
    const int64_t count = call.token_rows - first < kTokensAtOnce ? call.token_rows - first : kTokensAtOnce;
    const uint16_t* part = aligned(reinterpret_cast<const uint16_t*>(call.tokens) + first * call.token_stride, count, dense.columns, call.token_stride);
    uint16_t* out = reinterpret_cast<uint16_t*>(call.out) + first * call.out_stride;
    parallel_for(static_cast<int>(call.threads), blocks_of(dense.rows), kBlocksAtOnce,
                 [&](int64_t begin, int64_t end) { (dense.scales ? multiply<Eight> : multiply<Sixteen>)(dense, part, count, out, call.out_stride, begin, end); });
  }
}

}  // namespace strata
#endif
