// Any-precision clusters of the rows of a weight: the same arithmetic in the same order as formats/any_precision/clusters.py, which explains it
// and is what this is tested against, code for code. Rows are spread over threads; each is sorted once, by radix.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu.h"
#include "parallel.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors wider than the target's stay within inlined functions
#define INLINE static inline __attribute__((always_inline))

namespace {

constexpr int64_t kLeastCandidates = 128;
constexpr int kMostSweeps = 64;
constexpr double kLeastImportance = 1e-6;
constexpr int64_t kLanes = 8;
constexpr double kNever = -std::numeric_limits<double>::infinity();

typedef double Doubles __attribute__((vector_size(64), aligned(8), may_alias));
typedef int64_t Places __attribute__((vector_size(64), aligned(8), may_alias));

struct Job {
  const float* weight;      // [rows, columns]
  const float* importance;  // null, or rows of importance_stride (0: one row for all)
  int64_t importance_stride;
  int64_t rows, columns;
  int seed_bits, bits;
  uint8_t* codes;  // [rows, columns]
  float* tables;   // [rows, all widths one after the other]
  int64_t table_stride;
};

// One sorted row and its prefix sums; what the steps need beside, allocated once a thread.
struct Row {
  int64_t columns;
  std::vector<uint64_t> keys, spare;
  std::vector<double> values, weights, weight_sums, value_sums, steps;
  std::vector<int64_t> borders, finer, candidates, origins;
  std::vector<double> at_weight, at_value, gains, best, next, means, finer_means;

  Row(int64_t columns, int64_t clusters, int64_t most_clusters)
      : columns(columns), keys(columns), spare(columns), values(columns), weights(columns), weight_sums(columns + 1),
        value_sums(columns + 1), steps(columns), borders(most_clusters + 1), finer(most_clusters + 1), means(most_clusters),
        finer_means(most_clusters) {
    const int64_t count = std::min(columns, std::max(kLeastCandidates, 2 * clusters)) + 1;
    candidates.resize(count);
    at_weight.resize(count);
    at_value.resize(count);
    best.resize(count);
    next.resize(count);
    gains.resize(count * count);
    origins.resize(clusters * count);
  }

  double gain(int64_t start, int64_t stop) const {
    if (start >= stop) return 0.0;
    const double weight = weight_sums[stop] - weight_sums[start], value = value_sums[stop] - value_sums[start];
    return value * value / weight;
  }

