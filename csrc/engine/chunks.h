// The two stages of a task, scan and attention, split into chunks that idle workers can take.
//
// The boundaries of chunks depend only on the sizes of the task, and its owner merges the chunks in order. So
// neither the number of workers nor their timing changes a bit of the result.
#pragma once

#include <cstdint>
#include <functional>

#include "engine/layer.h"
#include "engine/scratch.h"

namespace fluxion {

// Attention of a group to the pages that the scratch lists. Writes o [G][D] and lse [G].
FLUXION_API void attend(const Layer& layer, const Task& task, const Selection& selection, Scratch* scratch,
                        float* o, float* lse);
// The same for `heads` queries over any pages of a KV head, with masks if the selection is masked. The
// scratch needs room for the parts. page_lse: as for KernelTable::attend_pages, or nullptr.
FLUXION_API void attend(const Layer& layer, const char* q, int heads, int kv_head, const Selection& selection,
                        const int32_t* pages, const uint16_t* masks, Scratch* scratch, float* o, float* lse,
                        float* page_lse = nullptr);

// Attention of a task's group to the first `count` tokens of the scratch, at least 1. Copies their rows to
// tiles of their own, which is faster than masks when few tokens of many tiles are read. Not for 8-bit tiles.
void attend_tokens(const Layer& layer, const Task& task, int count, Scratch* scratch, float* o, float* lse);

// Tokens with known weights: those that masks[i] names in physical page pages[i]. For head g, token t weighs
// weights[g * stride + at[i] * 16 + t] * e^unit[g].
struct Weighed {
  const int32_t *pages, *at;
  const uint16_t* masks;
  int count;   // pages
  int tokens;  // in all pages, at least 1
  const float* weights;
  int64_t stride;
  const float* unit;
};
// Attention of a task's group to weighed tokens. Reads only their values. Not for 8-bit tiles.
void attend_weighed(const Layer& layer, const Task& task, const Weighed& tokens, Scratch* scratch, float* o,
                    float* lse);

// Scores blocks of a task's request for `heads` queries: scores[h * stride + i]. Returns the bytes of
// metadata read.
FLUXION_API int64_t score_blocks(const Layer& layer, const Task& task, const Blocks& at, const char* q,
                                 int heads, float spread, float* scores, int64_t stride, Scratch* scratch);
// Scores all tokens of `count` physical pages into the scratch.
FLUXION_API void score_tokens(const Layer& layer, const Task& task, const int32_t* pages, int count,
                              Scratch* scratch);
// The same, approximately, from their sketches.
void score_sketches(const Layer& layer, const Task& task, const int32_t* pages, int count, Scratch* scratch);
// KernelTable::skim_sketches of `count` physical pages.
void skim_sketches(const Layer& layer, const Task& task, const int32_t* pages, int count, float* about,
                   float* most, int64_t stride, Scratch* scratch);
// Calls body(g, helper) for every head of a group. bytes: of scores that one head goes through.
void for_each_head(const Layer& layer, int64_t bytes, Scratch* scratch,
                   const std::function<void(int, Scratch*)>& body);
// Scores the first `count` tokens of the scratch into the scratch.
FLUXION_API void score_rows(const Layer& layer, const Task& task, int count, Scratch* scratch);

}  // namespace fluxion
