// Resident attention of one group in two parts, sinks and window: what the predictor knows about a step
// before anything is read of the middle, and what its labels are measured against. One function for both, so
// that both see the same bits.
#pragma once

#include <cstdint>

#include "kernels/feature_index.h"
#include "kernels/table.h"

namespace fluxion {

// Consecutive tokens of one KV head, in whole tiles but for the last.
struct TileRun {
  const char* tiles;     // tile i at tiles + pages[i] * bytes of a tile
  const int32_t* pages;  // [count]
  int count;
  int last_tokens;  // of the last tile, 1 to 16; what lies behind them is not read
};

// Attends to each run in one call of the kernel and merges the two in float32.
//
// kernels: of the tiles; exact: the same ISA's of float32. q: KV dtype [G][D]. masks: scratch, G times the
// longer run. Written: o [G][D], lse [G] (of both runs together; of nothing 0 and -inf), and parts
// [G][kParts].
void resident_parts(const KernelTable& kernels, const KernelTable& exact, const void* q, int G, int D,
                    Scale scale, const TileRun& sinks, const TileRun& local, uint16_t* masks, float* o,
                    float* lse, float* parts);

}  // namespace fluxion
