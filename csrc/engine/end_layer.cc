// The end of a layer: waits for running work, revokes the rest, and writes the coarse entries, which no task
// reads any more.
#include <sched.h>
#include <time.h>

#include <chrono>
#include <cstdio>

#include "engine/engine.h"

namespace fluxion {

namespace {

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

}  // namespace

// Ends the open layer, if any. Afterwards no thread accesses what layer_ points to. An abandoned layer starts
// no new work, because its pages and rows may have another owner by now.
void Engine::end_layer(bool abandoned) {
  if (!open()) return;
  if (abandoned) {
    next_item_.store(items_, std::memory_order_relaxed);
    const std::lock_guard lock(foreign_mutex_);
    queue_.close();
  }
  if (launched_) pool_->workers().join();
  launched_ = false;
  wait_or_revoke(!abandoned);
  {
    const std::scoped_lock lock(foreign_mutex_, selection_mutex_);
    queue_.close();
    state_.store(State::kNone, std::memory_order_release);
  }
  if (!abandoned) seal_coarse();
  for (size_t w = 0; w < scratch_.size(); ++w) {
    Scratch& s = scratch_[w];
    worker_ns_[w].fetch_add(s.busy_ns, std::memory_order_relaxed);
    worker_helped_[w].fetch_add(s.helped_chunks, std::memory_order_relaxed);
    s.busy_ns = s.helped_chunks = 0;
    for (int i = 0; i < kStatCount; ++i) {
      if (s.stats[i] == 0) continue;
      totals_[i].fetch_add(s.stats[i], std::memory_order_relaxed);
      s.stats[i] = 0;
    }
  }
}

void Engine::wait_or_revoke(bool wait) {
  using Clock = std::chrono::steady_clock;
  for (int i = 0; wait && i < 2000 && !queue_.all_done(); ++i) cpu_pause();
  if (queue_.all_done()) return;
  const auto start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  while (wait && !queue_.all_done()) {
    const double seconds = elapsed();
    if (seconds >= timeout_s_) break;
    if (seconds < 1e-3) {
      sched_yield();
    } else {
      const timespec pause{0, 20'000};
      nanosleep(&pause, nullptr);
    }
  }
  revoke_rest(queue_, foreign_mutex_, [&](int i, Executor executor) {
    if (!wait) return;
    totals_[kStatFailedTasks].fetch_add(1, std::memory_order_relaxed);
    record_failure("Task " + std::to_string(i) + " (request " + std::to_string(tasks_[i].request) +
                   ", KV head " + std::to_string(tasks_[i].head) + ") belongs to the executor \"" +
                   kExecutorNames[static_cast<int>(executor)] + "\" and was not delivered within " +
                   number(timeout_s_) +
                   " s; look for that executor's error, or raise FLUXION_TASK_TIMEOUT_S.");
  });
}

// Only every second page ends a coarse block.
bool Engine::ends_coarse(int b) const { return !skip_[b] && step_.request(b).length % (2 * kPage) == 0; }

void Engine::seal_coarse() {
  if (!appended_) return;
  const int batch = step_.batch();
  bool any = false;
  for (int b = 0; b < batch; ++b) any |= ends_coarse(b);
  if (!any) return;
  // Every head seals in the order of requests, in which blocks are also tagged. After a collision, entries
  // and tag are therefore of the same, last request.
  const auto seal_head = [](void* self, int h) {
    Engine& e = *static_cast<Engine*>(self);
    for (int b = 0; b < e.step_.batch(); ++b) {
      if (!e.ends_coarse(b)) continue;
      try {
        e.pool_->seal_blocks(e.layer_.at.index, h, e.step_.pages(b), e.step_.request(b).length / kPage - 1);
      } catch (const CorruptMemory&) {
        e.lose(b, std::current_exception());
      }
    }
  };
  pool_->workers().parallel_for(shape_.kv_heads, seal_head, this, /*wake=*/false);
  for (int b = 0; b < batch; ++b) {
    if (ends_coarse(b))
      pool_->tag_blocks(layer_.at.index, step_.pages(b), step_.request(b).length / kPage - 1);
  }
}

}  // namespace fluxion
