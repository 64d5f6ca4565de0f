// The work of one worker on the residents of one request and KV head.
#pragma once

#include "engine/layer.h"
#include "engine/scratch.h"

namespace fluxion {

// Writes this step's token to the host, and to the window if there is one.
void append_token(const Layer& layer, const HostPool& pool, const Task& task);
// Attention to sinks and window into the layer's res_o and res_lse, with AttentionLayer::sinks.
void attend_residents(const Layer& layer, const Task& task, Scratch* scratch);
// The same with separate results for sinks and window. Writes parts: [G][kParts].
void attend_parts(const Layer& layer, const Task& task, Scratch* scratch, float* parts);
// Attention of a sliding-window layer to its newest tokens in the pool, into res_o and res_lse.
void attend_newest(const Layer& layer, const Task& task, Scratch* scratch);
// Writes the parts of an empty set of tokens.
void no_parts(const Layer& layer, float* parts);

}  // namespace fluxion
