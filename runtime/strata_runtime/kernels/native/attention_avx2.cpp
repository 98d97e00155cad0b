// The attention of attention.cpp in AVX2: keys and values are widened as they are gathered; products and sums are float32.
#include "attention.h"
#include "vectors_avx2.h"

#if STRATA_X86
namespace strata {
namespace {

constexpr int kKeys = 64;     // at once
constexpr int kTogether = 6;  // queries whose sums are held in registers, for 16 keys or 16 columns
constexpr int kVectors = 2;
constexpr int kStep = kVectors * kFloats;
constexpr int kApart = 16;    // floats between queries, so that they do not meet in one set of the cache
constexpr int kWidest = 256;

// One thread's memory for one key head's queries.
struct Workplace {
  float queries[kRows * (kWidest + kApart)];
  float keys[kWidest * kKeys];    // [columns, keys]
  float values[kKeys * kWidest];  // [keys, columns]
  float scores[kRows * kKeys];    // then softmax of them, not yet divided
  float sums[kRows * kWidest];
  float largest[kRows], total[kRows];
  float restored[kFloats * kWidest];
};

// Entries of one head as floats; where they are 8 bits wide they are brought back as `pool` does.
struct Entries {
  const void* items;
  const uint16_t* scales;
  int64_t width;

  STRATA_INLINE_AVX2 void take(int64_t place, float* out) const {
    if (!scales) {
      const uint16_t* from = static_cast<const uint16_t*>(items) + place * width;
      for (int64_t each = 0; each < width; each += kFloats) _mm256_store_ps(out + each, floats_at(from + each));
      return;
    }
    const int8_t* codes = static_cast<const int8_t*>(items) + place * width;
    const __m256 scale = _mm256_set1_ps(float_of_bfloat16(scales[place]));
    for (int64_t each = 0; each < width; each += kFloats) {
      const __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + each)));
      _mm256_store_ps(out + each, rounded(_mm256_mul_ps(_mm256_cvtepi32_ps(wide), scale)));
    }
  }
};

// Keys [first, first + count) to [columns, keys]; beyond them the last one again.
STRATA_AVX2 void take_keys(const Entries& keys, const Places& places, int64_t first, int64_t count, Workplace& here) {
  for (int64_t group = 0; group < (count + kStep - 1) / kStep * kStep; group += kFloats) {
    for (int64_t lane = 0; lane < kFloats; ++lane) {
      const int64_t key = group + lane < count ? group + lane : count - 1;
      keys.take(places.of(first + key), here.restored + lane * kWidest);
    }
    for (int64_t column = 0; column < keys.width; column += kFloats) {
      __m256i rows[kFloats];
#pragma GCC unroll 8
      for (int lane = 0; lane < kFloats; ++lane) rows[lane] = _mm256_load_si256(reinterpret_cast<const __m256i*>(here.restored + lane * kWidest + column));
      transpose(rows);
#pragma GCC unroll 8
      for (int each = 0; each < kFloats; ++each) _mm256_store_si256(reinterpret_cast<__m256i*>(here.keys + (column + each) * kKeys + group), rows[each]);
    }
  }
}

// Some queries times 16 keys from `key` on: scores [query][keys].
template <int Rows>
STRATA_AVX2 void score(Workplace& here, int64_t row, int64_t key, int64_t width, float scale) {
  __m256 found[Rows][kVectors];
#pragma GCC unroll 8
  for (auto& each : found)
#pragma GCC unroll 2
    for (auto& sum : each) sum = _mm256_setzero_ps();
  const float* queries = here.queries + row * (width + kApart);
  for (int64_t column = 0; column < width; ++column) {
    __m256 keys[kVectors];
#pragma GCC unroll 2
    for (int each = 0; each < kVectors; ++each) keys[each] = _mm256_load_ps(here.keys + column * kKeys + key + each * kFloats);
#pragma GCC unroll 8
    for (int place = 0; place < Rows; ++place) {
      const __m256 query = _mm256_broadcast_ss(queries + place * (width + kApart) + column);
#pragma GCC unroll 2
      for (int each = 0; each < kVectors; ++each) found[place][each] = _mm256_fmadd_ps(keys[each], query, found[place][each]);
    }
  }
#pragma GCC unroll 8
  for (int place = 0; place < Rows; ++place)
#pragma GCC unroll 2
    for (int each = 0; each < kVectors; ++each)
      _mm256_store_ps(here.scores + (row + place) * kKeys + key + each * kFloats, _mm256_mul_ps(found[place][each], _mm256_set1_ps(scale)));
}

