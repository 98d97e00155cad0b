// What one function of the library takes from Python, and from the function that runs whole layers (layer.cpp): numbers in one array, in the order in which a
// module of kernels/ packs them. Addresses and sizes; strides in items.
#pragma once
#include "planes.h"

namespace strata {

// native_rowwise.py
struct NormCall {
  int64_t rows_at, rows, width, stride;  // bfloat16 [rows, width]
  int64_t weight;                        // bfloat16 [width]
  int64_t out;                           // bfloat16 [rows, width]
  double epsilon;
  int64_t threads;
};

struct RotateCall {
  int64_t items, heads, tokens, width, head_stride, token_stride;  // bfloat16 [heads, tokens, width], turned in place
  int64_t cos, sin, stride;                                        // bfloat16 [tokens, width]
  int64_t threads;
};

// gate = silu(gate) * up
struct GateCall {
  int64_t gate, gate_stride, up, up_stride;  // bfloat16 [rows, width]
  int64_t rows, width;
  int64_t out;                               // bfloat16 [rows, width]
  int64_t threads;
};

// native_dense.py
struct DenseCall {
  int64_t tokens, token_rows, token_stride;
  int64_t packed, rows, columns;
  int64_t bias;    // bfloat16 [rows], or 0
  int64_t scales;  // bfloat16 [rows] where a weight is int8, else 0
  int64_t out, out_stride;
  int64_t threads;
};

// native_planes.py
struct PlanesCall {
  int64_t tokens, token_rows, token_columns, token_stride, type;
  int64_t out, out_stride, threads;
  int64_t rows, columns, bits, table, table_stride;
  int64_t planes[kMostBits], strides[kMostBits];
};

// native_channels.py
struct ChannelCall {
  int64_t tokens, token_rows, columns, token_stride, type;
  int64_t out, out_stride, threads;
  int64_t rows, codes, code_stride, scales;  // int8 [rows, columns], float32 [rows]
  int64_t smoothing, activation_scale;       // of the tokens' type [columns] and float32 [], or 0: a scale per token
};

// native_attention.py
struct AttentionCall {
  int64_t query, query_head_stride, query_token_stride;  // bfloat16 [heads, tokens, width]
  int64_t keys, values;                                  // bfloat16 or int8 [kv_heads, places, width]
  int64_t key_scales, value_scales;                      // bfloat16 [kv_heads, places], or 0
  int64_t heads, kv_heads, width, places, page_tokens;
  int64_t spans, span_count;                             // int64 [spans, 4]: row, start, length, where its pages begin
  int64_t pages;                                         // int64, one sequence's behind the other's
  int64_t slopes, sinks;                                 // float [heads], or 0
  double scale, soft_cap;                                // 0: none
  int64_t window, chunk;                                 // positions; 0: none
  int64_t first;                                         // position before which nothing is seen
  int64_t out;                                           // bfloat16 [tokens, heads, width]
  int64_t threads;
};

// native_pages.py
// Keys or values of some tokens: [heads, tokens, width], a token's values next to each other; strides in items.
struct EntriesCall {
  int64_t entries, head_stride, token_stride, type;
  int64_t heads, tokens, width;
  int64_t places;                // int64 [tokens]
  int64_t codes, scales, held;   // int8 [heads, held, width], bfloat16 [heads, held]
  int64_t out;                   // restored: [heads, tokens, width]
};

// ranks/shared_memory.py
struct MeetCall {
  int64_t segment, rank, ranks, buffer_bytes, meeting, patience_nanoseconds;
};

struct SumCall {
  MeetCall meet;
  int64_t items, count, item_bytes;  // 4: float32, 2: bfloat16
};

}  // namespace strata

STRATA_API void strata_rms_norm(const strata::NormCall* call);
STRATA_API void strata_rotate(const strata::RotateCall* call);
STRATA_API void strata_gate(const strata::GateCall* call);
STRATA_API void strata_dense_linear(const strata::DenseCall* call);
STRATA_API void strata_planes_linear(const strata::PlanesCall* call);
STRATA_API void strata_planes_decoded_linear(const strata::PlanesCall* call);
STRATA_API void strata_planes_linear_int8(const strata::PlanesCall* call);
STRATA_API void strata_channel_linear(const strata::ChannelCall* call);
STRATA_API void strata_attend(const strata::AttentionCall* call);
STRATA_API void strata_round_entries(const strata::EntriesCall* call);
STRATA_API int64_t strata_ranks_sum(const strata::SumCall* call);