  double mean(int64_t start, int64_t stop) const {  // start < stop
    const double mean = (value_sums[stop] - value_sums[start]) / (weight_sums[stop] - weight_sums[start]);
    return std::min(std::max(mean, values[start]), values[stop - 1]);
  }
};

constexpr uint64_t kSign = 0x80000000u;

INLINE uint64_t sortable(float value) {
  uint32_t bits;
  value += 0.0f;  // -0 becomes 0
  std::memcpy(&bits, &value, 4);
  return bits & kSign ? static_cast<uint32_t>(~bits) : bits | kSign;
}

INLINE double value_of(uint64_t key) {
  const uint32_t sorted = static_cast<uint32_t>(key >> 32);
  const uint32_t bits = sorted & kSign ? sorted ^ static_cast<uint32_t>(kSign) : ~sorted;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Stable, by three digits of 11 bits; a key holds the value above and its column below.
INLINE void sort_row(Row& row, const float* weight) {
  constexpr int kDigits = 3, kBits = 11, kBuckets = 1 << kBits;
  static thread_local uint32_t counts[kDigits][kBuckets];
  std::memset(counts, 0, sizeof counts);
  for (int64_t i = 0; i < row.columns; ++i) {
    const uint64_t key = sortable(weight[i]);
    row.keys[i] = key << 32 | static_cast<uint64_t>(i);
    for (int digit = 0; digit < kDigits; ++digit) ++counts[digit][key >> (digit * kBits) & (kBuckets - 1)];
  }
  for (int digit = 0; digit < kDigits; ++digit) {
    uint32_t sum = 0;
    for (uint32_t& count : counts[digit]) {
      const uint32_t here = count;
      count = sum;
      sum += here;
    }
    for (const uint64_t key : row.keys) row.spare[counts[digit][key >> (32 + digit * kBits) & (kBuckets - 1)]++] = key;
    row.keys.swap(row.spare);
  }
}

INLINE void sum_row(Row& row, const float* importance) {
  const int64_t columns = row.columns;
  for (int64_t i = 0; i < columns; ++i) row.values[i] = value_of(row.keys[i]);
  double total = 0.0;
  if (importance)
    for (int64_t i = 0; i < columns; ++i) total += row.weights[i] = importance[static_cast<uint32_t>(row.keys[i])];
  const double least = total / static_cast<double>(columns) * kLeastImportance;
  double weight_sum = 0.0, value_sum = 0.0;
  row.weight_sums[0] = row.value_sums[0] = 0.0;
  for (int64_t i = 0; i < columns; ++i) {
    const double weight = total > 0 ? row.weights[i] + least : 1.0;
    row.weight_sums[i + 1] = weight_sum += weight;
    row.value_sums[i + 1] = value_sum += weight * row.values[i];
  }
}

// The best border within [start, stop): between unlike values, the first of equally good ones; `stop` where there is none.
INLINE int64_t split(const Row& row, int64_t start, int64_t stop) {
  const double *weights = row.weight_sums.data(), *sums = row.value_sums.data(), *values = row.values.data();
  const double first_weight = weights[start], first_sum = sums[start], last_weight = weights[stop], last_sum = sums[stop];
  int64_t i = start + 1, found = stop;
  double most = kNever;
  if (stop - i >= kLanes) {
    Doubles best = Doubles{} + kNever;
    Places place = Places{} + stop, here = Places{0, 1, 2, 3, 4, 5, 6, 7} + i;
    for (; i + kLanes <= stop; i += kLanes, here += kLanes) {
      const Doubles weight = *reinterpret_cast<const Doubles*>(weights + i), sum = *reinterpret_cast<const Doubles*>(sums + i);
      const Doubles low = sum - first_sum, high = last_sum - sum;
      const Doubles gain = low * low / (weight - first_weight) + high * high / (last_weight - weight);
      const Places better = (gain > best) & (*reinterpret_cast<const Doubles*>(values + i) !=
                                             *reinterpret_cast<const Doubles*>(values + i - 1));
      best = better ? gain : best;
      place = better ? here : place;
    }
    for (int lane = 0; lane < kLanes; ++lane)
      if (best[lane] > most || (best[lane] == most && place[lane] < found)) most = best[lane], found = place[lane];
  }
  for (; i < stop; ++i) {
    if (values[i] == values[i - 1]) continue;
    const double gain = row.gain(start, i) + row.gain(i, stop);
    if (gain > most) most = gain, found = i;
  }
  return found;
}

INLINE void find_candidates(Row& row) {
  const int64_t columns = row.columns, count = static_cast<int64_t>(row.candidates.size()) - 1;
  if (columns <= count) {
    for (int64_t i = 0; i < columns; ++i)
      row.candidates[i] = i > 0 && row.values[i] == row.values[i - 1] ? row.candidates[i - 1] : i;
  } else {
    double sum = 0.0;
    row.steps[0] = 0.0;
    for (int64_t i = 1; i < columns; ++i)
      row.steps[i] = sum += std::sqrt((row.weight_sums[i + 1] - row.weight_sums[i]) * (row.values[i] - row.values[i - 1]));
    for (int64_t i = 0; i < count; ++i) {
      const double share = sum * (static_cast<double>(i) / static_cast<double>(count));
      row.candidates[i] = std::lower_bound(row.steps.begin(), row.steps.end(), share) - row.steps.begin();
    }
  }
  row.candidates[count] = columns;
}

INLINE void find_gains(Row& row) {
  const int64_t count = static_cast<int64_t>(row.candidates.size());
  for (int64_t i = 0; i < count; ++i) {
    row.at_weight[i] = row.weight_sums[row.candidates[i]];
    row.at_value[i] = row.value_sums[row.candidates[i]];
  }
  const int64_t* places = row.candidates.data();
  for (int64_t from = 0; from < count; ++from) {
    double* gains = row.gains.data() + from * count;
    for (int64_t to = from; to < count; ++to) {
      const double weight = row.at_weight[to] - row.at_weight[from], value = row.at_value[to] - row.at_value[from];
      const double gain = value * value / weight;
      gains[to] = places[from] < places[to] ? gain : 0.0;
    }
  }
}

// Borders with the least error among candidates; the earliest of equally good ones.
INLINE void choose_candidates(Row& row, int64_t clusters) {
  const int64_t count = static_cast<int64_t>(row.candidates.size());
  std::copy_n(row.gains.begin(), count, row.best.begin());
  for (int64_t layer = 1; layer < clusters; ++layer) {
    double* next = row.next.data();
    int64_t* origins = row.origins.data() + layer * count;
    std::fill_n(next, count, kNever);
    for (int64_t from = 0; from < count; ++from) {
      const double before = row.best[from];
      const double* gains = row.gains.data() + from * count;
      int64_t to = from;
      for (; to + kLanes <= count; to += kLanes) {
        Doubles& most = *reinterpret_cast<Doubles*>(next + to);
        Places& origin = *reinterpret_cast<Places*>(origins + to);
        const Doubles found = before + *reinterpret_cast<const Doubles*>(gains + to);
        const Places better = found > most;
        most = better ? found : most;
        origin = better ? Places{} + from : origin;
      }
      for (; to < count; ++to)
        if (before + gains[to] > next[to]) next[to] = before + gains[to], origins[to] = from;
    }
    row.best.swap(row.next);
  }
  int64_t place = count - 1;
  row.borders[clusters] = row.columns;
  for (int64_t layer = clusters - 1; layer > 0; --layer) {
    place = row.origins[layer * count + place];
    row.borders[layer] = row.candidates[place];
  }
  row.borders[0] = 0;
}

INLINE void refine(Row& row, int64_t clusters) {
  for (int sweep = 0; sweep < kMostSweeps; ++sweep) {
    bool moved = false;
    for (int64_t first = 1; first <= 2; ++first)
      for (int64_t each = first; each < clusters; each += 2) {
        const int64_t border = split(row, row.borders[each - 1], row.borders[each + 1]);
        moved |= border != row.borders[each];
        row.borders[each] = border;
      }
    if (!moved) return;
  }
}

// Empty clusters of a seed take the centroid before them, the first ones that of the first cluster that holds something.
INLINE void seed_means(Row& row, int64_t clusters) {
  double last = 0.0;
  for (int64_t each = clusters - 1; each >= 0; --each)
    if (row.borders[each] < row.borders[each + 1]) last = row.mean(row.borders[each], row.borders[each + 1]);
  for (int64_t each = 0; each < clusters; ++each) {
    if (row.borders[each] < row.borders[each + 1]) last = row.mean(row.borders[each], row.borders[each + 1]);
    row.means[each] = last;
  }
}

INLINE void split_all(Row& row, int64_t clusters) {
  for (int64_t each = 0; each < clusters; ++each) {
    const int64_t start = row.borders[each], stop = row.borders[each + 1];
    const int64_t border = stop - start > 1 ? split(row, start, stop) : stop;
    row.finer[2 * each] = start;
    row.finer[2 * each + 1] = border;
    row.finer_means[2 * each] = start < border ? row.mean(start, border) : row.means[each];
    row.finer_means[2 * each + 1] = border < stop ? row.mean(border, stop) : row.means[each];
  }
  row.finer[2 * clusters] = row.columns;
  row.borders.swap(row.finer);
  row.means.swap(row.finer_means);
}

INLINE float* write_table(const Row& row, int64_t clusters, float* table) {
  return std::transform(row.means.begin(), row.means.begin() + clusters, table,
                        [](double mean) { return static_cast<float>(mean); });
}

INLINE void quantize_rows(const Job& job, int64_t begin, int64_t end) {
  const int64_t clusters = int64_t{1} << job.seed_bits, most = int64_t{1} << job.bits;
  Row row(job.columns, clusters, most);
  for (int64_t place = begin; place < end; ++place) {
    sort_row(row, job.weight + place * job.columns);
    sum_row(row, job.importance ? job.importance + place * job.importance_stride : nullptr);
    find_candidates(row);
    find_gains(row);
    choose_candidates(row, clusters);
    refine(row, clusters);
    seed_means(row, clusters);
    float* table = write_table(row, clusters, job.tables + place * job.table_stride);
    for (int64_t each = clusters; each < most; each *= 2) {
      split_all(row, each);
      table = write_table(row, 2 * each, table);
    }
    uint8_t* codes = job.codes + place * job.columns;
    for (int64_t each = 0; each < most; ++each)
      for (int64_t i = row.borders[each]; i < row.borders[each + 1]; ++i)
        codes[static_cast<uint32_t>(row.keys[i])] = static_cast<uint8_t>(each);
  }
}

void rows_portable(const Job& job, int64_t begin, int64_t end) { quantize_rows(job, begin, end); }
#if STRATA_X86
STRATA_AVX2 void rows_avx2(const Job& job, int64_t begin, int64_t end) { quantize_rows(job, begin, end); }
STRATA_AVX512 void rows_avx512(const Job& job, int64_t begin, int64_t end) { quantize_rows(job, begin, end); }
#endif

}  // namespace

// codes: uint8 [rows, columns]; tables: float32 [rows, 2^seed_bits + ... + 2^bits]. importance: null, or rows `importance_stride` apart (0: one for
// all). All finite, importance not negative, 1 <= seed_bits <= bits <= 8, 1 <= columns < 2^31.
STRATA_API void strata_quantize_any(const float* weight, const float* importance, int64_t importance_stride, int64_t rows,
                                    int64_t columns, int seed_bits, int bits, uint8_t* codes, float* tables, int threads) {
  const int64_t table_stride = (int64_t{2} << bits) - (int64_t{1} << seed_bits);
  const Job job{weight, importance, importance_stride, rows, columns, seed_bits, bits, codes, tables, table_stride};
  strata::parallel_for(threads, rows, 1, [&](int64_t begin, int64_t end) {
#if STRATA_X86
    if (strata::cpu_level() == strata::Level::avx512) return rows_avx512(job, begin, end);
    if (strata::cpu_level() == strata::Level::avx2) return rows_avx2(job, begin, end);
#endif
    rows_portable(job, begin, end);
  });
}
