// Reads memory once, by so many threads, each its own piece: what `stream_peer` times.
#include <cstddef>
#include <cstdint>

namespace {
constexpr size_t kBlock = 512;  // words of a page
constexpr size_t kLanes = 32;
}  // namespace

extern "C" uint64_t sweep(const uint64_t* data, size_t words, int threads) {
  uint64_t total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
  for (size_t block = 0; block < words / kBlock; ++block) {
    const uint64_t* at = data + block * kBlock;
    uint64_t sums[kLanes] = {};
    for (size_t row = 0; row < kBlock; row += kLanes)
      for (size_t lane = 0; lane < kLanes; ++lane) sums[lane] += at[row + lane];
    for (uint64_t each : sums) total += each;
  }
  return total;
}
