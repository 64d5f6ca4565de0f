// The plan of a layer: what it reads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace fluxion {

class TaskKind;

// The C++ side of LayerPlan (policy/base.py), which documents the fields. B requests, H KV heads, Hq query
// heads; everything contiguous. A plan may serve any number of layers. While one is open the plan does not
// change, and its tensors stay alive.
struct LayerPlan {
  int batch, kv_heads, q_heads;
  const int32_t* blk;              // [B][H]
  const float* budget;             // [B][Hq]
  const float* value;              // [B][H]
  const int32_t* owner = nullptr;  // [B][H]: an Executor; nullptr: Executor::kAny for all
  // Kinds of tasks other than blocks. A group belongs to the first kind that takes it.
  std::vector<std::shared_ptr<const TaskKind>> kinds;
};

}  // namespace fluxion
