// Rounding a weight to nearest: whole rows to int8 by a scale each, or groups that share a scale and a zero, the range of a group clipped
// where that lowers its squared error. The references are `quantize_channels` and `_best_clip` in formats/quantizers.py: the same candidates in
// the same order. Errors of candidates are compared with a product
// by the reciprocal of the step; the codes that are kept are divided, so that they are those of the reference.
#include <cstdint>
#include <cstring>

#include "cpu.h"
#include "parallel.h"

namespace strata {
namespace {

constexpr int kLanes = 16;
constexpr int kMostLanes = 8;  // of a group: 128 inputs
constexpr int kCodeOffset = 8;
constexpr float kTiny = 1.17549435e-38f;   // the least normal number of float32 and of bfloat16
constexpr float kRounder = 12582912.0f;    // 1.5 * 2^23: added and taken off, it rounds to even what is below 2^22

typedef float Lanes __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Integers __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef int8_t SignedBytes __attribute__((vector_size(16)));

#define STRATA_INLINE inline __attribute__((always_inline))

enum Type { kFloat32 = 0, kBfloat16 = 1 };

STRATA_INLINE float rounded_to(float value, int type) {
  if (type == kFloat32) return value;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

STRATA_INLINE void load_group(const char* from, int type, int lanes, Lanes* values) {
  for (int i = 0; i < lanes; ++i) {
    if (type == kFloat32) {
      std::memcpy(&values[i], from + i * sizeof(Lanes), sizeof(Lanes));
    } else {
      Halves halves;
      std::memcpy(&halves, from + i * sizeof(Halves), sizeof(Halves));
      const Words words = __builtin_convertvector(halves, Words) << 16;
      std::memcpy(&values[i], &words, sizeof words);
    }
  }
}

struct Grid {
  float scale, zero, origin;
};

STRATA_INLINE Grid grid_of(float low, float high, float top, int type) {
  float scale = rounded_to((high - low) / top, type);
  if (!(scale > 0)) scale = kTiny;
  const float zero = rounded_to(low + kCodeOffset * scale, type);
  return {scale, zero, zero - kCodeOffset * scale};
}

STRATA_INLINE void round_within(Lanes& x, float top) {
  const Lanes zeros = {}, tops = zeros + top;
  x = x > zeros ? x : zeros;
  x = x < tops ? x : tops;
  x = (x + kRounder) - kRounder;
}

STRATA_INLINE float error_of(const Lanes* values, int lanes, const Grid& grid, float top) {
  const float inverse = 1.0f / grid.scale;
  Lanes sum = {};
  for (int i = 0; i < lanes; ++i) {
    Lanes codes = (values[i] - grid.origin) * inverse;
    round_within(codes, top);
    const Lanes off = (codes * grid.scale + grid.origin) - values[i];
    sum += off * off;
  }
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += sum[i];
  return total;
}

struct Job {
  const char* weight;
  int weight_type, scale_type;
  int64_t columns, row_bytes, group;
  float top;
  const float* ratios;
  int ratio_count;
  uint8_t* codes;
  float* scales;
  float* zeros;
};

template <int kGroupLanes>
STRATA_INLINE void quantize_rows(const Job& job, int64_t begin, int64_t end) {
  const int64_t groups = job.columns / job.group;
  const int64_t group_bytes = job.group * (job.weight_type == kFloat32 ? 4 : 2);
  for (int64_t place = begin * groups; place < end * groups; ++place) {
    const int64_t row = place / groups, in_row = place % groups;
    Lanes values[kGroupLanes];
    load_group(job.weight + row * job.row_bytes + in_row * group_bytes, job.weight_type, kGroupLanes, values);
    Lanes least = values[0], most = values[0];
    for (int i = 1; i < kGroupLanes; ++i) {
      least = values[i] < least ? values[i] : least;
      most = values[i] > most ? values[i] : most;
    }
    float low = least[0], high = most[0];
    for (int i = 1; i < kLanes; ++i) {
      low = least[i] < low ? least[i] : low;
      high = most[i] > high ? most[i] : high;
    }
    Grid best = {};
    float best_error = 0;
    for (int i = 0; i < job.ratio_count; ++i) {
      const Grid grid = grid_of(low * job.ratios[i], high * job.ratios[i], job.top, job.scale_type);
      const float error = error_of(values, kGroupLanes, grid, job.top);
      if (i == 0 || error < best_error) best_error = error, best = grid;
    }
    uint8_t* codes = job.codes + place * job.group;
    for (int i = 0; i < kGroupLanes; ++i) {
      Lanes exact = (values[i] - best.origin) / best.scale;
      round_within(exact, job.top);
      const Bytes bytes = __builtin_convertvector(__builtin_convertvector(exact, Integers), Bytes);
      std::memcpy(codes + i * kLanes, &bytes, sizeof bytes);
    }
    job.scales[place] = best.scale;
    job.zeros[place] = best.zero;
  }
}

STRATA_INLINE void quantize_any_group(const Job& job, int64_t begin, int64_t end) {
  switch (job.group / kLanes) {
    case 2: return quantize_rows<2>(job, begin, end);
    case 4: return quantize_rows<4>(job, begin, end);
    default: return quantize_rows<kMostLanes>(job, begin, end);
  }
}

struct ChannelJob {
  const char* weight;
  int weight_type, scale_type;
  int64_t columns, row_bytes;
  int8_t* codes;
  float* scales;
};

// Whole lanes of a row, then what is left behind zeros.
STRATA_INLINE void load_lanes(const char* row, int type, int64_t start, int64_t columns, Lanes& values) {
  if (start + kLanes <= columns) return load_group(row + start * (type == kFloat32 ? 4 : 2), type, 1, &values);
  values = Lanes{};
  for (int64_t i = start; i < columns; ++i) {
    uint32_t bits = 0;
    if (type == kFloat32) {
      std::memcpy(&bits, row + i * 4, 4);
    } else {
      uint16_t half;
      std::memcpy(&half, row + i * 2, 2);
      bits = static_cast<uint32_t>(half) << 16;
    }
    float value;
    std::memcpy(&value, &bits, sizeof value);
    values[i - start] = value;
  }
}

STRATA_INLINE void quantize_channels(const ChannelJob& job, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const char* at = job.weight + row * job.row_bytes;
    Lanes least = {}, most = {}, values;
    for (int64_t start = 0; start < job.columns; start += kLanes) {
      load_lanes(at, job.weight_type, start, job.columns, values);
      least = values < least ? values : least;
      most = values > most ? values : most;
    }
    float peak = 0;
    for (int i = 0; i < kLanes; ++i) {
      peak = -least[i] > peak ? -least[i] : peak;
      peak = most[i] > peak ? most[i] : peak;
    }
    float scale = rounded_to(peak / 127.0f, job.scale_type);
    if (!(scale > 0)) scale = kTiny;
    job.scales[row] = scale;
    int8_t* codes = job.codes + row * job.columns;
    const Lanes largest = Lanes{} + 127.0f;
    for (int64_t start = 0; start < job.columns; start += kLanes) {
      load_lanes(at, job.weight_type, start, job.columns, values);
      values = values / scale;
      values = values > -largest ? values : -largest;
      values = values < largest ? values : largest;
      values = (values + kRounder) - kRounder;
      const SignedBytes bytes = __builtin_convertvector(__builtin_convertvector(values, Integers), SignedBytes);
      const int64_t left = job.columns - start;
      std::memcpy(codes + start, &bytes, left < kLanes ? static_cast<size_t>(left) : sizeof bytes);
    }
  }
}

void portable_channels(const ChannelJob& job, int64_t begin, int64_t end) { quantize_channels(job, begin, end); }
#if STRATA_X86
STRATA_AVX2 void avx2_channels(const ChannelJob& job, int64_t begin, int64_t end) { quantize_channels(job, begin, end); }
STRATA_AVX512 void avx512_channels(const ChannelJob& job, int64_t begin, int64_t end) { quantize_channels(job, begin, end); }
#endif

void portable_rows(const Job& job, int64_t begin, int64_t end) { quantize_any_group(job, begin, end); }
#if STRATA_X86
STRATA_AVX2 void avx2_rows(const Job& job, int64_t begin, int64_t end) { quantize_any_group(job, begin, end); }
STRATA_AVX512 void avx512_rows(const Job& job, int64_t begin, int64_t end) { quantize_any_group(job, begin, end); }
#endif

}  // namespace
}  // namespace strata

