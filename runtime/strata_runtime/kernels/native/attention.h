// Attention over paged keys and values in bfloat16 (kernels/native_attention.py): one pass over a sequence's blocks for all queries of a key head that lie
// together, with the softmax taken along (FlashAttention, arXiv 2205.14135, section 3.1): what the levels of processors share.
#pragma once
#include <algorithm>
#include <cmath>

#include "calls.h"

#if STRATA_X86
namespace strata {

constexpr int kRows = 96;          // queries at once
constexpr int kPairsOfLanes = 32;  // columns that AVX-512 takes at once; of heads of other widths AVX2 takes 16

struct Span {
  int64_t row, start, length, pages;
};

// Where the positions of a sequence lie.
struct Places {
  const int64_t* pages;
  int64_t page_tokens;

  int64_t of(int64_t position) const { return pages[position / page_tokens] * page_tokens + position % page_tokens; }
};

struct Rule {
  float scale, soft_cap;
  int64_t window, chunk, first;

  explicit Rule(const AttentionCall& call)
      : scale(static_cast<float>(call.scale)), soft_cap(static_cast<float>(call.soft_cap)), window(call.window), chunk(call.chunk), first(call.first) {}

  int64_t first_seen(int64_t position) const {
    if (chunk) return std::max(first, position / chunk * chunk);
    return window && position + 1 > window ? std::max(first, position + 1 - window) : first;
  }
};

// `rows` queries of one key head from query number `first` on; query number i is that of head i % group of the span's token i / group.
void attend_avx2(const AttentionCall& call, const Span& span, int64_t kv_head, int64_t first, int64_t rows);
void attend_avx512(const AttentionCall& call, const Span& span, int64_t kv_head, int64_t first, int64_t rows);

}  // namespace strata
#endif
