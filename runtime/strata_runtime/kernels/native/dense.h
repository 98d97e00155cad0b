// Weights of 16 bits, or of 8 with a scale per output, packed for the products of dense.cpp: their layout, and what the levels of processors offer to it.
//
// Packed: blocks of 32 outputs; in a block, pair after pair of columns, the 32 outputs' pairs next to each other. A vector holds the pairs of neighbouring
// outputs, so that sums need no adding up across it, and a product reads the weight as one stream.
#pragma once
#include "calls.h"

namespace strata {

constexpr int kOutputs = 32;  // of a block
constexpr int kPairItems = 2 * kOutputs;

inline int64_t blocks_of(int64_t rows) { return (rows + kOutputs - 1) / kOutputs; }
inline int64_t pairs_of(int64_t columns) { return (columns + 1) / 2; }

// Where one of a pair's 64 values lies. Bytes that are unpacked: eight of the first half of the outputs, eight of the second, by turns.
inline int64_t place_of(int64_t item, int64_t item_bytes) { return item_bytes == 2 ? item : item % 32 / 8 * 16 + item / 32 * 8 + item % 8; }

struct Dense {
  const void* packed;
  int64_t rows, columns;
  const uint16_t *bias, *scales;

  explicit Dense(const DenseCall& call)
      : packed(reinterpret_cast<const void*>(call.packed)),
        rows(call.rows),
        columns(call.columns),
        bias(reinterpret_cast<const uint16_t*>(call.bias)),
        scales(reinterpret_cast<const uint16_t*>(call.scales)) {}
};

#if STRATA_X86
// 16-bit weights of a whole block, `stride` items from row to row, to where they are packed; gives how many of `pairs` it took from the first on.
int64_t pack_block_avx2(const uint16_t* weights, int64_t stride, int64_t pairs, uint32_t* out);

void dense_avx2(const DenseCall& call);
void dense_avx512(const DenseCall& call);
#endif

}  // namespace strata
