// Products with 16-bit weights (kernels/native_dense.py): packed once, multiplied at any number of tokens by one kernel, so that nothing is kept for a number.
// AVX-512 with BF16 alone; elsewhere torch's own product is taken.
//
// Packed: blocks of 32 outputs; in a block, pair after pair of columns, the 32 outputs' pairs next to each other. A vector holds 16 outputs, so that sums
// need no adding up across it, and a product reads the weight as one stream.
#include "blocks_avx512.h"

using namespace strata;

namespace {

constexpr int kOutputs = 32;  // of a block
constexpr int kPairItems = 2 * kOutputs;

// In the order of native_dense.py. Addresses and sizes; strides in items.
struct PackCall {
  int64_t weight, rows, columns, stride;
  int64_t out;  // [blocks, pairs, 32, 2]
  int64_t threads;
};

struct DenseCall {
  int64_t tokens, token_rows, token_stride;
  int64_t packed, rows, columns;
  int64_t bias;  // bfloat16 [rows], or 0
  int64_t out, out_stride;
  int64_t threads;
};

int64_t blocks_of(int64_t rows) { return (rows + kOutputs - 1) / kOutputs; }
int64_t pairs_of(int64_t columns) { return (columns + 1) / 2; }

#if STRATA_X86

constexpr int kMostTogether = 12;       // tokens whose sums are held in registers
constexpr int64_t kTokensAtOnce = 128;  // they stay in the second-level cache
constexpr int64_t kSection = 256;       // pairs of columns: of 32 outputs and 12 tokens they stay in the first
constexpr int64_t kBlocksAtOnce = 4;    // a thread's least work

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

STRATA_INLINE __m512 multiplied(__m512 sum, __m512i weights, __m512i pair) { return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)pair); }

STRATA_INLINE __m512i pair_at(const uint16_t* token) {
  int32_t pair;
  __builtin_memcpy(&pair, token, 4);
  return _mm512_set1_epi32(pair);
}

// Some tokens times a section of a block, added to sums [token][32]. `Lines` of what is read next are brought near for each pair. Pair after pair in one
// order, whatever the number of tokens: what comes out for a token does not depend on those beside it.
template <int Tokens, int Lines>
STRATA_AVX512 void section(const uint16_t* weights, const uint16_t* ahead, const uint16_t* tokens, int64_t pairs, int64_t width, float* sums) {
  __m512 found[Tokens][2];
#pragma GCC unroll 16
  for (int token = 0; token < Tokens; ++token) {
    found[token][0] = _mm512_load_ps(sums + token * kOutputs);
    found[token][1] = _mm512_load_ps(sums + token * kOutputs + 16);
  }
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const uint16_t* at = weights + pair * kPairItems;
    const __m512i first = _mm512_load_si512(at), second = _mm512_load_si512(at + kOutputs);
#pragma GCC unroll 2
    for (int line = 0; line < Lines; ++line) _mm_prefetch(ahead + (pair * Lines + line) * kOutputs, _MM_HINT_T1);
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

using Section = void (*)(const uint16_t*, const uint16_t*, const uint16_t*, int64_t, int64_t, float*);
template <int Lines>
constexpr Section kSections[] = {nullptr,           section<1, Lines>, section<2, Lines>, section<3, Lines>,  section<4, Lines>,  section<5, Lines>, section<6, Lines>,
                                 section<7, Lines>, section<8, Lines>, section<9, Lines>, section<10, Lines>, section<11, Lines>, section<12, Lines>};

struct Dense {
  const uint16_t* packed;
  int64_t rows, columns;
  const uint16_t* bias;
};

STRATA_AVX512 void store(const Dense& dense, int64_t block, const float* sums, int64_t count, uint16_t* out, int64_t out_stride) {
  for (int half = 0; half < 2; ++half) {
    const int64_t row = block * kOutputs + 16 * half;
    if (row >= dense.rows) return;
    const __mmask16 mask = first_floats(dense.rows - row);
    __m512 bias = _mm512_setzero_ps();
    if (dense.bias) bias = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, dense.bias + row)), 16));
    for (int64_t token = 0; token < count; ++token)
      _mm256_mask_storeu_epi16(out + token * out_stride + row, mask, bfloat16_of(_mm512_add_ps(_mm512_load_ps(sums + token * kOutputs + 16 * half), bias)));
  }
}

