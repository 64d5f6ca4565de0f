// Phases of a layer without tasks: every group of every request is one item, which one worker does.
#include <algorithm>
#include <limits>
#include <stdexcept>

#include "engine/engine.h"
#include "engine/residents.h"
#include "kernels/feature_index.h"

namespace fluxion {

// Calls body(task, scratch) for every group on all workers and waits for the end. Groups of skipped requests
// are included. residents: the bodies attend to residents.
template <class Body>
void Engine::each_group(bool residents, const Body& body) {
  struct Run {
    Engine& engine;
    const Body& body;
  } run{*this, body};
  const auto work = [](void* ctx, int worker) {
    const auto& [engine, body] = *static_cast<const Run*>(ctx);
    Scratch* scratch = &engine.scratch_[worker];
    const int64_t start = now_ns();
    for (int i; (i = engine.next_item_.fetch_add(1, std::memory_order_relaxed)) < engine.items_;)
      body(engine.layer_.task(i), scratch);
    scratch->busy_ns += now_ns() - start;
  };
  if (items_ == 0) return;
  if (!launch(work, residents, &run)) throw_busy();
  pool_->workers().join();
}

void Engine::residents(const AttentionLayer& at, const LayerInput& in, float* parts) {
  abandon();
  check_layer(at, in);
  open_input(at, in);
  each_group(/*residents=*/true, [&](const Task& task, Scratch* scratch) {
    float* own = parts + layer_.state(task) * kParts;
    if (skip_[task.request]) return no_parts(layer_, own);
    // Lost requests get parts as well, because their policy plans like any other.
    attempt(task, nullptr, [&] { append_token(layer_, *pool_, task); });
    attempt(task, nullptr, [&] { attend_parts(layer_, task, scratch, own); });
  });
  if (thrown_ != nullptr) {
    record_thrown();
    throw std::runtime_error("Layer " + std::to_string(at.index) + ": " + failure_);
  }
  state_.store(State::kHeld, std::memory_order_relaxed);
}

void Engine::append(int layer, const TokenView& k, const TokenView& v) {
  abandon();
  const AttentionLayer at{.index = layer, .scale = {}};
  const LayerInput in{.q = nullptr, .q_stride = 0, .k = k, .v = v};
  check_layer(at, in);
  open_input(at, in);
  each_group(/*residents=*/false, [&](const Task& task, Scratch*) {
    if (!skip_[task.request]) append_token(layer_, *pool_, task);
  });
  state_.store(State::kWritten, std::memory_order_relaxed);
}

void Engine::newest(const AttentionLayer& at, const LayerInput& in, const LayerOutput& to) {
  abandon();
  check_layer(at, in);
  open_input(at, in);
  layer_.to = to;
  std::fill_n(layer_.mid_lse, static_cast<size_t>(step_.batch()) * config_.q_heads,
              -std::numeric_limits<float>::infinity());
  for (int b = 0; b < step_.batch(); ++b) {
    const int tokens = step_.request(b).good ? std::min(step_.request(b).length, at.newest) : 0;
    task_bytes_ += static_cast<int64_t>(tokens / kPage) * shape_.kv_heads * shape_.tile_bytes();
  }
  each_group(/*residents=*/false, [&](const Task& task, Scratch* scratch) {
    if (skip_[task.request]) return;
    attempt(task, nullptr, [&] {
      append_token(layer_, *pool_, task);
      attend_newest(layer_, task, scratch);
      merge(task);
    });
  });
  throw_failure();
}

}  // namespace fluxion
