// bfloat16 activations times codes of uniform groups in AVX-512. A few tokens: codes are multiplied as they are (whole numbers that bfloat16 holds exactly), a
// run's sum by its group's scale, and the zeros are taken off with the tokens' sums over the groups. More: as in product_avx512.cpp, on decoded values.
#include <cmath>

#include "product.h"
#include "rows.h"

#if STRATA_X86
#include "blocks_avx512.h"

namespace strata {
namespace {

constexpr int64_t kGroupQuantum = 32;  // columns: what keeps the 16 of a lane within one group

// bfloat16 of 0, 1, 2, ... as a table of codes.
const uint16_t* whole_numbers() {
  static const struct Numbers {
    uint16_t values[1 << kMostBits];
    Numbers() {
      for (int code = 0; code < 1 << kMostBits; ++code) values[code] = bfloat16_of_float(static_cast<float>(code));
    }
  } numbers;
  return numbers.values;
}

struct Job {
  const Planes& weight;
  const Groups& groups;
  const uint16_t* activations;  // permuted
  int64_t tokens;
  const float* token_sums;  // [tokens, groups rounded up to 16]; null: multiply decoded values
  int64_t padded_groups;
  const int32_t* groups_of_16;  // of each 16 columns of the full tiles
  const int32_t* short_groups;  // of each place of the short tile's 8 runs of 64
  uint16_t* out;
  int64_t out_stride;

  int64_t width() const { return weight.tiles() * kTile + kPadding; }
};

// The scales of a row as floats, and their products with the zeros.
STRATA_INLINE void load_groups(const Groups& groups, int64_t row, int64_t padded, float* scales, float* shifts) {
  for (int64_t group = 0; group < padded; group += 16) {
    const __mmask16 mask = first_floats(groups.count - group);
    const __m512 scale = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, groups.scales + row * groups.scale_stride + group));
    const __m128i zero = _mm_maskz_loadu_epi8(mask, groups.zeros + row * groups.zero_stride + group);
    _mm512_storeu_ps(scales + group, scale);
    _mm512_storeu_ps(shifts + group, _mm512_mul_ps(scale, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(zero))));
  }
}

// The scales of a run of a full tile, lane by lane of its sums: the 32 columns of 8 lanes are in one group.
STRATA_INLINE __m512 scales_of_run(const Job& job, const float* scales, int64_t start) {
  const int32_t* groups = job.groups_of_16 + start / 16;
  return _mm512_mask_broadcastss_ps(_mm512_set1_ps(scales[groups[0]]), 0xFF00, _mm_load_ss(scales + groups[2]));
}

