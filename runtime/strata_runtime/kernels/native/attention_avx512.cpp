// The attention of attention.cpp in AVX-512 with BF16.
#include "attention.h"
#include "vectors.h"

#if STRATA_X86
namespace strata {
namespace {

constexpr int kKeys = 128;       // at once
constexpr int kTogether = 6;     // queries whose sums are held in registers, for 64 keys or 64 columns
constexpr int kVectors = 4;
constexpr int kApart = 32;       // items between queries, so that they do not meet in one set of the cache
constexpr int kWidest = 256;

// One thread's memory for one key head's queries.
struct Workplace {
  uint16_t queries[kRows * (kWidest + kApart)];
  uint16_t keys[kWidest * kKeys];              // [pairs of columns, keys, 2]
  uint16_t values[kWidest * kKeys];            // [pairs of keys, columns, 2]
  uint16_t restored[2 * kLanes * kWidest];     // 8-bit entries brought back
  float scores[kRows * kKeys];
  uint16_t weights[kRows * (kKeys + kApart)];  // softmax of the scores, not yet divided
  float sums[kRows * kWidest];
  float largest[kRows], total[kRows];
};

// 16 x 16 numbers of 32 bits, rows for columns.
STRATA_INLINE void transpose(__m512i* rows) {
  __m512i next[16];
#pragma GCC unroll 8
  for (int each = 0; each < 8; ++each) {
    next[2 * each] = _mm512_unpacklo_epi32(rows[2 * each], rows[2 * each + 1]);
    next[2 * each + 1] = _mm512_unpackhi_epi32(rows[2 * each], rows[2 * each + 1]);
  }
#pragma GCC unroll 4
  for (int each = 0; each < 4; ++each) {
    rows[4 * each] = _mm512_unpacklo_epi64(next[4 * each], next[4 * each + 2]);
    rows[4 * each + 1] = _mm512_unpackhi_epi64(next[4 * each], next[4 * each + 2]);
    rows[4 * each + 2] = _mm512_unpacklo_epi64(next[4 * each + 1], next[4 * each + 3]);
    rows[4 * each + 3] = _mm512_unpackhi_epi64(next[4 * each + 1], next[4 * each + 3]);
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half)
#pragma GCC unroll 4
    for (int each = 0; each < 4; ++each) {
      next[8 * half + each] = _mm512_shuffle_i32x4(rows[8 * half + each], rows[8 * half + 4 + each], 0x88);
      next[8 * half + 4 + each] = _mm512_shuffle_i32x4(rows[8 * half + each], rows[8 * half + 4 + each], 0xdd);
    }
#pragma GCC unroll 8
  for (int each = 0; each < 8; ++each) {
    rows[each] = _mm512_shuffle_i32x4(next[each], next[8 + each], 0x88);
    rows[8 + each] = _mm512_shuffle_i32x4(next[each], next[8 + each], 0xdd);
  }
}

// Entries of one head; where they are 8 bits wide they are brought back as `pool` does.
struct Entries {
  const void* items;
  const uint16_t* scales;
  int64_t width;

  STRATA_INLINE const uint16_t* at(int64_t place, uint16_t* restored) const {
    if (!scales) return static_cast<const uint16_t*>(items) + place * width;
    const int8_t* codes = static_cast<const int8_t*>(items) + place * width;
    const __m512 scale = _mm512_set1_ps(float_of_bfloat16(scales[place]));
    for (int64_t each = 0; each < width; each += kLanes) {
      const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + each)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(restored + each), bfloat16_of(_mm512_mul_ps(_mm512_cvtepi32_ps(wide), scale)));
    }
    return restored;
  }
};

// Keys [first, first + count) to [pairs, keys, 2]; beyond them the last one again.
STRATA_AVX512 void take_keys(const Entries& keys, const Places& places, int64_t first, int64_t count, Workplace& here) {
  for (int64_t group = 0; group < count; group += kLanes) {
    const uint16_t* at[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t key = group + lane < count ? group + lane : count - 1;
      at[lane] = keys.at(places.of(first + key), here.restored + lane * kWidest);
    }
    for (int64_t column = 0; column < keys.width; column += 2 * kLanes) {
      __m512i rows[kLanes];
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes; ++lane) rows[lane] = _mm512_loadu_si512(at[lane] + column);
      transpose(rows);
#pragma GCC unroll 16
      for (int pair = 0; pair < kLanes; ++pair) _mm512_store_si512(here.keys + ((column / 2 + pair) * kKeys + group) * 2, rows[pair]);
    }
  }
}

