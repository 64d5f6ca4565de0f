// Tasks that read blocks: score them all, read the best of every head.
#pragma once

#include <cstdint>

#include "engine/block_scores.h"
#include "engine/task_kind.h"

namespace fluxion {

inline bool is_block_size(int blk) { return blk == 16 || blk == 32 || blk == 64 || blk == 128; }

// The blocks of a task's middle.
FLUXION_API Blocks blocks_of(const Layer& layer, const Task& task);
// Tiles that a task reads by its budgets, about.
FLUXION_API int64_t block_bytes(const Layer& layer, const Task& task);
Wanted wanted_blocks(const Layer& layer, const Task& task, const Blocks& at);

// The steps of a task, which a bundle takes one by one.

// chosen[blocks]: the heads that read each block. scores[g * stride + i].
void choose_blocks(const Layer& layer, const Wanted& wanted, const float* scores, int64_t stride, int blocks,
                   uint16_t* chosen, Scratch* scratch);
// The pages of the blocks that heads chose, with their masks, and what it takes to read them. pages: physical
// page of every logical page.
FLUXION_API void list_blocks(const Layer& layer, const Blocks& at, const int32_t* pages,
                             const uint16_t* chosen, Scratch* scratch, Selection* out);
// The guard: after a task's selection was attended to, what it shows to be missing is read, too, and merged
// into the middle's state. The scratch has the task's scores and choice.
void read_more(const Layer& layer, const Task& task, Selection* chosen, Scratch* scratch);

Selection select_blocks(const Layer& layer, const Task& task, Scratch* scratch);
// Attends to what was selected, guard included.
Selection read_blocks(const Layer& layer, const Task& task, Selection chosen, Scratch* scratch, float* o,
                      float* lse);

}  // namespace fluxion
