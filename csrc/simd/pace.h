#pragma once

#include "simd/types.h"

// How lines are fetched of kSide lists that are read side by side: how many bytes ahead of their use, all
// lists together, which is far enough to cover the latency of memory and near enough for the nearest cache (a
// scan looks one block of entries ahead, whatever this says); and how many multiplications apart, of which
// kernels/throttle.h finds the best. Found by measurement on Intel's cores; an ISA that only others' cores
// choose specialises it.
namespace fluxion::FLUXION_ISA {
namespace {

template <int kSide>
struct Pace {
  static constexpr int kAheadBytes = 12 << 10;
  static constexpr int kGaps[] = {0};  // ascending
};

}  // namespace
}  // namespace fluxion::FLUXION_ISA
