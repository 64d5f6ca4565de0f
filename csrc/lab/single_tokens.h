// Tasks that read single tokens of the middle by their exact scores: what no selection can know without
// reading every key (policy `oracle`).
#pragma once

#include "engine/task_kind.h"

namespace fluxion {

// Each head reads its own choice, whatever attend_union says: of all sets of so many tokens, the one with the
// most attention weight. The keys that tokens are chosen by do not count as read.
class SingleTokens : public TaskKind {
 public:
  static constexpr int kBlk = 1;  // of its groups

  void check_shape(const LayerPlan&) const override {}
  bool takes(const Layer& layer, const Task& task) const override { return layer.blk(task) == kBlk; }
  std::string wrong(const Layer&, const Task&) const override { return ""; }
  int64_t bytes(const Layer& layer, const Task& task) const override;
  int ranked_tokens(const Layer& layer, const Task& task) const override;
  Selection select(const Layer& layer, const Task& task, Scratch* scratch) const override;
};

}  // namespace fluxion
