// bfloat16 activations times bit-planes in AVX-512. Up to 16 tokens: codes are looked up in registers and multiplied there, by up to 8 tokens at once; looking up
// is mostly the work of ports that multiplying leaves idle. More: some rows of the weight are decoded into the cache, then multiplied in blocks of 4 rows x 6
// tokens of accumulators.
#include "product.h"

#if STRATA_X86
#include "blocks_avx512.h"

namespace strata {
namespace {

constexpr int kMostTogether = 8;      // tokens whose sums are held in registers
constexpr int kFewTogether = 2;       // beside whose sums there are registers for codes
constexpr int64_t kRowsNear = 48;     // that groups of tokens meet in turn

// Rows of the weight that are multiplied at once: with the tokens up to 24 sums, fewer where tables take registers.
template <int Bits>
constexpr int rows_with(int tokens) {
  return Bits > 6 ? 2 : tokens <= 6 ? 4 : 3;
}

// The same of few tokens. Long rows are read as fewer streams, which memory gives faster; of short ones more share what each block costs once.
constexpr int64_t kShortRow = 2048;
template <int Bits>
constexpr int few_rows(bool are_short) {
  return Bits > 6 ? 1 : are_short ? 4 : 2;
}

// The order in which planes give codes: those of one quad after each other.
constexpr int kRuns[8] = {3, 7, 1, 5, 2, 6, 0, 4};

// In place of rows beyond the last: the last.
inline int64_t row_or_last(int64_t row, int64_t end) { return row < end ? row : end - 1; }

// 32 columns of some rows, times some tokens.
template <int Rows, int Tokens>
STRATA_INLINE void multiply_line(const __m512i* weights, const uint16_t* activations, __m512 sums[Tokens][Rows]) {
#pragma GCC unroll 16
  for (int token = 0; token < Tokens; ++token)
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) sums[token][row] = dot(sums[token][row], weights[row], activations + token * kLine);
}

template <int Rows, int Tokens>
STRATA_INLINE void clear(__m512 sums[Tokens][Rows]) {
#pragma GCC unroll 16
  for (int token = 0; token < Tokens; ++token)
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) sums[token][row] = _mm512_setzero_ps();
}

// Four of `Count` sums, each added up across its vector; in place of those beyond the last any.
template <int Count>
STRATA_INLINE __m128 four_sums(const __m512* sums, int place) {
  const int last = place < Count ? Count - 1 : place;
  return place < Count ? sums_of(sums[place], sums[place + 1 < last ? place + 1 : last], sums[place + 2 < last ? place + 2 : last], sums[place + 3 < last ? place + 3 : last])
                       : _mm_setzero_ps();
}

// Tokens x Rows sums, added up, rounded, and stored for the rows that there are.
template <int Rows, int Tokens>
STRATA_INLINE void store_sums(const __m512* sums, int64_t rows, uint16_t* out, int64_t out_stride) {
  constexpr int kCount = Rows * Tokens, kPadded = (kCount + 15) / 16 * 16;
  if constexpr (Rows == 1) {
    for (int token = 0; token < Tokens; ++token) out[token * out_stride] = bfloat16_of_float(_mm512_reduce_add_ps(sums[token]));
    return;
  }
  alignas(64) uint16_t found[kPadded];
#pragma GCC unroll 2
  for (int place = 0; place < kPadded; place += 16) {
    __m512 added = _mm512_castps128_ps512(four_sums<kCount>(sums, place));
    added = _mm512_insertf32x4(added, four_sums<kCount>(sums, place + 4), 1);
    added = _mm512_insertf32x4(added, four_sums<kCount>(sums, place + 8), 2);
    added = _mm512_insertf32x4(added, four_sums<kCount>(sums, place + 12), 3);
    _mm256_store_si256(reinterpret_cast<__m256i*>(found + place), bfloat16_of(added));
  }
  if (rows < Rows) {
    for (int token = 0; token < Tokens; ++token)
      for (int64_t row = 0; row < rows; ++row) out[token * out_stride + row] = found[token * Rows + row];
    return;
  }
#pragma GCC unroll 16
  for (int token = 0; token < Tokens; ++token) __builtin_memcpy(out + token * out_stride, found + token * Rows, Rows * sizeof(uint16_t));
}

