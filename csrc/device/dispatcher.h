// The GPU executor: a thread that has a device read what tasks have chosen.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "device/batch.h"
#include "device/costs.h"
#include "device/device_api.h"
#include "device/hot_tiles.h"
#include "device/offers.h"
#include "engine/engine.h"
#include "runtime/topology.h"

namespace fluxion {

struct DispatcherConfig {
  int streams = 2;
  int tasks = 32;                 // of a batch, at most
  int entries = 1 << 14;          // tiles of a batch, at most: a task that reads more stays with the CPU
  int64_t batch_bytes = 8 << 20;  // a batch with so many bytes of tiles waits for no further task
  int64_t hot_bytes = 0;          // device memory for hot tiles
  int touches = 2, horizon = 16;  // HotTilesConfig
  int64_t stage_bytes = 0;        // device memory of a batch for tiles that are gathered before they are read
  int64_t stage_from = 0;         // StageShape
  bool flash = true;              // Batch::allocate
  Rates rates{};
};

enum DispatchStat {
  kDispatchTasks,       // delivered
  kDispatchBatches,     // launched
  kDispatchFailed,      // tasks
  kDispatchLate,        // batches that did not finish in time
  kDispatchQuarantine,  // streams that wait for one, now
  kDispatchTileBytes,   // that batches read
  kDispatchLinkBytes,   // of these, those read in host memory; copies to hot slots come on top
  kDispatchHotHits,     // tiles: HotStat, in its order
  kDispatchHotMisses,
  kDispatchHotCopies,
  kDispatchHotEvictions,
  kDispatchHotStale,
  kDispatchHotSlots,  // used, now
  kDispatchStaged,    // tiles that were gathered
  kDispatchFlash,     // batches that FlashInfer attended to
  kDispatchStatCount
};
// A batch whose results were delivered; now_ns().
struct BatchTimes {
  int64_t submitted, done;
  int64_t tasks, tile_bytes;
};

extern const char* const kDispatchStatNames;  // comma separated, in the order of DispatchStat

// Workers claim tasks and choose what to read. Where Offers says so, a task comes here with its list, and a
// device reads what the worker would have read. Tasks become batches, a launch each, on several streams with
// two batches each: while the device reads, the next batch fills.
//
// Failures. A batch that does not finish in Engine::timeout_s() fails its tasks, and its stream takes no
// other until the batch's signal comes, if ever: a device that hangs writes into buffers that nobody uses. A
// device that reports an error is lost: what it has fails, and the workers keep all tasks from then on.
// Either way the engine goes on.
//
// All that is not said to be for other threads belongs to the dispatcher's.
class Dispatcher {
 public:
  // engine and api must outlive it. Throws DeviceFailure, or std::invalid_argument for another API version.
  Dispatcher(Engine* engine, const DeviceApi* api, const DispatcherConfig& config);
  ~Dispatcher();

  // From any thread.
  void stop();  // and join; batches on their way are waited for, a few seconds at most
  void stats(int64_t* out) const;
  // Batches since the last call, up to `most` of the oldest; returns how many. kTimes wait to be asked for,
  // further ones are dropped. One thread at a time.
  int64_t times(BatchTimes* out, int64_t most);
  std::string lost() const;  // why the device is lost, as one sentence; "" while it is not

 private:
  static constexpr int kBuffers = 2;  // batches of a stream
  static constexpr uint64_t kTimes = 8192;

  struct Stream {
    void* handle = nullptr;
    Batch batches[kBuffers];
    bool quarantined = false;
  };

  void allocate();
  void warm_up();
  void release();
  void run();
  bool poll();
  void complete(Stream* stream, Batch* batch);
  void look_after(Stream* stream, Batch* batch);
  void poll_copies();
  bool feed();
  bool take_buffer(int pages);
  void add(const Offer& offer);
  void use_hot_tiles(const Offer& offer);
  void submit();
  void note(const Batch& batch);
  void ended();
  void drop_batch(const std::string& sentence);
  void fail_claims(Batch* batch, const std::string& sentence);
  void fail_offers(const std::string& sentence);
  bool all_hang() const;
  void lose(const std::string& sentence);
  bool wait_for_device();
  void publish_hot_stats();
  void count(DispatchStat stat, int64_t by) { stats_[stat].fetch_add(by, std::memory_order_relaxed); }

  Engine& engine_;
  const DeviceApi& api_;
  DispatcherConfig config_;
  const PoolShape shape_;

  std::vector<Stream> streams_;
  Stream* stream_ = nullptr;  // of batch_
  Batch* batch_ = nullptr;    // that is being filled, or nullptr
  Offer* offer_ = nullptr;    // that waits for a batch
  uint32_t numbers_ = 0;
  int64_t batches_ = 0;  // begun
  // Without work, before it sleeps: longer than a device takes from one layer's attention to the next.
  const int64_t spin_ns_ = idle_spin_ns(read_topology(), 1'000'000);
  int in_flight_ = 0;  // batches whose tasks are waited for

  std::optional<HotTiles> hot_;
  DeviceMemory slots_;  // the hot tiles', then the stages of all batches
  void* copy_stream_ = nullptr;
  CopyBatch copies_[2];
  uint32_t last_step_ = 0;
  double hit_share_ = 0;  // of tile bytes, lately

  std::shared_ptr<Offers> offers_;  // the engine's, too, until the layer after detach()

  std::atomic<bool> stop_{false};
  std::atomic<bool> is_lost_{false};
  mutable std::mutex lost_mutex_;
  std::string lost_;
  std::atomic<int64_t> stats_[kDispatchStatCount] = {};
  // A ring of one writer and one reader: batch n is at n % kTimes, from `told_` to before `noted_`.
  std::array<BatchTimes, kTimes> times_;
  std::atomic<uint64_t> noted_{0}, told_{0};
  std::mutex stop_mutex_;
  std::thread thread_;
};

}  // namespace fluxion