// Some queries' weights times the values: added to 16 columns of the sums, from `column` on.
template <int Rows>
STRATA_AVX2 void weigh(Workplace& here, int64_t row, int64_t column, int64_t keys, int64_t width) {
  __m256 found[Rows][kVectors];
#pragma GCC unroll 8
  for (int place = 0; place < Rows; ++place)
#pragma GCC unroll 2
    for (int each = 0; each < kVectors; ++each) found[place][each] = _mm256_load_ps(here.sums + (row + place) * width + column + each * kFloats);
  const float* weights = here.scores + row * kKeys;
  for (int64_t key = 0; key < keys; ++key) {
    __m256 values[kVectors];
#pragma GCC unroll 2
    for (int each = 0; each < kVectors; ++each) values[each] = _mm256_load_ps(here.values + key * width + column + each * kFloats);
#pragma GCC unroll 8
    for (int place = 0; place < Rows; ++place) {
      const __m256 weight = _mm256_broadcast_ss(weights + place * kKeys + key);
#pragma GCC unroll 2
      for (int each = 0; each < kVectors; ++each) found[place][each] = _mm256_fmadd_ps(values[each], weight, found[place][each]);
    }
  }
#pragma GCC unroll 8
  for (int place = 0; place < Rows; ++place)
#pragma GCC unroll 2
    for (int each = 0; each < kVectors; ++each) _mm256_store_ps(here.sums + (row + place) * width + column + each * kFloats, found[place][each]);
}

using Score = void (*)(Workplace&, int64_t, int64_t, int64_t, float);
using Weigh = void (*)(Workplace&, int64_t, int64_t, int64_t, int64_t);
constexpr Score kScores[] = {nullptr, score<1>, score<2>, score<3>, score<4>, score<5>, score<6>};
constexpr Weigh kWeighs[] = {nullptr, weigh<1>, weigh<2>, weigh<3>, weigh<4>, weigh<5>, weigh<6>};

// tanh(score / cap) * cap.
STRATA_INLINE_AVX2 __m256 capped(__m256 score, float cap) {
  const __m256 sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1.0f);
  const __m256 small = exponential(_mm256_mul_ps(_mm256_andnot_ps(sign, score), _mm256_set1_ps(-2.0f / cap)));
  const __m256 size = _mm256_mul_ps(_mm256_div_ps(_mm256_sub_ps(one, small), _mm256_add_ps(one, small)), _mm256_set1_ps(cap));
  return _mm256_or_ps(size, _mm256_and_ps(score, sign));
}

STRATA_INLINE_AVX2 float largest_of(__m256 values) {
  alignas(32) float lanes[kFloats];
  _mm256_store_ps(lanes, values);
  return *std::max_element(lanes, lanes + kFloats);
}

