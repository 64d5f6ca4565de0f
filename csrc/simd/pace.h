#pragma once

#include "simd/types.h"

// How lines of kSide lists that are read side by side are prefetched. kAheadBytes, of all lists together,
// covers the latency of memory and fits in the L1 cache (a scan always looks one block of entries ahead).
// kGaps: multiplications between prefetches, of which kernels/throttle.h finds the best. Measured on Intel's
// cores; an ISA that only other cores choose specialises it.
namespace fluxion::FLUXION_ISA {
namespace {

template <int kSide>
struct Pace {
  static constexpr int kAheadBytes = 12 << 10;
  static constexpr int kGaps[] = {0};  // ascending
};

}  // namespace
}  // namespace fluxion::FLUXION_ISA