// weight: [rows, columns] of float32 (type 0) or bfloat16 (1), rows `row_bytes` apart, columns a multiple of `group` (32, 64 or 128), finite.
// ratios: what the range of a group is multiplied by, `ratio_count` candidates of which the first of the best is taken.
// codes: uint8 [rows, columns] below 2^bits; scales and zeros: float32 [rows, columns / group], rounded to `scale_type`.
STRATA_API void strata_quantize_groups(const void* weight, int weight_type, int64_t rows, int64_t columns, int64_t row_bytes,
                                       int64_t group, int bits, int scale_type, const float* ratios, int ratio_count,
                                       uint8_t* codes, float* scales, float* zeros, int threads) {
  const strata::Job job{static_cast<const char*>(weight), weight_type, scale_type, columns, row_bytes, group,
                        static_cast<float>((1 << bits) - 1), ratios, ratio_count, codes, scales, zeros};
  auto* run = strata::portable_rows;
#if STRATA_X86
  const strata::Level level = strata::cpu_level();
  if (level == strata::Level::avx2) run = strata::avx2_rows;
  if (level == strata::Level::avx512) run = strata::avx512_rows;
#endif
  strata::parallel_for(threads, rows, 16, [&](int64_t begin, int64_t end) { run(job, begin, end); });
}

// weight: as above, of any number of columns. codes: int8 [rows, columns] within -127..127; scales: float32 [rows], rounded to `scale_type`.
STRATA_API void strata_quantize_channels(const void* weight, int weight_type, int64_t rows, int64_t columns, int64_t row_bytes,
                                         int scale_type, int8_t* codes, float* scales, int threads) {
  const strata::ChannelJob job{static_cast<const char*>(weight), weight_type, scale_type, columns, row_bytes, codes, scales};
  auto* run = strata::portable_channels;
#if STRATA_X86
  const strata::Level level = strata::cpu_level();
  if (level == strata::Level::avx2) run = strata::avx2_channels;
  if (level == strata::Level::avx512) run = strata::avx512_channels;
#endif
  strata::parallel_for(threads, rows, 16, [&](int64_t begin, int64_t end) { run(job, begin, end); });
}