STRATA_AVX512 void multiply(const Dense& dense, const uint16_t* tokens, int64_t count, uint16_t* out, int64_t out_stride, int64_t begin, int64_t end) {
  thread_local Scratch scratch;
  float* sums = scratch.of<float>(count * kOutputs);
  const int64_t width = width_of(dense.columns), pairs = pairs_of(dense.columns), groups = (count + kMostTogether - 1) / kMostTogether;
  for (int64_t block = begin; block < end; ++block) {
    const uint16_t* weights = dense.packed + block * pairs * kPairItems;
    __builtin_memset(sums, 0, static_cast<size_t>(count) * kOutputs * sizeof(float));
    for (int64_t start = 0; start < pairs; start += kSection) {
      const int64_t here = pairs - start < kSection ? pairs - start : kSection;
      const uint16_t *at = weights + start * kPairItems, *next = at + here * kPairItems;
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = count * group / groups, taken = count * (group + 1) / groups - first;
        const uint16_t* values = tokens + first * width + 2 * start;
        float* to = sums + first * kOutputs;
        if (groups == 1)
          kSections<2>[taken](at, next, values, here, width, to);
        else if (group < 2)
          kSections<1>[taken](at, next + group * here * kOutputs, values, here, width, to);
        else
          kSections<0>[taken](at, next, values, here, width, to);
      }
    }
    store(dense, block, sums, count, out, out_stride);
  }
}
#endif

}  // namespace

// Whether this processor multiplies packed weights.
STRATA_API int64_t strata_dense_runs() {
#if STRATA_X86
  return cpu_level() == Level::avx512;
#else
  return 0;
#endif
}

// weight [N, K] -> packed, zeros where there are no outputs or columns.
STRATA_API void strata_dense_pack(const PackCall* call) {
  const int64_t pairs = pairs_of(call->columns);
  parallel_for(static_cast<int>(call->threads), blocks_of(call->rows), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      uint32_t* out = reinterpret_cast<uint32_t*>(call->out) + block * pairs * kOutputs;
      for (int64_t output = 0; output < kOutputs; ++output) {
        const int64_t row = block * kOutputs + output;
        const uint16_t* weights = reinterpret_cast<const uint16_t*>(call->weight) + row * call->stride;
        for (int64_t pair = 0; pair < pairs; ++pair) {
          uint32_t both = 0;
          if (row < call->rows) {
            both = weights[2 * pair];
            if (2 * pair + 1 < call->columns) both |= static_cast<uint32_t>(weights[2 * pair + 1]) << 16;
          }
          out[pair * kOutputs + output] = both;
        }
      }
    }
  });
}

// tokens [M, K] x packed weight + bias -> out [M, N], bfloat16.
STRATA_API void strata_dense_linear(const DenseCall* call) {
#if STRATA_X86
  const Dense dense{reinterpret_cast<const uint16_t*>(call->packed), call->rows, call->columns, reinterpret_cast<const uint16_t*>(call->bias)};
  for (int64_t first = 0; first < call->token_rows; first += kTokensAtOnce) {
    const int64_t count = call->token_rows - first < kTokensAtOnce ? call->token_rows - first : kTokensAtOnce;
    const uint16_t* part = aligned(reinterpret_cast<const uint16_t*>(call->tokens) + first * call->token_stride, count, dense.columns, call->token_stride);
    uint16_t* out = reinterpret_cast<uint16_t*>(call->out) + first * call->out_stride;
    parallel_for(static_cast<int>(call->threads), blocks_of(dense.rows), kBlocksAtOnce,
                 [&](int64_t begin, int64_t end) { multiply(dense, part, count, out, call->out_stride, begin, end); });
  }
#else
  (void)call;
#endif
}
