// What the library is: the digest of the sources it was made from, and what this processor can do.
// Read by kernels/native/__init__.py, which loads the library only if the digest is that of the sources beside it.
#include "cpu.h"

#ifndef STRATA_DIGEST
#define STRATA_DIGEST "unknown"
#endif

STRATA_API const char* strata_digest() { return STRATA_DIGEST; }

// "avx512", "avx2" or "portable": the widest path that the kernels take here.
STRATA_API const char* strata_cpu_level() {
  switch (strata::cpu_level()) {
    case strata::Level::avx512: return "avx512";
    case strata::Level::avx2: return "avx2";
    default: return "portable";
  }
}

// Takes a narrower path than the processor has (0 portable, 1 AVX2, 2 AVX-512), for tests; gives the level that is then taken.
STRATA_API int strata_limit_cpu_level(int level) {
  strata::level_limit() = level;
  return static_cast<int>(strata::cpu_level());
}
