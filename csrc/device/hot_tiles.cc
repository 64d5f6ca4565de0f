#include "device/hot_tiles.h"

#include <bit>

namespace fluxion {

namespace {

// Pinned slots were used last, so they are seldom among the oldest: who finds this many of them gives up.
constexpr int kLooks = 16;

}  // namespace

HotTiles::HotTiles(const HotTilesConfig& config) : config_(config), slots_(config.slots) {
  const uint64_t size = std::bit_ceil(2 * static_cast<uint64_t>(slots_.size()) + 2);
  table_.assign(size, kNone);
  shift_ = 64 - std::countr_zero(size);
  // Twice as many recent misses as slots: a tile that comes back later than that would be evicted as soon.
  touches_.resize(config.touches > 1 ? size : 0);
  for (int32_t s = slots() - 1; s >= 0; --s) free_slot(s);
}

uint64_t HotTiles::place(int64_t tile) const {
  uint64_t at = home(tile);
  while (table_[at] != kNone && slots_[table_[at]].tile != tile) at = (at + 1) & (table_.size() - 1);
  return at;
}

// Takes a tile out of the table; those that had to make way for it move up.
void HotTiles::forget(int64_t tile) {
  const uint64_t mask = table_.size() - 1;
  uint64_t hole = place(tile);
  for (uint64_t at = (hole + 1) & mask; table_[at] != kNone; at = (at + 1) & mask) {
    const uint64_t wanted = home(slots_[table_[at]].tile);
    if (((at - wanted) & mask) < ((at - hole) & mask)) continue;
    table_[hole] = table_[at];
    hole = at;
  }
  table_[hole] = kNone;
}

void HotTiles::push_front(int32_t slot) {
  Slot& s = slots_[slot];
  s.before = kNone;
  s.after = newest_;
  (newest_ == kNone ? oldest_ : slots_[newest_].before) = slot;
  newest_ = slot;
}

void HotTiles::unlink(int32_t slot) {
  const Slot& s = slots_[slot];
  (s.before == kNone ? newest_ : slots_[s.before].after) = s.after;
  (s.after == kNone ? oldest_ : slots_[s.after].before) = s.before;
}

void HotTiles::free_slot(int32_t slot) {
  Slot& s = slots_[slot];
  s.state = kFree;
  s.tile = -1;
  s.after = free_;
  free_ = slot;
  ++free_count_;
}

// A valid slot whose tile nobody may find any more.
void HotTiles::drop(int32_t slot) {
  Slot& s = slots_[slot];
  forget(s.tile);
  unlink(slot);
  if (s.pins > 0) {
    s.state = kDoomed;
  } else {
    free_slot(slot);
  }
}

int32_t HotTiles::find(int64_t tile, uint32_t writes) {
  const int32_t slot = table_[place(tile)];
  if (slot != kNone && slots_[slot].state == kValid) {
    Slot& s = slots_[slot];
    if (s.writes == writes) {
      unlink(slot);
      push_front(slot);
      ++s.pins;
      ++stats_[kHotHits];
      return slot;
    }
    drop(slot);
    ++stats_[kHotStale];
  }
  ++stats_[kHotMisses];
  return kNone;
}

bool HotTiles::touched_before(int64_t tile) {
  if (config_.touches <= 1) return true;
  Touch& last = touches_[home(tile)];
  const bool before = last.tile == tile && now_ - last.when <= static_cast<uint32_t>(config_.horizon);
  last = {tile, now_};
  return before;
}

int32_t HotTiles::take_slot() {
  if (free_ == kNone) {
    int32_t slot = oldest_;
    for (int looks = 0; slot != kNone && slots_[slot].pins > 0; slot = slots_[slot].before) {
      if (++looks == kLooks) return kNone;
    }
    if (slot == kNone) return kNone;
    drop(slot);
    ++stats_[kHotEvictions];
  }
  const int32_t slot = free_;
  free_ = slots_[slot].after;
  --free_count_;
  return slot;
}

int32_t HotTiles::admit(int64_t tile, uint32_t writes) {
  if (!touched_before(tile) || table_[place(tile)] != kNone) return kNone;  // the latter: it is on its way
  const int32_t slot = take_slot();
  if (slot == kNone) return kNone;
  Slot& s = slots_[slot];
  s.tile = tile;
  s.writes = writes;
  s.state = kFilling;
  table_[place(tile)] = slot;
  ++stats_[kHotCopies];
  return slot;
}

void HotTiles::filled(int32_t slot) {
  slots_[slot].state = kValid;
  push_front(slot);
}

void HotTiles::unpin(int32_t slot) {
  Slot& s = slots_[slot];
  if (--s.pins == 0 && s.state == kDoomed) free_slot(slot);
}

}  // namespace fluxion
