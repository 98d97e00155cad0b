// Attention over paged keys and values (attention.h): pieces of the work for threads. AVX-512 with BF16, or AVX2; elsewhere torch's own is taken.
#include "attention.h"

using namespace strata;

// Every token of the spans sees its sequence, whose keys and values lie in the pages already.
STRATA_API void strata_attend(const AttentionCall* call) {
#if STRATA_X86
  const Span* spans = reinterpret_cast<const Span*>(call->spans);
  const int64_t group = call->heads / call->kv_heads;
  const auto attend = cpu_level() == Level::avx512 && call->width % kPairsOfLanes == 0 ? attend_avx512 : attend_avx2;
  // Piece by piece in turn, so that each thread has as many of the late ones, which see more.
  parallel_for(static_cast<int>(call->threads), call->threads, 1, [&](int64_t begin, int64_t end) {
    int64_t piece = 0;
    for (int64_t span = 0; span < call->span_count; ++span) {
      const int64_t queries = spans[span].length * group;
      for (int64_t first = 0; first < queries; first += kRows)
        for (int64_t head = 0; head < call->kv_heads; ++head, ++piece) {
          const int64_t whose = piece % call->threads;
          if (begin <= whose && whose < end) attend(*call, spans[span], head, first, queries - first < kRows ? queries - first : kRows);
        }
    }
  });
#else
  (void)call;
#endif
}