// The next scores of one query, of which it sees [low, high): its weights, and what came before on the new scale. `slope` times a key's distance is added.
STRATA_AVX2 void soften(Workplace& here, int64_t row, int64_t low, int64_t high, int64_t keys, const Rule& rule, float slope, int64_t distance, int64_t width) {
  float* scores = here.scores + row * kKeys;
  if (low >= high) {
    __builtin_memset(scores, 0, static_cast<size_t>(keys) * sizeof(float));
    return;
  }
  const __m256 nothing = _mm256_set1_ps(-INFINITY);
  const __m256i lanes = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  const __m256i from = _mm256_set1_epi32(static_cast<int>(low) - 1), to = _mm256_set1_epi32(static_cast<int>(high));
  __m256 most = nothing;
  for (int64_t key = 0; key < keys; key += kFloats) {
    const __m256i place = _mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int>(key)));
    const __m256i seen = _mm256_and_si256(_mm256_cmpgt_epi32(place, from), _mm256_cmpgt_epi32(to, place));
    __m256 value = _mm256_load_ps(scores + key);
    if (rule.soft_cap != 0) value = capped(value, rule.soft_cap);
    if (slope != 0) {
      const __m256 away = _mm256_cvtepi32_ps(_mm256_add_epi32(place, _mm256_set1_epi32(static_cast<int>(distance))));
      value = _mm256_fmadd_ps(_mm256_set1_ps(slope), away, value);
    }
    value = _mm256_blendv_ps(nothing, value, _mm256_castsi256_ps(seen));
    _mm256_store_ps(scores + key, value);
    most = _mm256_max_ps(value, most);  // the second where the first is NaN, which shows in its weight
  }
  const float before = here.largest[row], now = std::fmax(before, largest_of(most));
  const __m256 shift = _mm256_set1_ps(std::isfinite(now) ? now : 0.0f);
  __m256 total = _mm256_setzero_ps();
  for (int64_t key = 0; key < keys; key += kFloats) {
    const __m256 score = _mm256_load_ps(scores + key);
    const __m256 apart = _mm256_sub_ps(score, shift);
    __m256 weight = _mm256_andnot_ps(_mm256_cmp_ps(score, nothing, _CMP_EQ_OQ), exponential(apart));
    weight = _mm256_blendv_ps(weight, apart, _mm256_cmp_ps(apart, apart, _CMP_UNORD_Q));
    total = _mm256_add_ps(total, weight);
    _mm256_store_ps(scores + key, weight);
  }
  if (now != before) {
    const float change = std::isfinite(before) ? std::exp(before - now) : 0.0f;
    here.total[row] *= change;
    const __m256 changes = _mm256_set1_ps(change);
    float* sums = here.sums + row * width;
    for (int64_t column = 0; column < width; column += kFloats) _mm256_store_ps(sums + column, _mm256_mul_ps(_mm256_load_ps(sums + column), changes));
    here.largest[row] = now;
  }
  here.total[row] += sum_of(total);
}

STRATA_AVX2 void attend(const AttentionCall& call, const Span& span, int64_t kv_head, int64_t first, int64_t rows, Workplace& here) {
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
    for (int64_t column = 0; column < width; column += kFloats) _mm256_store_ps(here.queries + row * (width + kApart) + column, floats_at(query + column));
    here.largest[row] = sinks ? sinks[head] : -INFINITY;
    here.total[row] = sinks ? 1.0f : 0.0f;
  }
  __builtin_memset(here.sums, 0, static_cast<size_t>(rows * width) * sizeof(float));
  // From whole blocks of positions on: what a query gets does not depend on those beside it.
  const int64_t begin = rule.first_seen(span.start + first / group) / kKeys * kKeys, end = span.start + (first + rows - 1) / group + 1;
  for (int64_t block = begin; block < end; block += kKeys) {
    const int64_t count = end - block < kKeys ? end - block : kKeys;
    take_keys(keys, places, block, count, here);
    for (int64_t row = 0; row < rows; row += kTogether) {
      const int64_t together = rows - row < kTogether ? rows - row : kTogether;
      for (int64_t key = 0; key < count; key += kStep) kScores[together](here, row, key, width, rule.scale);
    }
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = span.start + (first + row) / group, head = kv_head * group + (first + row) % group;
      const int64_t low = rule.first_seen(position) - block, high = position + 1 - block;
      soften(here, row, low < 0 ? 0 : low, high < count ? high : count, count, rule, slopes ? slopes[head] : 0.0f, block - position, width);
    }
    for (int64_t key = 0; key < count; ++key) values.take(places.of(block + key), here.values + key * width);
    for (int64_t row = 0; row < rows; row += kTogether) {
      const int64_t together = rows - row < kTogether ? rows - row : kTogether;
      for (int64_t column = 0; column < width; column += kStep) kWeighs[together](here, row, column, count, width);
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = (first + row) / group, head = kv_head * group + (first + row) % group;
    uint16_t* out = reinterpret_cast<uint16_t*>(call.out) + ((span.row + token) * call.heads + head) * width;
    const __m256 whole = _mm256_set1_ps(1.0f / here.total[row]);
    for (int64_t column = 0; column < width; column += kFloats)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + column), bfloat16_of(_mm256_mul_ps(_mm256_load_ps(here.sums + row * width + column), whole)));
  }
}

}  // namespace

void attend_avx2(const AttentionCall& call, const Span& span, int64_t kv_head, int64_t first, int64_t rows) {
  thread_local Scratch scratch;
  attend(call, span, kv_head, first, rows, *scratch.of<Workplace>(1));
}

}  // namespace strata
#endif
