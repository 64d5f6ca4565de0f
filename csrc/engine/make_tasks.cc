// The open layer's tasks, in the order of the queue.
#include <algorithm>
#include <bit>
#include <cmath>

#include "engine/engine.h"

namespace fluxion {

namespace {

// Maps a float to an unsigned number with the same order, NaN lowest.
uint32_t ordered(float value) {
  if (std::isnan(value)) return 0;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

}  // namespace

// Fills tasks_ in the order of the queue. Returns how many tasks each lane has.
Engine::Lanes Engine::make_tasks() {
  Lanes lanes{};
  int count = 0, ranked_tokens = 0;
  int64_t middle_tokens = 0;
  task_bytes_ = 0;
  for (int b = 0; b < step_.batch(); ++b) {
    if (skip_[b]) continue;
    middle_tokens += static_cast<int64_t>(step_.middle_tokens(b)) * config_.q_heads;
    for (int h = 0; h < shape_.kv_heads; ++h) {
      const Task task{b, h};
      const int i = layer_.index(task);
      int lane;
      const bool made = make_task(task, &lane, &ranked_tokens);
      waits_[i].store(made ? 2 : 1, std::memory_order_relaxed);
      if (!made) continue;
      ++lanes[lane];
      order_[count++] = static_cast<uint64_t>(lane) << (32 + TaskQueue::kBits) | static_cast<uint64_t>(i);
    }
  }
  reserve_tasks(ranked_tokens);
  bundles_.begin_layer(layer_, [&](int i, int blk) {
    const LayerPlan& plan = *layer_.plan;
    return !skip_[i / shape_.kv_heads] && plan.blk[i] == blk && kinds_[i] == nullptr &&
           waits_[i].load(std::memory_order_relaxed) == 2 && plan.owner != nullptr &&
           plan.owner[i] == static_cast<int32_t>(Executor::kCpu);
  });
  sort_tasks(count);
  totals_[kStatMiddleTokens].fetch_add(middle_tokens, std::memory_order_relaxed);
  totals_[kStatTasks].fetch_add(count, std::memory_order_relaxed);
  return lanes;
}

// Sorts by lane, value, index; the index takes kBits.
void Engine::sort_tasks(int count) {
  for (int n = 0; n < count; ++n) {
    const int i = TaskQueue::task_of(static_cast<int64_t>(order_[n]));
    order_[n] |= static_cast<uint64_t>(~ordered(bundles_.value(layer_, i))) << TaskQueue::kBits;
  }
  std::sort(order_.begin(), order_.begin() + count);
  for (int n = 0; n < count; ++n)
    tasks_[n] = layer_.task(TaskQueue::task_of(static_cast<int64_t>(order_[n])));
}

// The kind of a task; nullptr: blocks.
const TaskKind* Engine::kind_of(const Task& task) const {
  for (const auto& kind : layer_.plan->kinds) {
    if (kind->takes(layer_, task)) return kind.get();
  }
  return nullptr;
}

// Returns whether a group has a task, and for which lane. An invalid plan fails the layer.
bool Engine::make_task(const Task& task, int* lane, int* ranked_tokens) {
  const int blk = layer_.blk(task);
  if (blk == 0) return false;
  const TaskKind* kind = kinds_[layer_.index(task)] = kind_of(task);
  if (kind == nullptr && !is_block_size(blk)) {
    fail_task(task, "asks for blocks of " + std::to_string(blk) +
                        " tokens; a block has 16, 32, 64 or 128 (0 for no task), and the plan brings no kind "
                        "of task for another");
    return false;
  }
  const float* budget = layer_.budget(task);
  if (step_.middle_tokens(task.request) == 0 ||
      std::none_of(budget, budget + layer_.group, [](float f) { return f > 0; })) {
    return false;
  }
  const int32_t* owner = layer_.plan->owner;
  *lane = owner == nullptr ? static_cast<int>(Executor::kAny) : owner[layer_.index(task)];
  if (*lane < 0 || *lane >= kLanes) {
    fail_task(task, "has the owner " + std::to_string(*lane) + "; executors are 0 to " +
                        std::to_string(kExecutors - 1) + ", and any of them is " +
                        std::to_string(static_cast<int>(Executor::kAny)));
    return false;
  }
  if (const std::string wrong = kind != nullptr ? kind->wrong(layer_, task) : ""; !wrong.empty()) {
    fail_task(task, wrong);
    return false;
  }
  const int64_t bytes = kind != nullptr ? kind->bytes(layer_, task) : block_bytes(layer_, task);
  if (kind != nullptr && bytes == 0) return false;
  task_bytes_ += bytes;
  if (kind != nullptr) *ranked_tokens = std::max(*ranked_tokens, kind->ranked_tokens(layer_, task));
  return true;
}

}  // namespace fluxion
