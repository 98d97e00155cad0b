// The function that Python calls (kernels/native_groups.py).
#include "nibbles.h"

// tokens [M, K] x a weight of codes in groups -> out [M, N]. Whoever calls has asked whether this processor multiplies packed weights.
STRATA_API void strata_groups_linear(const strata::NibblesCall* call) {
#if STRATA_X86
  strata::nibbles_avx2(*call);
#else
  (void)call;
#endif
}
