// Tasks that read until they have enough.
#pragma once

#include <cstdint>
#include <string>

#include "engine/blocks.h"

namespace fluxion {

// Every active head goes through the blocks of the middle in the order of its own scores, all of them a
// microbatch at a time, until it has enough. What enough is, say the kinds that derive from this. A budget
// bounds how far down its order a head may go.
class Progressive : public TaskKind {
 public:
  // How far a head has come. Weights are logs of sums of exp(logit).
  struct Head {
    float resident;        // weight of the residents
    float middle;          // weight of what it has attended to
    double least;          // least weight per token among the blocks it chose itself; +inf: it chose none
    int64_t left;          // tokens of the middle that it has not attended to
    double known() const;  // weight of residents and middle
  };

  std::string wrong(const Layer& layer, const Task& task) const override;
  int64_t bytes(const Layer& layer, const Task& task) const override;
  int ranked_tokens(const Layer&, const Task&) const override { return 0; }
  void reserve(int pages, int group, Scratch* scratch) const override;
  Selection select(const Layer& layer, const Task& task, Scratch* scratch) const override;
  Selection run(const Layer& layer, const Task& task, Scratch* scratch, float* o, float* lse) const override;

 protected:
  // KernelTable::score's, of the task's blocks.
  virtual float spread(const Layer& layer, const Task& task) const = 0;
  // Whether head g goes on no more. Asked before every microbatch, the first one included.
  virtual bool enough(const Layer& layer, const Task& task, int g, const Head& head) const = 0;

 private:
  struct Room;
  struct Walk;
};

}  // namespace fluxion
