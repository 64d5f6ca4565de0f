// The engine's C ABI. Argument checks live here: what the engine receives has the right shape and dtype.
#include "ffi/engine.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffi/plan.h"
#include "ffi/program.h"
#include "kernels/feature_index.h"
#include "runtime/topology.h"

namespace fluxion {

void check_plan(const Engine& engine, const LayerPlan& plan) {
  const PoolShape& s = engine.pool().shape();
  if (plan.batch != engine.batch() || plan.kv_heads != s.kv_heads ||
      plan.q_heads != engine.config().q_heads) {
    Raise("ValueError") << "The plan is for " << plan.batch << " requests, " << plan.q_heads
                        << " query heads and " << plan.kv_heads << " KV heads, and the step has "
                        << engine.batch() << ", " << engine.config().q_heads << " and " << s.kv_heads
                        << "; plan this step.";
  }
}

namespace {

using ffi::Optional;

EngineRef engine_create(Pool pool, int64_t q_heads, int64_t sinks, int64_t window, int64_t max_requests,
                        int64_t max_pages, bool attend_union, int64_t chunk_bytes, bool share_prefixes,
                        int64_t cached_bytes) {
  for (int64_t n : {q_heads, sinks, window, max_requests, max_pages}) {
    if (n < 0 || n > INT32_MAX)
      Raise("ValueError") << "A size of the engine is " << n << ", which cannot be.";
  }
  return guarded([&] {
    const std::vector<int>& cores = pool->pool->workers().cores();
    const EngineConfig config{
        .q_heads = static_cast<int>(q_heads),
        .sinks = static_cast<int>(sinks),
        .window = static_cast<int>(window),
        .max_requests = static_cast<int>(max_requests),
        .max_pages = static_cast<int>(max_pages),
        .attend_union = attend_union,
        .chunk_bytes = chunk_bytes > 0 ? chunk_bytes : kChunkBytes,
        .share_prefixes = share_prefixes,
        .cached_bytes =
            cached_bytes >= 0 ? cached_bytes : last_cache_per_thread(cores.empty() ? 0 : cores[0]) / 2,
    };
    return EngineRef(ffi::make_object<EngineObj>(std::make_unique<Engine>(pool->pool, config)));
  });
}

void engine_step(EngineRef engine, TensorView rows, TensorView seq_lens, TensorView table) {
  expect(rows, "rows", kInt32, {-1}, 1);
  expect(seq_lens, "seq_lens", kInt32, {rows.size(0)}, 1);
  expect(table, "page_table", kInt32, {rows.size(0), -1}, 1);
  guarded([&] {
    engine->engine->step(data<int32_t>(rows), data<int32_t>(seq_lens), static_cast<int>(rows.size(0)),
                         data<int32_t>(table), table.stride(0), table.size(1));
  });
}

// An object of the C ABI. The caller keeps its tensors alive.
class AttentionLayerObj : public ffi::Object {
 public:
  explicit AttentionLayerObj(const AttentionLayer& l) : layer(l) {}
  AttentionLayer layer;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fluxion.AttentionLayer", AttentionLayerObj, ffi::Object);
};
class AttentionLayerRef : public ffi::ObjectRef {
 public:
  explicit AttentionLayerRef(ffi::ObjectPtr<AttentionLayerObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(AttentionLayerRef, ffi::ObjectRef, AttentionLayerObj);
};

AttentionLayerRef engine_layer(EngineRef ref, int64_t index, Optional<TensorView> windows, double scale,
                               double cap, Optional<TensorView> sinks, Optional<int64_t> newest) {
  const Engine& engine = *ref->engine;
  AttentionLayer layer{.index = narrow(index), .scale = scale_of(scale, cap)};
  guarded([&] { engine.pool().check_layer(layer.index); });
  if (windows.has_value())
    layer.window = window_view(engine.pool(), *windows, engine.config().sinks, engine.config().window);
  layer.sinks = sinks_of(sinks, engine.config().q_heads);
  if (newest.has_value()) {
    if (*newest < 1)
      Raise("ValueError") << "The window of a layer is " << *newest
                          << " tokens; a token attends at least to itself.";
    layer.newest = static_cast<int>(std::min<int64_t>(*newest, kNoWindow));
  }
  return AttentionLayerRef(ffi::make_object<AttentionLayerObj>(layer));
}

LayerInput input_of(const Engine& engine, int64_t batch, const TensorView& q, const Optional<TensorView>& k,
                    const Optional<TensorView>& v) {
  const HostPool& pool = engine.pool();
  expect(q, "q", kv_type(pool), {batch, engine.config().q_heads, pool.shape().head_dim}, 2);
  LayerInput in{};
  in.q = data<char>(q);
  in.q_stride = q.stride(0) * pool.shape().element();
  if (both(k, "k", v, "v")) {
    in.k = token_view(pool, *k, "k", batch);
    in.v = token_view(pool, *v, "v", batch);
  }
  return in;
}

LayerOutput output_of(const Engine& engine, int64_t batch, const TensorView& out) {
  const PoolShape& s = engine.pool().shape();
  expect(out, "out", kv_type(engine.pool()), {batch, engine.config().q_heads, s.head_dim}, 2);
  LayerOutput to;
  to.out = data<char>(out);
  to.out_stride = out.stride(0) * s.element();
  return to;
}

void engine_layer_newest(EngineRef ref, AttentionLayerRef at, TensorView q, TensorView k, TensorView v,
                         TensorView out) {
  Engine& engine = *ref->engine;
  if (at->layer.newest < 1)
    Raise("ValueError") << "Layer " << at->layer.index << " has no window; begin it with a plan.";
  const LayerInput in = input_of(engine, engine.batch(), q, k, v);
  const LayerOutput to = output_of(engine, engine.batch(), out);
  guarded([&] { engine.newest(at->layer, in, to); });
}

void engine_layer_resident(EngineRef ref, AttentionLayerRef at, TensorView q, Optional<TensorView> k,
                           Optional<TensorView> v, TensorView parts) {
  Engine& engine = *ref->engine;
  const LayerInput in = input_of(engine, engine.batch(), q, k, v);
  if (at->layer.window.data == nullptr)
    Raise("ValueError") << "Layer " << at->layer.index << " has no windows to attend to.";
  expect(parts, "parts", kFloat32, {engine.batch(), engine.config().q_heads, kParts}, 3);
  guarded([&] { engine.residents(at->layer, in, data<float>(parts)); });
}

void engine_layer_append(EngineRef ref, int64_t layer, TensorView k, TensorView v) {
  Engine& engine = *ref->engine;
  const TokenView keys = token_view(engine.pool(), k, "k", engine.batch()),
                  values = token_view(engine.pool(), v, "v", engine.batch());
  guarded([&] { engine.append(narrow(layer), keys, values); });
}

int64_t engine_layer_begin(EngineRef ref, PlanRef plan, AttentionLayerRef at, TensorView q,
                           Optional<TensorView> k, Optional<TensorView> v, TensorView out) {
  Engine& engine = *ref->engine;
  const LayerInput in = input_of(engine, engine.batch(), q, k, v);
  check_plan(engine, *plan->plan);
  const LayerOutput to = output_of(engine, engine.batch(), out);
  return guarded([&] { return static_cast<int64_t>(engine.begin(at->layer, in, to, plan->plan)); });
}

int64_t engine_middle_begin(EngineRef ref, PlanRef plan, AttentionLayerRef at, TensorView q,
                            Optional<TensorView> k, Optional<TensorView> v, TensorView o, TensorView lse,
                            Optional<TensorView> parts) {
  Engine& engine = *ref->engine;
  const int64_t B = engine.batch(), Hq = engine.config().q_heads;
  const LayerInput in = input_of(engine, B, q, k, v);
  check_plan(engine, *plan->plan);
  expect(o, "o", kFloat32, {B, Hq, engine.pool().shape().head_dim}, 3);
  expect(lse, "lse", kFloat32, {B, Hq}, 2);
  LayerOutput to;
  to.o = data<float>(o);
  to.lse = data<float>(lse);
  if (parts.has_value()) {
    expect(*parts, "parts", kFloat32, {B, Hq, kParts}, 3);
    to.parts = data<float>(*parts);
  }
  return guarded([&] { return static_cast<int64_t>(engine.begin(at->layer, in, to, plan->plan)); });
}

void engine_plan_step(EngineRef ref, PlanRef plan, bool looks) {
  check_plan(*ref->engine, *plan->plan);
  ref->engine->plan_step(plan->plan, looks);
}

// A layer by the step's plan, for any number of steps of as many requests as q has.
void program_attention(Program program, EngineRef ref, AttentionLayerRef at, TensorView q, TensorView k,
                       TensorView v, TensorView out) {
  const int64_t batch = q.size(0);
  const LayerInput in = input_of(*ref->engine, batch, q, k, v);
  const LayerOutput to = output_of(*ref->engine, batch, out);
  program->steps.emplace_back([=] {
    if (ref->engine->batch() != batch)
      Raise("ValueError") << "The program is for " << batch << " requests, and the step has "
                          << ref->engine->batch() << ".";
    ref->engine->attend(at->layer, in, to);
  });
}

void engine_layer_finish(EngineRef ref) {
  guarded([&] { ref->engine->finish(); });
}

// For the last layer: a line "request<tab>sentence" for each request that read corrupt memory.
ffi::String engine_corrupt(EngineRef ref) {
  return guarded([&] {
    std::string out;
    for (int b = 0; b < ref->engine->batch(); ++b) {
      if (const std::exception_ptr& corrupt = ref->engine->corrupt(b))
        out += std::to_string(b) + "\t" + sentence_of(corrupt) + "\n";
    }
    return ffi::String(out);
  });
}

int64_t engine_queue_pop(EngineRef ref, int64_t executor) {
  if (executor < 1 || executor >= kExecutors) {
    Raise("ValueError") << "There is no foreign executor " << executor << "; 1 is torch.";
  }
  return guarded([&] { return ref->engine->pop(static_cast<Executor>(executor)); });
}

int64_t engine_task(EngineRef ref, int64_t claim) {
  return guarded([&] { return static_cast<int64_t>(ref->engine->task(claim)); });
}

void engine_abandon(EngineRef ref) { ref->engine->abandon(); }

void engine_result(EngineRef ref, TensorView out) {
  Engine& engine = *ref->engine;
  expect(out, "out", kFloat32, {engine.batch(), engine.config().q_heads, engine.pool().shape().head_dim}, 3);
  guarded([&] { engine.result(data<float>(out)); });
}

void engine_reads(EngineRef ref, TensorView out) {
  Engine& engine = *ref->engine;
  const int64_t heads = engine.pool().shape().kv_heads;
  expect(out, "out", kInt64, {engine.batch(), heads, 2}, 3);
  const Reads* reads = guarded([&] { return engine.reads(); });
  for (int64_t i = 0; i < engine.batch() * heads; ++i) {
    data<int64_t>(out)[2 * i] = reads[i].tile_bytes;
    data<int64_t>(out)[2 * i + 1] = reads[i].metadata_bytes;
  }
}

bool engine_task_done(EngineRef ref, int64_t claim, TensorView o, TensorView lse, int64_t tokens,
                      int64_t tile_bytes, int64_t metadata_bytes) {
  Engine& engine = *ref->engine;
  expect(o, "o", kFloat32, {engine.group(), engine.pool().shape().head_dim}, 2);
  expect(lse, "lse", kFloat32, {engine.group()}, 1);
  return guarded([&] {
    return engine.deliver(claim, data<float>(o), data<float>(lse), tokens, {tile_bytes, metadata_bytes});
  });
}

bool engine_task_failed(EngineRef ref, int64_t claim, ffi::String message) {
  return guarded([&] { return ref->engine->fail(claim, std::string(message)); });
}

int64_t engine_selection(EngineRef ref, int64_t claim, TensorView pages, TensorView masks) {
  Engine& engine = *ref->engine;
  expect(pages, "pages", kInt32, {-1}, 1);
  expect(masks, "masks", kUInt16, {pages.size(0), engine.group()}, 2);
  return guarded([&] {
    return static_cast<int64_t>(engine.selection(claim, data<int32_t>(pages), data<uint16_t>(masks),
                                                 static_cast<int>(pages.size(0))));
  });
}

ffi::String engine_stat_names() { return ffi::String(kStatNames); }

void engine_stats(EngineRef ref, TensorView out) {
  expect(out, "out", kInt64, {kStatCount}, 1);
  ref->engine->stats(data<int64_t>(out));
}

void engine_worker_counts(EngineRef ref, TensorView out) {
  Engine& engine = *ref->engine;
  const int64_t workers = engine.pool().workers().size();
  expect(out, "out", kInt64, {2, workers}, 2);
  engine.worker_counts(data<int64_t>(out), data<int64_t>(out) + workers);
}

int64_t engine_owners(EngineRef ref, TensorView out) {
  expect(out, "out", kInt8, {-1}, 1);
  const int count = ref->engine->last_tasks();
  for (int i = 0; i < count && i < out.size(0); ++i)
    data<int8_t>(out)[i] = static_cast<int8_t>(ref->engine->owner(i));
  return count;
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_create, fluxion::engine_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_step, fluxion::engine_step);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_layer, fluxion::engine_layer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_plan_step, fluxion::engine_plan_step);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(program_attention, fluxion::program_attention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_layer_newest, fluxion::engine_layer_newest);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_layer_resident, fluxion::engine_layer_resident);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_layer_append, fluxion::engine_layer_append);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_layer_begin, fluxion::engine_layer_begin);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_middle_begin, fluxion::engine_middle_begin);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_layer_finish, fluxion::engine_layer_finish);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_corrupt, fluxion::engine_corrupt);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_queue_pop, fluxion::engine_queue_pop);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_task, fluxion::engine_task);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_abandon, fluxion::engine_abandon);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_task_done, fluxion::engine_task_done);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_result, fluxion::engine_result);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_reads, fluxion::engine_reads);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_task_failed, fluxion::engine_task_failed);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_selection, fluxion::engine_selection);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_stat_names, fluxion::engine_stat_names);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_stats, fluxion::engine_stats);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_worker_counts, fluxion::engine_worker_counts);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_owners, fluxion::engine_owners);
