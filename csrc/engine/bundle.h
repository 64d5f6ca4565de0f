// Tasks whose middles begin with the same blocks: what they share is read once.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/blocks.h"
#include "engine/sharing.h"

namespace fluxion {

// Block tasks of one family (Families) with the same KV head and block size, reserved to the CPU. The worker
// that takes the first task from the queue does all of them; the others do nothing in their turn. All members
// have the blocks before end_page. An entry of these is read once for all heads. So is a tile, or the last
// cache serves the repeated reads. The bundle does not change what a head chooses and attends to.
struct Bundle {
  const int32_t* tasks;  // b * H + h of each task
  int count;
  int end_page;  // a block's end
  float value;   // sum of the values of its tasks
};

// The bundles of the open layer.
class Bundles {
 public:
  // Reserves room for this many requests. May throw std::bad_alloc.
  void reserve(int requests, int kv_heads);
  // Finds the families of a new step and makes room for their tasks in every worker's scratch.
  void begin_step(const Layer& layer, std::vector<Scratch>* scratch);
  void clear_step() { families_.clear(); }
  // joins(i, blk): whether task i = b * H + h with block size blk can be in a bundle.
  template <class Joins>
  void begin_layer(const Layer& layer, const Joins& joins);

  // The bundle that task b * H + h belongs to, or nullptr.
  const Bundle* of(int i) const { return all_.empty() || of_[i] < 0 ? nullptr : &all_[of_[i]]; }
  float value(const Layer& layer, int i) const {
    const Bundle* bundle = of(i);
    return bundle != nullptr && bundle->tasks[0] == i ? bundle->value : layer.plan->value[i];
  }

 private:
  void add(const Layer& layer, int first, int end_page);

  Families families_;
  std::vector<int32_t> middle_ends_;  // [B]: logical page; 0 for a bad request
  std::vector<Bundle> all_;
  std::vector<int32_t>
      tasks_;                // of the bundles; as much room as there can be tasks, so that it stays in place
  std::vector<int32_t> of_;  // [B][H]: bundle or -1; valid only while there are bundles
};

// Does the tasks of a bundle: calls done(task, selection) for each, with its result in the middle's state. A
// selection counts its reads as if its task ran alone.
template <class Done>
void run_bundle(const Layer& layer, const Bundle& bundle, Scratch* scratch, const Done& done);

// ---- implementation

template <class Joins>
void Bundles::begin_layer(const Layer& layer, const Joins& joins) {
  all_.clear();
  tasks_.clear();
  if (layer.step.batch() == 0 || families_.all().empty()) return;
  const int heads = layer.shape.kv_heads;
  std::fill_n(of_.data(), layer.step.batch() * heads, -1);
  for (const Family& family : families_.all()) {
    for (int level = 0; level < kLevels; ++level) {
      const int end_page = family.end_page >> level << level;
      if (end_page - layer.step.sink_pages() < kLeastSharedPages) continue;
      for (int h = 0; h < heads; ++h) {
        const int first = static_cast<int>(tasks_.size());
        for (const int32_t b : families_.members(family)) {
          if (joins(b * heads + h, kPage << level)) tasks_.push_back(b * heads + h);
        }
        add(layer, first, end_page);
      }
    }
  }
}

// The run of one bundle. After construction, finish_member() is called for each member in turn.
class BundleRun {
 public:
  BundleRun(const Layer& layer, const Bundle& bundle, Scratch* scratch);
  Task task(int m) const;
  // Finishes member m. It reads the member's whole selection, or only the part that was not read together,
  // and merges the two.
  Selection finish_member(int m);

 private:
  struct Member;
  struct Room;
  friend class Bundles;
  struct SharedTiles {
    int64_t once = 0;   // tiles that at least one member chose
    int64_t apart = 0;  // summed over the members
  };

  static void reserve(const Layer& layer, size_t members, size_t pages, Scratch* scratch);
  Blocks shared() const;
  void gather();
  int64_t select();
  SharedTiles shared_tiles() const;
  bool attends_together(const SharedTiles& tiles) const;
  Selection list_shared();
  void mask_shared(const Blocks& at, int i, uint16_t* masks) const;
  // Heads of a member's group that attend to a block which the heads `chosen` selected.
  uint16_t readers(uint16_t chosen) const {
    return layer_.config.attend_union && chosen != 0 ? everyone_ : chosen;
  }

  const Layer& layer_;
  const Bundle& bundle_;
  Scratch* s_;
  Room& room_;
  const uint16_t everyone_;
  bool together_ = false, near_ = false;
};

template <class Done>
void run_bundle(const Layer& layer, const Bundle& bundle, Scratch* scratch, const Done& done) {
  BundleRun run(layer, bundle, scratch);
  for (int m = 0; m < bundle.count; ++m) {
    const Selection chose = run.finish_member(m);
    done(run.task(m), chose);
  }
}

}  // namespace fluxion
