// What one worker does for the residents of one request and KV head.
#pragma once

#include "engine/layer.h"
#include "engine/scratch.h"

namespace fluxion {

// This step's token: to the host, and to the window where there is one.
void append_token(const Layer& layer, const HostPool& pool, const Task& task);
// Attention to sinks and window, into the layer's res_o and res_lse; logits without value count there, too.
void attend_residents(const Layer& layer, const Task& task, Scratch* scratch);
// The same with sinks and window apart. parts: [G][kParts], written.
void attend_parts(const Layer& layer, const Task& task, Scratch* scratch, float* parts);
// Attention of a layer with a window to its newest tokens, where they lie in the pool, into the same.
void attend_newest(const Layer& layer, const Task& task, Scratch* scratch);
// The parts of no tokens.
void no_parts(const Layer& layer, float* parts);

}  // namespace fluxion
