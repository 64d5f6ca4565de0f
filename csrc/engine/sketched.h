// Tasks that find the tokens worth reading in sketches of all keys.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "engine/task_kind.h"

namespace fluxion {

// Every head of a group chooses the heaviest tokens of the middle until what it leaves has at most a given
// share of its attention, residents included. All heads attend to what any of them chose, whatever
// attend_union says.
//
// 1. The upper bits of all sketches (KernelTable::skim_sketches) say which pages may matter to some head.
// 2. Their tokens are scored by all bits of the sketches, and each head chooses.
// 3. The heaviest of what was chosen is attended to exactly. The others are many and have little attention.
//    Of these only the values are read: their weights are those of the sketches.
//
// A group that attends to most rows of its tiles exactly, or whose rows cannot be read one by one (8 bits),
// reads these tiles whole, and attends to all that it chose exactly.
class Sketched : public TaskKind {
 public:
  static constexpr int kBlk = -3;  // of its groups; -1 is of lists, -2 of what a device has left

  // left: [B][H] in [0, 1], the share that may be left; 0: they read everything. memory keeps alive what it
  // points to.
  Sketched(const float* left, int64_t batch, int64_t kv_heads, std::shared_ptr<const void> memory)
      : left_(left), batch_(batch), kv_heads_(kv_heads), memory_(std::move(memory)) {}

  void check_shape(const LayerPlan& plan) const override;
  bool takes(const Layer& layer, const Task& task) const override { return layer.blk(task) == kBlk; }
  std::string wrong(const Layer& layer, const Task& task) const override;
  int64_t bytes(const Layer& layer, const Task& task) const override;
  int ranked_tokens(const Layer& layer, const Task& task) const override;
  void reserve(int pages, int group, Scratch* scratch) const override;
  Selection select(const Layer& layer, const Task& task, Scratch* scratch) const override;
  Selection run(const Layer& layer, const Task& task, Scratch* scratch, float* o, float* lse) const override;

 private:
  const float* left_;
  const int64_t batch_, kv_heads_;
  const std::shared_ptr<const void> memory_;
};

}  // namespace fluxion
