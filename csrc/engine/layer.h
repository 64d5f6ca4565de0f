// The open layer, as its tasks see it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/plan.h"
#include "engine/step.h"
#include "engine/task.h"
#include "runtime/pool.h"

namespace fluxion {

// Bytes that a stage of a task (scan or attention) reads per chunk; idle workers help with further chunks. A
// chunk takes 20 to 40 us on one core, a hundred times the cost of claiming it and merging its result.
inline constexpr int64_t kChunkBytes = 512 << 10;

struct EngineConfig {
  int q_heads;
  int sinks;         // tokens, a multiple of 16; equal to the pool's sink_pages * 16
  int window;        // tokens, a multiple of 16
  int max_requests;  // initial capacities; step() grows them
  int max_pages;     // of the longest request
  bool attend_union;
  int64_t chunk_bytes;   // bytes that a chunk of a stage reads
  bool share_prefixes;   // see Bundle
  int64_t cached_bytes;  // tiles that the last cache keeps from one request to the next
};

// The parameters of a layer's attention that are the same in every step. Pointers must stay valid until every
// layer opened with them has ended.
struct AttentionLayer {
  int index;  // of the pool's layers
  Scale scale;
  WindowView window{};  // of the residents; data nullptr: a device has them
  // [Hq]: a logit per head that joins the softmax without a value, as if it were a resident; nullptr: none.
  const float* sinks = nullptr;
  // Sliding-window attention: how many of the newest tokens a token attends to, itself included. 0: all.
  int newest = 0;
};

// The inputs of a layer of B requests. Pointers must stay valid until the layer ends.
struct LayerInput {
  const char* q;     // [B][Hq][D] KV dtype, the last two contiguous
  int64_t q_stride;  // bytes
  TokenView k, v;    // [B][Hk][D]: the token at position n-1 of each request; data nullptr: already written
};

// Where the result goes. `out` is merged with the residents. o and lse are the middle's alone, for residents
// on a device; then k and v go to the host alone.
struct LayerOutput {
  char* out = nullptr;     // [B][Hq][D] KV dtype, the last two contiguous
  int64_t out_stride = 0;  // bytes
  float* o = nullptr;      // [B][Hq][D]; written where lse is not -inf
  float* lse = nullptr;    // [B][Hq], natural log
  // The device's results for the residents (layout of Engine::residents), for kinds of tasks that depend on
  // them; copied. nullptr: unknown.
  const float* parts = nullptr;

  bool on_device() const { return lse != nullptr; }
};

struct Layer {
  Layer(const HostPool& pool, const EngineConfig& config, const Step& step)
      : pool(pool),
        shape(pool.shape()),
        config(config),
        step(step),
        kernels(pool.kernels()),
        window_kernels(pool.window_kernels()),
        exact(*kernel_table(kernels.isa, DType::kF32)),
        group(config.q_heads / shape.kv_heads) {}

  const HostPool& pool;
  const PoolShape& shape;
  const EngineConfig& config;
  const Step& step;
  const KernelTable& kernels;         // for tiles of the pool
  const KernelTable& window_kernels;  // for tiles of a window
  const KernelTable& exact;           // float32 kernels of the same ISA
  const int group;                    // G

  AttentionLayer at{};
  LayerInput in{};
  LayerOutput to;
  std::shared_ptr<const LayerPlan> plan;
  // Results of the residents and of the middle: [B][Hq][D], [B][Hq].
  float *res_o = nullptr, *res_lse = nullptr, *mid_o = nullptr, *mid_lse = nullptr;
  bool residents_known = false;  // res_lse is set before the tasks begin

  int index(const Task& task) const { return task.request * shape.kv_heads + task.head; }
  Task task(int i) const { return {i / shape.kv_heads, i % shape.kv_heads}; }
  const char* query(const Task& task) const {
    return in.q + task.request * in.q_stride + int64_t{task.head} * group * shape.token_bytes();
  }
  // Index of the group's first state in res_lse and mid_lse; times D in res_o and mid_o.
  int64_t state(const Task& task) const {
    return static_cast<int64_t>(task.request) * config.q_heads + int64_t{task.head} * group;
  }
  float* middle_o(const Task& task) const { return mid_o + state(task) * shape.head_dim; }
  float* middle_lse(const Task& task) const { return mid_lse + state(task); }

  const int32_t* pages(const Task& task) const { return step.pages(task.request); }
  int blk(const Task& task) const { return plan->blk[index(task)]; }
  const float* budget(const Task& task) const { return plan->budget + state(task); }
  const char* tiles(const Task& task) const { return pool.tiles(at.index, task.head); }

  // Merges a second partial result of `heads` heads into o and lse.
  void merge(int heads, float* o, float* lse, const float* more_o, const float* more_lse) const {
    const int D = shape.head_dim;
    for (int g = 0; g < heads; ++g)
      lse[g] = exact.merge_state(o + g * D, lse[g], more_o + g * D, more_lse[g], D, o + g * D);
  }
};

}  // namespace fluxion
