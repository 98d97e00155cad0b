// Codes out of bit-planes in plain C++, 64 bits at a time; compiled anew for each level of processor that includes it in a function of its own.
#pragma once
#include <cstring>

#include "planes.h"

#define STRATA_PLAIN inline __attribute__((always_inline))

namespace strata {

// codes: of the tile's columns in their order, a byte each, 8 * tile_bytes of them.
STRATA_PLAIN void plain_codes(const Planes& weight, int64_t row, int64_t tile, uint8_t* codes) {
  const int run = weight.tile_bytes(tile);
  const uint64_t ones = 0x0101010101010101u;
  for (int b = 0; b < 8; ++b) {
    for (int byte = 0; byte < run; byte += 8) {
      uint64_t found = 0;
      for (int place = 0; place < weight.bits; ++place) {
        uint64_t bits;
        std::memcpy(&bits, weight.planes[place] + row * weight.stride[place] + tile * kTileBytes + byte, 8);
        found = (found << 1) | ((bits >> b) & ones);
      }
      std::memcpy(codes + b * run + byte, &found, 8);
    }
  }
}

}  // namespace strata
