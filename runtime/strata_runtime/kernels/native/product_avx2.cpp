// bfloat16 activations times bit-planes in AVX2. Values are looked up in registers and widened there; products, which are exact, and sums are float32. Up to
// three tokens are multiplied at once; for more, some rows are decoded a section at a time into the first-level cache. Whatever their number, a token's
// products are added in one order: what comes out for it does not depend on those beside it. Values of groups, (code - zero) * scale, are exact, too.
#include "product.h"

#if STRATA_X86
#include "planes_avx2.h"

namespace strata {
namespace {

using namespace avx2;

constexpr int kFew = 3;               // tokens that meet codes as they are looked up
constexpr int kChains = 2;            // sums of a token and a row: of every other vector; one would wait for itself
constexpr int64_t kRowsAtOnce = 8;    // decoded
constexpr int64_t kSectionLines = 16;  // of those rows they stay in the first-level cache
constexpr int64_t kRowsOfThread = 16;
constexpr int64_t kTokensOfThread = 4;

constexpr int64_t kLineFloats = kLine;
constexpr int64_t kApart = 16;  // floats between tokens, so that they do not meet in one set of the cache

// Tokens as floats in the order of products, zeros where there are no columns: [token][line][32]; kept until the thread's next call.
struct Activations {
  const float* values;
  int64_t width;
};

STRATA_AVX2 void place_token(const uint16_t* token, int64_t columns, const Lines& lines, float* out) {
  const int64_t count = lines.count();
  for (int64_t each = 0; each < count; ++each, out += kLineFloats) {
    const int64_t start = lines.start(each), most = lines.length(each), left = columns - start;
    const int64_t length = left < 0 ? 0 : left < most ? left : most;
    const uint16_t* at = token + start;
    alignas(32) uint16_t some[kLine];
    if (length < kLine) {
      __builtin_memset(some, 0, sizeof(some));
      if (length) __builtin_memcpy(some, at, static_cast<size_t>(length) * 2);
      at = some;
    }
    __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)), second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 16));
    reorder(first, second);
    const Line line = widened(first, second);
    for (int place = 0; place < 4; ++place) _mm256_store_ps(out + kFloats * place, line.values[place]);
  }
}

Activations placed(const Matrix& tokens, const Lines& lines, int threads) {
  thread_local Scratch scratch;
  const int64_t width = lines.count() * kLineFloats + kApart;
  float* out = scratch.of<float>(tokens.rows * width);
  parallel_for(threads, tokens.rows, kTokensOfThread, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
      place_token(reinterpret_cast<const uint16_t*>(tokens.row(token)), tokens.columns, lines, out + token * width);
  });
  return {out, width};
}

// Values of a table of each row.
template <int Bits>
class Looked {
 public:
  static constexpr int kBits = Bits;
  using Made = Planes;  // what it is made of

  Looked(const Planes& weight, int) : weight_(weight) {}
  STRATA_INLINE_AVX2 void start(int64_t row) { table_.load(weight_.table + row * weight_.table_stride_bytes); }
  STRATA_INLINE_AVX2 Line line(const HalfTile<Bits>& tile, int run, int64_t) const {
    __m256i first, second;
    table_.look_up(tile, run, first, second);
    return widened(first, second);
  }

 private:
  const Planes& weight_;
  Table16<Bits> table_;
};

// Which groups the columns of lines are in, asked once a call.
struct GroupsOfLines {
  const Groups& groups;
  const int32_t* first;   // of a line
  const int32_t* places;  // of each value of a line of several groups, in the order of products; of others nothing
  const bool* are_mixed;
};

GroupsOfLines groups_of_lines(const Groups& groups, const Lines& lines) {
  thread_local Scratch first_scratch, places_scratch, mixed_scratch;
  const int64_t count = lines.count();
  int32_t *first = first_scratch.of<int32_t>(count), *places = places_scratch.of<int32_t>(count * kLine);
  bool* are_mixed = mixed_scratch.of<bool>(count);
  for (int64_t line = 0; line < count; ++line) {
    const int64_t start = lines.start(line);
    first[line] = static_cast<int32_t>(groups.at(start));
    are_mixed[line] = groups.at(start + lines.length(line) - 1) != first[line];
    if (!are_mixed[line]) continue;
    for (int place = 0; place < kLine; ++place) {
      const int vector = place / kFloats, lane = place % kFloats;  // even or odd items of the first or second unpacked vector
      const int item = 2 * (lane % 4) + vector % 2, column = (lane / 4) * 16 + vector / 2 * 8 + item;
      places[line * kLine + place] = static_cast<int32_t>(groups.at(start + column));
    }
  }
  return {groups, first, places, are_mixed};
}