// Values [first, first + count) to [pairs of keys, columns, 2]; an odd last one is paired with itself.
STRATA_AVX512 void take_values(const Entries& values, const Places& places, int64_t first, int64_t count, Workplace& here) {
  alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                    8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t key = 0; key < count; key += 2) {
    const uint16_t* even = values.at(places.of(first + key), here.restored);
    const uint16_t* odd = key + 1 < count ? values.at(places.of(first + key + 1), here.restored + kWidest) : even;
    uint16_t* out = here.values + key * values.width;
    for (int64_t column = 0; column < values.width; column += 32) {
      const __m512i one = _mm512_loadu_si512(even + column), other = _mm512_loadu_si512(odd + column);
      _mm512_store_si512(out + 2 * column, _mm512_permutex2var_epi16(one, low, other));
      _mm512_store_si512(out + 2 * column + 32, _mm512_permutex2var_epi16(one, high, other));
    }
  }
}

// Some queries times 64 keys from `key` on: scores [query][keys].
template <int Rows>
STRATA_AVX512 void score(const Workplace& here, int64_t row, int64_t key, int64_t width, __m512 scale, float* scores) {
  __m512 found[Rows][kVectors];
#pragma GCC unroll 8
  for (auto& each : found)
#pragma GCC unroll 4
    for (auto& sum : each) sum = _mm512_setzero_ps();
  const uint16_t* queries = here.queries + row * (width + kApart);
  for (int64_t pair = 0; pair < width / 2; ++pair) {
    __m512i keys[kVectors];
#pragma GCC unroll 4
    for (int each = 0; each < kVectors; ++each) keys[each] = _mm512_load_si512(here.keys + (pair * kKeys + key + each * kLanes) * 2);
#pragma GCC unroll 8
    for (int place = 0; place < Rows; ++place) {
      const __m512i query = pair_at(queries + place * (width + kApart) + 2 * pair);
#pragma GCC unroll 4
      for (int each = 0; each < kVectors; ++each) found[place][each] = multiplied(found[place][each], keys[each], query);
    }
  }
#pragma GCC unroll 8
  for (int place = 0; place < Rows; ++place)
#pragma GCC unroll 4
    for (int each = 0; each < kVectors; ++each)
      _mm512_store_ps(scores + (row + place) * kKeys + key + each * kLanes, _mm512_mul_ps(found[place][each], scale));
}

// Some queries' weights times the values: added to 64 columns of the sums, from `column` on.
template <int Rows, int Vectors>
STRATA_AVX512 void weigh(Workplace& here, int64_t row, int64_t column, int64_t keys, int64_t width) {
  __m512 found[Rows][Vectors];
#pragma GCC unroll 8
  for (int place = 0; place < Rows; ++place)
#pragma GCC unroll 4
    for (int each = 0; each < Vectors; ++each) found[place][each] = _mm512_load_ps(here.sums + (row + place) * width + column + each * kLanes);
  const uint16_t* weights = here.weights + row * (kKeys + kApart);
  for (int64_t key = 0; key < keys; key += 2) {
    __m512i values[Vectors];
#pragma GCC unroll 4
    for (int each = 0; each < Vectors; ++each) values[each] = _mm512_load_si512(here.values + key * width + 2 * (column + each * kLanes));
#pragma GCC unroll 8
    for (int place = 0; place < Rows; ++place) {
      const __m512i weight = pair_at(weights + place * (kKeys + kApart) + key);
#pragma GCC unroll 4
      for (int each = 0; each < Vectors; ++each) found[place][each] = multiplied(found[place][each], values[each], weight);
    }
  }
#pragma GCC unroll 8
  for (int place = 0; place < Rows; ++place)
#pragma GCC unroll 4
    for (int each = 0; each < Vectors; ++each) _mm512_store_ps(here.sums + (row + place) * width + column + each * kLanes, found[place][each]);
}