// The planes of a tile of a row, transposed; those further on are brought near.
template <int Bits>
STRATA_INLINE Transposed<Bits> transposed(const Planes& weight, int64_t row, int64_t tile) {
  const __mmask64 mask = first_bytes(weight.tile_bytes(tile));
  __m512i planes[Bits];
#pragma GCC unroll 8
  for (int place = 0; place < Bits; ++place) {
    const uint8_t* at = weight.planes[place] + row * weight.stride[place] + tile * kTileBytes;
    planes[place] = _mm512_maskz_loadu_epi8(mask, at);
    _mm_prefetch(at + kAheadBytes, _MM_HINT_T0);
  }
  Transposed<Bits> found;
  found.load(planes);
  return found;
}

template <int Bits, int Rows>
STRATA_INLINE void load_tables(const Planes& weight, int64_t start, int64_t end, Table16<Bits>* tables) {
#pragma GCC unroll 8
  for (int each = 0; each < Rows; ++each) {
    const uint8_t* table = weight.table + row_or_last(start + each, end) * weight.table_stride_bytes;
    tables[each].load(table);
    for (int byte = 0; byte < (2 << Bits); byte += 64) _mm_prefetch(table + 2 * Rows * weight.table_stride_bytes + byte, _MM_HINT_T0);
  }
}

// A tile of some rows times so few tokens that registers hold codes beside the sums.
template <int Bits, int Tokens, int Rows, int Chains, bool IsCut>
STRATA_INLINE void few_tile(const RowPlanes<Bits>* rows, const Table16<Bits>* tables, int64_t tile, __mmask64 cut, const uint16_t* at, __m512 sums[Chains][Tokens][Rows]) {
  Transposed<Bits> tiles[Rows];
#pragma GCC unroll 8
  for (int each = 0; each < Rows; ++each) {
    __m512i planes[Bits];
    rows[each].template load<IsCut>(tile, cut, kAheadBytes, planes);
    tiles[each].load(planes);
  }
#pragma GCC unroll 8
  for (int run = 0; run < 8; ++run) {
    const int b = kRuns[run];
    __m512i first[Rows], second[Rows];
#pragma GCC unroll 8
    for (int each = 0; each < Rows; ++each) tables[each].look_up(tiles[each].codes(b), first[each], second[each]);
    multiply_line<Rows, Tokens>(first, at + 2 * b * Tokens * kLine, sums[2 * run % Chains]);
    multiply_line<Rows, Tokens>(second, at + (2 * b + 1) * Tokens * kLine, sums[(2 * run + 1) % Chains]);
  }
}

template <int Bits, int Tokens, bool AreShort>
STRATA_AVX512 void few_tokens(const Planes& weight, int64_t start, int64_t end, const uint16_t* activations, uint16_t* out, int64_t out_stride) {
  constexpr int kRows = few_rows<Bits>(AreShort), kChains = 4 / kRows;  // fewer than four chains of additions would wait for each other
  const int64_t whole = weight.full_tiles(), cut_bytes = weight.tiles() > whole ? weight.tile_bytes(whole) : 0;
  for (int64_t row = start; row < end; row += kRows) {
    Table16<Bits> tables[kRows];
    RowPlanes<Bits> rows[kRows];
    __m512 sums[kChains][Tokens][kRows];
    load_tables<Bits, kRows>(weight, row, end, tables);
#pragma GCC unroll 4
    for (int each = 0; each < kRows; ++each) rows[each].start(weight, row_or_last(row + each, end));
#pragma GCC unroll 4
    for (auto& chain : sums) clear<kRows, Tokens>(chain);
    const uint16_t* at = activations;
    for (int64_t tile = 0; tile < whole; ++tile, at += kTile * Tokens) few_tile<Bits, Tokens, kRows, kChains, false>(rows, tables, tile, 0, at, sums);
    if (cut_bytes) few_tile<Bits, Tokens, kRows, kChains, true>(rows, tables, whole, first_bytes(cut_bytes), at, sums);
#pragma GCC unroll 4
    for (int chain = 1; chain < kChains; ++chain)
#pragma GCC unroll 2
      for (int token = 0; token < Tokens; ++token)
#pragma GCC unroll 4
        for (int each = 0; each < kRows; ++each) sums[0][token][each] = _mm512_add_ps(sums[0][token][each], sums[chain][token][each]);
    store_sums<kRows, Tokens>(sums[0][0], end - row, out + row, out_stride);
  }
}

// Vectors of a tile's codes that wait in memory: quads as they are, since shifts alone take their nibbles apart; else the codes of each run.
template <int Bits>
constexpr int kKept = Bits == 3 || Bits == 4 ? 4 : 8;