template <int Bits, int Tokens>
STRATA_AVX512 void few_tokens(const Job& job, int64_t begin, int64_t end) {
  thread_local Scratch scratch;
  const Planes& weight = job.weight;
  const int64_t full = weight.full_tiles(), width = job.width();
  float* scales = scratch.of<float>(2 * job.padded_groups);
  float* shifts = scales + job.padded_groups;
  Table16<Bits> table;
  table.load(whole_numbers());
  const auto lanes = [](int half) STRATA_AVX512 {  // of a run's sums: their first columns
    return _mm512_and_si512(_mm512_load_si512(order_of(Bits).columns + 32 * half), _mm512_set1_epi32(0xFFFF));
  };
  const __m512i first_lanes = lanes(0), second_lanes = lanes(1);
  for (int64_t row = begin; row < end; ++row) {
    load_groups(job.groups, row, job.padded_groups, scales, shifts);
    __m512 sums[Tokens];
    for (int token = 0; token < Tokens; ++token) {
      sums[token] = _mm512_setzero_ps();
      for (int64_t group = 0; group < job.padded_groups; group += 16)
        sums[token] = _mm512_fnmadd_ps(_mm512_loadu_ps(shifts + group), _mm512_loadu_ps(job.token_sums + token * job.padded_groups + group), sums[token]);
    }
    __m512i planes[Bits], codes[8];
    for (int64_t tile = 0; tile < full; ++tile) {
      for (int place = 0; place < Bits; ++place) {
        const uint8_t* at = weight.planes[place] + row * weight.stride[place] + tile * kTileBytes;
        planes[place] = _mm512_loadu_si512(at);
        _mm_prefetch(at + kAheadBytes, _MM_HINT_T0);
      }
      transpose<Bits>(planes, codes);
#pragma GCC unroll 8
      for (int b = 0; b < 8; ++b) {
        __m512i first, second;
        table.look_up(codes[b], first, second);
        const __m512 scale = scales_of_run(job, scales, tile * kTile + b * 64);
#pragma GCC unroll 8
        for (int token = 0; token < Tokens; ++token) {
          const uint16_t* at = job.activations + token * width + tile * kTile + b * 64;
          sums[token] = _mm512_fmadd_ps(dot(dot(_mm512_setzero_ps(), first, at), second, at + 32), scale, sums[token]);
        }
      }
    }
    if (full < weight.tiles()) {
      load_planes<Bits>(weight, row, full, first_bytes(weight.tile_bytes(full)), planes);
      transpose<Bits>(planes, codes);
      for (int b = 0; b < 8; ++b) {
        __m512i first, second;
        table.look_up(codes[b], first, second);
        const int32_t* groups = job.short_groups + b * 64;
        const __m512 first_scales = _mm512_i32gather_ps(_mm512_i32gather_epi32(first_lanes, groups, 4), scales, 4);
        const __m512 second_scales = _mm512_i32gather_ps(_mm512_i32gather_epi32(second_lanes, groups, 4), scales, 4);
        for (int token = 0; token < Tokens; ++token) {
          const uint16_t* at = job.activations + token * width + full * kTile + b * 64;
          sums[token] = _mm512_fmadd_ps(dot(_mm512_setzero_ps(), first, at), first_scales, sums[token]);
          sums[token] = _mm512_fmadd_ps(dot(_mm512_setzero_ps(), second, at + 32), second_scales, sums[token]);
        }
      }
    }
    for (int token = 0; token < Tokens; ++token) job.out[token * job.out_stride + row] = bfloat16_of_float(_mm512_reduce_add_ps(sums[token]));
  }
}

// Some tiles of a row to bfloat16 in the order of `permute_token`.
template <int Bits>
STRATA_AVX512 void decode_row(const Job& job, int64_t row, int64_t first_tile, int64_t last_tile, uint16_t* out) {
  thread_local Scratch scratch;
  const Planes& weight = job.weight;
  float* scales = scratch.of<float>(2 * job.padded_groups);
  float* shifts = scales + job.padded_groups;
  load_groups(job.groups, row, job.padded_groups, scales, shifts);
  const __m512i meant = _mm512_set1_epi8(static_cast<char>((1 << Bits) - 1));
  for (int64_t tile = first_tile; tile < last_tile; ++tile) {
    __m512i planes[Bits], codes[8];
    for (int place = 0; place < Bits; ++place) {
      const uint8_t* at = weight.planes[place] + row * weight.stride[place] + tile * kTileBytes;
      planes[place] = _mm512_maskz_loadu_epi8(first_bytes(weight.tile_bytes(tile)), at);
      _mm_prefetch(at + kRowsAhead * weight.stride[place], _MM_HINT_T0);
    }
    transpose<Bits>(planes, codes);
    const bool is_short = tile >= weight.full_tiles();
    for (int b = 0; b < 8; ++b, out += 64) {
      alignas(64) uint8_t bytes[64];
      _mm512_store_si512(bytes, _mm512_and_si512(codes[b], meant));
      __m512 quarters[4];
#pragma GCC unroll 4
      for (int quarter = 0; quarter < 4; ++quarter) {
        const __m512 code = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes + 16 * quarter))));
        __m512 scale, shift;
        if (is_short) {
          const __m512i groups = _mm512_loadu_si512(job.short_groups + b * 64 + 16 * quarter);
          scale = _mm512_i32gather_ps(groups, scales, 4);
          shift = _mm512_i32gather_ps(groups, shifts, 4);
        } else {
          const int32_t group = job.groups_of_16[(tile * kTile + b * 64) / 16 + quarter];
          scale = _mm512_set1_ps(scales[group]);
          shift = _mm512_set1_ps(shifts[group]);
        }
        quarters[quarter] = _mm512_fmsub_ps(code, scale, shift);
      }
      const __m512i front = (__m512i)_mm512_cvtne2ps_pbh(quarters[1], quarters[0]);  // no value is NaN or as small as a subnormal
      const __m512i back = (__m512i)_mm512_cvtne2ps_pbh(quarters[3], quarters[2]);
      __m512i first, second;
      reorder(order_of(Bits).columns, front, back, first, second);
      _mm512_store_si512(out, first);
      _mm512_store_si512(out + 32, second);
    }
  }
}

