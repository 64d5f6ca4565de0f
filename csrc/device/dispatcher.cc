// What the dispatcher's thread does.
#include "device/dispatcher.h"

#include <algorithm>
#include <cmath>

namespace fluxion {

const char* const kDispatchStatNames =
    "tasks,batches,failed_tasks,late_batches,quarantined_streams,tile_bytes,link_bytes,hot_hits,hot_misses,"
    "hot_copies,hot_evictions,hot_stale,hot_slots,staged_tiles,flashinfer_batches";

namespace {

constexpr int64_t kLookNs = 50'000'000;  // how often a device is asked about a batch that is not done
constexpr double kHitWeight = 1.0 / 16;  // of a task, in the moving share of hits

}  // namespace

void Dispatcher::stats(int64_t* out) const {
  for (int i = 0; i < kDispatchStatCount; ++i) out[i] = stats_[i].load(std::memory_order_relaxed);
}

std::string Dispatcher::lost() const {
  if (!is_lost_.load(std::memory_order_acquire)) return "";
  const std::lock_guard lock(lost_mutex_);
  return lost_;
}

void Dispatcher::run() {
  uint32_t seen = engine_.opened() - 1;  // a layer may be open already
  Backoff backoff;
  int64_t idle_since = now_ns();
  while (!stop_.load(std::memory_order_acquire)) {
    if (const uint32_t opened = engine_.opened(); opened != seen) {
      seen = opened;
      begin_layer();
    }
    if (poll() | feed()) {
      backoff = {};
      idle_since = now_ns();
    } else if (in_flight_ > 0 || feeding_ || now_ns() - idle_since < spin_ns_) {
      backoff.wait();
    } else {
      engine_.wait_opened(seen);
      backoff = {};
      idle_since = now_ns();
    }
  }
  drop_batch("the executor was stopped");
  for (Stream& s : streams_) {
    for (Batch& batch : s.batches) {
      if (batch.submitted && !batch.failed) fail_claims(&batch, "the executor was stopped");
    }
  }
}

// Whether something was done.
bool Dispatcher::poll() {
  bool any = false;
  for (Stream& s : streams_) {
    for (Batch& batch : s.batches) {
      if (!batch.submitted) continue;
      if (batch.done()) {
        complete(&s, &batch);
        any = true;
      } else if (!batch.failed) {
        look_after(&s, &batch);
      }
    }
  }
  poll_copies();
  return any;
}

void Dispatcher::complete(Stream* stream, Batch* batch) {
  unpin(*batch);
  batch->submitted = false;
  if (batch->failed) {
    // The stream's other batch comes to its end, too, or waits as this one did.
    const bool hangs = std::any_of(std::begin(stream->batches), std::end(stream->batches),
                                   [](const Batch& b) { return b.submitted && b.failed; });
    if (stream->quarantined && !hangs) count(kDispatchQuarantine, -1);
    stream->quarantined &= hangs;
    return;
  }
  --in_flight_;
  note(*batch);
  for (size_t i = 0; i < batch->claims.size(); ++i) {
    const Batch::Claimed& c = batch->claims[i];
    const int task = static_cast<int>(i);
    // A claim that no longer holds was of a layer that was abandoned.
    if (engine_.deliver(c.claim, batch->o(task), batch->lse(task), c.tokens, c.reads))
      count(kDispatchTasks, 1);
  }
}

void Dispatcher::note(const Batch& batch) {
  const uint64_t at = noted_.load(std::memory_order_relaxed);
  if (at - told_.load(std::memory_order_acquire) == kTimes) return;
  times_[at % kTimes] = {batch.since_ns, now_ns(), static_cast<int64_t>(batch.claims.size()), batch.bytes};
  noted_.store(at + 1, std::memory_order_release);
}

int64_t Dispatcher::times(BatchTimes* out, int64_t most) {
  const uint64_t from = told_.load(std::memory_order_relaxed);
  const uint64_t to = std::min(noted_.load(std::memory_order_acquire), from + static_cast<uint64_t>(most));
  for (uint64_t at = from; at < to; ++at) out[at - from] = times_[at % kTimes];
  told_.store(to, std::memory_order_release);
  return static_cast<int64_t>(to - from);
}

// The hot tiles that a batch reads no more.
void Dispatcher::unpin(const Batch& batch) {
  for (int i = 0; hot_ && i < batch.entries; ++i) {
    const int32_t slot = -1 - batch.tiles()[i];
    if (slot >= 0 && slot < hot_->slots()) hot_->unpin(slot);
  }
}

// A batch that is not done: whether it ever will be.
void Dispatcher::look_after(Stream* stream, Batch* batch) {
  const int64_t now = now_ns();
  if (now - batch->looked_ns < kLookNs && now - batch->since_ns < engine_.timeout_s() * 1e9) return;
  batch->looked_ns = now;
  if (api_.stream_query(stream->handle) != 0) {
    const char* sentence = api_.error();
    return lose(std::string("the device was lost (") +
                (sentence == nullptr ? "it did not say why" : sentence) + ")");
  }
  const double seconds = static_cast<double>(now - batch->since_ns) / 1e9;
  if (seconds < engine_.timeout_s()) return;
  fail_claims(batch,
              "the device did not finish a batch in time; raise FLUXION_TASK_TIMEOUT_S if it is only slow");
  count(kDispatchLate, 1);
  if (!stream->quarantined) count(kDispatchQuarantine, 1);
  stream->quarantined = true;
  if (stream_ == stream) drop_batch("the device's stream hangs");
}

void Dispatcher::poll_copies() {
  if (!hot_) return;
  for (CopyBatch& copy : copies_) {
    if (!copy.submitted || !copy.done()) continue;
    for (const int32_t slot : copy.slots) hot_->filled(slot);
    copy.slots.clear();
    copy.submitted = false;
  }
  publish_hot_stats();
}

void Dispatcher::publish_hot_stats() {
  for (int i = 0; i < kHotStatCount; ++i)
    stats_[kDispatchHotHits + i].store(hot_->stats()[i], std::memory_order_relaxed);
  stats_[kDispatchHotSlots].store(hot_->used(), std::memory_order_relaxed);
}

void Dispatcher::begin_layer() {
  load_ = engine_.load();
  feeding_ = load_.own + load_.tasks > 0;
  const bool fits = load_.longest <= config_.entries && !is_lost_.load(std::memory_order_relaxed);
  const double share = device_share(load_, rates_of_layer(), hit_share_);
  left_ = fits ? std::llround(share * static_cast<double>(load_.tile_bytes)) : 0;
}

// Where a batch of this layer is not staged, or only in part, its tiles come at the rate of reading in place.
Rates Dispatcher::rates_of_layer() const {
  Rates rates = config_.rates;
  const double in_host = static_cast<double>(batch_of_layer()) * (1 - hit_share_);
  const int64_t slots = std::min<int64_t>(config_.stage_bytes / shape_.tile_bytes(), config_.entries);
  const bool whole = slots > 0 && in_host <= static_cast<double>(slots * shape_.tile_bytes());
  if (!whole || in_host < static_cast<double>(config_.stage_from)) rates.stage = 0;
  return rates;
}

// Bytes of tiles in a batch of this layer's tasks, as add() and take_buffer() fill it, if each reads as much
// as the tasks for anyone do on average.
int64_t Dispatcher::batch_of_layer() const {
  if (load_.tile_bytes == 0) return 0;
  const int64_t typical = std::max<int64_t>(load_.tile_bytes / load_.tasks, 1);
  // While there is room for the longest list, another task is taken.
  const int64_t room = std::max(config_.entries - load_.longest, 0) * shape_.tile_bytes();
  const int64_t tasks = std::min({(config_.batch_bytes + typical - 1) / typical, 1 + room / typical,
                                  int64_t{config_.tasks}, int64_t{load_.own} + load_.tasks});
  return std::max<int64_t>(tasks, 1) * load_.tile_bytes / load_.tasks;
}

// Claims a task, or launches what there is when there are no more. Whether something was done.
bool Dispatcher::feed() {
  if (!feeding_) return false;
  const bool lost = is_lost_.load(std::memory_order_relaxed);
  if (!lost && !take_buffer()) {
    feeding_ = in_flight_ > 0;  // where nothing is on its way, every stream hangs
    return false;
  }
  // The last task is one that the share covers by half.
  const int64_t typical = load_.tasks > 0 ? load_.tile_bytes / load_.tasks : 0;
  const int64_t claim = engine_.pop(Executor::kGpu, /*own_lane=*/lost || left_ <= typical / 2);
  if (claim < 0) {
    feeding_ = false;
    if (batch_ != nullptr && !batch_->claims.empty()) submit();
    return false;
  }
  if (lost) {
    engine_.fail(claim, this->lost());
    count(kDispatchFailed, 1);
  } else {
    add(claim);
  }
  return true;
}

// A batch to fill, with room for any task of the layer.
bool Dispatcher::take_buffer() {
  if (batch_ != nullptr && !batch_->claims.empty() &&
      !batch_->has_room(std::min(load_.longest, config_.entries)))
    submit();
  if (batch_ != nullptr) return true;
  Stream* best = nullptr;
  int fewest = kBuffers;
  for (Stream& s : streams_) {
    const int busy = static_cast<int>(std::count_if(std::begin(s.batches), std::end(s.batches),
                                                    [](const Batch& b) { return b.submitted; }));
    if (s.quarantined || busy >= fewest) continue;
    best = &s;
    fewest = busy;
  }
  if (best == nullptr) return false;
  stream_ = best;
  batch_ = std::find_if(std::begin(best->batches), std::end(best->batches),
                        [](const Batch& b) { return !b.submitted; });
  numbers_ = numbers_ == UINT32_MAX ? 1 : numbers_ + 1;
  batch_->clear(numbers_);
  return true;
}

void Dispatcher::add(int64_t claim) {
  ForeignTask task;
  try {
    task = engine_.foreign_task(claim, batch_->next_tiles(), batch_->next_masks(), batch_->room(),
                                batch_->next_q());
  } catch (const std::exception& error) {
    // Refused where the layer has ended meanwhile; then there is nothing to do.
    if (engine_.fail(claim, error.what())) count(kDispatchFailed, 1);
    return;
  }
  left_ -= task.chosen.reads.tile_bytes;
  int32_t* tiles = batch_->next_tiles();
  const int pages = task.chosen.count;
  if (hot_) use_hot_tiles(task);
  const int64_t hot = std::count_if(tiles, tiles + pages, [](int32_t tile) { return tile < 0; });
  hit_share_ += kHitWeight * (static_cast<double>(hot) / std::max(pages, 1) - hit_share_);
  count(kDispatchTileBytes, pages * shape_.tile_bytes());
  batch_->add(claim, task, engine_.pool().tiles(task.layer, task.head));
  if (batch_->bytes >= config_.batch_bytes || static_cast<int>(batch_->claims.size()) == config_.tasks)
    submit();
}

// Points the list of the next task to the copies there are, and has some made of what it misses.
void Dispatcher::use_hot_tiles(const ForeignTask& task) {
  if (task.layer <= last_layer_) hot_->tick();
  last_layer_ = task.layer;
  CopyBatch* copy =
      std::find_if(std::begin(copies_), std::end(copies_), [](const CopyBatch& c) { return !c.submitted; });
  int32_t* tiles = batch_->next_tiles();
  for (int i = 0; i < task.chosen.count; ++i) {
    const int32_t page = tiles[i];
    const int64_t tile = engine_.pool().tile_number(task.layer, task.head, page);
    const uint32_t writes = engine_.pool().writes(task.layer, task.head, page);
    if (const int32_t slot = hot_->find(tile, writes); slot != HotTiles::kNone) {
      tiles[i] = -1 - slot;
    } else if (copy != std::end(copies_) && !copy->full()) {
      const int32_t to = hot_->admit(tile, writes);
      if (to != HotTiles::kNone) copy->add(engine_.pool().tile(task.layer, task.head, page), to);
    }
  }
}

void Dispatcher::submit() {
  Batch* batch = batch_;
  batch_ = nullptr;
  ++in_flight_;
  count(kDispatchBatches, 1);
  try {
    batch->submit(api_, stream_->handle, slots_.data());
    count(kDispatchStaged, batch->staged);
    count(kDispatchFlash, batch->flash() ? 1 : 0);
    count(kDispatchLinkBytes, (batch->in_host + batch->staged) * shape_.tile_bytes());
    // Behind the batch, so that it does not wait for them.
    for (CopyBatch& copy : copies_) {
      if (!copy.submitted && !copy.slots.empty())
        copy.submit(api_, copy_stream_, shape_.tile_bytes(), slots_.data());
    }
  } catch (const DeviceFailure& failure) {
    lose(failure.what());
  }
}

// The batch that is being filled, if there is one, will not be launched.
void Dispatcher::drop_batch(const std::string& sentence) {
  if (batch_ == nullptr) return;
  fail_claims(batch_, sentence);
  unpin(*batch_);
  batch_ = nullptr;
}

void Dispatcher::fail_claims(Batch* batch, const std::string& sentence) {
  for (const Batch::Claimed& c : batch->claims) {
    if (engine_.fail(c.claim, sentence)) count(kDispatchFailed, 1);
  }
  batch->failed = true;
  if (batch->submitted) --in_flight_;
}

void Dispatcher::lose(const std::string& sentence) {
  {
    const std::lock_guard lock(lost_mutex_);
    lost_ = sentence;
  }
  is_lost_.store(true, std::memory_order_release);
  left_ = 0;
  drop_batch(sentence);
  for (Stream& s : streams_) {
    for (Batch& batch : s.batches) {
      if (batch.submitted && !batch.failed) fail_claims(&batch, sentence);
    }
  }
}

}  // namespace fluxion
