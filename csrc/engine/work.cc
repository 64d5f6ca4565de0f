// What the workers do in a layer: resident items, then tasks from the queue.
#include <algorithm>
#include <limits>

#include "engine/engine.h"
#include "engine/residents.h"
#include "kernels/feature_index.h"

namespace fluxion {

void Engine::worker_main(void* self, int worker) { static_cast<Engine*>(self)->work(worker); }

void Engine::work(int worker) {
  Scratch* scratch = &scratch_[worker];
  const int64_t start = now_ns();
  for (int i; (i = next_item_.fetch_add(1, std::memory_order_relaxed)) < items_;)
    attempt(layer_.task(i), nullptr, [&] { resident_item(layer_.task(i), scratch); });
  // Before the first pop: a worker that finds the queue empty must know of all who have a task.
  owners_.fetch_add(1, std::memory_order_relaxed);
  for (int64_t claim; (claim = queue_.pop(Executor::kCpu)) >= 0;) {
    const Task& task = tasks_[TaskQueue::task_of(claim)];
    attempt(task, bundles_.of(layer_.index(task)), [&] { run_task(task, scratch); });
    queue_.finish(claim);
  }
  owners_.fetch_sub(1, std::memory_order_release);
  scratch->busy_ns += now_ns() - start;
  help(worker);
}

void Engine::lose(int request, const std::exception_ptr& corrupt) {
  totals_[kStatFailedTasks].fetch_add(1, std::memory_order_relaxed);
  const std::lock_guard lock(failure_mutex_);
  corrupt_[request] = corrupt;
}

// Helps until no running task can open a stage any more.
void Engine::help(int worker) {
  constexpr int kPauses = 16;  // about a microsecond between two rounds of looks
  const int workers = static_cast<int>(scratch_.size());
  Scratch* own = &scratch_[worker];
  for (Backoff backoff; owners_.load(std::memory_order_acquire) > 0;) {
    int helped = 0;
    const int64_t start = now_ns();
    for (int i = 1; i < workers; ++i) helped += scratch_[(worker + i) % workers].stage.help(own);
    if (helped > 0) {
      own->busy_ns += now_ns() - start;
      own->helped_chunks += helped;
      backoff = {};
    } else {
      backoff.wait(kPauses);
    }
  }
}

// If residents() did both, the item only takes its turn in the merge.
void Engine::resident_item(const Task& task, Scratch* scratch) {
  if (skip_[task.request]) return;
  if (!held_) {
    append_token(layer_, *pool_, task);
    if (layer_.at.window.data == nullptr) return;
    attend_residents(layer_, task, scratch);
  }
  part_done(task);
}

// A bundle is done with its first task; its other tasks do nothing.
void Engine::run_task(const Task& task, Scratch* scratch) {
  const int at = layer_.index(task);
  if (const Bundle* bundle = bundles_.of(at)) {
    if (bundle->tasks[0] != at) return;
    run_bundle(layer_, *bundle, scratch,
               [&](const Task& member, const Selection& chosen) { task_done(member, chosen, scratch); });
    return;
  }
  float *o = layer_.middle_o(task), *lse = layer_.middle_lse(task);
  const TaskKind* kind = kinds_[at];
  task_done(
      task,
      kind != nullptr ? kind->run(layer_, task, scratch, o, lse) : read_blocks(layer_, task, scratch, o, lse),
      scratch);
}

void Engine::task_done(const Task& task, const Selection& chosen, Scratch* scratch) {
  scratch->stats[kStatTasksCpu] += 1;
  scratch->stats[kStatTokensRead] += chosen.tokens;
  scratch->stats[kStatTileBytes] += chosen.reads.tile_bytes;
  scratch->stats[kStatMetadataBytes] += chosen.reads.metadata_bytes;
  reads_[layer_.index(task)] = chosen.reads;
  part_done(task);
}

// The later of a group's resident item and task merges the two. A device does its own merge.
void Engine::part_done(const Task& task) {
  if (layer_.to.on_device()) return;
  if (waits_[layer_.index(task)].fetch_sub(1, std::memory_order_acq_rel) == 1) merge(task);
}

void Engine::merge(const Task& task) {
  const int64_t at = layer_.state(task), D = shape_.head_dim, bytes = shape_.token_bytes();
  char* out = layer_.to.out + task.request * layer_.to.out_stride + int64_t{task.head} * layer_.group * bytes;
  for (int64_t i = at; i < at + layer_.group; ++i, out += bytes) {
    layer_.kernels.merge_state(&layer_.res_o[i * D], layer_.res_lse[i], &layer_.mid_o[i * D],
                               layer_.mid_lse[i], shape_.head_dim, out);
  }
}

}  // namespace fluxion
