// The format any4_a8: int8 activations, a scale per token; values rounded to int8, a scale per row. How AVX-512 multiplies is in int8_avx512.h.
#include "int8.h"

#include "codes.h"
#include "int8_avx512.h"
#include "product.h"
#include "rows.h"

namespace strata {
namespace {

STRATA_PLAIN void plain_rows(const Planes& weight, const Activations& activations, const Result& result, int64_t begin, int64_t end) {
  thread_local Scratch codes_scratch, placed_scratch;
  uint8_t* codes = codes_scratch.of<uint8_t>(weight.columns);
  const int64_t count = activations.runs * kRun;
  int8_t* placed = placed_scratch.of<int8_t>(count);
  const Runs runs = Runs::of(weight, weight.columns);
  for (int64_t row = begin; row < end; ++row) {
    float values[1 << kMostBits];
    int8_t table[1 << kMostBits];
    widen(weight.table + row * weight.table_stride_bytes, result.type, 1 << weight.bits, values);
    float scale = peak_of(values, 1 << weight.bits) / 127.0f;
    if (!(scale > 0)) scale = kTiny;
    codes_of(values, nullptr, scale, 1 << weight.bits, table);
    decode_codes(weight, row, codes);
    for (int64_t run = 0; run < runs.count; ++run)
      for (int64_t each = 0, start = runs.start(run), length = runs.length(run); each < kRun; ++each)
        placed[run * kRun + each] = each < length ? table[codes[start + each]] : int8_t{0};
    plain_row(placed, count, scale, activations, result, row);
  }
}

void portable_rows(const Planes& weight, const Activations& activations, const Result& result, int64_t begin, int64_t end) {
  plain_rows(weight, activations, result, begin, end);
}

#if STRATA_X86
STRATA_AVX2 void avx2_rows(const Planes& weight, const Activations& activations, const Result& result, int64_t begin, int64_t end) {
  plain_rows(weight, activations, result, begin, end);
}

constexpr int64_t kPadding = 64;      // bytes between decoded rows, so that they do not meet in one set of the cache
constexpr int64_t kAheadBytes = 3072;  // of each plane, prefetched: 4096 would fall into the cache's set that is being read
constexpr int64_t kPairedTiles = 8;    // of one or two tokens: two longer rows at once are read from memory more slowly

// The values of a row of four bits as shifted bytes, and their scale.
STRATA_INLINE __m128i shifted_table(const Planes& weight, int64_t row, Type type, float& scale) {
  const uint8_t* at = weight.table + row * weight.table_stride_bytes;
  __m512 values;
  if (type == Type::float32)
    values = _mm512_loadu_ps(at);
  else if (type == Type::bfloat16)
    values = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))), 16));
  else
    values = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  scale = _mm512_reduce_max_ps(_mm512_abs_ps(values)) / 127.0f;
  if (!(scale > 0)) scale = kTiny;
  const __m512i codes = _mm512_cvtps_epi32(_mm512_div_ps(values, _mm512_set1_ps(scale)));
  const __m512i clipped = _mm512_min_epi32(_mm512_max_epi32(codes, _mm512_set1_epi32(-127)), _mm512_set1_epi32(127));
  return _mm512_cvtepi32_epi8(_mm512_add_epi32(clipped, _mm512_set1_epi32(kShift)));
}

// The next row's are brought near.
STRATA_INLINE void transposed(const Planes& weight, int64_t row, int64_t tile, __m512i codes[8]) {
  __m512i planes[4];
  const __mmask64 mask = first_bytes(weight.tile_bytes(tile));
#pragma GCC unroll 8
  for (int place = 0; place < 4; ++place) {
    const uint8_t* at = weight.planes[place] + row * weight.stride[place] + tile * kTileBytes;
    planes[place] = _mm512_maskz_loadu_epi8(mask, at);
    _mm_prefetch(at + weight.stride[place], _MM_HINT_T0);
  }
  transpose<4>(planes, codes);
}