template <int Bits, int Rows>
STRATA_INLINE void keep_codes(const Planes& weight, int64_t row, int64_t tile, __m512i* codes) {
  const Transposed<Bits> found = transposed<Bits>(weight, row, tile);
#pragma GCC unroll 8
  for (int each = 0; each < kKept<Bits>; ++each) codes[each * Rows] = kKept<Bits> == 4 ? found.quads[each] : found.codes(kRuns[each]);
}

// The runs of codes that were kept together.
template <int Bits, int Rows, int Tokens>
STRATA_INLINE void multiply_kept(const __m512i* codes, int each, const Table16<Bits>* tables, const uint16_t* activations, __m512 sums[Tokens][Rows]) {
  constexpr int kParts = 8 / kKept<Bits>;
#pragma GCC unroll 2
  for (int part = 0; part < kParts; ++part) {
    const uint16_t* line = activations + kRuns[each * kParts + part] * 2 * Tokens * kLine;
    __m512i first[Rows], second[Rows];
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) tables[row].look_up(_mm512_srli_epi16(codes[row], 4 * part), first[row], second[row]);
    multiply_line<Rows, Tokens>(first, line, sums);
    if constexpr (Table16<Bits>::kWhole) {
      asm volatile("" ::: "memory");  // looked up now, not before: the sums need the registers
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) second[row] = tables[row].odd(_mm512_srli_epi16(codes[row], 4 * part));
    }
    multiply_line<Rows, Tokens>(second, line + Tokens * kLine, sums);
    asm volatile("" ::: "memory");
  }
}

// Some rows times more tokens. Codes of the next tile are put into memory row by row while those of this one are multiplied: all of them at once would keep
// multiplication waiting.
template <int Bits, int Tokens>
STRATA_AVX512 void several_tokens(const Planes& weight, int64_t start, int64_t end, const uint16_t* activations, uint16_t* out, int64_t out_stride) {
  constexpr int kRows = rows_with<Bits>(Tokens), kVectors = kKept<Bits> * kRows;
  thread_local Scratch scratch;
  __m512i *codes = scratch.of<__m512i>(2 * kVectors), *next_codes = codes + kVectors;
  for (int each = 0; each < kRows; ++each) keep_codes<Bits, kRows>(weight, row_or_last(start + each, end), 0, codes + each);
  for (int64_t row = start; row < end; row += kRows) {
    Table16<Bits> tables[kRows];
    __m512 sums[Tokens][kRows];
    load_tables<Bits, kRows>(weight, row, end, tables);
    clear<kRows, Tokens>(sums);
    const uint16_t* at = activations;
    for (int64_t tile = 0; tile < weight.tiles(); ++tile, at += kTile * Tokens) {
      const bool is_last = tile + 1 == weight.tiles();
      const int64_t next_row = is_last ? row + kRows : row, next_tile = is_last ? 0 : tile + 1;
#pragma GCC unroll 1
      for (int each = 0; each < kRows; ++each) {
        keep_codes<Bits, kRows>(weight, row_or_last(next_row + each, end), next_tile, next_codes + each);
#pragma GCC unroll 1
        for (int kept = kKept<Bits> * each / kRows; kept < kKept<Bits> * (each + 1) / kRows; ++kept)
          multiply_kept<Bits, kRows, Tokens>(codes + kept * kRows, kept, tables, at, sums);
      }
      __m512i* before = codes;
      codes = next_codes;
      next_codes = before;
    }
    store_sums<kRows, Tokens>(sums[0], end - row, out + row, out_stride);
  }
}

// Some tiles of a row to bfloat16 in the order of `permute_token`.
template <int Bits>
STRATA_AVX512 void decode_row(const Planes& weight, int64_t row, int64_t first_tile, int64_t last_tile, uint16_t* out) {
  Table16<Bits> table;
  table.load(weight.table + row * weight.table_stride_bytes);
  for (int64_t tile = first_tile; tile < last_tile; ++tile) {
    __m512i planes[Bits];
    const __mmask64 mask = first_bytes(weight.tile_bytes(tile));
#pragma GCC unroll 8
    for (int place = 0; place < Bits; ++place) {
      const uint8_t* at = weight.planes[place] + row * weight.stride[place] + tile * kTileBytes;
      planes[place] = _mm512_maskz_loadu_epi8(mask, at);
      _mm_prefetch(at + kRowsAhead * weight.stride[place], _MM_HINT_T0);
    }
    Transposed<Bits> found;
    found.load(planes);
#pragma GCC unroll 8
    for (int b = 0; b < 8; ++b, out += 64) {
      __m512i first, second;
      table.look_up(found.codes(b), first, second);
      _mm512_store_si512(out, first);
      _mm512_store_si512(out + 32, second);
    }
  }
}

