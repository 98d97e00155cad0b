// What a refit of centroids needs of each output, S^T H S and S^T H e with S its codes one-hot: formats/any_precision/refit.py says why, and its
// `curved` is what this is tested against. S is mostly zeros: H S are sums of H's rows by code, K^2 additions an output however many codes there are.
// H passes by in tiles that stay in the second cache while all rows of a thread use them. Sums have one order, whatever the processor and the threads.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu.h"
#include "parallel.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors wider than the target's stay within inlined functions
#define INLINE static inline __attribute__((always_inline))

namespace {

constexpr int64_t kLanes = 16, kVectors = 4, kWidth = kLanes * kVectors;  // columns of a tile
constexpr int64_t kDepth = 2048;                                          // its rows: 512 KiB
constexpr int64_t kMostCodes = 256;

typedef float Floats __attribute__((vector_size(64), may_alias));

struct Job {
  const float* hessian;  // [columns, columns]
  const uint8_t* codes;  // [rows, columns]
  const float* missed;   // [rows, columns]
  int64_t columns, count;
  float* curvature;  // [rows, count, count]
  float* slope;      // [rows, count]
};

// `rows` x kWidth, at the border of a vector.
struct Wide {
  explicit Wide(int64_t rows) : kept((rows + 1) * kWidth) {}
  Floats* data() {
    const uintptr_t place = reinterpret_cast<uintptr_t>(kept.data()), border = sizeof(Floats);
    return reinterpret_cast<Floats*>((place + border - 1) / border * border);
  }
  std::vector<float> kept;
};

INLINE void load_tile(const Job& job, int64_t top, int64_t depth, int64_t left, int64_t width, Floats* tile) {
  for (int64_t k = 0; k < depth; ++k) {
    float* to = reinterpret_cast<float*>(tile + k * kVectors);
    std::memcpy(to, job.hessian + (top + k) * job.columns + left, width * sizeof(float));
    std::fill(to + width, to + kWidth, 0.0f);
  }
}

// A row's places within a tile by code, in rising order within one, and where each code's begin.
struct Order {
  uint16_t* places;  // [depth]
  uint16_t* starts;  // [count + 1]
};

INLINE void sort_codes(const uint8_t* codes, int64_t depth, int64_t count, Order order) {
  uint16_t next[kMostCodes + 1] = {};
  for (int64_t k = 0; k < depth; ++k) ++next[codes[k] + 1];
  for (int64_t c = 0; c < count; ++c) next[c + 1] += next[c];
  std::copy_n(next, count + 1, order.starts);
  for (int64_t k = 0; k < depth; ++k) order.places[next[codes[k]]++] = static_cast<uint16_t>(k);
}

// sums[code] = the sum of the tile's rows of that code.
INLINE void sum_by_code(Order order, const Floats* tile, int64_t count, Floats* sums) {
  for (int64_t c = 0; c < count; ++c) {
    Floats found[kVectors] = {};
    for (int64_t i = order.starts[c]; i < order.starts[c + 1]; ++i)
      for (int64_t v = 0; v < kVectors; ++v) found[v] += tile[order.places[i] * kVectors + v];
    for (int64_t v = 0; v < kVectors; ++v) sums[c * kVectors + v] = found[v];
  }
}

// What the tile adds to a row's curvature and slope.
INLINE void add_tile(const Job& job, int64_t row, int64_t left, int64_t width, const Floats* sums) {
  const uint8_t* codes = job.codes + row * job.columns + left;
  const float* by_code = reinterpret_cast<const float*>(sums);
  for (int64_t j = 0; j < width; ++j) {
    float* to = job.curvature + (row * job.count + codes[j]) * job.count;
    for (int64_t c = 0; c < job.count; ++c) to[c] += by_code[c * kWidth + j];
  }
  alignas(64) float missed[kWidth] = {};
  std::memcpy(missed, job.missed + row * job.columns + left, width * sizeof(float));
  for (int64_t c = 0; c < job.count; ++c) {
    Floats products{};
    for (int64_t v = 0; v < kVectors; ++v) products += sums[c * kVectors + v] * reinterpret_cast<const Floats*>(missed)[v];
    float sum = 0.0f;
    for (int64_t lane = 0; lane < kLanes; ++lane) sum += products[lane];
    job.slope[row * job.count + c] += sum;
  }
}

INLINE void curve_rows(const Job& job, int64_t begin, int64_t end) {
  const int64_t most = std::min(kDepth, job.columns), rows = end - begin;
  Wide tile(most), sums(job.count);
  std::vector<uint16_t> places(rows * most), starts(rows * (job.count + 1));
  const auto order = [&](int64_t row) {
    return Order{places.data() + (row - begin) * most, starts.data() + (row - begin) * (job.count + 1)};
  };
  std::fill_n(job.curvature + begin * job.count * job.count, rows * job.count * job.count, 0.0f);
  std::fill_n(job.slope + begin * job.count, rows * job.count, 0.0f);
  for (int64_t top = 0; top < job.columns; top += kDepth) {
    const int64_t depth = std::min(kDepth, job.columns - top);
    for (int64_t row = begin; row < end; ++row) sort_codes(job.codes + row * job.columns + top, depth, job.count, order(row));
    for (int64_t left = 0; left < job.columns; left += kWidth) {
      const int64_t width = std::min(kWidth, job.columns - left);
      load_tile(job, top, depth, left, width, tile.data());
      for (int64_t row = begin; row < end; ++row) {
        sum_by_code(order(row), tile.data(), job.count, sums.data());
        add_tile(job, row, left, width, sums.data());
      }
    }
  }
}

void rows_portable(const Job& job, int64_t begin, int64_t end) { curve_rows(job, begin, end); }
#if STRATA_X86
STRATA_AVX2 void rows_avx2(const Job& job, int64_t begin, int64_t end) { curve_rows(job, begin, end); }
STRATA_AVX512 void rows_avx512(const Job& job, int64_t begin, int64_t end) { curve_rows(job, begin, end); }
#endif

}  // namespace

// hessian: float32 [columns, columns], symmetric; codes: uint8 [rows, columns] below `count`; missed: float32 [rows, columns], e. Gives float32
// curvature [rows, count, count] and slope [rows, count].
STRATA_API void strata_curvature(const float* hessian, const uint8_t* codes, const float* missed, int64_t rows, int64_t columns,
                                 int64_t count, float* curvature, float* slope, int threads) {
  const Job job{hessian, codes, missed, columns, count, curvature, slope};
  strata::parallel_for(threads, rows, 1, [&](int64_t begin, int64_t end) {
#if STRATA_X86
    if (strata::cpu_level() == strata::Level::avx512) return rows_avx512(job, begin, end);
    if (strata::cpu_level() == strata::Level::avx2) return rows_avx2(job, begin, end);
#endif
    rows_portable(job, begin, end);
  });
}
