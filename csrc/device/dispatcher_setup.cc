// How a dispatcher comes and goes: its buffers, its thread, and what is left to a device that hangs.
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <stdexcept>

#include "device/dispatcher.h"

namespace fluxion {

namespace {

constexpr double kStopSeconds = 5;  // that stop() waits for a device
constexpr int kOffers = 64;         // tasks that wait for a batch, at most

}  // namespace

Dispatcher::Dispatcher(Engine* engine, const DeviceApi* api, const DispatcherConfig& config)
    : engine_(*engine),
      api_(*api),
      config_(config),
      shape_(engine->pool().shape()),
      streams_(config.streams) {
  if (api_.version != kDeviceApiVersion) {
    throw std::invalid_argument("The device library has API version " + std::to_string(api_.version) +
                                " and this one needs " + std::to_string(kDeviceApiVersion) +
                                "; reinstall fluxion-sglang so that both come from the same version.");
  }
  if (config.streams < 1 || config.tasks < 1 || config.entries < 1 || config.touches < 1 ||
      config.touches > 2 || config.hot_bytes < 0 || config.stage_bytes < 0) {
    throw std::invalid_argument(
        "A dispatcher needs at least one stream, and one task and tile a batch; hot tiles and stages take "
        "memory "
        "from 0 up, and hot tiles are kept from the first or the second touch on.");
  }
  try {
    allocate();
    warm_up();
  } catch (...) {
    release();
    throw;
  }
  const Rates& rates = config_.rates;
  const bool stages = rates.stage > 0 && config_.stage_bytes >= config_.batch_bytes &&
                      config_.stage_from <= config_.batch_bytes;
  offers_ = std::make_shared<Offers>(Division(rates, stages ? rates.stage : rates.link), least_bytes(rates),
                                     kOffers, config_.entries, engine_.timeout_s());
  // Signals belong to the threads Python knows.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    release();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  engine_.attach(offers_);
}

Dispatcher::~Dispatcher() { stop(); }

void Dispatcher::allocate() {
  const int group = engine_.group();
  const BatchShape shape{config_.tasks, config_.entries, group, shape_.head_dim,
                         static_cast<int>(shape_.element())};
  const int64_t workspace = api_.workspace_bytes(shape.tasks, shape.entries, group, shape_.head_dim);
  const auto slots_in = [&](int64_t bytes) {
    return static_cast<int32_t>(std::min<int64_t>(bytes / shape_.tile_bytes(), INT32_MAX / 4));
  };
  const int32_t slots = slots_in(config_.hot_bytes);
  StageShape stage{slots, std::min(slots_in(config_.stage_bytes), config_.entries), config_.stage_from};
  for (Stream& s : streams_) {
    check_device(api_, "make a stream", api_.stream_create(&s.handle));
    for (Batch& batch : s.batches) {
      batch.allocate(api_, shape, workspace, config_.flash, stage);
      stage.first += stage.slots;
    }
  }
  if (stage.first > 0) slots_ = DeviceMemory(api_, DeviceMemory::kDevice, stage.first * shape_.tile_bytes());
  if (slots == 0) return;
  const int64_t tiles = int64_t{shape_.layers} * shape_.kv_heads * shape_.pages;
  hot_.emplace(HotTilesConfig{tiles, slots, config_.touches, config_.horizon});
  check_device(api_, "make a stream", api_.stream_create(&copy_stream_));
  for (CopyBatch& copy : copies_) copy.allocate(api_);
  engine_.shared_pool()->count_writes();
}

// Everything once, now: a kernel's first launch may wait for the device to be idle, which it is not while a
// layer waits for its answer. What cannot work at all (a pool that the device cannot read) shows here.
void Dispatcher::warm_up() {
  constexpr int kTiles = 8;  // our own kernels cut them into parts
  const int tiles = std::min(kTiles, config_.entries);
  numbers_ = 1;
  if (hot_) {
    copies_[0].add(engine_.pool().tile(0, 0, 0), 0);
    copies_[0].submit(api_, copy_stream_, shape_.tile_bytes(), slots_.data());
    check_device(api_, "finish a copy", api_.stream_synchronize(copy_stream_));
    copies_[0].slots.clear();
    copies_[0].submitted = false;
  }
  // What is masked is our own kernels', wherever its tiles are; tiles that are all on the device may be
  // FlashInfer's.
  for (const bool on_device : {false, true}) {
    if (on_device && slots_.data() == nullptr) break;
    for (Stream& s : streams_) {
      Batch& batch = s.batches[0];
      batch.clear(numbers_);
      std::fill_n(batch.next_tiles(), tiles, on_device && hot_ ? -1 : 0);  // the padding page
      if (hot_) *batch.next_tiles() = -1;
      Selection chosen;
      chosen.count = tiles;
      const std::vector<uint16_t> masks(size_t(tiles) * engine_.group(), uint16_t{0xffff});
      if (!on_device) batch.mask(masks.data(), tiles);
      batch.add(-1, 1.0f, chosen, engine_.pool().tiles(0, 0));
      if (on_device) batch.gather();
      batch.submit(api_, s.handle, slots_.data());
      check_device(api_, "finish a batch", api_.stream_synchronize(s.handle));
      batch.submitted = false;
    }
  }
}

// Of a device that hangs nothing may be released.
void Dispatcher::release() {
  for (Stream& s : streams_) {
    if (s.handle != nullptr) static_cast<void>(api_.stream_synchronize(s.handle));
    for (Batch& batch : s.batches) batch.free(api_);
    if (s.handle != nullptr) static_cast<void>(api_.stream_destroy(s.handle));
    s.handle = nullptr;
  }
  if (copy_stream_ != nullptr) static_cast<void>(api_.stream_synchronize(copy_stream_));
  for (CopyBatch& copy : copies_) copy.free(api_);
  if (copy_stream_ != nullptr) static_cast<void>(api_.stream_destroy(copy_stream_));
  copy_stream_ = nullptr;
  slots_.free(api_);
}

void Dispatcher::stop() {
  const std::lock_guard lock(stop_mutex_);
  if (!thread_.joinable()) return;
  engine_.detach();
  stop_.store(true, std::memory_order_release);
  offers_->become(Offers::kEnded);
  offers_->wake();
  thread_.join();
  if (wait_for_device()) {
    release();
  } else {
    // It may come back to what it has, the pool's tiles included: all of it stays where it is, for ever.
    new std::shared_ptr<HostPool>(engine_.shared_pool());
  }
}

// Whether it is done with all it was given. A lost one is not asked: it never answers again.
bool Dispatcher::wait_for_device() {
  const auto all_done = [&] {
    for (const Stream& s : streams_) {
      for (const Batch& batch : s.batches) {
        if (batch.submitted && !batch.done()) return false;
      }
    }
    return std::all_of(std::begin(copies_), std::end(copies_),
                       [](const CopyBatch& copy) { return !copy.submitted || copy.done(); });
  };
  const int64_t start = now_ns();
  Backoff backoff;
  while (!all_done()) {
    if (is_lost_.load(std::memory_order_relaxed) ||
        static_cast<double>(now_ns() - start) > std::min(kStopSeconds, engine_.timeout_s()) * 1e9)
      return false;
    backoff.wait();
  }
  return true;
}

}  // namespace fluxion
