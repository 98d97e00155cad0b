// What a layer does with each row beside its products (kernels/native_rowwise.py), in bfloat16 with float32 between: root mean square norms, rotary
// positions, gates. Each rounds where transformers' own forward does. AVX-512, or AVX2.
#include "rowwise.h"

using namespace strata;

namespace {

constexpr int64_t kRowsAtOnce = 16;  // a thread's least work

}  // namespace

// weight * x / sqrt(mean(x^2) + epsilon); x on its new scale is rounded before it meets the weight.
STRATA_API void strata_rms_norm(const NormCall* call) {
#if STRATA_X86
  parallel_for(static_cast<int>(call->threads), call->rows, kRowsAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) rowwise().normalize(*call, row);
  });
#else
  (void)call;
#endif
}

STRATA_API void strata_rotate(const RotateCall* call) {
#if STRATA_X86
  parallel_for(static_cast<int>(call->threads), call->tokens, kRowsAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
      for (int64_t head = 0; head < call->heads; ++head)
        rowwise().rotate(pointer<uint16_t>(call->items) + head * call->head_stride + token * call->token_stride, pointer<const uint16_t>(call->cos) + token * call->stride,
               pointer<const uint16_t>(call->sin) + token * call->stride, call->width);
  });
#else
  (void)call;
#endif
}

// `out` may be where `gate` is.
STRATA_API void strata_gate(const GateCall* call) {
#if STRATA_X86
  parallel_for(static_cast<int>(call->threads), call->rows, kRowsAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) rowwise().gate(*call, row);
  });
#else
  (void)call;
#endif
}
