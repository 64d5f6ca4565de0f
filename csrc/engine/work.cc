// What the workers do in a layer: resident items, then tasks from the queue.
#include <algorithm>
#include <limits>

#include "engine/engine.h"
#include "engine/residents.h"
#include "kernels/feature_index.h"
#include "runtime/failure.h"

namespace fluxion {

void Engine::worker_main(void* self, int worker) { static_cast<Engine*>(self)->work(worker); }

void Engine::work(int worker) {
  Scratch* scratch = &scratch_[worker];
  const int64_t start = now_ns();
  for (int i; (i = next_item_.fetch_add(1, std::memory_order_relaxed)) < items_;)
    attempt(layer_.task(i), nullptr, [&] { resident_item(layer_.task(i), scratch); });
  // Before the first pop: whoever finds the queue dry then knows of all who have a task.
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

// What throws fails the layer, and the worker goes on: others wait for what it has claimed. Corrupt memory
// ends the task's request, or all those of the bundle that it is done with. Nothing is allocated here,
// because memory may have run out.
template <class Body>
void Engine::attempt(const Task& task, const Bundle* with, const Body& body) noexcept {
  try {
    body();
  } catch (const CorruptMemory&) {
    if (with == nullptr) return lose(task.request, std::current_exception());
    for (int i = 0; i < with->count; ++i) lose(layer_.task(with->tasks[i]).request, std::current_exception());
  } catch (...) {
    totals_[kStatFailedTasks].fetch_add(1, std::memory_order_relaxed);
    const std::lock_guard lock(failure_mutex_);
    if (thrown_ != nullptr) return;
    thrown_ = std::current_exception();
    thrower_ = task;
  }
}

void Engine::lose(int request, const std::exception_ptr& corrupt) {
  totals_[kStatFailedTasks].fetch_add(1, std::memory_order_relaxed);
  const std::lock_guard lock(failure_mutex_);
  corrupt_[request] = corrupt;
}

// Until no task that is begun can open a stage any more.
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

// Of residents().
void Engine::parts_main(void* self_ptr, int worker) {
  Engine* self = static_cast<Engine*>(self_ptr);
  Scratch* scratch = &self->scratch_[worker];
  const Layer& layer = self->layer_;
  const int64_t start = now_ns();
  for (int i; (i = self->next_item_.fetch_add(1, std::memory_order_relaxed)) < self->items_;) {
    const Task task = layer.task(i);
    float* parts = self->parts_out_ + layer.state(task) * kParts;
    if (self->skip_[task.request]) {
      no_parts(layer, parts);
      continue;
    }
    // A request that is lost has parts as well: its policy plans, like that of every other.
    self->attempt(task, nullptr, [&] { append_token(layer, *self->pool_, task); });
    self->attempt(task, nullptr, [&] { attend_parts(layer, task, scratch, parts); });
  }
  scratch->busy_ns += now_ns() - start;
}

// Of append().
void Engine::append_main(void* self_ptr, int) {
  Engine* self = static_cast<Engine*>(self_ptr);
  for (int i; (i = self->next_item_.fetch_add(1, std::memory_order_relaxed)) < self->items_;) {
    const Task task = self->layer_.task(i);
    if (!self->skip_[task.request]) append_token(self->layer_, *self->pool_, task);
  }
}

// Of newest().
void Engine::newest_main(void* self_ptr, int worker) {
  Engine* self = static_cast<Engine*>(self_ptr);
  Scratch* scratch = &self->scratch_[worker];
  const Layer& layer = self->layer_;
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  const int D = layer.shape.head_dim;
  const int64_t start = now_ns(), bytes = layer.shape.token_bytes();
  for (int i; (i = self->next_item_.fetch_add(1, std::memory_order_relaxed)) < self->items_;) {
    const Task task = layer.task(i);
    if (self->skip_[task.request]) continue;
    self->attempt(task, nullptr, [&] {
      append_token(layer, *self->pool_, task);
      attend_newest(layer, task, self->newest_, scratch);
      const int64_t at = layer.state(task);
      char* out =
          layer.to.out + task.request * layer.to.out_stride + int64_t{task.head} * layer.group * bytes;
      for (int64_t g = at; g < at + layer.group; ++g, out += bytes)
        layer.kernels.merge_state(&layer.res_o[g * D], layer.res_lse[g], nullptr, kNothing, D, out);
    });
  }
  scratch->busy_ns += now_ns() - start;
}

// Where residents() did both, the item only takes its turn in the merge.
void Engine::resident_item(const Task& task, Scratch* scratch) {
  if (skip_[task.request]) return;
  if (!held_) {
    append_token(layer_, *pool_, task);
    if (layer_.in.window.data == nullptr) return;
    attend_residents(layer_, task, scratch);
  }
  part_done(task);
}

// A bundle is done in its first task's; the others' are empty.
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
  task_done(task,
            kind != nullptr
                ? kind->run(layer_, task, scratch, o, lse)
                : read_blocks(layer_, task, select_blocks(layer_, task, scratch), scratch, o, lse),
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

// The later of a group's resident item and task merges the two. A device merges for itself.
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