using Score = void (*)(const Workplace&, int64_t, int64_t, int64_t, __m512, float*);
using Weigh = void (*)(Workplace&, int64_t, int64_t, int64_t, int64_t);
constexpr Score kScores[] = {nullptr, score<1>, score<2>, score<3>, score<4>, score<5>, score<6>};
constexpr Weigh kWide[] = {nullptr, weigh<1, 4>, weigh<2, 4>, weigh<3, 4>, weigh<4, 4>, weigh<5, 4>, weigh<6, 4>};
constexpr Weigh kNarrow[] = {nullptr, weigh<1, 2>, weigh<2, 2>, weigh<3, 2>, weigh<4, 2>, weigh<5, 2>, weigh<6, 2>};

// tanh(score / cap) * cap.
STRATA_INLINE __m512 capped(__m512 score, float cap) {
  const __m512 twice = _mm512_mul_ps(_mm512_abs_ps(score), _mm512_set1_ps(-2.0f / cap));
  const __m512 small = exponential(twice), one = _mm512_set1_ps(1.0f);
  const __m512 size = _mm512_mul_ps(_mm512_div_ps(_mm512_sub_ps(one, small), _mm512_add_ps(one, small)), _mm512_set1_ps(cap));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(size), _mm512_and_si512(_mm512_castps_si512(score), _mm512_set1_epi32(INT32_MIN))));
}

// The next scores of one query, of which it sees [low, high): its weights, and what came before on the new scale. `slope` times a key's distance is added.
STRATA_AVX512 void soften(Workplace& here, int64_t row, int64_t low, int64_t high, int64_t keys, const Rule& rule, float slope, int64_t distance, int64_t width) {
  float* scores = here.scores + row * kKeys;
  uint16_t* weights = here.weights + row * (kKeys + kApart);
  if (low >= high) {
    __builtin_memset(weights, 0, static_cast<size_t>(keys + 1) * 2);
    return;
  }
  const __m512 nothing = _mm512_set1_ps(-INFINITY);
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  __m512 most = nothing;
  for (int64_t key = 0; key < keys; key += kLanes) {
    const __m512i place = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(key)));
    const __mmask16 seen = _mm512_cmpge_epi32_mask(place, _mm512_set1_epi32(static_cast<int>(low))) &
                           _mm512_cmplt_epi32_mask(place, _mm512_set1_epi32(static_cast<int>(high)));
    __m512 value = _mm512_load_ps(scores + key);
    if (rule.soft_cap != 0) value = capped(value, rule.soft_cap);
    if (slope != 0) {
      const __m512 away = _mm512_cvtepi32_ps(_mm512_add_epi32(place, _mm512_set1_epi32(static_cast<int>(distance))));
      value = _mm512_fmadd_ps(_mm512_set1_ps(slope), away, value);
    }
    value = _mm512_mask_mov_ps(nothing, seen, value);
    _mm512_store_ps(scores + key, value);
    // As numbers NaN is above all: it must not be lost here, but show in what comes out.
    most = _mm512_max_ps(value, most);
  }
  const float before = here.largest[row], now = std::fmax(before, _mm512_reduce_max_ps(most));
  const __m512 shift = _mm512_set1_ps(std::isfinite(now) ? now : 0.0f);
  __m512 total = _mm512_setzero_ps();
  for (int64_t key = 0; key < keys; key += kLanes) {
    const __m512 score = _mm512_load_ps(scores + key);
    const __m512 apart = _mm512_sub_ps(score, shift);
    __m512 weight = exponential(apart);
    weight = _mm512_mask_mov_ps(weight, _mm512_cmp_ps_mask(score, nothing, _CMP_EQ_OQ), _mm512_setzero_ps());
    weight = _mm512_mask_mov_ps(weight, _mm512_cmp_ps_mask(apart, apart, _CMP_UNORD_Q), _mm512_set1_ps(NAN));
    total = _mm512_add_ps(total, weight);
    _mm256_store_si256(reinterpret_cast<__m256i*>(weights + key), bfloat16_of(weight));
  }
  if (now != before) {
    const float change = std::isfinite(before) ? std::exp(before - now) : 0.0f;
    here.total[row] *= change;
    const __m512 changes = _mm512_set1_ps(change);
    float* sums = here.sums + row * width;
    for (int64_t column = 0; column < width; column += kLanes) _mm512_store_ps(sums + column, _mm512_mul_ps(_mm512_load_ps(sums + column), changes));
    here.largest[row] = now;
  }
  here.total[row] += _mm512_reduce_add_ps(total);
}

