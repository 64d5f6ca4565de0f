// Tasks over tiles that a device has chosen but has no copy of.
#pragma once

#include <memory>

#include "device/far_lists.h"
#include "engine/task_kind.h"

namespace fluxion {

class FarTiles : public TaskKind {
 public:
  static constexpr int kBlk = -2;  // blk of its groups

  // arena: far_bytes(shape) bytes, which memory keeps alive. parity: of its layers' sequence numbers.
  FarTiles(const char* arena, const FarShape& shape, int parity, std::shared_ptr<const void> memory);

  void check_shape(const LayerPlan& plan) const override;
  bool takes(const Layer& layer, const Task& task) const override { return layer.blk(task) == kBlk; }
  std::string wrong(const Layer& layer, const Task& task) const override;
  int64_t bytes(const Layer& layer, const Task& task) const override;
  int ranked_tokens(const Layer&, const Task&) const override { return 0; }
  Selection select(const Layer& layer, const Task& task, Scratch* scratch) const override;

 private:
  const FarShape shape_;
  const int32_t *counts_, *pages_;
  const uint16_t* heads_;
  const std::shared_ptr<const void> memory_;
};

}  // namespace fluxion
