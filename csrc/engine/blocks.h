// Tasks that read blocks: they score all blocks and read the best ones of every head.
#pragma once

#include <cstdint>

#include "engine/block_scores.h"
#include "engine/task_kind.h"

namespace fluxion {

inline bool is_block_size(int blk) { return blk == 16 || blk == 32 || blk == 64 || blk == 128; }

// The blocks of a task's middle.
FLUXION_API Blocks blocks_of(const Layer& layer, const Task& task);
// Estimated bytes of tiles that a task reads, from its budgets.
FLUXION_API int64_t block_bytes(const Layer& layer, const Task& task);
Wanted wanted_blocks(const Layer& layer, const Task& task, const Blocks& at);

// The steps of a task; a bundle calls them one by one.

// chosen[blocks]: the heads that read each block. scores[g * stride + i].
void choose_blocks(const Layer& layer, const Wanted& wanted, const float* scores, int64_t stride, int blocks,
                   uint16_t* chosen, Scratch* scratch);
// Lists the pages of the blocks that heads chose, with their masks, and counts the reads. pages: physical
// page of every logical page.
FLUXION_API void list_blocks(const Layer& layer, const Blocks& at, const int32_t* pages,
                             const uint16_t* chosen, Scratch* scratch, Selection* out);

Selection select_blocks(const Layer& layer, const Task& task, Scratch* scratch);
// Selects blocks and attends to them.
Selection read_blocks(const Layer& layer, const Task& task, Scratch* scratch, float* o, float* lse);

}  // namespace fluxion