// Up to how many tokens looking codes up for each group of them is faster than decoding them once.
template <int Bits>
constexpr int64_t kMostLookedUp = Bits <= 4 ? 16 : 8;

// Groups of tokens that are multiplied together.
struct Parts {
  int64_t tokens;

  int64_t count() const { return (tokens + kMostTogether - 1) / kMostTogether; }
  int64_t first(int64_t part) const { return tokens * part / count(); }
  int64_t size(int64_t part) const { return first(part + 1) - first(part); }
};

// Each part's tokens in the order of look-ups, vector by vector, so that a product reads one stream; kept until the thread's next call.
STRATA_AVX512 const uint16_t* parted(const Matrix& tokens, const Planes& weight) {
  thread_local Scratch scratch;
  const int64_t width = weight.tiles() * kTile;
  uint16_t* out = scratch.of<uint16_t>(tokens.rows * width);
  const Parts parts{tokens.rows};
  for (int64_t part = 0; part < parts.count(); ++part)
    for (int64_t token = 0; token < parts.size(part); ++token)
      permute_token(reinterpret_cast<const uint16_t*>(tokens.row(parts.first(part) + token)), tokens.columns, weight,
                    out + parts.first(part) * width + token * kLine, parts.size(part) * kLine);
  return out;
}

template <int Bits>
void looked_up(const Matrix& tokens, const Planes& weight, uint16_t* out, int64_t out_stride, int threads) {
  using Part = void (*)(const Planes&, int64_t, int64_t, const uint16_t*, uint16_t*, int64_t);
  constexpr Part kFew[][2] = {{few_tokens<Bits, 1, false>, few_tokens<Bits, 1, true>}, {few_tokens<Bits, 2, false>, few_tokens<Bits, 2, true>}};
  constexpr Part kSeveral[] = {several_tokens<Bits, 3>, several_tokens<Bits, 4>, several_tokens<Bits, 5>,
                               several_tokens<Bits, 6>, several_tokens<Bits, 7>, several_tokens<Bits, 8>};
  const uint16_t* activations = parted(tokens, weight);
  const Parts parts{tokens.rows};
  const int64_t width = weight.tiles() * kTile;
  const auto part_of = [&](int64_t size) { return size <= kFewTogether ? kFew[size - 1][weight.columns <= kShortRow] : kSeveral[size - kFewTogether - 1]; };
  parallel_for(threads, weight.rows, kRowsNear, [&](int64_t begin, int64_t end) {
    for (int64_t start = begin; start < end; start += kRowsNear)
      for (int64_t part = 0; part < parts.count(); ++part)
        part_of(parts.size(part))(weight, start, start + kRowsNear < end ? start + kRowsNear : end, activations + parts.first(part) * width,
                                  out + parts.first(part) * out_stride, out_stride);
  });
}

template <int Bits>
void product(const Matrix& tokens, const Planes& weight, uint16_t* out, int64_t out_stride, int threads) {
  if (tokens.rows <= kMostLookedUp<Bits>) return looked_up<Bits>(tokens, weight, out, out_stride, threads);
  const uint16_t* activations = permuted(tokens, weight, threads);
  parallel_for(threads, weight.rows, kRowsDecoded, [&](int64_t begin, int64_t end) {
    many_tokens(weight, activations, tokens.rows, out, out_stride, begin, end,
                [&](int64_t row, int64_t tile, int64_t last, uint16_t* decoded) { decode_row<Bits>(weight, row, tile, last, decoded); });
  });
}

}  // namespace

void product_bfloat16_avx512(const Matrix& tokens, const Planes& weight, uint16_t* out, int64_t out_stride, int threads) {
  using Product = void (*)(const Matrix&, const Planes&, uint16_t*, int64_t, int);
  constexpr Product kProducts[] = {nullptr, nullptr, product<2>, product<3>, product<4>, product<5>, product<6>, product<7>, product<8>};
  kProducts[weight.bits](tokens, weight, out, out_stride, threads);
}

}  // namespace strata
#endif
