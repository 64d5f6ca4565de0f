// Which tiles a device keeps copies of in its own memory: one clock for all layers and heads.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace fluxion {

struct HotTilesConfig {
  int64_t tiles = 0;  // of the pool: HostPool::tile_number
  int32_t slots = 0;
  // A tile gets a slot the `touches`-th time (1 or 2) that it was missing: with 2 only if the two were no
  // more than `horizon` steps apart.
  int touches = 2;
  int horizon = 16;
};

enum HotStat { kHotHits, kHotMisses, kHotCopies, kHotEvictions, kHotStale, kHotStatCount };

// Bookkeeping alone; the caller moves bytes. For one thread. A layer's tiles of one head stand side by side,
// as a task looks for them.
//
// A slot is free, filling (a copy is on its way), valid, or doomed (its tile was written again while a batch
// may still read the copy: nobody finds it, and it is freed when the batch has ended). What the tile's
// writers count (HostPool::writes) is kept with it: a copy is believed only while the count is what it was
// before the copy began. Batches have numbers that rise, and a slot that one reads which has not ended is
// given to nobody. Of the others goes the next one, in the order of slots, that nobody found since it was
// last passed over (the second-chance algorithm).
class HotTiles {
 public:
  static constexpr int32_t kNone = -1;

  explicit HotTiles(const HotTilesConfig& config);

  // find() comes soon. A layer's tiles are cold by the next step, and waiting for them one by one takes long.
  void expect(int64_t tile) const { __builtin_prefetch(&tiles_[tile], 1); }
  // The slot with the tile's copy, which this batch reads, or kNone. writes: the tile's count now.
  int32_t find(int64_t tile, uint32_t writes, int64_t batch);
  // After find() missed: a slot that the caller copies the tile to, or kNone. It is filling.
  int32_t admit(int64_t tile, uint32_t writes);
  // The copy is there.
  void filled(int32_t slot);
  // No batch before this one will read any more.
  void ended(int64_t batch);
  // A decode step has passed.
  void tick() { ++now_; }

  int32_t slots() const { return static_cast<int32_t>(tile_of_.size()); }
  int32_t used() const { return slots() - static_cast<int32_t>(free_.size()); }
  const int64_t* stats() const { return stats_; }

 private:
  struct Tile {
    int64_t batch = -1;  // that found it last
    int32_t slot = kNone;
    uint32_t writes = 0;       // when its copy began
    uint32_t missed : 30 = 0;  // 1 + the step in which it was missing last; 0: never
    uint32_t filling : 1 = 0;
    uint32_t found : 1 = 0;  // since it was last passed over
  };

  void drop(Tile* tile);
  bool touched_before(Tile* tile) const;
  int32_t take_slot();

  HotTilesConfig config_;
  std::vector<Tile> tiles_;
  std::vector<int64_t> tile_of_;  // [slots]; -1: none
  std::vector<int32_t> free_;
  std::vector<std::pair<int64_t, int32_t>> doomed_;  // the last batch that reads it, and the slot
  int32_t hand_ = 0;
  int64_t reading_ = 0;  // the oldest batch that may still read
  uint32_t now_ = 0;
  int64_t stats_[kHotStatCount] = {};
};

}  // namespace fluxion