// Many tokens: six rows are decoded a section of columns at a time, and the planes of the next ones fetched meanwhile.
class PlaneRows {
 public:
  // Of six rows.
  struct Columns {
    static constexpr bool kMayBeCut = false;
    static constexpr __mmask64 last_mask = ~__mmask64{0};
    const uint8_t* decoded;
    int64_t stride;
    const Planes& weight;
    int64_t row, tile, first_tile, last_tile;  // to be fetched: the next of its tiles

    STRATA_AVX512 void before(int64_t part, int64_t parts) {
      const int64_t all = (last_tile - first_tile) * kGroupRows;
      for (int64_t left = all * (part + 1) / parts - all * part / parts; left > 0; --left) {
        for (int place = 0; place < 4; ++place) _mm_prefetch(weight.planes[place] + row * weight.stride[place] + tile * kTileBytes, _MM_HINT_T1);
        if (++tile == last_tile) {
          tile = first_tile;
          ++row;
        }
      }
    }

    STRATA_INLINE __m512i load(int row, int64_t column, __mmask64) const { return _mm512_load_si512(decoded + row * stride + column); }
  };

  PlaneRows(const Planes& weight, Type type, uint8_t* decoded, int64_t stride) : weight_(weight), type_(type), decoded_(decoded), stride_(stride) {}

  STRATA_AVX512 void start(int64_t row, int64_t count, float* scales) {
    row_ = row;
    count_ = count;
    for (int64_t each = 0; each < count; ++each) _mm512_store_si512(tables_[each], _mm512_broadcast_i32x4(shifted_table(weight_, row + each, type_, scales[each])));
  }

  STRATA_AVX512 Columns section(int64_t first_run, int64_t last_run) {
    const int64_t first = first_run / 8, last = last_run / 8;
    for (int64_t each = 0; each < count_; ++each) decode(row_ + each, first, last, _mm512_load_si512(tables_[each]), decoded_ + each * stride_);
    const bool row_ends = last == weight_.tiles();
    const int64_t next = row_ends ? 0 : last, end = next + last - first;
    return {decoded_, stride_, weight_, row_ends ? row_ + kGroupRows : row_, next, next, end < weight_.tiles() ? end : weight_.tiles()};
  }

  template <int Tokens>
  STRATA_AVX512 void few(const Activations& activations, const Result& result, int64_t begin, int64_t end) const {
    for (int64_t first = begin; first < end; first += kRowsAtOnce) {
      const int64_t rows = end - first < kRowsAtOnce ? end - first : kRowsAtOnce;
      int32_t sums[Tokens * kRowsAtOnce];
      float scales[kRowsAtOnce];
      __m128i tables[kRowsAtOnce];  // before they are needed: one takes as long as half a row
      for (int64_t each = 0; each < rows; ++each) tables[each] = shifted_table(weight_, first + each, type_, scales[each]);
      for (int64_t some = 0; some < rows; some += 4) {
        __m512i found[4][Tokens];
        for (int64_t each = some; each < some + 4; each += 2) {  // rows beyond the last repeat it: not stored
          const int64_t pair[2] = {each < rows ? each : rows - 1, each + 1 < rows ? each + 1 : rows - 1};
          if (Tokens > 2 || weight_.tiles() <= kPairedTiles) {
            multiply<Tokens, 2>(first, pair, tables, activations.codes, found + (each - some));
          } else {
            for (int place = 0; place < 2; ++place) multiply<Tokens, 1>(first, pair + place, tables, activations.codes, found + (each - some) + place);
          }
        }
        store_four<Tokens>(found, 1, sums + some);
      }
      store_rows(result, activations, first, rows, sums, scales);
    }
  }

