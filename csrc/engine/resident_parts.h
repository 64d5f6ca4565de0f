// Resident attention of one group in two parts, sinks and window. The predictor gets these before a step
// reads the middle, and its labels are measured against them. Both use this one function, so both see the
// same bits.
#pragma once

#include <cstdint>

#include "kernels/feature_index.h"
#include "kernels/table.h"

namespace fluxion {

// Consecutive tokens of one KV head, in tiles that are full except the last.
struct TileRun {
  const char* tiles;     // tile i at tiles + pages[i] * bytes of a tile
  const int32_t* pages;  // [count]
  int count;
  int last_tokens;  // of the last tile, 1 to 16; the rest of it is not read
};

// Attends to each run in one call of the kernel and merges the two in float32.
//
// kernels: for the tiles; exact: float32 kernels of the same ISA. q: KV dtype [G][D]. masks: scratch, G times
// the longer run. Writes o [G][D] and lse [G] (of both runs together; 0 and -inf if they are empty), and
// parts [G][kParts].
void resident_parts(const KernelTable& kernels, const KernelTable& exact, const void* q, int G, int D,
                    Scale scale, const TileRun& sinks, const TileRun& local, uint16_t* masks, float* o,
                    float* lse, float* parts);

}  // namespace fluxion
