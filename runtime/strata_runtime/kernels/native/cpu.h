// Which instructions this processor has, asked once; and the mark of functions that the library gives to the outside.
#pragma once
#include <cstdint>

#define STRATA_API extern "C" __attribute__((visibility("default")))

#if defined(__x86_64__)
#define STRATA_X86 1
#define STRATA_AVX2 __attribute__((target("avx2,fma,f16c,bmi2")))
#define STRATA_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx512vnni,gfni,avx2,fma,f16c,bmi2")))
#define STRATA_CLMUL __attribute__((target("pclmul,sse4.1")))
#define STRATA_WIDE_CLMUL __attribute__((target("vpclmulqdq,avx512f,avx512vl,pclmul,sse4.1")))
#else
#define STRATA_X86 0
#endif

namespace strata {

enum class Level { portable = 0, avx2 = 1, avx512 = 2 };

inline Level detected_level() {
#if STRATA_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16") &&
      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("gfni"))
    return Level::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return Level::avx2;
#endif
  return Level::portable;
}

inline int& level_limit() {
  static int limit = static_cast<int>(Level::avx512);
  return limit;
}

inline Level cpu_level() {
  static const Level detected = detected_level();
  return static_cast<int>(detected) < level_limit() ? detected : static_cast<Level>(level_limit());
}

}  // namespace strata
