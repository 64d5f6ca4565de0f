#pragma once

#include "kernels/table.h"

namespace fluxion::FLUXION_ISA {
namespace {

inline void compare_codes(const uint8_t* codes, int64_t words, uint8_t limit, uint64_t* above,
                          uint64_t* equal) {
  for (int64_t i = 0; i < words; ++i) compare_bytes(codes + 64 * i, limit, &above[i], &equal[i]);
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
