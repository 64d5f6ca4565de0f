// Tasks that read single tokens of the middle by their exact scores, which no selection knows without reading
// every key (policy `oracle`).
#pragma once

#include "engine/task_kind.h"

namespace fluxion {

// Each head reads its own choice, whatever attend_union says: the tokens with the most attention weight. Keys
// that are read for the choice do not count as read.
class SingleTokens : public TaskKind {
 public:
  static constexpr int kBlk = 1;  // blk of its groups

  void check_shape(const LayerPlan&) const override {}
  bool takes(const Layer& layer, const Task& task) const override { return layer.blk(task) == kBlk; }
  std::string wrong(const Layer&, const Task&) const override { return ""; }
  int64_t bytes(const Layer& layer, const Task& task) const override;
  int ranked_tokens(const Layer& layer, const Task& task) const override;
  Selection select(const Layer& layer, const Task& task, Scratch* scratch) const override;
};

}  // namespace fluxion
