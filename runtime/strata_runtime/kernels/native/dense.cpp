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

constexpr int64_t kPairsAtOnce = 128;  // of all outputs of a block: what is written stays in the first-level cache until its lines are whole

// `Pair`: an unsigned integer of two items.
template <class Item, class Pair>
void pack(const PackCall& call) {
  static_assert(sizeof(Pair) == 2 * sizeof(Item));
  const int64_t pairs = pairs_of(call.columns), whole = call.columns / 2;
  parallel_for(static_cast<int>(call.threads), blocks_of(call.rows), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      Pair* out = reinterpret_cast<Pair*>(call.out) + block * pairs * kOutputs;
      int64_t packed = 0;  // pairs
#if STRATA_X86
      if (sizeof(Item) == 2 && (block + 1) * kOutputs <= call.rows && cpu_level() != Level::portable)
        packed = pack_block_avx2(reinterpret_cast<const uint16_t*>(call.weight) + block * kOutputs * call.stride, call.stride, whole,
                                 reinterpret_cast<uint32_t*>(out));
#endif
      for (int64_t first = packed; first < pairs; first += kPairsAtOnce) {
        const int64_t last = pairs - first < kPairsAtOnce ? pairs : first + kPairsAtOnce;
        for (int64_t output = 0; output < kOutputs; ++output) {
          const int64_t row = block * kOutputs + output;
          const Item* weights = reinterpret_cast<const Item*>(call.weight) + row * call.stride;
          Pair* to = out + place_of(2 * output, sizeof(Item)) / 2;  // the two items of a pair lie next to each other
          const int64_t there = row >= call.rows ? first : last < whole ? last : whole;
          int64_t pair = first;
          for (; pair < there; ++pair) __builtin_memcpy(to + pair * kOutputs, weights + 2 * pair, sizeof(Pair));
          for (; pair < last; ++pair) to[pair * kOutputs] = row < call.rows ? static_cast<Pair>(weights[2 * pair]) : Pair{0};  // an odd last column
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
    pack<uint8_t, uint16_t>(*call);
  else
    pack<uint16_t, uint32_t>(*call);
}

// tokens [M, K] x packed weight + bias -> out [M, N], bfloat16.
STRATA_API void strata_dense_linear(const DenseCall* call) {
#if STRATA_X86
  (cpu_level() == Level::avx512 ? dense_avx512 : dense_avx2)(*call);
#else
  (void)call;
#endif
}
