#include "device/hot_tiles.h"

#include <algorithm>

namespace fluxion {

namespace {

// Of slots, for one that may go. Who does not find it gives up.
constexpr int kLooks = 64;
constexpr uint32_t kSteps = (1u << 30) - 1;  // steps are counted modulo this and one

}  // namespace

HotTiles::HotTiles(const HotTilesConfig& config)
    : config_(config), tiles_(config.tiles), tile_of_(config.slots, -1) {
  free_.reserve(tile_of_.size());
  for (int32_t slot = slots() - 1; slot >= 0; --slot) free_.push_back(slot);
}

int32_t HotTiles::find(int64_t tile, uint32_t writes, int64_t batch) {
  Tile& t = tiles_[tile];
  if (t.slot != kNone && !t.filling) {
    if (t.writes == writes) {
      t.batch = batch;
      t.found = 1;
      ++stats_[kHotHits];
      return t.slot;
    }
    drop(&t);
    ++stats_[kHotStale];
  }
  ++stats_[kHotMisses];
  return kNone;
}

// A valid slot whose tile nobody may find any more.
void HotTiles::drop(Tile* tile) {
  const int32_t slot = tile->slot;
  tile->slot = kNone;
  tile_of_[slot] = -1;
  if (tile->batch >= reading_) {
    doomed_.emplace_back(tile->batch, slot);
  } else {
    free_.push_back(slot);
  }
}

void HotTiles::ended(int64_t batch) {
  reading_ = batch;
  const auto over = [&](const std::pair<int64_t, int32_t>& doomed) { return doomed.first < batch; };
  for (const auto& doomed : doomed_) {
    if (over(doomed)) free_.push_back(doomed.second);
  }
  std::erase_if(doomed_, over);
}

bool HotTiles::touched_before(Tile* tile) const {
  const uint32_t since = (now_ + 1 - tile->missed) & kSteps;
  const bool before = tile->missed != 0 && since <= static_cast<uint32_t>(config_.horizon);
  tile->missed = (now_ + 1) & kSteps;
  return config_.touches <= 1 || before;
}

int32_t HotTiles::take_slot() {
  if (!free_.empty()) {
    const int32_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  for (int looks = std::min(2 * slots(), kLooks); looks > 0; --looks) {
    const int32_t slot = hand_;
    hand_ = hand_ + 1 == slots() ? 0 : hand_ + 1;
    if (tile_of_[slot] < 0) continue;
    Tile& t = tiles_[tile_of_[slot]];
    if (t.filling || t.batch >= reading_) continue;
    if (t.found) {
      t.found = 0;
      continue;
    }
    t.slot = kNone;
    ++stats_[kHotEvictions];
    return slot;
  }
  return kNone;
}

int32_t HotTiles::admit(int64_t tile, uint32_t writes) {
  Tile& t = tiles_[tile];
  if (!touched_before(&t) || t.slot != kNone) return kNone;  // the latter: it is on its way
  const int32_t slot = take_slot();
  if (slot == kNone) return kNone;
  t = {-1, slot, writes, t.missed, /*filling=*/1, /*found=*/0};
  tile_of_[slot] = tile;
  ++stats_[kHotCopies];
  return slot;
}

void HotTiles::filled(int32_t slot) { tiles_[tile_of_[slot]].filling = 0; }

}  // namespace fluxion
