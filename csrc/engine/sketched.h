// Tasks that find the tokens worth reading in sketches of all keys.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "engine/task_kind.h"

namespace fluxion {

// Every head of a group chooses the heaviest tokens of the middle until the rest has at most a given share of
// its attention, residents included. All heads attend to the union of the choices, whatever attend_union
// says.
//
// 1. The upper bits of all sketches (KernelTable::skim_sketches) tell which pages may matter to some head.
// 2. Tokens of these pages are scored by all bits of the sketches, and each head chooses.
// 3. The heaviest chosen tokens are attended to exactly. The others are many and have little attention; only
//    their values are read, and weighted by their sketch scores.
//
// A group reads whole tiles, and attends exactly to all chosen tokens, in two cases: it attends exactly to
// most rows of its tiles, or rows cannot be read one by one (8 bits).
class Sketched : public TaskKind {
 public:
  static constexpr int kBlk = -3;  // blk of its groups; -1: lists; -2: what a device has left

  // left: [B][H] in [0, 1], the share of attention that may be left; 0: read everything. memory keeps the
  // array alive.
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
