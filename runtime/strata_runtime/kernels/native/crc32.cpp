// CRC-32 as zlib computes it, by products without carries: 16 bytes are multiplied by a power of x and added to those that follow them, modulo the
// polynomial. (Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ", Intel 2009.) And reading a file with the check of what is
// read taken while it lies in the processor's cache. Knows nothing of what is read. Without such products there is no function here: callers take zlib.
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "cpu.h"

#if STRATA_X86
#include <immintrin.h>
#endif

namespace strata {
namespace {

constexpr uint32_t kPolynomial = 0xedb88320u;  // bits mirrored, as all that follows
constexpr int64_t kPieceBytes = 1 << 18;       // read at once: what a core's second cache holds

constexpr uint32_t times_x(uint32_t value) { return (value >> 1) ^ (value & 1 ? kPolynomial : 0); }

// x^exponent modulo the polynomial; one place up, since the product of mirrored numbers comes out one place down.
constexpr uint64_t power(int exponent) {
  uint32_t value = 0x80000000u;
  for (int i = 0; i < exponent; ++i) value = times_x(value);
  return uint64_t{value} << 1;
}
static_assert(power(4 * 128 + 32) == 0x154442bd4 && power(4 * 128 - 32) == 0x1c6e41596, "k1 and k2 of the paper");
static_assert(power(128 + 32) == 0x1751997d0 && power(128 - 32) == 0x0ccaa009e, "k3 and k4 of the paper");

constexpr std::array<uint32_t, 256> table_of_bytes() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int i = 0; i < 8; ++i) value = times_x(value);
    table[byte] = value;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kTable = table_of_bytes();

uint32_t by_bytes(uint32_t state, const uint8_t* data, int64_t size) {
  for (int64_t i = 0; i < size; ++i) state = kTable[(state ^ data[i]) & 0xff] ^ (state >> 8);
  return state;
}

#if STRATA_X86

STRATA_CLMUL inline __m128i load(const uint8_t* data) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data)); }

// What moves 16 bytes on by `bits` of message: a factor for each half.
constexpr uint64_t low_factor(int bits) { return power(bits + 32); }
constexpr uint64_t high_factor(int bits) { return power(bits - 32); }

template <int kBits>
STRATA_CLMUL inline __m128i moved(__m128i sum, __m128i next) {
  constexpr uint64_t kLow = low_factor(kBits), kHigh = high_factor(kBits);
  const __m128i factors = _mm_set_epi64x(static_cast<int64_t>(kHigh), static_cast<int64_t>(kLow));
  const __m128i low = _mm_clmulepi64_si128(sum, factors, 0x00), high = _mm_clmulepi64_si128(sum, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// The state after a message that is congruent to `sum` followed by `data`.
STRATA_CLMUL inline uint32_t finished(__m128i sum, const uint8_t* data, int64_t size) {
  for (; size >= 16; data += 16, size -= 16) sum = moved<128>(sum, load(data));
  uint8_t last[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(last), sum);
  return by_bytes(by_bytes(0, last, 16), data, size);
}

// size >= 64
STRATA_CLMUL uint32_t folded(uint32_t state, const uint8_t* data, int64_t size) {
  __m128i sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = load(data + 16 * i);
  sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  for (data += 64, size -= 64; size >= 64; data += 64, size -= 64)
    for (int i = 0; i < 4; ++i) sums[i] = moved<512>(sums[i], load(data + 16 * i));
  for (int i = 1; i < 4; ++i) sums[i] = moved<128>(sums[i - 1], sums[i]);
  return finished(sums[3], data, size);
}

template <int kBits>
STRATA_WIDE_CLMUL inline __m512i moved(__m512i sum, __m512i next) {
  constexpr uint64_t kLow = low_factor(kBits), kHigh = high_factor(kBits);
  const __m512i factors = _mm512_broadcast_i32x4(_mm_set_epi64x(static_cast<int64_t>(kHigh), static_cast<int64_t>(kLow)));
  const __m512i low = _mm512_clmulepi64_epi128(sum, factors, 0x00), high = _mm512_clmulepi64_epi128(sum, factors, 0x11);
  return _mm512_ternarylogic_epi64(low, high, next, 0x96);  // the sum of the three
}

// size >= 256
STRATA_WIDE_CLMUL uint32_t folded_wide(uint32_t state, const uint8_t* data, int64_t size) {
  __m512i sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = _mm512_loadu_si512(data + 64 * i);
  sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
  for (data += 256, size -= 256; size >= 256; data += 256, size -= 256)
    for (int i = 0; i < 4; ++i) sums[i] = moved<2048>(sums[i], _mm512_loadu_si512(data + 64 * i));
  for (int i = 1; i < 4; ++i) sums[i] = moved<512>(sums[i - 1], sums[i]);
  for (; size >= 64; data += 64, size -= 64) sums[3] = moved<512>(sums[3], _mm512_loadu_si512(data));
  __m128i sum = _mm512_extracti32x4_epi32(sums[3], 0);
  sum = moved<128>(sum, _mm512_extracti32x4_epi32(sums[3], 1));
  sum = moved<128>(sum, _mm512_extracti32x4_epi32(sums[3], 2));
  sum = moved<128>(sum, _mm512_extracti32x4_epi32(sums[3], 3));
  return finished(sum, data, size);
}

bool has_products() {
  static const bool found = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  return found && cpu_level() != Level::portable;
}

bool has_wide_products() {
  static const bool found = __builtin_cpu_supports("vpclmulqdq");
  return found && has_products() && cpu_level() == Level::avx512;
}

uint32_t crc32(uint32_t crc, const uint8_t* data, int64_t size) {
  if (size >= 256 && has_wide_products()) return ~folded_wide(~crc, data, size);
  if (size >= 64 && has_products()) return ~folded(~crc, data, size);
  return ~by_bytes(~crc, data, size);
}

#else

bool has_products() { return false; }
uint32_t crc32(uint32_t crc, const uint8_t* data, int64_t size) { return ~by_bytes(~crc, data, size); }

#endif

}  // namespace
}  // namespace strata

// Whether what follows is faster than zlib, and may be called.
STRATA_API int strata_has_crc32() { return strata::has_products(); }

// Of `size` bytes that follow those whose CRC-32 is `crc` (0: none).
STRATA_API uint32_t strata_crc32(uint32_t crc, const uint8_t* data, int64_t size) { return strata::crc32(crc, data, size); }

// Fills `count` pieces of memory one after the other from the bytes of an open file from `offset` on, and takes the CRC-32 of each.
// Gives how many bytes were read, fewer where the file ends; or an errno, negative.
STRATA_API int64_t strata_read_crc32(
    int file, int64_t offset, int count, uint8_t* const* pieces, const int64_t* sizes, uint32_t* checks) {
  int64_t total = 0;
  for (int i = 0; i < count; ++i) {
    checks[i] = 0;
    for (int64_t done = 0; done < sizes[i];) {
      const int64_t left = sizes[i] - done;
      const ssize_t got = pread(file, pieces[i] + done, left < strata::kPieceBytes ? left : strata::kPieceBytes, offset + total);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return -errno;
      if (got == 0) return total;
      checks[i] = strata::crc32(checks[i], pieces[i] + done, got);
      done += got;
      total += got;
    }
  }
  return total;
}
