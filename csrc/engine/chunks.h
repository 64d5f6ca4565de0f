// The two stages of a task, scan and attention, in chunks that idle workers can take.
//
// Nothing but the sizes of a task decides where it is cut, and its owner merges the chunks in their order. So
// neither the number of workers nor their timing changes a bit of the result.
#pragma once

#include <cstdint>
#include <functional>

#include "engine/layer.h"
#include "engine/scratch.h"

namespace fluxion {

// Attention of a group to what the scratch lists. Written: o [G][D], lse [G].
FLUXION_API void attend(const Layer& layer, const Task& task, const Selection& selection, Scratch* scratch,
                        float* o, float* lse);
// The same of `heads` queries over any pages of a KV head, with masks if the selection is masked. The scratch
// has room for the parts. page_lse: as for KernelTable::attend_pages, or nullptr.
FLUXION_API void attend(const Layer& layer, const char* q, int heads, int kv_head, const Selection& selection,
                        const int32_t* pages, const uint16_t* masks, Scratch* scratch, float* o, float* lse,
                        float* page_lse = nullptr);

// Attention of a task's group to the scratch's tokens, `count` of them, at least 1. Their rows are copied to
// tiles of their own first, which is faster than masks where few tokens of many tiles are read. Not of tiles
// of 8 bits.
void attend_tokens(const Layer& layer, const Task& task, int count, Scratch* scratch, float* o, float* lse);

// Tokens whose weights are known, those that masks[i] names of physical page pages[i]: token t weighs
// weights[g * stride + at[i] * 16 + t] times e^unit[g] for head g.
struct Weighed {
  const int32_t *pages, *at;
  const uint16_t* masks;
  int count;   // pages
  int tokens;  // of them all, at least 1
  const float* weights;
  int64_t stride;
  const float* unit;
};
// Attention of a task's group to them, which reads their values alone. Not of tiles of 8 bits.
void attend_weighed(const Layer& layer, const Task& task, const Weighed& tokens, Scratch* scratch, float* o,
                    float* lse);

// Scores of blocks of a task's request for `heads` queries: scores[h * stride + i]; the bytes of metadata
// read.
FLUXION_API int64_t score_blocks(const Layer& layer, const Task& task, const Blocks& at, const char* q,
                                 int heads, float spread, float* scores, int64_t stride, Scratch* scratch);
// Scores of all tokens of `count` physical pages into the scratch.
FLUXION_API void score_tokens(const Layer& layer, const Task& task, const int32_t* pages, int count,
                              Scratch* scratch);
// The same by their sketches, about.
void score_sketches(const Layer& layer, const Task& task, const int32_t* pages, int count, Scratch* scratch);
// KernelTable::skim_sketches of `count` physical pages.
void skim_sketches(const Layer& layer, const Task& task, const int32_t* pages, int count, float* about,
                   float* most, int64_t stride, Scratch* scratch);
// body(g, helper) for every head of a group, each of which goes through so many bytes of scores.
void for_each_head(const Layer& layer, int64_t bytes, Scratch* scratch,
                   const std::function<void(int, Scratch*)>& body);
// Scores of the scratch's tokens, `count` of them, into the scratch.
FLUXION_API void score_rows(const Layer& layer, const Task& task, int count, Scratch* scratch);

}  // namespace fluxion
