// Products of bfloat16 with weights of 16 bits, or of 8 with a scale per output (kernels/native_dense.py): packed once, multiplied at any number of tokens by
// one kernel, so that nothing is kept for a number. AVX-512 with BF16, or AVX2; elsewhere torch's own products are taken.
#include "dense.h"

using namespace strata;

namespace {

// In the order of native_dense.py. Addresses and sizes; strides in items.
struct PackCall {
  int64_t weight, rows, columns, stride;
  int64_t item_bytes;  // 2, or 1
  int64_t out;         // [blocks, pairs, 32, 2]
  int64_t threads;
};

template <class Item>
void pack(const PackCall& call) {
  const int64_t pairs = pairs_of(call.columns);
  parallel_for(static_cast<int>(call.threads), blocks_of(call.rows), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      Item* out = reinterpret_cast<Item*>(call.out) + block * pairs * kPairItems;
      for (int64_t output = 0; output < kOutputs; ++output) {
        const int64_t row = block * kOutputs + output;
        const Item* weights = reinterpret_cast<const Item*>(call.weight) + row * call.stride;
        for (int64_t column = 0; column < 2 * pairs; ++column) {
          const bool is_there = row < call.rows && column < call.columns;
          out[column / 2 * kPairItems + place_of(2 * output + column % 2, sizeof(Item))] = is_there ? weights[column] : Item{0};
        }
      }
    }
  });
}

}  // namespace

// Whether this processor multiplies packed weights.
STRATA_API int64_t strata_dense_runs() {
#if STRATA_X86
  return cpu_level() != Level::portable;
#else
  return 0;
#endif
}

// weight [N, K] -> packed, zeros where there are no outputs or columns.
STRATA_API void strata_dense_pack(const PackCall* call) {
  if (call->item_bytes == 1)
    pack<uint8_t>(*call);
  else
    pack<uint16_t>(*call);
}

// tokens [M, K] x packed weight + bias -> out [M, N], bfloat16.
STRATA_API void strata_dense_linear(const DenseCall* call) {
#if STRATA_X86
  (cpu_level() == Level::avx512 ? dense_avx512 : dense_avx2)(*call);
#else
  (void)call;
#endif
}
