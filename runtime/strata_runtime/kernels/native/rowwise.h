// What a layer does with each row beside its products, as each level of processor does it. bfloat16, with float32 between.
#pragma once
#include "calls.h"

#if STRATA_X86
namespace strata {

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(address);
}

struct Rowwise {
  void (*normalize)(const NormCall& call, int64_t row);
  void (*rotate)(uint16_t* items, const uint16_t* cos, const uint16_t* sin, int64_t width);
  void (*gate)(const GateCall& call, int64_t row);
  // out [rows, width] = left + right, of which each may have the same row for all.
  void (*add)(const uint16_t* left, const uint16_t* right, int64_t right_stride, int64_t rows, int64_t width, uint16_t* out);
};

extern const Rowwise kRowwiseAvx2, kRowwiseAvx512;

inline const Rowwise& rowwise() { return cpu_level() == Level::avx512 ? kRowwiseAvx512 : kRowwiseAvx2; }

}  // namespace strata
#endif
