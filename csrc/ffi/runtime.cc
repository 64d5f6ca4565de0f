// The runtime's C ABI. Argument checks live here: what the classes below it receive has the right shape and
// dtype.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/engine.h"
#include "kernels/feature_index.h"
#include "runtime/engine.h"
#include "runtime/pool.h"
#include "runtime/topology.h"
#include "runtime/worker_pool.h"

namespace fluxion {
namespace {

// Raised by one whenever a function's signature or the layout of the pool changes; native.py compares it.
constexpr int64_t kAbiVersion = 18;

// [tokens, heads, D], D contiguous
TokenView token_view(const HostPool& pool, const TensorView& t, const char* name, int64_t tokens) {
  const PoolShape& s = pool.shape();
  expect(t, name, kv_type(pool), {tokens, s.kv_heads, s.head_dim}, 1);
  return {data<char>(t), t.stride(0) * s.element(), t.stride(1) * s.element()};
}

PoolShape pool_shape(int64_t layers, int64_t kv_heads, int64_t pages, int64_t head_dim, int64_t dtype,
                     int64_t sink_pages) {
  for (int64_t v : {layers, kv_heads, pages, head_dim, sink_pages}) {
    if (v < 0 || v > INT32_MAX) Raise("ValueError") << "A size of the pool is " << v << ", which cannot be.";
  }
  return {static_cast<int>(layers),   static_cast<int>(kv_heads), static_cast<int>(pages),
          static_cast<int>(head_dim), static_cast<DType>(dtype),  static_cast<int>(sink_pages)};
}

int64_t abi_version() { return kAbiVersion; }

ffi::String topology() {
  return guarded([] { return ffi::String(topology_json()); });
}

Workers workers_create(int64_t n, TensorView cores) {
  expect(cores, "cores", kInt32, {-1}, 1);
  return guarded([&] {
    const int32_t* c = data<int32_t>(cores);
    const int threads = static_cast<int>(std::clamp<int64_t>(n, -1, 1 << 20));
    return Workers(ffi::make_object<WorkersObj>(
        std::make_shared<WorkerPool>(threads, std::vector<int>(c, c + cores.numel()))));
  });
}

ffi::String workers_cores(Workers workers) {
  std::string out;
  for (int c : workers->pool->cores()) out += (out.empty() ? "" : ",") + std::to_string(c);
  return out;
}

int64_t pool_bytes_of(int64_t layers, int64_t kv_heads, int64_t pages, int64_t head_dim, int64_t dtype) {
  return guarded([&] { return pool_bytes(pool_shape(layers, kv_heads, pages, head_dim, dtype, 0)); });
}

Pool pool_create(Workers workers, int64_t layers, int64_t kv_heads, int64_t pages, int64_t head_dim,
                 int64_t dtype, int64_t sink_pages, double spread, ffi::String isa) {
  return guarded([&] {
    const PoolShape shape = pool_shape(layers, kv_heads, pages, head_dim, dtype, sink_pages);
    return Pool(ffi::make_object<PoolObj>(
        std::make_shared<HostPool>(workers->pool, shape, static_cast<float>(spread), std::string(isa))));
  });
}

ffi::String pool_isa(Pool pool) { return ffi::String(pool->pool->kernels().isa); }

// A tensor over the pool's memory, which lives as long as the tensor.
struct PoolMemory {
  std::shared_ptr<HostPool> pool;
  void* at;
  void AllocData(DLTensor* t) { t->data = at; }
  void FreeData(DLTensor*) {}
};

ffi::Tensor pool_tensor(Pool pool_ref, ffi::String name_ref, int64_t layer) {
  const std::string name(name_ref);
  const HostPool& pool = *pool_ref->pool;
  const PoolShape& s = pool.shape();
  const int l = static_cast<int>(std::clamp<int64_t>(layer, -1, INT32_MAX));
  guarded([&] { pool.check_layer(l); });
  const auto view = [&](void* at, std::initializer_list<int64_t> shape, DLDataType dtype) {
    return ffi::Tensor::FromNDAlloc(PoolMemory{pool_ref->pool, at},
                                    ffi::ShapeView(shape.begin(), shape.size()), dtype, DLDevice{kDLCPU, 0});
  };
  if (name == "memory") {  // whole small pages: what follows the last byte belongs to the mapping
    const HostMemory& memory = pool.memory();
    return view(memory.data(), {round_up(memory.bytes(), kSmallPage)}, DLDataType{kDLUInt, 8, 1});
  }
  if (name == "tiles")
    return view(pool.tiles_base(l), {s.kv_heads, s.pages, 2, kPage, s.head_dim}, kv_type(pool));
  if (name == "moments") return view(pool.moments_base(l), {s.kv_heads, s.pages, s.moments_len()}, kFloat64);
  for (int j = 0; j < kLevels; ++j) {
    const std::string level = std::to_string(j);
    if (name == "meta" + level)
      return view(pool.meta_base(l, j), {s.kv_heads, s.entries(j), 2, s.head_dim}, kv_type(pool));
    if (j > 0 && name == "tag" + level) return view(pool.tags(l, j), {s.entries(j)}, kInt32);
  }
  Raise("ValueError") << "The pool has no tensor \"" << name
                      << "\"; choose tiles, meta0 to meta3, tag1 to tag3, moments or memory.";
  TVM_FFI_UNREACHABLE();
}

void pool_append(Pool pool_ref, int64_t layer, TensorView pages, int64_t start, TensorView k, TensorView v) {
  HostPool& pool = *pool_ref->pool;
  expect(pages, "pages", kInt32, {-1}, 1);
  const TokenView keys = token_view(pool, k, "k", -1), values = token_view(pool, v, "v", k.size(0));
  guarded([&] {
    pool.append(static_cast<int>(layer), data<int32_t>(pages), pages.size(0), start, k.size(0), keys, values);
  });
}

void pool_check(Pool pool, TensorView pages, int64_t start, int64_t count) {
  expect(pages, "pages", kInt32, {-1}, 1);
  guarded([&] { pool->pool->check_tokens(data<int32_t>(pages), pages.size(0), start, count); });
}

void pool_adopt(Pool pool, int64_t layer, TensorView pages, int64_t start, int64_t count) {
  expect(pages, "pages", kInt32, {-1}, 1);
  guarded(
      [&] { pool->pool->adopt(static_cast<int>(layer), data<int32_t>(pages), pages.size(0), start, count); });
}

void pool_append_decode(Pool pool_ref, int64_t layer, TensorView seq_lens, TensorView table, TensorView k,
                        TensorView v) {
  HostPool& pool = *pool_ref->pool;
  expect(seq_lens, "seq_lens", kInt32, {-1}, 1);
  const int64_t batch = seq_lens.size(0);
  expect(table, "page_table", kInt32, {batch, -1}, 1);
  const TokenView keys = token_view(pool, k, "k", batch), values = token_view(pool, v, "v", batch);
  guarded([&] {
    pool.append_decode(static_cast<int>(layer), data<int32_t>(seq_lens), data<int32_t>(table),
                       table.stride(0), table.size(1), static_cast<int>(batch), keys, values);
  });
}

void pool_fill_window(Pool pool_ref, int64_t layer, TensorView window, int64_t row, int64_t n,
                      TensorView pages, int64_t sinks, int64_t window_tokens) {
  HostPool& pool = *pool_ref->pool;
  expect(pages, "pages", kInt32, {-1}, 1);
  const WindowView view = window_view(pool, window, sinks, window_tokens);
  guarded([&] {
    pool.fill_window(static_cast<int>(layer), view, static_cast<int>(row), static_cast<int>(n),
                     data<int32_t>(pages), pages.size(0));
  });
}

void pool_gather(Pool pool_ref, int64_t layer, TensorView pages, TensorView k, TensorView v) {
  HostPool& pool = *pool_ref->pool;
  const PoolShape& s = pool.shape();
  expect(pages, "pages", kInt32, {-1}, 1);
  for (auto [t, name] : {std::pair{&k, "out_k"}, std::pair{&v, "out_v"}}) {
    expect(*t, name, kv_type(pool), {s.kv_heads, pages.size(0) * kPage, s.head_dim}, 2);
  }
  guarded([&] {
    pool.gather(static_cast<int>(layer), data<int32_t>(pages), pages.size(0), data<char>(k),
                k.stride(0) * s.element(), data<char>(v), v.stride(0) * s.element());
  });
}

EngineRef engine_create(Pool pool, int64_t q_heads, int64_t sinks, int64_t window, int64_t max_requests,
                        int64_t max_pages, bool attend_union, double guard, int64_t chunk_bytes,
                        bool share_prefixes, int64_t cached_bytes) {
  for (int64_t n : {q_heads, sinks, window, max_requests, max_pages}) {
    if (n < 0 || n > INT32_MAX)
      Raise("ValueError") << "A size of the engine is " << n << ", which cannot be.";
  }
  return guarded([&] {
    const std::vector<int>& cores = pool->pool->workers().cores();
    const int64_t cache =
        cached_bytes >= 0 ? cached_bytes : last_cache_per_thread(cores.empty() ? 0 : cores[0]) / 2;
    const EngineConfig config{static_cast<int>(q_heads),
                              static_cast<int>(sinks),
                              static_cast<int>(window),
                              static_cast<int>(max_requests),
                              static_cast<int>(max_pages),
                              attend_union,
                              guard,
                              chunk_bytes > 0 ? chunk_bytes : kChunkBytes,
                              share_prefixes,
                              cache};
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

void engine_layer_resident(EngineRef ref, int64_t layer, TensorView q, TensorView k, TensorView v,
                           TensorView window, double scale, TensorView parts) {
  Engine& engine = *ref->engine;
  const HostPool& pool = engine.pool();
  const int64_t B = engine.batch(), Hq = engine.config().q_heads;
  expect(q, "q", kv_type(pool), {B, Hq, pool.shape().head_dim}, 2);
  expect(parts, "parts", kFloat32, {B, Hq, kParts}, 3);
  ResidentArgs args{};
  args.layer = static_cast<int>(layer);
  args.q = data<char>(q);
  args.q_stride = q.stride(0) * pool.shape().element();
  if (k.numel() > 0) {
    args.k = token_view(pool, k, "k", B);
    args.v = token_view(pool, v, "v", B);
  }
  args.window = window_view(pool, window, engine.config().sinks, engine.config().window);
  args.scale = static_cast<float>(scale);
  args.parts = data<float>(parts);
  guarded([&] { engine.layer_resident(args); });
}

void engine_layer_append(EngineRef ref, int64_t layer, TensorView k, TensorView v) {
  Engine& engine = *ref->engine;
  const TokenView keys = token_view(engine.pool(), k, "k", engine.batch()),
                  values = token_view(engine.pool(), v, "v", engine.batch());
  guarded([&] { engine.layer_append(static_cast<int>(layer), keys, values); });
}

int64_t engine_layer_begin(EngineRef ref, int64_t layer, TensorView q, TensorView k, TensorView v,
                           TensorView window, TensorView blk, TensorView budget, TensorView value,
                           TensorView owner, double scale, TensorView out, TensorView listed_offsets,
                           TensorView listed_pages, TensorView listed_masks, TensorView record_chosen,
                           TensorView record_scores, TensorView given_o, TensorView given_lse,
                           TensorView stop, TensorView spread, TensorView mid_o, TensorView mid_lse,
                           TensorView parts) {
  Engine& engine = *ref->engine;
  const HostPool& pool = engine.pool();
  const PoolShape& s = pool.shape();
  const int64_t B = engine.batch(), Hq = engine.config().q_heads;
  expect(q, "q", kv_type(pool), {B, Hq, s.head_dim}, 2);
  expect(blk, "blk", kInt32, {B, s.kv_heads}, 2);
  expect(budget, "budget", kFloat32, {B, Hq}, 2);
  expect(value, "value", kFloat32, {B, s.kv_heads}, 2);
  LayerArgs args{};
  args.layer = static_cast<int>(layer);
  args.q = data<char>(q);
  args.q_stride = q.stride(0) * s.element();
  if (k.numel() > 0) {
    args.k = token_view(pool, k, "k", B);
    args.v = token_view(pool, v, "v", B);
  }
  if (window.numel() > 0)
    args.window = window_view(pool, window, engine.config().sinks, engine.config().window);
  args.blk = data<int32_t>(blk);
  args.budget = data<float>(budget);
  args.value = data<float>(value);
  if (owner.numel() > 0) {
    expect(owner, "owner", kInt32, {B, s.kv_heads}, 2);
    args.owner = data<int32_t>(owner);
  }
  if (listed_offsets.numel() > 0) {
    expect(listed_offsets, "listed.offsets", kInt64, {B * s.kv_heads + 1}, 1);
    expect(listed_pages, "listed.pages", kInt32, {-1}, 1);
    expect(listed_masks, "listed.masks", kUInt16, {listed_pages.size(0), engine.group()}, 2);
    args.listed = {data<int64_t>(listed_offsets), data<int32_t>(listed_pages), data<uint16_t>(listed_masks),
                   listed_pages.size(0)};
    if (record_chosen.numel() > 0) {
      expect(record_chosen, "record.chosen", kUInt16, {listed_pages.size(0), engine.group()}, 2);
      expect(record_scores, "record.scores", kFloat32, {listed_pages.size(0), engine.group(), kPage}, 3);
      args.listed.chosen = data<uint16_t>(record_chosen);
      args.listed.scores = data<float>(record_scores);
    }
  }
  if (given_lse.numel() > 0) {
    expect(given_o, "given.o", kFloat32, {B, Hq, s.head_dim}, 3);
    expect(given_lse, "given.lse", kFloat32, {B, Hq}, 2);
    args.given_o = data<float>(given_o);
    args.given_lse = data<float>(given_lse);
  }
  args.scale = static_cast<float>(scale);
  // A step of no requests has empty tensors of either kind.
  if (mid_lse.ndim() == 2) {
    if (window.numel() > 0)
      Raise("ValueError") << "A layer has a window or mid_lse; its residents are one's.";
    expect(mid_o, "mid_o", kFloat32, {B, Hq, s.head_dim}, 3);
    expect(mid_lse, "mid_lse", kFloat32, {B, Hq}, 2);
    args.mid_o = data<float>(mid_o);
    args.mid_lse = data<float>(mid_lse);
    if (parts.numel() > 0) {
      expect(parts, "parts", kFloat32, {B, Hq, kParts}, 3);
      args.parts = data<float>(parts);
    }
  } else {
    expect(out, "out", kv_type(pool), {B, Hq, s.head_dim}, 2);
    args.out = data<char>(out);
    args.out_stride = out.stride(0) * s.element();
  }
  if (stop.numel() > 0) {
    expect(stop, "stop", kFloat32, {B, s.kv_heads}, 2);
    args.stop = data<float>(stop);
  }
  if (spread.numel() > 0) {
    expect(spread, "spread", kFloat32, {B, s.kv_heads}, 2);
    args.spread = data<float>(spread);
  }
  return guarded([&] { return static_cast<int64_t>(engine.layer_begin(args)); });
}

void engine_set_resident(EngineRef ref, TensorView o, TensorView lse) {
  Engine& engine = *ref->engine;
  const int64_t B = engine.batch(), Hq = engine.config().q_heads;
  expect(o, "o", kFloat32, {B, Hq, engine.pool().shape().head_dim}, 3);
  expect(lse, "lse", kFloat32, {B, Hq}, 2);
  guarded([&] { engine.set_resident(data<float>(o), data<float>(lse)); });
}

void engine_layer_finish(EngineRef ref) {
  guarded([&] { ref->engine->layer_finish(); });
}

int64_t engine_queue_pop(EngineRef ref, int64_t executor) {
  if (executor < 1 || executor >= kExecutors) {
    Raise("ValueError") << "There is no foreign executor " << executor << "; 1 is torch and 2 is gpu.";
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

TVM_FFI_DLL_EXPORT_TYPED_FUNC(abi_version, fluxion::abi_version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(topology_json, fluxion::topology);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workers_create, fluxion::workers_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workers_cores, fluxion::workers_cores);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_bytes, fluxion::pool_bytes_of);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_create, fluxion::pool_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_isa, fluxion::pool_isa);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_tensor, fluxion::pool_tensor);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_append, fluxion::pool_append);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_check, fluxion::pool_check);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_adopt, fluxion::pool_adopt);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_append_decode, fluxion::pool_append_decode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_fill_window, fluxion::pool_fill_window);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_gather, fluxion::pool_gather);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_create, fluxion::engine_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_step, fluxion::engine_step);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_layer_resident, fluxion::engine_layer_resident);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_layer_append, fluxion::engine_layer_append);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_layer_begin, fluxion::engine_layer_begin);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_set_resident, fluxion::engine_set_resident);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(engine_layer_finish, fluxion::engine_layer_finish);
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
