#include "device/offers.h"

#include "runtime/worker_pool.h"

namespace fluxion {

Offers::Offers(const Division& division, int64_t least_bytes, int room, int longest, double patience_s)
    : least_(least_bytes),
      longest_(longest),
      patience_ns_(static_cast<int64_t>(patience_s * 1e9)),
      offers_(room),
      division_(division),
      ready_(room) {
  free_.reserve(offers_.size());
  for (Offer& offer : offers_) free_.push_back(&offer);
}

void Offers::wake() noexcept {
  news_.fetch_add(1, std::memory_order_release);
  news_.notify_all();
}

void Offers::become(State state) noexcept {
  const std::lock_guard lock(mutex_);
  if (state_.load(std::memory_order_relaxed) != kEnded) state_.store(state, std::memory_order_release);
}

bool Offers::open(const ReadableLoad& load) noexcept {
  if (load.layer <= last_layer_) step_.fetch_add(1, std::memory_order_relaxed);
  last_layer_ = load.layer;
  if (load.own == 0 && (load.tasks == 0 || load.bytes() < least_)) return false;
  const State state = state_.load(std::memory_order_acquire);
  if (state == kEnded) return false;
  {
    const std::lock_guard lock(mutex_);
    division_.open(now_ns(), load);
  }
  wake();  // where the device hangs, to see whether it still does
  return state == kTakes;
}

void Offers::close() noexcept {
  const std::lock_guard lock(mutex_);
  division_.close(now_ns());
}

// Where the device is not to have the task: nullptr.
Offer* Offers::room_for(const ChosenTask& task) noexcept {
  const int64_t bytes = task.chosen.reads.tile_bytes, since = now_ns();
  for (Backoff backoff; state_.load(std::memory_order_acquire) == kTakes; backoff.wait()) {
    const std::lock_guard lock(mutex_);
    const int64_t now = now_ns();
    if (free_.empty() && task.alone && now - since < patience_ns_) continue;
    if (!task.alone) division_.chosen(bytes, task.guess);
    if (free_.empty() || !(task.alone || division_.device_is_sooner(now, bytes))) return nullptr;
    division_.given(now, bytes, task.alone);
    Offer* offer = free_.back();
    free_.pop_back();
    return offer;
  }
  return nullptr;
}

bool Offers::take(const ChosenTask& task) noexcept {
  if (task.chosen.count > longest_) return false;
  Offer* offer = room_for(task);
  if (offer == nullptr) return false;
  const Layer& layer = task.layer;
  const int64_t masks = int64_t{task.chosen.count} * layer.group;
  const char* q = layer.query(task.task);
  offer->claim = task.claim;
  offer->layer = layer.in.layer;
  offer->head = task.task.head;
  offer->step = step_.load(std::memory_order_relaxed);
  offer->scale = layer.in.scale;
  offer->chosen = task.chosen;
  bool there = true;
  try {
    offer->q.assign(q, q + layer.group * layer.shape.token_bytes());
    offer->pages.assign(task.pages, task.pages + task.chosen.count);
    if (task.chosen.masked) offer->masks.assign(task.masks, task.masks + masks);
  } catch (...) {  // memory has run out: the worker needs none for the task
    there = false;
  }
  {
    const std::lock_guard lock(mutex_);
    there &= state_.load(std::memory_order_relaxed) == kTakes;
    if (there) {
      ready_[(first_ + waiting_++) % ready_.size()] = offer;
    } else {
      free_.push_back(offer);
      division_.taken_back(now_ns(), task.chosen.reads.tile_bytes, task.alone);
    }
  }
  if (there) wake();
  return there;
}

Offer* Offers::next() {
  const std::lock_guard lock(mutex_);
  if (waiting_ == 0) return nullptr;
  Offer* offer = ready_[first_];
  first_ = (first_ + 1) % ready_.size();
  --waiting_;
  return offer;
}

void Offers::put_back(Offer* offer) {
  const std::lock_guard lock(mutex_);
  free_.push_back(offer);
}

void Offers::returned(int64_t bytes, double hit_share) {
  const std::lock_guard lock(mutex_);
  division_.expect(hit_share);
  division_.returned(now_ns(), bytes);
}

}  // namespace fluxion
