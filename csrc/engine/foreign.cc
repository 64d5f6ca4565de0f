// The part of the engine that foreign executors use, from threads of their own.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "engine/engine.h"

namespace fluxion {

static_assert(kStatTasksTorch - kStatTasksCpu + 1 == kExecutors, "every executor counts its tasks");

int64_t Engine::pop(Executor executor) { return claim_next(queue_, foreign_mutex_, executor); }

// Index of the open layer's task that a claim or a plain index names. The caller holds foreign_mutex_ or
// selection_mutex_; begin and end_layer take both to open and to close a layer.
int Engine::resolve(int64_t claim_or_index) const {
  const int i = TaskQueue::task_of(claim_or_index);
  Executor executor;
  const bool is_claim = claim_or_index > TaskQueue::kTaskMask;
  if (claim_or_index < 0 || !open() || i >= queue_.count() ||
      (is_claim && !queue_.holds(claim_or_index, &executor))) {
    throw std::runtime_error("There is no task " + std::to_string(claim_or_index) +
                             " now; tasks exist between layer_begin and layer_finish.");
  }
  return i;
}

int Engine::task(int64_t claim_or_index) {
  const std::lock_guard lock(foreign_mutex_);
  return layer_.index(tasks_[resolve(claim_or_index)]);
}

bool Engine::deliver(int64_t claim, const float* o, const float* lse, int64_t tokens, const Reads& reads) {
  // The layer stays open until the claim is finished, so its pointers are valid.
  return settle(queue_, foreign_mutex_, claim, [&](int i, Executor executor) {
    const Task& task = tasks_[i];
    std::copy_n(o, static_cast<int64_t>(layer_.group) * shape_.head_dim, layer_.middle_o(task));
    std::copy_n(lse, layer_.group, layer_.middle_lse(task));
    totals_[kStatTasksCpu + static_cast<int>(executor)].fetch_add(1, std::memory_order_relaxed);
    totals_[kStatTokensRead].fetch_add(tokens, std::memory_order_relaxed);
    totals_[kStatTileBytes].fetch_add(reads.tile_bytes, std::memory_order_relaxed);
    totals_[kStatMetadataBytes].fetch_add(reads.metadata_bytes, std::memory_order_relaxed);
    reads_[layer_.index(task)] = reads;
    part_done(task);
  });
}

bool Engine::fail(int64_t claim, const std::string& message) {
  return settle(queue_, foreign_mutex_, claim, [&](int i, Executor executor) {
    const Task& task = tasks_[i];
    record_failure("The executor \"" + std::string(kExecutorNames[static_cast<int>(executor)]) +
                   "\" failed on request " + std::to_string(task.request) + ", KV head " +
                   std::to_string(task.head) + ": " + message);
    totals_[kStatFailedTasks].fetch_add(1, std::memory_order_relaxed);
  });
}

int Engine::selection(int64_t claim_or_index, int32_t* pages, uint16_t* masks, int max) {
  const std::lock_guard lock(selection_mutex_);
  Scratch* s = &selection_scratch_;
  const Task& task = tasks_[resolve(claim_or_index)];
  const TaskKind* kind = kinds_[layer_.index(task)];
  const Selection chosen = kind != nullptr ? kind->select(layer_, task, s) : select_blocks(layer_, task, s);
  if (chosen.count > max) {
    throw std::invalid_argument("The selection has " + std::to_string(chosen.count) +
                                " pages and room was given for " + std::to_string(max) +
                                "; pass tensors as long as the middle.");
  }
  std::copy_n(s->pages.data(), chosen.count, pages);
  if (chosen.masked) {
    std::copy_n(s->masks.data(), chosen.count * layer_.group, masks);
  } else {
    std::fill_n(masks, chosen.count * layer_.group, uint16_t{0xffff});
  }
  return chosen.count;
}

}  // namespace fluxion