template <int Bits>
void rows_of(const Job& job, int64_t begin, int64_t end) {
  using Few = void (*)(const Job&, int64_t, int64_t);
  constexpr Few kFew[] = {nullptr, few_tokens<Bits, 1>, few_tokens<Bits, 2>, few_tokens<Bits, 3>, few_tokens<Bits, 4>};
  if (job.token_sums) return kFew[job.tokens](job, begin, end);
  many_tokens(job.weight, job.activations, job.tokens, job.out, job.out_stride, begin, end,
              [&](int64_t row, int64_t tile, int64_t last, uint16_t* decoded) { decode_row<Bits>(job, row, tile, last, decoded); });
}

// The sums of the tokens over the groups, zeros beyond; null if one is not finite: then the zeros cannot be taken off.
float* sums_over_groups(const Matrix& tokens, const Groups& groups, int64_t padded, Scratch& scratch) {
  float* out = scratch.of<float>(tokens.rows * padded);
  for (int64_t token = 0; token < tokens.rows; ++token) {
    for (int64_t group = 0; group < padded; ++group) {
      const int64_t start = group * groups.size;
      int64_t end = start + groups.size < tokens.columns ? start + groups.size : tokens.columns;
      float sum = 0;
      for (int64_t column = start; column < end; ++column) sum += value_at(tokens.row(token), column, Type::bfloat16);
      if (!std::isfinite(sum)) return nullptr;
      out[token * padded + group] = sum;
    }
  }
  return out;
}

}  // namespace

bool groups_bfloat16_avx512_takes(const Groups& groups) { return groups.size % kGroupQuantum == 0; }

void product_groups_bfloat16_avx512(const Matrix& tokens, const Planes& weight, const Groups& groups, uint16_t* out, int64_t out_stride, int threads) {
  thread_local Scratch sums_scratch, places_scratch;
  const int64_t padded = (groups.count + 15) / 16 * 16;
  int32_t short_groups[kTile];
  const int64_t full = weight.full_tiles();
  for (int b = 0, run = full < weight.tiles() ? weight.tile_bytes(full) : kTileBytes; b < 8; ++b)
    for (int byte = 0; byte < 64; ++byte) short_groups[b * 64 + byte] = static_cast<int32_t>(groups.at(full * kTile + b * run + byte));
  int32_t* groups_of_16 = places_scratch.of<int32_t>(full * kTile / 16);
  for (int64_t place = 0; place < full * kTile / 16; ++place) groups_of_16[place] = static_cast<int32_t>(groups.at(16 * place));
  const float* sums = tokens.rows <= kFewTokens ? sums_over_groups(tokens, groups, padded, sums_scratch) : nullptr;
  const Job job{weight, groups, permuted(tokens, weight, threads), tokens.rows, sums, padded, groups_of_16, short_groups, out, out_stride};
  using Rows = void (*)(const Job&, int64_t, int64_t);
  constexpr Rows kRows[] = {nullptr, nullptr, rows_of<2>, rows_of<3>, rows_of<4>, rows_of<5>, rows_of<6>, rows_of<7>, rows_of<8>};
  parallel_for(threads, weight.rows, kRowsDecoded, [&](int64_t begin, int64_t end) { kRows[weight.bits](job, begin, end); });
}

}  // namespace strata
#endif
