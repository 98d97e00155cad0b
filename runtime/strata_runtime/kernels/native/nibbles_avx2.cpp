// Weights of 4 or 3 bits in groups, as formats/packing.py lays whole blocks of 64 rows, in AVX2: a byte of a column holds row r and row r + 32, so that
// neighbours in memory are neighbouring rows and sums need no adding up across a vector. value = code * scale + origin of its row and group, float32.
#include "dense_avx2.h"
#include "nibbles.h"
#include "rowwise.h"

#if STRATA_X86
namespace strata {
namespace {

constexpr int64_t kBlockRows = 2 * kOutputs;
constexpr int kMost = 3;  // tokens that meet values as they are made
constexpr int kZeroCode = 8;

// Values of neighbouring rows of one group.
template <int Vectors>
struct Group {
  __m256 scale[Vectors], origin[Vectors];

  // pairs: scale and zero of each row. `row`: within the block.
  STRATA_INLINE_AVX2 Group(const uint16_t* pairs, int64_t row) {
#pragma GCC unroll 4
    for (int each = 0; each < Vectors; ++each) {
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs + 2 * (row + each * kFloats)));
      scale[each] = even_of(both);
      origin[each] = _mm256_fnmadd_ps(scale[each], _mm256_set1_ps(kZeroCode), odd_of(both));
    }
  }

  // line: the bytes of a column. `High`: of rows r + 32. `first`: the first row's byte.
  template <bool High>
  STRATA_INLINE_AVX2 __m256 value(const uint8_t* line, int each) const {
    __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(line + each * kFloats));
    if constexpr (High) bytes = _mm_srli_epi16(bytes, 4);
    const __m256i codes = _mm256_cvtepu8_epi32(_mm_and_si128(bytes, _mm_set1_epi8(15)));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(codes), scale[each], origin[each]);
  }
};

// A group's columns of some rows of half a block, from `row` on, times some tokens, added to sums [token][32].
template <int Tokens, int Vectors, bool High>
STRATA_AVX2 void multiply_rows(const uint8_t* lines, const uint16_t* pairs, int64_t row, const float* tokens, int64_t columns, int64_t width, float* sums) {
  const Group<Vectors> group(pairs, High ? row + kOutputs : row);
  __m256 found[Tokens][Vectors];
#pragma GCC unroll 4
  for (int token = 0; token < Tokens; ++token)
#pragma GCC unroll 4
    for (int each = 0; each < Vectors; ++each) found[token][each] = _mm256_load_ps(sums + token * kOutputs + row + each * kFloats);
  for (int64_t column = 0; column < columns; ++column)
#pragma GCC unroll 4
    for (int each = 0; each < Vectors; ++each) {
      const __m256 value = group.template value<High>(lines + column * kOutputs + row, each);
#pragma GCC unroll 4
      for (int token = 0; token < Tokens; ++token)
        found[token][each] = _mm256_fmadd_ps(value, _mm256_broadcast_ss(tokens + token * width + column), found[token][each]);
    }
#pragma GCC unroll 4
  for (int token = 0; token < Tokens; ++token)
#pragma GCC unroll 4
    for (int each = 0; each < Vectors; ++each) _mm256_store_ps(sums + token * kOutputs + row + each * kFloats, found[token][each]);
}

template <int Tokens>
void multiply_group(const uint8_t* lines, const uint16_t* pairs, const float* tokens, int64_t columns, int64_t width, float* low, float* high) {
  constexpr int kVectors = Tokens == 1 ? 4 : 2;
  for (int64_t row = 0; row < kOutputs; row += kVectors * kFloats) {
    multiply_rows<Tokens, kVectors, false>(lines, pairs, row, tokens, columns, width, low);
    multiply_rows<Tokens, kVectors, true>(lines, pairs, row, tokens, columns, width, high);
  }
}

// A group's columns of half a block, rounded to bfloat16, as packed weights lie.
template <bool High>
STRATA_AVX2 void decode_half(const uint8_t* lines, const uint16_t* pairs, int64_t columns, uint16_t* packed) {
  constexpr int kVectors = 2;
  for (int64_t row = 0; row < kOutputs; row += kVectors * kFloats) {
    const Group<kVectors> group(pairs, High ? row + kOutputs : row);
    for (int64_t column = 0; column < columns; column += 2) {
      const uint8_t* line = lines + column * kOutputs + row;
#pragma GCC unroll 2
      for (int each = 0; each < kVectors; ++each) {
        const __m256i even = _mm256_castps_si256(rounded(group.template value<High>(line, each)));
        const __m256i odd = _mm256_castps_si256(rounded(group.template value<High>(line + kOutputs, each)));
        _mm256_store_si256(reinterpret_cast<__m256i*>(packed + column / 2 * kPairItems + 2 * (row + each * kFloats)),
                           _mm256_or_si256(_mm256_srli_epi32(even, 16), odd));
      }
    }
  }
}

