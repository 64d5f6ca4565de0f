// The GPU executor's C ABI: dispatcher, placement and what it is measured with.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "device/costs.h"
#include "device/dispatcher.h"
#include "device/timing.h"
#include "ffi/engine.h"

namespace fluxion {
namespace {

class DispatcherObj : public ffi::Object {
 public:
  DispatcherObj(EngineRef e, std::unique_ptr<Dispatcher> d)
      : engine(std::move(e)), dispatcher(std::move(d)) {}
  EngineRef engine;  // first: it must outlive the dispatcher
  std::unique_ptr<Dispatcher> dispatcher;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fluxion.Dispatcher", DispatcherObj, ffi::Object);
};
class DispatcherRef : public ffi::ObjectRef {
 public:
  explicit DispatcherRef(ffi::ObjectPtr<DispatcherObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(DispatcherRef, ffi::ObjectRef, DispatcherObj);
};

const DeviceApi* device_api(int64_t address) {
  if (address == 0) Raise("ValueError") << "The address of the device library's functions is 0.";
  return reinterpret_cast<const DeviceApi*>(address);
}

int small(int64_t value) { return static_cast<int>(std::clamp<int64_t>(value, -1, INT32_MAX)); }

Rates rates_of(const TensorView& t) {
  expect(t, "rates", kFloat64, {6}, 1);
  const double* r = data<double>(t);
  return {r[0], r[1], r[2], r[3], r[4], r[5]};
}

DispatcherRef dispatcher_create(EngineRef engine, int64_t api, int64_t streams, int64_t tasks,
                                int64_t entries, int64_t batch_bytes, int64_t hot_bytes, int64_t touches,
                                int64_t horizon, int64_t stage_bytes, int64_t stage_from, bool flash,
                                TensorView rates) {
  DispatcherConfig config;
  config.streams = small(streams);
  config.tasks = small(tasks);
  config.entries = small(entries);
  config.batch_bytes = batch_bytes;
  config.hot_bytes = hot_bytes;
  config.touches = small(touches);
  config.horizon = small(horizon);
  config.rates = rates_of(rates);
  config.flash = flash;
  config.stage_from = stage_from >= 0 ? stage_from : fluxion::stage_from(config.rates);
  config.stage_bytes = config.stage_from == int64_t{1} << 62 ? 0 : stage_bytes;
  return guarded([&] {
    auto dispatcher = std::make_unique<Dispatcher>(engine->engine.get(), device_api(api), config);
    return DispatcherRef(ffi::make_object<DispatcherObj>(engine, std::move(dispatcher)));
  });
}

void dispatcher_stop(DispatcherRef ref) { ref->dispatcher->stop(); }

ffi::String dispatcher_lost(DispatcherRef ref) { return ffi::String(ref->dispatcher->lost()); }

ffi::String dispatcher_stat_names() { return ffi::String(kDispatchStatNames); }

void dispatcher_stats(DispatcherRef ref, TensorView out) {
  expect(out, "out", kInt64, {kDispatchStatCount}, 1);
  ref->dispatcher->stats(data<int64_t>(out));
}

// out: [n, 4], BatchTimes; returns how many there are.
int64_t dispatcher_times(DispatcherRef ref, TensorView out) {
  static_assert(sizeof(BatchTimes) == 4 * sizeof(int64_t));
  expect(out, "out", kInt64, {-1, 4}, 2);
  return ref->dispatcher->times(reinterpret_cast<BatchTimes*>(data<int64_t>(out)), out.size(0));
}

double share(int64_t tile_bytes, int64_t metadata_bytes, int64_t cpu_bytes, TensorView rates,
             double hit_share) {
  ReadableLoad load;
  load.tile_bytes = tile_bytes;
  load.metadata_bytes = metadata_bytes;
  load.cpu_bytes = cpu_bytes;
  return device_share(load, rates_of(rates), hit_share);
}

int64_t staged_from(TensorView rates) { return stage_from(rates_of(rates)); }
int64_t least(TensorView rates) { return least_bytes(rates_of(rates)); }

void attend_times(int64_t api, TensorView q, TensorView tiles, int64_t pages, int64_t where, bool flash,
                  double timeout_s, TensorView ns) {
  expect(q, "q", q.dtype(), {-1, -1, -1}, 3);
  expect(tiles, "tiles", q.dtype(), {-1, 2, kPage, q.size(2)}, 4);
  expect(ns, "ns", kInt64, {-1}, 1);
  TimedBatch what{};
  what.tasks = small(q.size(0));
  what.pages = small(pages);
  what.q = data<char>(q);
  what.tiles = data<char>(tiles);
  what.available = tiles.size(0);
  if (where < 0 || where > 2) Raise("ValueError") << "Tiles are read in place (0), hot (1) or staged (2).";
  what.where = static_cast<Where>(where);
  what.group = small(q.size(1));
  what.head_dim = small(q.size(2));
  what.element = q.dtype().bits / 8;
  what.flash = flash;
  what.timeout_s = timeout_s;
  if (what.tasks < 1 || what.pages < 1 || what.available < int64_t{what.tasks} * what.pages) {
    Raise("ValueError") << what.tasks << " tasks of " << what.pages << " tiles each cannot be timed with "
                        << what.available
                        << " tiles; give at least one task, and as many tiles as they read.";
  }
  guarded([&] { time_attend(*device_api(api), what, small(ns.size(0)), data<int64_t>(ns)); });
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(dispatcher_create, fluxion::dispatcher_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dispatcher_stop, fluxion::dispatcher_stop);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dispatcher_lost, fluxion::dispatcher_lost);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dispatcher_stat_names, fluxion::dispatcher_stat_names);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dispatcher_stats, fluxion::dispatcher_stats);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dispatcher_times, fluxion::dispatcher_times);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_share, fluxion::share);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_stage_from, fluxion::staged_from);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_least_bytes, fluxion::least);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(time_attend, fluxion::attend_times);
