// any4_a8 in AVX2: rows are decoded into the cache, four at a time, and multiplied there (see int8_avx2.h).
#include "product.h"

#if STRATA_X86
#include "int8_avx2.h"
#include "planes_avx2.h"
#include "rows.h"

namespace strata {
namespace {

using namespace avx2;

// Rows of four bits, decoded into the cache.
class DecodedRows {
 public:
  DecodedRows(const Planes& weight, Type type, int8_t* decoded) : weight_(weight), type_(type), decoded_(decoded) {}

  int64_t columns() const { return weight_.tiles() * kTile; }

  STRATA_AVX2 void load(int64_t row, int64_t count, const int8_t** codes, float* scales) const {
    for (int64_t each = 0; each < count; ++each) {
      int8_t* out = decoded_ + each * (columns() + kRowApart);
      decode(row + each, table_of(row + each, scales[each]), out);
      codes[each] = out;
    }
  }

  static constexpr int64_t kRowApart = 64;  // bytes between decoded rows, so that they do not meet in one set of the cache

 private:
  // A row's values as bytes, in both halves, and their scale.
  STRATA_INLINE_AVX2 __m256i table_of(int64_t row, float& scale) const {
    const uint8_t* table = weight_.table + row * weight_.table_stride_bytes;
    alignas(32) float values[16];
    __m256 first, second;
    if (type_ == Type::bfloat16) {
      first = floats_at(reinterpret_cast<const uint16_t*>(table));
      second = floats_at(reinterpret_cast<const uint16_t*>(table) + kFloats);
    } else {
      widen(table, type_, 16, values);
      first = _mm256_load_ps(values);
      second = _mm256_load_ps(values + kFloats);
    }
    const __m256 sign = _mm256_set1_ps(-0.0f);
    const __m256 eight = _mm256_max_ps(_mm256_andnot_ps(sign, first), _mm256_andnot_ps(sign, second));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)), two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    scale = _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two))) / 127.0f;
    if (!(scale > 0)) scale = kTiny;
    const __m256 by = _mm256_set1_ps(scale), most = _mm256_set1_ps(127.0f), least = _mm256_set1_ps(-127.0f);
    const __m256i low = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(_mm256_div_ps(first, by), most), least));
    const __m256i high = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(_mm256_div_ps(second, by), most), least));
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
    return _mm256_permute4x64_epi64(_mm256_packs_epi16(words, words), 0x88);
  }

  STRATA_INLINE_AVX2 void decode(int64_t row, __m256i table, int8_t* out) const {
    for (int64_t line = 0, count = Lines(weight_).count(); line < count; line += kRuns) {
      HalfTile<4> codes;
      codes.load(weight_, row, line, kRowsNear * weight_.stride[0]);
      int8_t* at = out + line / (2 * kRuns) * kTile + line / kRuns % 2 * kHalfBytes;
#pragma GCC unroll 8
      for (int run = 0; run < kRuns; ++run) _mm256_store_si256(reinterpret_cast<__m256i*>(at + run * kRun), _mm256_shuffle_epi8(table, codes.low.codes(run)));
    }
  }

  const Planes& weight_;
  const Type type_;
  int8_t* const decoded_;
};

}  // namespace

void int8_rows_avx2(const Planes& weight, const Activations& activations, const Result& result, int64_t begin, int64_t end) {
  thread_local Scratch scratch;
  const int64_t bytes = kRowsNear * (weight.tiles() * kTile + DecodedRows::kRowApart);
  int8_t* decoded = scratch.of<int8_t>(bytes);
  __builtin_memset(decoded, 0, static_cast<size_t>(bytes));  // a short tile's second halves meet zeros
  DecodedRows source(weight, result.type, decoded);
  multiply_rows_avx2(source, activations, result, begin, end);
}

}  // namespace strata
#endif
