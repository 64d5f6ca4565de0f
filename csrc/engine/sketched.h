// Tasks that find the tokens worth reading in sketches of all keys.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "engine/task_kind.h"

namespace fluxion {

// Every head of a group scores all tokens of the middle by their sketches (KernelTable::score_sketches), and
// chooses the heaviest of them until what it leaves has at most a given share of its attention, residents
// included. All heads attend to what any of them chose, whatever attend_union says, by exact keys and values.
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
  Selection select(const Layer& layer, const Task& task, Scratch* scratch) const override;
  Selection run(const Layer& layer, const Task& task, Scratch* scratch, float* o, float* lse) const override;

 private:
  const float* left_;
  const int64_t batch_, kv_heads_;
  const std::shared_ptr<const void> memory_;
};

}  // namespace fluxion