// Values of uniform groups.
template <int Bits>
class Grouped {
 public:
  static constexpr int kBits = Bits;
  using Made = GroupsOfLines;

  // place: 0 or 1, of two that are in use at once.
  Grouped(const GroupsOfLines& lines, int place) : lines_(lines) {
    thread_local Scratch scratch[2];
    scales_ = scratch[place].of<float>(2 * lines.groups.count);
    shifts_ = scales_ + lines.groups.count;
  }

  STRATA_INLINE_AVX2 void start(int64_t row) {
    const Groups& groups = lines_.groups;
    const uint16_t* scales = groups.scales + row * groups.scale_stride;
    const uint8_t* zeros = groups.zeros + row * groups.zero_stride;
    int64_t group = 0;
    for (; group + kFloats <= groups.count; group += kFloats) {
      const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + group)));
      const __m256 zero = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(zeros + group))));
      _mm256_storeu_ps(scales_ + group, scale);
      _mm256_storeu_ps(shifts_ + group, _mm256_mul_ps(scale, _mm256_sub_ps(_mm256_setzero_ps(), zero)));
    }
    for (; group < groups.count; ++group) {
      scales_[group] = _cvtsh_ss(scales[group]);
      shifts_[group] = -scales_[group] * static_cast<float>(zeros[group]);
    }
  }

  STRATA_INLINE_AVX2 Line line(const HalfTile<Bits>& tile, int run, int64_t line) const {
    __m256i codes = tile.low.codes(run);
    if constexpr (Bits < 4) codes = _mm256_and_si256(codes, _mm256_set1_epi8((1 << Bits) - 1));
    if constexpr (Bits > 4) {
      __m256i chosen[HalfTile<Bits>::kUpper];
      tile.select(run, chosen);
#pragma GCC unroll 4
      for (int place = 0; place < HalfTile<Bits>::kUpper; ++place) {  // the first is the highest
        const __m256i top = _mm256_and_si256(chosen[place], _mm256_set1_epi8(static_cast<char>(0x80)));
        codes = _mm256_or_si256(codes, place + 8 - Bits ? _mm256_srli_epi16(top, place + 8 - Bits) : top);
      }
    }
    const __m256i first = _mm256_unpacklo_epi8(codes, _mm256_setzero_si256()), second = _mm256_unpackhi_epi8(codes, _mm256_setzero_si256());
    const __m256i low = _mm256_set1_epi32(0xFFFF);
    const __m256i whole[4] = {_mm256_and_si256(first, low), _mm256_srli_epi32(first, 16), _mm256_and_si256(second, low), _mm256_srli_epi32(second, 16)};
    const int32_t* places = lines_.places + line * kLine;
    Line found;
    if (!lines_.are_mixed[line]) {
      const __m256 scale = _mm256_broadcast_ss(scales_ + lines_.first[line]), shift = _mm256_broadcast_ss(shifts_ + lines_.first[line]);
#pragma GCC unroll 4
      for (int each = 0; each < 4; ++each) found.values[each] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[each]), scale, shift);
    } else {
#pragma GCC unroll 4
      for (int each = 0; each < 4; ++each) {
        const __m256i at = _mm256_load_si256(reinterpret_cast<const __m256i*>(places + each * kFloats));
        found.values[each] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[each]), _mm256_i32gather_ps(scales_, at, 4), _mm256_i32gather_ps(shifts_, at, 4));
      }
    }
    return found;
  }

 private:
  const GroupsOfLines& lines_;
  float *scales_, *shifts_;
};

STRATA_INLINE_AVX2 uint16_t result_of(const __m256* chains) { return bfloat16_of_float(sum_of(_mm256_add_ps(chains[0], chains[1]))); }

// Rows that take turns, line after line, so that their chains of additions do not wait.
template <int Tokens>
constexpr int kInTurn = Tokens <= 2 ? 2 : 1;

