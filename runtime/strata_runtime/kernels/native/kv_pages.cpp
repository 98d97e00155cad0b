// Keys and values at 8 bits (kernels/native_pages.py): rounded into their places, and pages of them gathered and restored to the compute type, each in one
// pass. The bits are those of cache/rounding.py.
#include <cmath>
#include <cstring>

#include "avx512.h"
#include "calls.h"
#include "codes.h"
#include "planes.h"
#include "rows.h"

using namespace strata;

namespace {

// In the order of native_pages.py. A block is the keys or the values of one head: `pages` pages of `page_tokens` tokens of `width` values.
struct PagesCall {
  int64_t codes, scales;  // int8 [blocks, pages, page_tokens, width], bfloat16 [blocks, pages, page_tokens]
  int64_t blocks, pages, page_tokens, width;
  int64_t chosen, count;  // int64 [count]
  int64_t out, type;      // [blocks, count, page_tokens, width]
  int64_t threads;
};

constexpr float kLargestHalf = 65504.0f;
constexpr float kTiny = 0x1p-126f;

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(address);
}

// `count` neighbouring tokens: codes [count, width], scales [count], to out from item `place` on.
STRATA_PLAIN void plain_restore(const int8_t* codes, const uint16_t* scales, int64_t count, int64_t width, Type type, void* out, int64_t place) {
  for (int64_t token = 0; token < count; ++token) {
    const float scale = float_of_bfloat16(scales[token]);
    for (int64_t each = token * width; each < (token + 1) * width; ++each) {
      float value = static_cast<float>(codes[each]) * scale;
      if (type == Type::float16) value = value > kLargestHalf ? kLargestHalf : value < -kLargestHalf ? -kLargestHalf : value;
      store_at(out, place + each, type, value);
    }
  }
}

void portable_restore(const int8_t* codes, const uint16_t* scales, int64_t count, int64_t width, Type type, void* out, int64_t place) {
  plain_restore(codes, scales, count, width, type, out, place);
}

#if STRATA_X86
STRATA_AVX2 void avx2_restore(const int8_t* codes, const uint16_t* scales, int64_t count, int64_t width, Type type, void* out, int64_t place) {
  plain_restore(codes, scales, count, width, type, out, place);
}

template <class Store>
STRATA_INLINE void restore_by(const int8_t* codes, const uint16_t* scales, int64_t count, int64_t width, const Store& store) {
  for (int64_t token = 0; token < count; ++token) {
    const __m512 scale = _mm512_set1_ps(float_of_bfloat16(scales[token]));
    for (int64_t each = 0; each < width; each += 16) {
      const int64_t from = token * width + each;
      const __mmask16 mask = first_floats(width - each);
      store(from, mask, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, codes + from))), scale));
    }
  }
}

struct StoreFloat {
  float* out;
  STRATA_INLINE void operator()(int64_t place, __mmask16 mask, __m512 values) const { _mm512_mask_storeu_ps(out + place, mask, values); }
};

struct StoreBfloat16 {
  uint16_t* out;
  STRATA_INLINE void operator()(int64_t place, __mmask16 mask, __m512 values) const {
    _mm256_mask_storeu_epi16(out + place, mask, bfloat16_of(values));
  }
};

STRATA_AVX512 void avx512_restore(const int8_t* codes, const uint16_t* scales, int64_t count, int64_t width, Type type, void* out, int64_t place) {
  if (type == Type::float32) return restore_by(codes, scales, count, width, StoreFloat{static_cast<float*>(out) + place});
  if (type == Type::bfloat16) return restore_by(codes, scales, count, width, StoreBfloat16{static_cast<uint16_t*>(out) + place});
  plain_restore(codes, scales, count, width, type, out, place);
}
#endif

// A token's codes for a scale; gives the scale as it is stored.
STRATA_PLAIN uint16_t plain_round(const float* values, int64_t width, int8_t* codes) {
  uint32_t largest = 0;  // among magnitudes as bits infinity is above all numbers and NaN above infinity
  for (int64_t each = 0; each < width; ++each) {
    uint32_t bits;
    std::memcpy(&bits, values + each, 4);
    bits &= 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  float peak;
  std::memcpy(&peak, &largest, 4);
  const float wanted = peak / 127.0f;
  const uint16_t stored = bfloat16_of_float(wanted < kTiny ? kTiny : wanted);
  const float scale = float_of_bfloat16(stored);
  if (!std::isfinite(scale)) {  // shows in all that it is restored to
    std::memset(codes, 0, static_cast<size_t>(width));
    return stored;
  }
  for (int64_t each = 0; each < width; ++each) {
    const float code = std::nearbyintf(values[each] / scale);
    codes[each] = static_cast<int8_t>(code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code);
  }
  return stored;
}

uint16_t portable_round(const float* values, int64_t width, int8_t* codes) { return plain_round(values, width, codes); }
#if STRATA_X86
STRATA_AVX2 uint16_t avx2_round(const float* values, int64_t width, int8_t* codes) { return plain_round(values, width, codes); }
STRATA_AVX512 uint16_t avx512_round(const float* values, int64_t width, int8_t* codes) { return plain_round(values, width, codes); }
#endif

using Round = uint16_t (*)(const float*, int64_t, int8_t*);
using Restore = void (*)(const int8_t*, const uint16_t*, int64_t, int64_t, Type, void*, int64_t);

Restore restore_here() {
#if STRATA_X86
  const Level level = cpu_level();
  if (level == Level::avx512) return avx512_restore;
  if (level == Level::avx2) return avx2_restore;
#endif
  return portable_restore;
}

Round round_here() {
#if STRATA_X86
  const Level level = cpu_level();
  if (level == Level::avx512) return avx512_round;
  if (level == Level::avx2) return avx2_round;
#endif
  return portable_round;
}

}  // namespace

STRATA_API void strata_round_entries(const EntriesCall* call) {
  thread_local Scratch scratch;
  const Type type = static_cast<Type>(call->type);
  const Round round = round_here();
  const Restore restore = restore_here();
  const int64_t width = call->width, *places = pointer<const int64_t>(call->places);
  float* values = scratch.of<float>(width);
  for (int64_t head = 0; head < call->heads; ++head)
    for (int64_t each = 0; each < call->tokens; ++each) {
      const int64_t place = head * call->held + places[each];
      const uint8_t* at = pointer<const uint8_t>(call->entries) + (head * call->head_stride + each * call->token_stride) * item_bytes(type);
      int8_t* codes = pointer<int8_t>(call->codes) + place * width;
      widen(at, type, width, values);
      const uint16_t scale = round(values, width, codes);
      pointer<uint16_t>(call->scales)[place] = scale;
      restore(codes, &scale, 1, width, type, pointer<void>(call->out), (head * call->tokens + each) * width);
    }
}

STRATA_API void strata_restore_pages(const PagesCall* call) {
  const int8_t* codes = pointer<const int8_t>(call->codes);
  const uint16_t* scales = pointer<const uint16_t>(call->scales);
  const int64_t* chosen = pointer<const int64_t>(call->chosen);
  const Restore restore = restore_here();
  const int64_t tokens = call->page_tokens, width = call->width;
  parallel_for(static_cast<int>(call->threads), call->blocks * call->count, 8, [&](int64_t begin, int64_t end) {
    for (int64_t each = begin; each < end; ++each) {
      const int64_t page = each / call->count * call->pages + chosen[each % call->count];
      restore(codes + page * tokens * width, scales + page * tokens, tokens, width, static_cast<Type>(call->type), pointer<void>(call->out),
              each * tokens * width);
    }
  });
}
