// Bit-planes to values in AVX2, 32 columns at a time. Half a tile's planes, a vector each, are transposed by shifts and selects until a byte holds two codes of
// four bits; their values are looked up in registers, low and high bytes apart. The same steps as in avx512.h, of half the width and with fewer instructions.
#pragma once
#include "vectors_avx2.h"

#if STRATA_X86
namespace strata::avx2 {  // templates of the same names in avx512.h are others

constexpr int kLine = 32;  // columns whose codes are one vector
constexpr int kRuns = 8;   // of a tile, in whose halves a line each lies
constexpr int kHalfBytes = 32;
constexpr int64_t kAheadBytes = 3072;  // of each plane, brought near

// Where the lines of a weight's columns lie: of each half of a tile (a short one may have one half) its eight runs.
struct Lines {
  const Planes& weight;

  explicit Lines(const Planes& weight) : weight(weight) {}
  int halves(int64_t tile) const { return (weight.tile_bytes(tile) + kHalfBytes - 1) / kHalfBytes; }
  int64_t count() const { return weight.full_tiles() * 2 * kRuns + (weight.tiles() > weight.full_tiles() ? halves(weight.full_tiles()) * kRuns : 0); }
  // The first column of a line, and how many it has.
  int64_t start(int64_t line) const {
    const int64_t tile = line / (2 * kRuns), half = line / kRuns % 2, run = line % kRuns;
    return tile * kTile + run * weight.tile_bytes(tile) + half * kHalfBytes;
  }
  int64_t length(int64_t line) const {
    const int left = weight.tile_bytes(line / (2 * kRuns)) - static_cast<int>(line / kRuns % 2) * kHalfBytes;
    return left < kHalfBytes ? left : kHalfBytes;
  }
};

// 16-bit items of a line in the order of its columns, and as unpacking bytes gives them: those of columns 0..7 and 16..23, of 8..15 and 24..31. Its own inverse.
STRATA_INLINE_AVX2 void reorder(__m256i& first, __m256i& second) {
  const __m256i low = _mm256_permute2x128_si256(first, second, 0x20), high = _mm256_permute2x128_si256(first, second, 0x31);
  first = low;
  second = high;
}

// A line's values in the order of products: of each unpacked vector even items, then odd ones.
struct Line {
  __m256 values[4];
};

STRATA_INLINE_AVX2 Line widened(__m256i first, __m256i second) { return {{even_of(first), odd_of(first), even_of(second), odd_of(second)}}; }

// The planes of half a tile; zeros beyond what a short one has.
template <int Bits>
STRATA_INLINE_AVX2 void load_planes(const Planes& weight, int64_t row, int64_t line, int64_t ahead, __m256i* found) {
  const int64_t start = line / kRuns * kHalfBytes, bytes = weight.columns / 8 - start;
#pragma GCC unroll 8
  for (int place = 0; place < Bits; ++place) {
    const uint8_t* at = weight.planes[place] + row * weight.stride[place] + start;
    if (bytes >= kHalfBytes) {
      found[place] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    } else {
      alignas(32) uint8_t some[kHalfBytes] = {};
      __builtin_memcpy(some, at, static_cast<size_t>(bytes));
      found[place] = _mm256_load_si256(reinterpret_cast<const __m256i*>(some));
    }
    _mm_prefetch(at + ahead, _MM_HINT_T0);
  }
}

// Of two vectors: the bits of `low` moved right by `Shift` under the mask, else those of `high` (odd), and the other way round (even).
template <int Shift>
STRATA_INLINE_AVX2 void swap_bits(__m256i high, __m256i low, char mask, __m256i& odd, __m256i& even) {
  const __m256i differing = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi16(low, Shift), high), _mm256_set1_epi8(mask));
  odd = _mm256_xor_si256(high, differing);
  even = _mm256_xor_si256(low, _mm256_slli_epi16(differing, Shift));
}

// Up to four planes of half a tile, transposed: codes of a run in the low bits of bytes.
template <int Bits>
struct Nibbles {
  static_assert(Bits >= 1 && Bits <= 4);
  __m256i kept[Bits == 1 ? 1 : Bits == 2 ? 2 : 4];

  STRATA_INLINE_AVX2 void load(const __m256i* planes) {
    if constexpr (Bits == 1) {
      kept[0] = planes[0];
    } else if constexpr (Bits == 2) {
      swap_bits<1>(planes[0], planes[1], 0x55, kept[0], kept[1]);
    } else {
      __m256i high_odd, high_even, low_odd, low_even;
      if constexpr (Bits == 4) {
        swap_bits<1>(planes[0], planes[1], 0x55, high_odd, high_even);
      } else {  // any bit in place of the first
        high_odd = _mm256_srli_epi16(planes[0], 1);
        high_even = planes[0];
      }
      swap_bits<1>(planes[Bits - 2], planes[Bits - 1], 0x55, low_odd, low_even);
      swap_bits<2>(high_odd, low_odd, 0x33, kept[0], kept[1]);
      swap_bits<2>(high_even, low_even, 0x33, kept[2], kept[3]);
    }
  }