template <class Values, int Tokens>
STRATA_AVX2 void few_tokens(const typename Values::Made& made, const Planes& weight, const Activations& activations, uint16_t* out, int64_t out_stride,
                            int64_t begin, int64_t end) {
  constexpr int kRows = kInTurn<Tokens>;
  const int64_t lines = Lines(weight).count();
  Values first(made, 0), second(made, 1);
  for (int64_t row = begin; row < end; row += kRows) {
    const int64_t other = row + 1 < end ? row + 1 : row;
    first.start(row);
    if constexpr (kRows == 2) second.start(other);
    __m256 sums[kRows][Tokens][kChains];
#pragma GCC unroll 2
    for (auto& tokens : sums)
#pragma GCC unroll 4
      for (auto& chains : tokens) chains[0] = chains[1] = _mm256_setzero_ps();
    for (int64_t line = 0; line < lines; line += kRuns) {
      HalfTile<Values::kBits> codes[kRows];
      codes[0].load(weight, row, line);
      if constexpr (kRows == 2) codes[1].load(weight, other, line);
      const float* at = activations.values + line * kLineFloats;
#pragma GCC unroll 8
      for (int run = 0; run < kRuns; ++run)
#pragma GCC unroll 2
        for (int each = 0; each < kRows; ++each) {
          const Line found = (each ? second : first).line(codes[each], run, line + run);
#pragma GCC unroll 4
          for (int token = 0; token < Tokens; ++token)
#pragma GCC unroll 4
            for (int place = 0; place < 4; ++place) {
              __m256& sum = sums[each][token][place % kChains];
              sum = _mm256_fmadd_ps(found.values[place], _mm256_load_ps(at + token * activations.width + run * kLineFloats + place * kFloats), sum);
            }
        }
    }
    for (int token = 0; token < Tokens; ++token) {
      out[token * out_stride + row] = result_of(sums[0][token]);
      if constexpr (kRows == 2) out[token * out_stride + other] = result_of(sums[1][token]);
    }
  }
}

// Two rows of a section times some tokens, added to sums [token][row][chain][8].
template <int Tokens>
STRATA_AVX2 void section(const float* first, const float* second, const float* tokens, int64_t width, int64_t floats, float* sums) {
  constexpr int64_t kTokenFloats = kRowsAtOnce * kChains * kFloats;
  __m256 found[Tokens][2][kChains];
#pragma GCC unroll 4
  for (int token = 0; token < Tokens; ++token)
#pragma GCC unroll 4
    for (int each = 0; each < 2 * kChains; ++each) found[token][each / kChains][each % kChains] = _mm256_load_ps(sums + token * kTokenFloats + each * kFloats);
  for (int64_t at = 0; at < floats; at += kChains * kFloats)
#pragma GCC unroll 2
    for (int chain = 0; chain < kChains; ++chain) {
      const int64_t place = at + chain * kFloats;
      const __m256 one = _mm256_load_ps(first + place), other = _mm256_load_ps(second + place);
#pragma GCC unroll 4
      for (int token = 0; token < Tokens; ++token) {
        const __m256 value = _mm256_load_ps(tokens + token * width + place);
        found[token][0][chain] = _mm256_fmadd_ps(one, value, found[token][0][chain]);
        found[token][1][chain] = _mm256_fmadd_ps(other, value, found[token][1][chain]);
      }
    }
#pragma GCC unroll 4
  for (int token = 0; token < Tokens; ++token)
#pragma GCC unroll 4
    for (int each = 0; each < 2 * kChains; ++each) _mm256_store_ps(sums + token * kTokenFloats + each * kFloats, found[token][each / kChains][each % kChains]);
}

// A section of a row, decoded: [line][32].
template <class Values>
STRATA_AVX2 void decode(const Values& values, const Planes& weight, int64_t row, int64_t first_line, int64_t last_line, float* out) {
  for (int64_t line = first_line; line < last_line; line += kRuns) {
    HalfTile<Values::kBits> codes;
    codes.load(weight, row, line);
#pragma GCC unroll 8
    for (int run = 0; run < kRuns; ++run) {
      const Line found = values.line(codes, run, line + run);
#pragma GCC unroll 4
      for (int each = 0; each < 4; ++each, out += kFloats) _mm256_store_ps(out, found.values[each]);
    }
  }
}

