// Products of bfloat16 with weights of 4 or 3 bits in groups (kernels/native_groups.py), whole blocks of 64 rows.
#pragma once
#include "planes.h"

namespace strata {

// In the order of native_groups.py. Addresses and sizes; strides in items.
struct NibblesCall {
  int64_t tokens, token_rows, token_stride;  // bfloat16 [tokens, columns]
  int64_t out, out_stride, threads;          // bfloat16 [tokens, rows]
  int64_t rows, columns, group;              // rows: whole blocks
  int64_t codes, lowest;                     // nibbles and 0; or the plane of two bits and that of the lowest
  int64_t scales_and_zeros, group_stride;    // bfloat16 [groups, rows, 2]
  int64_t rounds;                            // whether values are rounded to bfloat16 before they are multiplied
};

#if STRATA_X86
void nibbles_avx2(const NibblesCall& call);
#endif

}  // namespace strata
