// Collectives of the ranks of one stage over a shared segment of memory (ranks/shared_memory.py): sums of float32 and bfloat16, and the meeting that
// everything else that ranks tell each other is made of.
//
// A segment: a line with the word that ends all waiting, a line for each rank with the number of the meeting that it has come to, then two buffers for
// each rank. Ranks write into the one buffer of meeting n while others may still read the other one, of meeting n - 1: nobody comes to meeting n + 1 and
// writes again before all have come to n, and so have read what was there for n - 1.
#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "calls.h"

using namespace strata;

namespace {

constexpr int64_t kLine = 64;
constexpr int kSpins = 1 << 12;         // some ten microseconds: what ranks of one step are apart
constexpr int64_t kAwakeNanoseconds = 2'000'000;  // then a rank that waits sleeps in between
constexpr int64_t kNapNanoseconds = 50'000;

std::atomic<int64_t>& word(const MeetCall& call, int64_t line) {
  return *reinterpret_cast<std::atomic<int64_t>*>(call.segment + line * kLine);
}

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{1'000'000'000} * time.tv_sec + time.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Whether a rank has come: 0, -1 if all waiting was ended, else 1 + the rank that is late.
int64_t await(const MeetCall& call, int64_t rank) {
  const auto& come = word(call, 1 + rank);
  const auto& ended = word(call, 0);
  for (int spin = 0; spin < kSpins; ++spin) {
    if (come.load(std::memory_order_acquire) >= call.meeting) return 0;
    relax();
  }
  const int64_t started = now();
  while (come.load(std::memory_order_acquire) < call.meeting) {
    if (ended.load(std::memory_order_acquire)) return -1;
    const int64_t waited = now() - started;
    if (waited > call.patience_nanoseconds) return 1 + rank;
    if (waited < kAwakeNanoseconds) {
      sched_yield();
    } else {
      const timespec nap{0, kNapNanoseconds};
      nanosleep(&nap, nullptr);
    }
  }
  return 0;
}

int64_t meet(const MeetCall& call) {
  word(call, 1 + call.rank).store(call.meeting, std::memory_order_release);
  for (int64_t rank = 0; rank < call.ranks; ++rank)
    if (const int64_t late = await(call, rank)) return late;
  return word(call, 0).load(std::memory_order_acquire) ? -1 : 0;
}

char* buffer(const MeetCall& call, int64_t rank) {
  const int64_t place = 2 * rank + call.meeting % 2;
  return reinterpret_cast<char*>(call.segment + (1 + call.ranks) * kLine + place * call.buffer_bytes);
}

struct Float32 {
  using Stored = float;
  static float read(float item) { return item; }
  static float write(float value) { return value; }
};

struct Bfloat16 {
  using Stored = uint16_t;
  static float read(uint16_t item) {
    const uint32_t bits = uint32_t{item} << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  static uint16_t write(float value) {  // to nearest, ties to even; what is no number stays none
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>(value == value ? nearest : 0x7fc0);
  }
};

constexpr int64_t kBlock = 1024;  // items whose sums stay in the first cache

// In the order of ranks, so that all have the same bits. `ours`: the items of this rank, which its own cache has.
template <class Format>
void sum(const SumCall& call, typename Format::Stored* ours) {
  float sums[kBlock];
  for (int64_t begin = 0; begin < call.count; begin += kBlock) {
    const int64_t count = call.count - begin < kBlock ? call.count - begin : kBlock;
    for (int64_t rank = 0; rank < call.meet.ranks; ++rank) {
      const auto* from = (rank == call.meet.rank ? ours : reinterpret_cast<const typename Format::Stored*>(buffer(call.meet, rank))) + begin;
      if (rank == 0)
        for (int64_t item = 0; item < count; ++item) sums[item] = Format::read(from[item]);
      else
        for (int64_t item = 0; item < count; ++item) sums[item] += Format::read(from[item]);
    }
    for (int64_t item = 0; item < count; ++item) ours[begin + item] = Format::write(sums[item]);
  }
}

}  // namespace

// Come to a meeting and wait for all. 0, -1 if all waiting was ended, else 1 + the rank that did not come within the patience.
STRATA_API int64_t strata_ranks_meet(const MeetCall* call) { return meet(*call); }

// No rank waits any more, now or later.
STRATA_API void strata_ranks_end(int64_t segment) {
  reinterpret_cast<std::atomic<int64_t>*>(segment)->store(1, std::memory_order_release);
}

// Items, at most a buffer's: replaced by their sums over all ranks. As `strata_ranks_meet`.
STRATA_API int64_t strata_ranks_sum(const SumCall* call) {
  void* items = reinterpret_cast<void*>(call->items);
  std::memcpy(buffer(call->meet, call->meet.rank), items, call->count * call->item_bytes);
  if (const int64_t late = meet(call->meet)) return late;
  if (call->item_bytes == 4)
    sum<Float32>(*call, static_cast<float*>(items));
  else
    sum<Bfloat16>(*call, static_cast<uint16_t*>(items));
  return 0;
}
