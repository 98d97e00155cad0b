// Bit-planes to values in AVX-512 (F, BW, VL, VBMI, BF16, VNNI). A tile's planes, one vector each, are transposed by shifts and selects: after two stages
// a byte holds two codes of four bits, after three one code of eight. Values are then looked up in registers, 64 bytes at a time.
// Any-Precision LLM (arXiv 2402.10517, section 5.2) does both with 32-bit words of a GPU.
#pragma once
#include "planes.h"

#if STRATA_X86
#include <immintrin.h>

#define STRATA_INLINE STRATA_AVX512 inline __attribute__((always_inline))

namespace strata {

// mask ? a : b, bit by bit; the result may take the register of the first operand, which is the one that is not needed again.
STRATA_INLINE __m512i take_first(__m512i a, __m512i b, __m512i mask) { return _mm512_ternarylogic_epi32(a, b, mask, 0xE4); }
STRATA_INLINE __m512i take_second(__m512i b, __m512i a, __m512i mask) { return _mm512_ternarylogic_epi32(b, a, mask, 0xD8); }

// Pairs of bits: of columns with odd b in `odd` (at bits b, b - 1), with even b in `even` (at b + 1, b).
STRATA_INLINE void pair_planes(__m512i high, __m512i low, __m512i& odd, __m512i& even) {
  const __m512i mask = _mm512_set1_epi8(static_cast<char>(0xAA));
  odd = take_second(_mm512_srli_epi16(low, 1), high, mask);
  even = take_first(_mm512_slli_epi16(high, 1), low, mask);
}

// Nibbles: quads[0] holds the codes of b = 3 (low nibble) and 7 (high), [1]: 1 and 5, [2]: 2 and 6, [3]: 0 and 4.
STRATA_INLINE void pair_pairs(__m512i high_odd, __m512i high_even, __m512i low_odd, __m512i low_even, __m512i quads[4]) {
  const __m512i mask = _mm512_set1_epi8(static_cast<char>(0xCC));
  quads[0] = take_second(_mm512_srli_epi16(low_odd, 2), high_odd, mask);
  quads[1] = take_first(_mm512_slli_epi16(high_odd, 2), low_odd, mask);
  quads[2] = take_second(_mm512_srli_epi16(low_even, 2), high_even, mask);
  quads[3] = take_first(_mm512_slli_epi16(high_even, 2), low_even, mask);
}

// Of four planes; of three, with any bit in place of the first.
template <int Count>
STRATA_INLINE void transpose_nibbles(const __m512i* planes, __m512i quads[4]) {
  __m512i high_odd, high_even, low_odd, low_even;
  if constexpr (Count == 4) {
    pair_planes(planes[0], planes[1], high_odd, high_even);
    pair_planes(planes[2], planes[3], low_odd, low_even);
  } else {
    high_odd = _mm512_srli_epi16(planes[0], 1);
    high_even = planes[0];
    pair_planes(planes[1], planes[2], low_odd, low_even);
  }
  pair_pairs(high_odd, high_even, low_odd, low_even, quads);
}

constexpr int kQuadOf[4] = {3, 1, 2, 0};  // of a run b, in whose low nibble; runs 4 further have the high ones

// Every 16-bit lane moved to the left, or by a negative distance to the right.
STRATA_INLINE __m512i moved(__m512i values, int left) { return left < 0 ? _mm512_srli_epi16(values, -left) : _mm512_slli_epi16(values, left); }

// A tile's planes, transposed as far as nibbles: few enough vectors to wait in registers until codes are taken out of them.
template <int Bits>
struct Transposed {
  __m512i quads[4];  // the low four bits of all codes; of two bits: odd, even
  __m512i upper[4];  // the others. Of five bits: a plane; of six: odd, even; of more: quads

  STRATA_INLINE void load(const __m512i* planes) {
    if constexpr (Bits == 2) {
      pair_planes(planes[0], planes[1], quads[0], quads[1]);
    } else {
      transpose_nibbles<(Bits < 4 ? 3 : 4)>(planes + (Bits > 4 ? Bits - 4 : 0), quads);
      if constexpr (Bits == 5) upper[0] = planes[0];
      if constexpr (Bits == 6) pair_planes(planes[0], planes[1], upper[0], upper[1]);
      if constexpr (Bits > 6) transpose_nibbles<Bits - 4>(planes, upper);
    }
  }

