// PSA's rule (arXiv 2503.00392, Algorithm 1) of when a head has enough.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "engine/progressive.h"

namespace fluxion {

// A head goes on until
//
//   P_acc = AS_acc / (AS_acc + AS_min * N_left) >= stop
//
// with AS_acc the weight (sum of exp(scale * q.k)) of all it has attended to, residents included: they are
// blocks that are always computed. AS_min is the least weight among the blocks it chose itself, as these come
// in its order; those it attends to for another head's sake (attend_union) count in AS_acc and N_left alone.
// AS_min and N_left are per token, because the first and the last block may be cut; where none is, it is the
// same.
class EarlyStop : public Progressive {
 public:
  // stop, spread: EarlyStop of lab/kinds.py. memory keeps alive what they point to.
  struct Shares {
    const float* stop;    // [B][H]
    const float* spread;  // [B][H]: KernelTable::score's
    int64_t batch, kv_heads;
  };
  EarlyStop(const Shares& shares, std::shared_ptr<const void> memory)
      : shares_(shares), memory_(std::move(memory)) {}

  void check_shape(const LayerPlan& plan) const override;
  bool takes(const Layer& layer, const Task& task) const override;
  std::string wrong(const Layer& layer, const Task& task) const override;

 protected:
  float spread(const Layer& layer, const Task& task) const override;
  bool enough(const Layer& layer, const Task& task, int g, const Head& head) const override;

 private:
  const Shares shares_;
  const std::shared_ptr<const void> memory_;
};

}  // namespace fluxion