// The lines of a group of codes of three bits, from the planes of two and of one: a quarter of a block's columns after the other (`split_planes`).
STRATA_AVX2 void join(const uint8_t* two, const uint8_t* one, int64_t first, int64_t columns, int64_t all, uint8_t* lines) {
  const int64_t quarter = all * kOutputs / 4;
  const __m256i lowest = _mm256_set1_epi8(0x11), upper = _mm256_set1_epi8(0x66);
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t at = (first + column) * kOutputs, place = at / quarter, within = at % quarter;
    const __m256i ones = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(one + within));
    const __m256i twos = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(two + place / 2 * quarter + within));
    const __m256i low = _mm256_and_si256(_mm256_srl_epi16(ones, _mm_cvtsi64_si128(place)), lowest);
    const __m256i high = _mm256_and_si256(place % 2 ? _mm256_srli_epi16(twos, 1) : _mm256_slli_epi16(twos, 1), upper);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lines + column * kOutputs), _mm256_or_si256(low, high));
  }
}

void multiply_blocks(const NibblesCall& call, const float* tokens, int64_t count, uint16_t* out, int64_t begin, int64_t end) {
  using Few = void (*)(const uint8_t*, const uint16_t*, const float*, int64_t, int64_t, float*, float*);
  constexpr Few kFews[] = {nullptr, multiply_group<1>, multiply_group<2>, multiply_group<3>};
  thread_local Scratch sums_scratch, packed_scratch, lines_scratch;
  const int64_t columns = call.columns, group = call.group, width = width_of(columns), parts = (count + kMost - 1) / kMost;
  const Dense dense(DenseCall{0, 0, 0, 0, call.rows, columns, 0, 0, 0, 0, 0});
  float *low = sums_scratch.of<float>(2 * count * kOutputs), *high = low + count * kOutputs;
  uint16_t* packed = packed_scratch.of<uint16_t>((group / 2 + kAheadPairs) * kPairItems);
  uint8_t* joined = lines_scratch.of<uint8_t>(group * kOutputs);
  for (int64_t block = begin; block < end; ++block) {
    __builtin_memset(low, 0, static_cast<size_t>(2 * count) * kOutputs * sizeof(float));
    for (int64_t first = 0; first < columns; first += group) {
      const uint8_t* lines = pointer<const uint8_t>(call.codes) + (block * columns + first) * kOutputs;
      if (call.lowest) {
        join(pointer<const uint8_t>(call.codes) + block * columns * kOutputs / 2, pointer<const uint8_t>(call.lowest) + block * columns * kOutputs / 4, first,
             group, columns, joined);
        lines = joined;
      }
      const uint16_t* pairs = pointer<const uint16_t>(call.scales_and_zeros) + first / group * call.group_stride + 2 * block * kBlockRows;
      if (call.rounds) {
        decode_half<false>(lines, pairs, group, packed);
        multiply_section<Sixteen>(packed, tokens + first, count, group / 2, width, low);
        decode_half<true>(lines, pairs, group, packed);
        multiply_section<Sixteen>(packed, tokens + first, count, group / 2, width, high);
        continue;
      }
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t token = count * part / parts, taken = count * (part + 1) / parts - token;
        kFews[taken](lines, pairs, tokens + token * width + first, group, width, low + token * kOutputs, high + token * kOutputs);
      }
    }
    store(dense, 2 * block, low, count, out, call.out_stride);
    store(dense, 2 * block + 1, high, count, out, call.out_stride);
  }
}

}  // namespace

void nibbles_avx2(const NibblesCall& call) {
  for_tokens(call.tokens, call.token_rows, call.token_stride, call.columns, call.out, call.out_stride, [&](const float* part, int64_t count, uint16_t* out) {
    parallel_for(static_cast<int>(call.threads), call.rows / kBlockRows, 1,
                 [&](int64_t begin, int64_t end) { multiply_blocks(call, part, count, out, begin, end); });
  });
}

}  // namespace strata
#endif