  // Codes of the 64 (in a short tile fewer) columns of run b in the low `Bits` bits of bytes; bits above are any.
  STRATA_INLINE __m512i codes(int b) const {
    if constexpr (Bits == 2) return b % 2 ? moved(quads[0], 1 - b) : moved(quads[1], -b);
    const __m512i quad = quads[kQuadOf[b % 4]], low = b < 4 ? quad : _mm512_srli_epi16(quad, 4);
    if constexpr (Bits <= 4) return low;
    return take_first(low, above(b), _mm512_set1_epi8(0x0F));
  }

 private:
  // The upper bits of a run's codes, from bit 4 on.
  STRATA_INLINE __m512i above(int b) const {
    if constexpr (Bits == 5) return moved(upper[0], 4 - b);
    if constexpr (Bits == 6) return b % 2 ? moved(upper[0], 5 - b) : moved(upper[1], 4 - b);
    return b < 4 ? _mm512_slli_epi16(upper[kQuadOf[b % 4]], 4) : upper[kQuadOf[b % 4]];
  }
};

// codes[b] of run b.
template <int Bits>
STRATA_INLINE void transpose(const __m512i* planes, __m512i codes[8]) {
  Transposed<Bits> found;
  found.load(planes);
#pragma GCC unroll 8
  for (int b = 0; b < 8; ++b) codes[b] = found.codes(b);
}

STRATA_INLINE __mmask64 first_bytes(int64_t count) { return count >= 64 ? ~__mmask64{0} : (__mmask64{1} << count) - 1; }
STRATA_INLINE __mmask16 first_floats(int64_t count) { return static_cast<__mmask16>(first_bytes(count >= 16 ? 16 : count)); }

// Rounded to nearest, ties to even; NaN stays NaN. (The instruction for it would take subnormals for zeros.)
STRATA_INLINE __m256i bfloat16_of(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 broken = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, broken, quiet), 16));
}

// A row's planes, tile by tile: where they lie is worked out once. Only the last tile is masked where it is cut: a masked load takes longer.
template <int Bits>
struct RowPlanes {
  const uint8_t* planes[Bits];

  STRATA_INLINE void start(const Planes& weight, int64_t row) {
#pragma GCC unroll 8
    for (int place = 0; place < Bits; ++place) planes[place] = weight.planes[place] + row * weight.stride[place];
  }

  // `ahead`: bytes further on, which are brought near.
  template <bool IsCut>
  STRATA_INLINE void load(int64_t tile, __mmask64 cut, int64_t ahead, __m512i* found) const {
#pragma GCC unroll 8
    for (int place = 0; place < Bits; ++place) {
      const uint8_t* at = planes[place] + tile * kTileBytes;
      found[place] = IsCut ? _mm512_maskz_loadu_epi8(cut, at) : _mm512_loadu_si512(at);
      _mm_prefetch(at + ahead, _MM_HINT_T1);
    }
  }
};

template <int Bits>
STRATA_INLINE void load_planes(const Planes& weight, int64_t row, int64_t tile, __mmask64 mask, __m512i* found) {
  for (int place = 0; place < Bits; ++place)
    found[place] = _mm512_maskz_loadu_epi8(mask, weight.planes[place] + row * weight.stride[place] + tile * kTileBytes);
}

// While 4 decoded rows are multiplied, the planes that will be decoded in their place are brought near: those of the tiles from `tile` on, or of the rows
// `block_rows` further from the first tile on.
STRATA_INLINE void prefetch_next(const Planes& weight, int64_t row, int64_t each, int64_t block_rows, int64_t tile, int64_t section_tiles) {
  const bool is_last = tile == weight.tiles();
  const int64_t start = is_last ? 0 : tile, first_row = row + each + (is_last ? block_rows : 0);
  const int64_t end = start + section_tiles < weight.tiles() ? start + section_tiles : weight.tiles();
  for (int64_t next = first_row; next < first_row + 4 && next < weight.rows; ++next)
    for (int place = 0; place < weight.bits; ++place)
      for (int64_t at = start; at < end; ++at) _mm_prefetch(weight.planes[place] + next * weight.stride[place] + at * kTileBytes, _MM_HINT_T1);
}

// The order in which look-ups give the 64 columns of a run, 32 in each of two vectors: `columns`; `places`: the other way round.
struct Order {
  alignas(64) uint16_t columns[64] = {}, places[64] = {};

