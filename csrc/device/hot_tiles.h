// Which tiles a device keeps copies of in its own memory: one LRU for all layers and heads.
#pragma once

#include <cstdint>
#include <vector>

namespace fluxion {

struct HotTilesConfig {
  int32_t slots = 0;
  // A tile gets a slot the `touches`-th time (1 or 2) that it was missing: with 2 only if the two were no
  // more than `horizon` steps apart.
  int touches = 2;
  int horizon = 16;
};

enum HotStat { kHotHits, kHotMisses, kHotCopies, kHotEvictions, kHotStale, kHotStatCount };

// Bookkeeping alone; the caller moves bytes. For one thread.
//
// A slot is free, filling (a copy is on its way), valid, or doomed (its tile was written again while a batch
// still reads the copy: nobody finds it, and it is freed with its last pin). What the tile's writers count
// (HostPool::writes) is kept with the slot: a copy is believed only while the count is what it was before the
// copy began. A slot that a batch reads is pinned, and a pinned or filling slot is given to nobody.
class HotTiles {
 public:
  static constexpr int32_t kNone = -1;

  explicit HotTiles(const HotTilesConfig& config);

  // The slot with the tile's copy, pinned once more, or kNone. tile: HostPool::tile_number; writes: its count
  // now.
  int32_t find(int64_t tile, uint32_t writes);
  // After find() missed: a slot that the caller copies the tile to, or kNone. It is filling.
  int32_t admit(int64_t tile, uint32_t writes);
  // The copy is there.
  void filled(int32_t slot);
  void unpin(int32_t slot);
  // A decode step has passed.
  void tick() { ++now_; }

  int32_t slots() const { return static_cast<int32_t>(slots_.size()); }
  int32_t used() const { return slots() - free_count_; }
  const int64_t* stats() const { return stats_; }

 private:
  enum State : uint8_t { kFree, kFilling, kValid, kDoomed };
  struct Slot {
    int64_t tile = -1;
    uint32_t writes = 0;
    int32_t pins = 0;
    int32_t before = kNone, after = kNone;  // in the order of use, of valid slots; `after` of free ones
    State state = kFree;
  };
  struct Touch {
    int64_t tile = -1;
    uint32_t when = 0;
  };

  uint64_t home(int64_t tile) const { return (static_cast<uint64_t>(tile) * 0x9e3779b97f4a7c15u) >> shift_; }
  // Where the tile stands in the table, or would be put.
  uint64_t place(int64_t tile) const;
  void forget(int64_t tile);
  void push_front(int32_t slot);
  void unlink(int32_t slot);
  void free_slot(int32_t slot);
  void drop(int32_t slot);
  bool touched_before(int64_t tile);
  int32_t take_slot();

  HotTilesConfig config_;
  std::vector<Slot> slots_;
  std::vector<int32_t> table_;  // open addressing, linear; a power of two, at most half full
  std::vector<Touch> touches_;  // direct-mapped memory of misses
  int shift_ = 0;
  int32_t newest_ = kNone, oldest_ = kNone;
  int32_t free_ = kNone, free_count_ = 0;
  uint32_t now_ = 0;
  int64_t stats_[kHotStatCount] = {};
};

}  // namespace fluxion