 private:
  template <int Tokens, int Rows, bool IsCut>
  STRATA_INLINE static void multiply_tile(const RowPlanes<4>* rows, const __m512i* tables, int64_t tile, __mmask64 cut, const int8_t* activations,
                                          __m512i (&found)[Rows][2][Tokens]) {
    __m512i quads[Rows][4];
#pragma GCC unroll 8
    for (int place = 0; place < Rows; ++place) {
      __m512i planes[4];
      rows[place].template load<IsCut>(tile, cut, kAheadBytes, planes);
      transpose_nibbles<4>(planes, quads[place]);
    }
#pragma GCC unroll 8
    for (int b = 0; b < 8; ++b)
#pragma GCC unroll 8
      for (int place = 0; place < Rows; ++place) {
        const __m512i quad = quads[place][kQuadOf[b % 4]];
        add_tokens<Tokens>(found[place][b % 2], _mm512_permutexvar_epi8(b < 4 ? quad : _mm512_srli_epi16(quad, 4), tables[place]), activations + b * kRun * Tokens);
      }
  }

  // Codes are looked up in registers and multiplied there.
  template <int Tokens, int Rows>
  STRATA_INLINE void multiply(int64_t first, const int64_t* rows, const __m128i* of_rows, const int8_t* activations, __m512i (*sums)[Tokens]) const {
    __m512i tables[Rows], found[Rows][2][Tokens];
    RowPlanes<4> planes[Rows];
#pragma GCC unroll 8
    for (int place = 0; place < Rows; ++place) {
      tables[place] = _mm512_broadcast_i32x4(of_rows[rows[place]]);
      planes[place].start(weight_, first + rows[place]);
#pragma GCC unroll 8
      for (auto& part : found[place])
#pragma GCC unroll 8
        for (auto& sum : part) sum = _mm512_setzero_si512();
    }
    const int64_t whole = weight_.full_tiles(), cut_bytes = weight_.tiles() > whole ? weight_.tile_bytes(whole) : 0;
    for (int64_t tile = 0; tile < whole; ++tile, activations += kTile * Tokens) multiply_tile<Tokens, Rows, false>(planes, tables, tile, 0, activations, found);
    if (cut_bytes) multiply_tile<Tokens, Rows, true>(planes, tables, whole, first_bytes(cut_bytes), activations, found);
#pragma GCC unroll 8
    for (int place = 0; place < Rows; ++place)
#pragma GCC unroll 8
      for (int token = 0; token < Tokens; ++token) sums[place][token] = _mm512_add_epi32(found[place][0][token], found[place][1][token]);
  }

  STRATA_INLINE void decode(int64_t row, int64_t first_tile, int64_t last_tile, __m512i table, uint8_t* out) const {
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
      __m512i codes[8];
      transposed(weight_, row, tile, codes);
#pragma GCC unroll 8
      for (int b = 0; b < 8; ++b, out += kRun) _mm512_store_si512(out, _mm512_permutexvar_epi8(codes[b], table));
    }
  }

  const Planes& weight_;
  const Type type_;
  uint8_t* const decoded_;
  const int64_t stride_;
  int64_t row_ = 0, count_ = 0;
  alignas(64) uint8_t tables_[kGroupRows][64];
};

void avx512_rows(const Planes& weight, const Activations& activations, const Result& result, int64_t begin, int64_t end) {
  thread_local Scratch scratch;
  const int64_t tiles = weight.tiles() < kMostTiles ? weight.tiles() : kMostTiles, stride = tiles * kTile + kPadding;
  PlaneRows source(weight, result.type, scratch.of<uint8_t>(kGroupRows * stride), stride);
  multiply_rows(source, activations, result, begin, end);
}
#endif

}  // namespace

void product_int8(const Matrix& tokens, const Planes& weight, void* out, int64_t out_stride, int threads) {
  const Activations activations = rounded(tokens, Runs::of(weight, tokens.columns), {nullptr, 0}, threads);
  const Result result{out, out_stride, tokens.type};
  parallel_for(threads, weight.rows, kRowsAtOnce, [&](int64_t begin, int64_t end) {
#if STRATA_X86
    const Level level = cpu_level();
    if (level == Level::avx512 && weight.bits == 4) return avx512_rows(weight, activations, result, begin, end);
    if (level >= Level::avx2 && weight.bits == 4) return int8_rows_avx2(weight, activations, result, begin, end);
    if (level >= Level::avx2) return avx2_rows(weight, activations, result, begin, end);
#endif
    portable_rows(weight, activations, result, begin, end);
  });
}

}  // namespace strata