  constexpr explicit Order(bool is_whole) {
    for (int place = 0; place < 64; ++place) {
      const int second = place / 32, inner = place % 32;
      columns[place] = static_cast<uint16_t>(is_whole ? 2 * inner + second : inner / 8 * 16 + inner % 8 + 8 * second);
      places[columns[place]] = static_cast<uint16_t>(place);
    }
  }
};

constexpr bool looked_up_whole(int bits) { return bits <= 6; }
inline constexpr Order kOrders[2] = {Order(false), Order(true)};
constexpr const Order& order_of(int bits) { return kOrders[looked_up_whole(bits)]; }

// 64 items of two vectors in another order: that of `order`, of 64 numbers.
STRATA_INLINE void reorder(const uint16_t* order, __m512i first, __m512i second, __m512i& front, __m512i& back) {
  front = _mm512_permutex2var_epi16(first, _mm512_load_si512(order), second);
  back = _mm512_permutex2var_epi16(first, _mm512_load_si512(order + 32), second);
}

// A table of 2^Bits 16-bit values. Up to 64 of them are looked up whole, by vpermw and vpermi2w; more by their low and high bytes apart, by vpermi2b.
template <int Bits>
struct Table16 {
  static constexpr bool kWhole = looked_up_whole(Bits);
  static constexpr int kVectors = Bits <= 5 ? 1 : Bits <= 7 ? 2 : 4;
  __m512i low[kVectors], high[kVectors];  // `low` alone where values are whole

  STRATA_INLINE void load(const void* table) {
    const uint8_t* bytes = static_cast<const uint8_t*>(table);
    if constexpr (Bits < 5) {  // again and again: bits above a code name the same value
      const __m512i places = _mm512_and_si512(_mm512_load_si512(kWords), _mm512_set1_epi16((1 << Bits) - 1));
      low[0] = _mm512_permutexvar_epi16(places, _mm512_maskz_loadu_epi8((__mmask64{1} << (2 << Bits) % 64) - 1, table));
    } else if constexpr (kWhole) {
      for (int each = 0; each < kVectors; ++each) low[each] = _mm512_loadu_si512(bytes + 64 * each);
    } else {
      const __m512i places = _mm512_load_si512(kPlaces), even = _mm512_add_epi8(places, places);
      const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi8(1));
      for (int each = 0; each < kVectors; ++each) {
        const __m512i first = _mm512_loadu_si512(bytes + 128 * each), second = _mm512_loadu_si512(bytes + 128 * each + 64);
        low[each] = _mm512_permutex2var_epi8(first, even, second);
        high[each] = _mm512_permutex2var_epi8(first, odd, second);
      }
    }
  }

  // The second half of `look_up` where values are whole.
  STRATA_INLINE __m512i odd(__m512i codes) const { return named(_mm512_srli_epi16(codes, 8)); }

  // 64 values, in the order of `order_of(Bits)`.
  STRATA_INLINE void look_up(__m512i codes, __m512i& first, __m512i& second) const {
    if constexpr (kWhole) {
      first = named(codes);
      second = named(_mm512_srli_epi16(codes, 8));
    } else {
      const __m512i low_bytes = bytes_of(low, codes), high_bytes = bytes_of(high, codes);
      first = _mm512_unpacklo_epi8(low_bytes, high_bytes);
      second = _mm512_unpackhi_epi8(low_bytes, high_bytes);
    }
  }

 private:
  // The values that the low bits of 16-bit lanes name.
  STRATA_INLINE __m512i named(__m512i codes) const {
    return Bits == 6 ? _mm512_permutex2var_epi16(low[0], codes, low[kVectors - 1]) : _mm512_permutexvar_epi16(codes, low[0]);
  }

  STRATA_INLINE static __m512i bytes_of(const __m512i* halves, __m512i codes) {
    const __m512i lower = _mm512_permutex2var_epi8(halves[0], codes, halves[1]);
    if constexpr (Bits == 7) return lower;
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(codes), lower, _mm512_permutex2var_epi8(halves[kVectors - 2], codes, halves[kVectors - 1]));
  }

  alignas(64) static constexpr uint8_t kPlaces[64] = {
      0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
      32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
  alignas(64) static constexpr uint16_t kWords[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                                      16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
};

}  // namespace strata
#endif