template <class Values>
STRATA_AVX2 void many_tokens(const typename Values::Made& made, const Planes& weight, const Activations& activations, int64_t tokens, uint16_t* out,
                             int64_t out_stride, int64_t begin, int64_t end) {
  using Section = void (*)(const float*, const float*, const float*, int64_t, int64_t, float*);
  constexpr Section kSections[] = {nullptr, section<1>, section<2>, section<3>};
  constexpr int64_t kRowFloats = kSectionLines * kLineFloats + kApart, kSums = kRowsAtOnce * kChains * kFloats;
  thread_local Scratch decoded_scratch, sums_scratch;
  Values values(made, 0);
  float *decoded = decoded_scratch.of<float>(kRowsAtOnce * kRowFloats), *sums = sums_scratch.of<float>(tokens * kSums);
  const int64_t lines = Lines(weight).count(), groups = (tokens + kFew - 1) / kFew;
  for (int64_t row = begin; row < end; row += kRowsAtOnce) {
    const int64_t rows = end - row < kRowsAtOnce ? end - row : kRowsAtOnce;
    __builtin_memset(sums, 0, static_cast<size_t>(tokens * kSums) * sizeof(float));
    for (int64_t line = 0; line < lines; line += kSectionLines) {
      const int64_t last = line + kSectionLines < lines ? line + kSectionLines : lines;
      for (int64_t each = 0; each < rows; ++each) {
        values.start(row + each);
        decode(values, weight, row + each, line, last, decoded + each * kRowFloats);
      }
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = tokens * group / groups, taken = tokens * (group + 1) / groups - first;
        for (int64_t each = 0; each < rows; each += 2) {
          const int64_t other = each + 1 < rows ? each + 1 : each;
          kSections[taken](decoded + each * kRowFloats, decoded + other * kRowFloats, activations.values + first * activations.width + line * kLineFloats,
                           activations.width, (last - line) * kLineFloats, sums + first * kSums + each * kChains * kFloats);
        }
      }
    }
    for (int64_t token = 0; token < tokens; ++token)
      for (int64_t each = 0; each < rows; ++each) {
        const float* at = sums + token * kSums + each * kChains * kFloats;
        const __m256 chains[kChains] = {_mm256_load_ps(at), _mm256_load_ps(at + kFloats)};
        out[token * out_stride + row + each] = result_of(chains);
      }
  }
}

template <class Values>
void product(const Matrix& tokens, const Planes& weight, const typename Values::Made& made, uint16_t* out, int64_t out_stride, int threads) {
  using Few = void (*)(const typename Values::Made&, const Planes&, const Activations&, uint16_t*, int64_t, int64_t, int64_t);
  constexpr Few kFews[] = {nullptr, few_tokens<Values, 1>, few_tokens<Values, 2>, few_tokens<Values, 3>};
  const Activations activations = placed(tokens, Lines(weight), threads);
  parallel_for(threads, weight.rows, kRowsOfThread, [&](int64_t begin, int64_t end) {
    if (tokens.rows <= kFew)
      kFews[tokens.rows](made, weight, activations, out, out_stride, begin, end);
    else
      many_tokens<Values>(made, weight, activations, tokens.rows, out, out_stride, begin, end);
  });
}

template <int Bits>
void product_of_table(const Matrix& tokens, const Planes& weight, uint16_t* out, int64_t out_stride, int threads) {
  product<Looked<Bits>>(tokens, weight, weight, out, out_stride, threads);
}

template <int Bits>
void product_of_groups(const Matrix& tokens, const Planes& weight, const GroupsOfLines& groups, uint16_t* out, int64_t out_stride, int threads) {
  product<Grouped<Bits>>(tokens, weight, groups, out, out_stride, threads);
}

}  // namespace

void product_bfloat16_avx2(const Matrix& tokens, const Planes& weight, uint16_t* out, int64_t out_stride, int threads) {
  using Product = void (*)(const Matrix&, const Planes&, uint16_t*, int64_t, int);
  constexpr Product kProducts[] = {nullptr,             product_of_table<1>, product_of_table<2>, product_of_table<3>, product_of_table<4>,
                                   product_of_table<5>, product_of_table<6>, product_of_table<7>, product_of_table<8>};
  kProducts[weight.bits](tokens, weight, out, out_stride, threads);
}

void product_groups_bfloat16_avx2(const Matrix& tokens, const Planes& weight, const Groups& groups, uint16_t* out, int64_t out_stride, int threads) {
  using Product = void (*)(const Matrix&, const Planes&, const GroupsOfLines&, uint16_t*, int64_t, int);
  constexpr Product kProducts[] = {nullptr,              product_of_groups<1>, product_of_groups<2>, product_of_groups<3>, product_of_groups<4>,
                                   product_of_groups<5>, product_of_groups<6>, product_of_groups<7>, product_of_groups<8>};
  kProducts[weight.bits](tokens, weight, groups_of_lines(groups, Lines(weight)), out, out_stride, threads);
}

}  // namespace strata
#endif
