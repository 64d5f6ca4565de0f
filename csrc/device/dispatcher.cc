// What the dispatcher's thread does.
#include "device/dispatcher.h"

#include <algorithm>
#include <utility>

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
  uint32_t seen = offers_->news() - 1;
  Backoff backoff;
  int64_t idle_since = now_ns();
  for (;;) {
    // Before it looks whether it is to stop: what is said after that is news.
    const uint32_t news = offers_->news();
    if (stop_.load(std::memory_order_acquire)) break;
    if (news != seen) idle_since = now_ns();
    seen = news;
    if (poll() | feed()) {
      backoff = {};
      idle_since = now_ns();
    } else if (in_flight_ > 0 || now_ns() - idle_since < spin_ns_) {
      backoff.wait();
    } else {
      offers_->wait_for_news(seen);
      backoff = {};
      idle_since = now_ns();
    }
  }
  const std::string sentence = "the executor was stopped";
  offers_->become(Offers::kEnded);
  drop_batch(sentence);
  fail_offers(sentence);
  for (Stream& s : streams_) {
    for (Batch& batch : s.batches) {
      if (batch.submitted && !batch.failed) fail_claims(&batch, sentence);
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
  batch->submitted = false;
  ended();
  if (batch->failed) {
    // The stream's other batch comes to its end, too, or waits as this one did.
    const bool hangs = std::any_of(std::begin(stream->batches), std::end(stream->batches),
                                   [](const Batch& b) { return b.submitted && b.failed; });
    if (stream->quarantined && !hangs) count(kDispatchQuarantine, -1);
    stream->quarantined &= hangs;
    if (!is_lost_.load(std::memory_order_relaxed) && !all_hang()) offers_->become(Offers::kTakes);
    return;
  }
  --in_flight_;
  offers_->returned(batch->bytes, hit_share_);
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

// What batches that have ended read may be given to other tiles.
void Dispatcher::ended() {
  if (!hot_) return;
  int64_t oldest = batches_;
  for (const Stream& s : streams_) {
    for (const Batch& batch : s.batches) {
      if (batch.submitted) oldest = std::min(oldest, batch.serial);
    }
  }
  if (batch_ != nullptr) oldest = std::min(oldest, batch_->serial);
  hot_->ended(oldest);
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
  const std::string late =
      "the device did not finish a batch in time; raise FLUXION_TASK_TIMEOUT_S if it is only slow";
  fail_claims(batch, late);
  count(kDispatchLate, 1);
  if (!stream->quarantined) count(kDispatchQuarantine, 1);
  stream->quarantined = true;
  if (stream_ == stream) drop_batch("the device's stream hangs");
  if (!all_hang()) return;
  offers_->become(Offers::kHangs);
  fail_offers(late);
}

bool Dispatcher::all_hang() const {
  return std::all_of(streams_.begin(), streams_.end(), [](const Stream& s) { return s.quarantined; });
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

// Adds what was offered, and launches what there is where the device would wait for it. Whether something was
// done.
bool Dispatcher::feed() {
  bool any = false;
  while (offer_ != nullptr || (offer_ = offers_->next()) != nullptr) {
    if (!take_buffer(offer_->chosen.count)) break;
    Offer* offer = std::exchange(offer_, nullptr);
    add(*offer);
    offers_->put_back(offer);
    any = true;
  }
  if (batch_ == nullptr || batch_->claims.empty() || in_flight_ >= static_cast<int>(streams_.size()))
    return any;
  submit();
  return true;
}

// A batch to fill, with room for a task of so many pages.
bool Dispatcher::take_buffer(int pages) {
  if (batch_ != nullptr && !batch_->has_room(pages)) submit();
  if (batch_ != nullptr) return true;
  if (is_lost_.load(std::memory_order_relaxed)) return false;
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
  batch_->serial = batches_++;
  return true;
}

void Dispatcher::add(const Offer& offer) {
  const int pages = offer.chosen.count;
  std::copy_n(offer.q.data(), batch_->q_bytes(), batch_->next_q());
  std::copy_n(offer.pages.data(), pages, batch_->next_tiles());
  batch_->mask(offer.chosen.masked ? offer.masks.data() : nullptr, pages);
  if (hot_) use_hot_tiles(offer);
  const int32_t* tiles = batch_->next_tiles();
  const int64_t hot = std::count_if(tiles, tiles + pages, [](int32_t tile) { return tile < 0; });
  hit_share_ += kHitWeight * (static_cast<double>(hot) / std::max(pages, 1) - hit_share_);
  count(kDispatchTileBytes, pages * shape_.tile_bytes());
  batch_->add(offer.claim, offer.scale, offer.chosen, engine_.pool().tiles(offer.layer, offer.head));
  if (batch_->bytes >= config_.batch_bytes || static_cast<int>(batch_->claims.size()) == config_.tasks)
    submit();
}

// Points the list of the next task to the copies there are, and has some made of what it misses.
void Dispatcher::use_hot_tiles(const Offer& offer) {
  for (; last_step_ != offer.step; ++last_step_) hot_->tick();
  CopyBatch* copy =
      std::find_if(std::begin(copies_), std::end(copies_), [](const CopyBatch& c) { return !c.submitted; });
  int32_t* tiles = batch_->next_tiles();
  const HostPool& pool = engine_.pool();
  for (int i = 0; i < offer.chosen.count; ++i) {
    hot_->expect(pool.tile_number(offer.layer, offer.head, tiles[i]));
    pool.expect_writes(offer.layer, offer.head, tiles[i]);
  }
  for (int i = 0; i < offer.chosen.count; ++i) {
    const int32_t page = tiles[i];
    const int64_t tile = pool.tile_number(offer.layer, offer.head, page);
    const uint32_t writes = pool.writes(offer.layer, offer.head, page);
    if (const int32_t slot = hot_->find(tile, writes, batch_->serial); slot != HotTiles::kNone) {
      tiles[i] = -1 - slot;
    } else if (copy != std::end(copies_) && !copy->full()) {
      const int32_t to = hot_->admit(tile, writes);
      if (to != HotTiles::kNone) copy->add(pool.tile(offer.layer, offer.head, page), to);
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
  batch_ = nullptr;
  ended();
}

// What was offered and is in no batch.
void Dispatcher::fail_offers(const std::string& sentence) {
  for (; offer_ != nullptr || (offer_ = offers_->next()) != nullptr; offer_ = nullptr) {
    if (engine_.fail(offer_->claim, sentence)) count(kDispatchFailed, 1);
    offers_->returned(offer_->chosen.reads.tile_bytes, hit_share_);
    offers_->put_back(offer_);
  }
}

void Dispatcher::fail_claims(Batch* batch, const std::string& sentence) {
  for (const Batch::Claimed& c : batch->claims) {
    if (engine_.fail(c.claim, sentence)) count(kDispatchFailed, 1);
  }
  batch->failed = true;
  offers_->returned(batch->bytes, hit_share_);
  if (batch->submitted) --in_flight_;
}

void Dispatcher::lose(const std::string& sentence) {
  {
    const std::lock_guard lock(lost_mutex_);
    lost_ = sentence;
  }
  is_lost_.store(true, std::memory_order_release);
  offers_->become(Offers::kEnded);
  drop_batch(sentence);
  fail_offers(sentence);
  for (Stream& s : streams_) {
    for (Batch& batch : s.batches) {
      if (batch.submitted && !batch.failed) fail_claims(&batch, sentence);
    }
  }
}

}  // namespace fluxion
