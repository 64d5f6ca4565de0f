// Tasks that read blocks until they have enough, by PSA's rule (arXiv 2503.00392, Algorithm 1).
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "engine/blocks.h"

namespace fluxion {

// Every active head goes through the blocks of the middle in the order of its own scores, in common
// microbatches, until
//
//   P_acc = AS_acc / (AS_acc + AS_min * N_left) >= stop
//
// with AS_acc the weight (sum of exp(scale * q.k)) of all it has attended to. The paper's algorithm is for
// one query and a list of all blocks of a request. It leaves open:
//
// - Residents (sinks, window) count as blocks that are computed before the first microbatch: their weight is
//   in AS_acc. They are not in the order of criticality, so they do not lower AS_min.
// - Every head of a group has its own order, AS_acc, AS_min and N_left, and stops on its own; a block that
//   several heads choose in one microbatch is read once. One order for a group would break the bound: a block
//   that another head wanted says nothing about the next blocks of this head.
// - AS_min is the least weight among the blocks that a head chose itself. Blocks that it attends to for
//   another head (attend_union) count in AS_acc and N_left alone.
// - AS_min and N_left are per token, because the first and the last block may be cut; without cuts it is the
//   same.
//
// A budget bounds how far down its order a head may go.
class EarlyStop : public TaskKind {
 public:
  // stop, spread: EarlyStop of fluxion_lab/kinds.py. memory keeps alive what they point to.
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
  struct Walk;

  const Shares shares_;
  const std::shared_ptr<const void> memory_;
};

}  // namespace fluxion
