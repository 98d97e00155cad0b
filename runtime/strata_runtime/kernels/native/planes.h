// A weight in bit-planes as the kernels see it, and what they share. The layout is that of formats/planes/planes.py: tiles of 512 columns, byte j of a tile
// of w columns that starts at s holds the bits of columns s + b * w/8 + j, b = 0..7, the least significant bit first. So byte vectors hold 8 runs of
// neighbouring columns.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>

#include "cpu.h"
#include "parallel.h"

namespace strata {

constexpr int kTile = 512;      // columns
constexpr int kTileBytes = 64;  // of one plane
constexpr int kMostBits = 8;

enum class Type : int { bfloat16 = 0, float16 = 1, float32 = 2 };

inline int64_t item_bytes(Type type) { return type == Type::float32 ? 4 : 2; }

// planes: most significant first; a row of a plane is (columns + 7) / 8 bytes, `stride` apart from the next; table: 2^bits values of a row, or null.
struct Planes {
  const uint8_t* planes[kMostBits];
  int64_t stride[kMostBits];
  const uint8_t* table;
  int64_t table_stride_bytes;
  int64_t rows, columns;  // columns: padded to 64
  int bits;

  int64_t tiles() const { return (columns + kTile - 1) / kTile; }
  int64_t full_tiles() const { return columns / kTile; }
  // Bytes of a plane in a tile: 64, in the last one perhaps fewer.
  int tile_bytes(int64_t tile) const {
    const int64_t left = (columns - tile * kTile) / 8;
    return static_cast<int>(left < kTileBytes ? left : kTileBytes);
  }
};

// A matrix of activations, rows `stride` items apart and items of a row next to each other.
struct Matrix {
  const void* data;
  int64_t rows, columns, stride;
  Type type;

  const uint8_t* row(int64_t place) const { return static_cast<const uint8_t*>(data) + place * stride * item_bytes(type); }
};

// Aligned memory of a thread, kept for its next call.
class Scratch {
 public:
  ~Scratch() { ::operator delete(data_, std::align_val_t{64}); }
  template <class T>
  T* of(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    if (bytes > bytes_) {
      ::operator delete(data_, std::align_val_t{64});
      data_ = nullptr;
      data_ = ::operator new(bytes, std::align_val_t{64});
      bytes_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

inline float float_of_bfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  __builtin_memcpy(&value, &wide, 4);
  return value;
}

inline uint16_t bfloat16_of_float(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float float_of_float16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 31u, fraction = half & 0x3ffu;
  float value;
  if (exponent == 0) {
    value = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -value : value;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23) | (fraction << 13);
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

inline uint16_t float16_of_float(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7e00u;
  if (bits >= 0x477ff000u) return sign | 0x7c00u;  // rounds beyond the largest
  if (bits < 0x38800000u) {                        // subnormal: let the addition round
    float small;
    __builtin_memcpy(&small, &bits, 4);
    small += 0.5f;  // its last bit is 2^-24
    __builtin_memcpy(&bits, &small, 4);
    return sign | static_cast<uint16_t>(bits - 0x3f000000u);
  }
  bits += 0xfffu + ((bits >> 13) & 1u);
  return sign | static_cast<uint16_t>((bits >> 13) - (112u << 10));
}

inline float value_at(const void* data, int64_t place, Type type) {
  if (type == Type::float32) return static_cast<const float*>(data)[place];
  const uint16_t bits = static_cast<const uint16_t*>(data)[place];
  return type == Type::bfloat16 ? float_of_bfloat16(bits) : float_of_float16(bits);
}

inline void store_at(void* data, int64_t place, Type type, float value) {
  if (type == Type::float32)
    static_cast<float*>(data)[place] = value;
  else
    static_cast<uint16_t*>(data)[place] = type == Type::bfloat16 ? bfloat16_of_float(value) : float16_of_float(value);
}

}  // namespace strata
