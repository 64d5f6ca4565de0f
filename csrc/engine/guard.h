// The guard rail: what a task that has read its blocks can say about the ones it left out.
#pragma once

#include <cstdint>

#include "engine/block_scores.h"
#include "kernels/table.h"

namespace fluxion {

// A task after its blocks were attended to.
struct BlocksRead {
  const Blocks& blocks;
  const float* scores;  // [G][stride]: what the blocks were ranked by
  int64_t stride;
  const uint16_t* chosen;  // [blocks.count]: heads that chose a block
  bool together;           // what one head chose, all of them read
  Scale scale;
  const float* res_lse;  // [G], of sinks and window
  const float* mid_lse;  // [G], of what was read of the middle
};

// The share of its attention that a head is estimated to have left out, over the attention that it is known
// to have (so it can be above 1).
//
// The scores of blocks bound their attention (spread 1): exp(unread) over what is known bounds what is left
// out. But it would nearly always be far too much, so unread blocks are taken to stay as far below their
// scores as the read ones did: left out = exp(unread - read) * (what the read blocks have of what is known).
//
// read, unread: KernelTable::block_mass. NaN where nothing can be said: the read blocks weigh nothing.
double left_out(float read, float unread, float res_lse, float mid_lse);

// Those of `heads` (a bit each) that left out more than `guard`.
uint16_t heads_to_widen(const KernelTable& kernels, const BlocksRead& task, uint16_t heads, double guard);

}  // namespace fluxion
