// What a layer reads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace fluxion {

class TaskKind;

// The C++ side of LayerPlan (policy/base.py), which says what each field means. B requests, H KV heads, Hq
// query heads; everything contiguous. A plan may serve any number of layers; while one is open it does not
// change, and its tensors live.
struct LayerPlan {
  int batch, kv_heads, q_heads;
  const int32_t* blk;              // [B][H]
  const float* budget;             // [B][Hq]
  const float* value;              // [B][H]
  const int32_t* owner = nullptr;  // [B][H]: an Executor; nullptr: Executor::kAny for all
  // Tasks that are not done by blocks; the first kind that takes a group has it.
  std::vector<std::shared_ptr<const TaskKind>> kinds;
};

}  // namespace fluxion