STRATA_AVX512 void attend(const AttentionCall& call, const Span& span, int64_t kv_head, int64_t first, int64_t rows, Workplace& here) {
  const int64_t width = call.width, group = call.heads / call.kv_heads;
  const Rule rule(call);
  const int64_t item = call.key_scales ? 1 : 2;
  const auto entries = [&](int64_t items, int64_t scales) {
    const uint8_t* at = reinterpret_cast<const uint8_t*>(items) + kv_head * call.places * width * item;
    return Entries{at, scales ? reinterpret_cast<const uint16_t*>(scales) + kv_head * call.places : nullptr, width};
  };
  const Entries keys = entries(call.keys, call.key_scales), values = entries(call.values, call.value_scales);
  const Places places{reinterpret_cast<const int64_t*>(call.pages) + span.pages, call.page_tokens};
  const float *slopes = reinterpret_cast<const float*>(call.slopes), *sinks = reinterpret_cast<const float*>(call.sinks);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = (first + row) / group, head = kv_head * group + (first + row) % group;
    const uint16_t* query =
        reinterpret_cast<const uint16_t*>(call.query) + head * call.query_head_stride + (span.row + token) * call.query_token_stride;
    __builtin_memcpy(here.queries + row * (width + kApart), query, static_cast<size_t>(width) * 2);
    here.largest[row] = sinks ? sinks[head] : -INFINITY;
    here.total[row] = sinks ? 1.0f : 0.0f;
  }
  __builtin_memset(here.sums, 0, static_cast<size_t>(rows * width) * sizeof(float));
  const __m512 scale = _mm512_set1_ps(rule.scale);
  // From whole blocks of positions on: what a query gets does not depend on those beside it.
  const int64_t begin = rule.first_seen(span.start + first / group) / kKeys * kKeys, end = span.start + (first + rows - 1) / group + 1;
  for (int64_t block = begin; block < end; block += kKeys) {
    const int64_t count = end - block < kKeys ? end - block : kKeys;
    take_keys(keys, places, block, count, here);
    for (int64_t row = 0; row < rows; row += kTogether) {
      const int64_t together = rows - row < kTogether ? rows - row : kTogether;
      for (int64_t key = 0; key < count; key += kVectors * kLanes) kScores[together](here, row, key, width, scale, here.scores);
    }
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = span.start + (first + row) / group, head = kv_head * group + (first + row) % group;
      const int64_t low = rule.first_seen(position) - block, high = position + 1 - block;
      soften(here, row, low < 0 ? 0 : low, high < count ? high : count, count, rule, slopes ? slopes[head] : 0.0f, block - position, width);
    }
    take_values(values, places, block, count, here);
    for (int64_t row = 0; row < rows; row += kTogether) {
      const int64_t together = rows - row < kTogether ? rows - row : kTogether;
      int64_t column = 0;
      for (; column + 64 <= width; column += 64) kWide[together](here, row, column, count, width);
      if (column < width) kNarrow[together](here, row, column, count, width);
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = (first + row) / group, head = kv_head * group + (first + row) % group;
    uint16_t* out = reinterpret_cast<uint16_t*>(call.out) + ((span.row + token) * call.heads + head) * width;
    const __m512 whole = _mm512_set1_ps(1.0f / here.total[row]);
    for (int64_t column = 0; column < width; column += kLanes)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + column), bfloat16_of(_mm512_mul_ps(_mm512_load_ps(here.sums + row * width + column), whole)));
  }
}

}  // namespace

void attend_avx512(const AttentionCall& call, const Span& span, int64_t kv_head, int64_t first, int64_t rows) {
  thread_local Scratch scratch;
  attend(call, span, kv_head, first, rows, *scratch.of<Workplace>(1));
}

}  // namespace strata
#endif
