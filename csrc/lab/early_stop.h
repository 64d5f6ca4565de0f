// Tasks that read until they have enough: PSA (arXiv 2503.00392), Algorithm 1.
#pragma once

#include <memory>
#include <utility>

#include "engine/blocks.h"

namespace fluxion {

// Every active head goes through the blocks in the order of its own scores, all of them a microbatch at a
// time, until it has enough: until
//
//   P_acc = AS_acc / (AS_acc + AS_min * N_left) >= stop
//
// with AS_acc the weight (sum of exp(scale * q.k)) of all it has attended to, residents included: they are
// blocks that are always computed. AS_min is the least weight among the blocks it chose itself, as these come
// in its order; those it attends to for another head's sake (attend_union) count in AS_acc and N_left alone.
// AS_min and N_left are per token, because the first and the last block may be cut; where none is, it is the
// same. A budget bounds how far down its order a head may go.
class EarlyStop : public TaskKind {
 public:
  // stop, spread: EarlyStop of lab/psa.py. memory keeps alive what they point to.
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
  int64_t bytes(const Layer& layer, const Task& task) const override;
  int ranked_tokens(const Layer&, const Task&) const override { return 0; }
  void reserve(int pages, int group, Scratch* scratch) const override;
  Selection select(const Layer& layer, const Task& task, Scratch* scratch) const override;
  Selection run(const Layer& layer, const Task& task, Scratch* scratch, float* o, float* lse) const override;

 private:
  struct Head;
  struct Room;

  int pick(const Layer& layer, const Blocks& at, const Wanted& wanted, int quota, uint16_t* going,
           Head* heads, Scratch* scratch) const;

  const Shares shares_;
  const std::shared_ptr<const void> memory_;
};

}  // namespace fluxion