  // Bits above a code's own are any, those above the fourth 0.
  STRATA_INLINE_AVX2 __m256i codes(int run) const {
    __m256i found;
    if constexpr (Bits == 1) {
      found = _mm256_srli_epi16(kept[0], run);
    } else if constexpr (Bits == 2) {
      found = run % 2 ? _mm256_srli_epi16(kept[0], run - 1) : _mm256_srli_epi16(kept[1], run);
    } else {
      constexpr int kQuads[4] = {3, 1, 2, 0};
      found = run < 4 ? kept[kQuads[run % 4]] : _mm256_srli_epi16(kept[kQuads[run % 4]], 4);
    }
    return _mm256_and_si256(found, _mm256_set1_epi8(0x0F));
  }
};

// Sixteen entries of a table each, in both halves of a vector; tables of fewer again and again, so that bits above a code name the same.
template <int Bits>
constexpr int kParts = Bits <= 4 ? 1 : 1 << (Bits - 4);

// Looks up the bytes that codes name: the lowest four bits by a shuffle, one for each part of the table, and what those above choose among them.
// planes: of the upper bits, moved so that a run's lie at the top of their bytes.
template <int Upper>
STRATA_INLINE_AVX2 __m256i looked_up(const __m256i* parts, __m256i codes, const __m256i* planes) {
  if constexpr (Upper == 0) {
    return _mm256_shuffle_epi8(parts[0], codes);
  } else {
    const __m256i low = looked_up<Upper - 1>(parts, codes, planes + 1), high = looked_up<Upper - 1>(parts + (1 << (Upper - 1)), codes, planes + 1);
    return _mm256_blendv_epi8(low, high, planes[0]);
  }
}

// Half a tile's codes, by run.
template <int Bits>
struct HalfTile {
  static constexpr int kLow = Bits < 4 ? Bits : 4, kUpper = Bits - kLow;
  Nibbles<kLow> low;
  __m256i planes[Bits];

  // line: its first run's. ahead: bytes, after which planes are brought near.
  STRATA_INLINE_AVX2 void load(const Planes& weight, int64_t row, int64_t line, int64_t ahead = kAheadBytes) {
    load_planes<Bits>(weight, row, line, ahead, planes);
    low.load(planes + kUpper);
  }

  STRATA_INLINE_AVX2 void select(int run, __m256i* chosen) const {
#pragma GCC unroll 4
    for (int place = 0; place < kUpper; ++place) chosen[place] = _mm256_slli_epi16(planes[place], 7 - run);
  }
};

// A row's 2^Bits values of 16 bits, their low and high bytes apart.
template <int Bits>
struct Table16 {
  static constexpr int kUpper = Bits < 4 ? 0 : Bits - 4;
  __m256i low[kParts<Bits>], high[kParts<Bits>];

  STRATA_INLINE_AVX2 void load(const uint8_t* table) {
#pragma GCC unroll 16
    for (int part = 0; part < kParts<Bits>; ++part) {
      __m128i first, second;
      if constexpr (Bits >= 4) {
        first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table + 32 * part));
        second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table + 32 * part + 16));
      } else {
        alignas(16) uint8_t some[16];
        for (int byte = 0; byte < 16; byte += 2 << Bits) __builtin_memcpy(some + byte, table, 2 << Bits);
        first = second = _mm_load_si128(reinterpret_cast<const __m128i*>(some));
      }
      const __m128i mask = _mm_set1_epi16(0xFF);
      low[part] = _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_and_si128(first, mask), _mm_and_si128(second, mask)));
      high[part] = _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8)));
    }
  }

  // A run's values, unpacked (see `reorder`).
  STRATA_INLINE_AVX2 void look_up(const HalfTile<Bits>& tile, int run, __m256i& first, __m256i& second) const {
    const __m256i codes = tile.low.codes(run);
    __m256i chosen[kUpper + 1];
    tile.select(run, chosen);
    const __m256i low_bytes = looked_up<kUpper>(low, codes, chosen), high_bytes = looked_up<kUpper>(high, codes, chosen);
    first = _mm256_unpacklo_epi8(low_bytes, high_bytes);
    second = _mm256_unpackhi_epi8(low_bytes, high_bytes);
  }
};

// 16-bit values of a row's lines [first, last), whole halves of tiles, in the columns' order; `from`: the column of out[0].
template <int Bits>
STRATA_AVX2 void values16(const Planes& weight, int64_t row, int64_t first, int64_t last, int64_t from, uint16_t* out) {
  const Lines lines(weight);
  Table16<Bits> table;
  table.load(weight.table + row * weight.table_stride_bytes);
  for (int64_t line = first; line < last; line += kRuns) {
    HalfTile<Bits> codes;
    codes.load(weight, row, line);
#pragma GCC unroll 8
    for (int run = 0; run < kRuns; ++run) {
      __m256i found[2];
      table.look_up(codes, run, found[0], found[1]);
      reorder(found[0], found[1]);
      uint16_t* at = out + lines.start(line + run) - from;
      if (lines.length(line) == kLine) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), found[0]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(at + 16), found[1]);
      } else {
        __builtin_memcpy(at, found, static_cast<size_t>(lines.length(line)) * 2);
      }
    }
  }
}

}  // namespace strata::avx2
#endif
