// Tasks that read the blocks within a head's reach.
#pragma once

#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "engine/progressive.h"

namespace fluxion {

// How blocks are scored. With Quest's bound (1) nearly every block is within reach of a head that needs one;
// with less, blocks that matter rank deeper. On the bundled model, calibrated for equal misses, 0.3 to 0.5
// read the least, and 0.5 misses the fewest of documents that are unlike those it was calibrated on.
inline constexpr float kReachSpread = 0.5f;      // of blocks of 16
inline constexpr int kReachGateBlk = 128;        // tokens of the blocks that are looked at first
inline constexpr float kReachGateSpread = 0.4f;  // of these

// A head goes on while the best block that it has not come to scores a logit of at least
//
//   log(weight of its residents and of the blocks that it has come to) - reach
//
// That is what it would do alone: what it attends to for another head's sake counts only once it comes to it
// in its own order. It does not begin where no block of kReachGateBlk tokens scores log(weight of its
// residents) - gate; where no head of a group begins, the entries of blocks of 16 are not read. +inf reads
// everything, -inf nothing.
class Reach : public Progressive {
 public:
  // memory keeps alive what they point to.
  struct Reaches {
    const float* reach;  // [B][Hq]; NaN: a head of a group that is not of this kind
    const float* gate;   // [B][Hq]
    int64_t batch, q_heads;
  };
  Reach(const Reaches& of, std::shared_ptr<const void> memory) : of_(of), memory_(std::move(memory)) {}

  void check_shape(const LayerPlan& plan) const override;
  bool takes(const Layer& layer, const Task& task) const override;
  std::string wrong(const Layer& layer, const Task& task) const override;

 protected:
  float spread(const Layer&, const Task&) const override { return kReachSpread; }
  uint16_t candidates(const Layer& layer, const Task& task, uint16_t heads, Scratch* scratch,
                      int64_t* bytes) const override;
  // Most heads that begin need a page or two.
  int microbatch(int read, int) const override { return read < 16 ? 2 : read / 8; }
  bool looks_ahead() const override { return true; }
  bool enough(const Layer& layer, const Task& task, int g, const Head& head) const override;

 private:
  const Reaches of_;
  const std::shared_ptr<const void> memory_;
};

// Of a score. Not for the kernels, which have their own.
double logit_of(Scale scale, float score);

}  // namespace fluxion
