// Kinds of tasks: what a task reads, and how it attends to that.
#pragma once

#include <cstdint>
#include <string>

#include "engine/layer.h"
#include "engine/scratch.h"
#include "kernels/api.h"
#include "kernels/units.h"

namespace fluxion {

// Blocks are the engine's own kind (blocks.h), in bundles where requests share a prefix (bundle.h). Every
// other kind comes with a plan: its object holds the plan's data for its tasks, and its scratch is its own
// (Scratch::own). The methods are called from many threads at once; nothing changes while a layer is open.
class FLUXION_API TaskKind {
 public:
  virtual ~TaskKind() = default;

  // Throws std::invalid_argument unless its part of a plan has the shape of the plan.
  virtual void check_shape(const LayerPlan& plan) const = 0;
  // Whether a task is of this kind.
  virtual bool takes(const Layer& layer, const Task& task) const = 0;
  // What is wrong with a task of this kind ("has ...", completes the name of a request and head), or "" if
  // the task can be done.
  virtual std::string wrong(const Layer& layer, const Task& task) const = 0;
  // Upper estimate of the bytes that the task reads; 0: nothing, so there is no task.
  virtual int64_t bytes(const Layer& layer, const Task& task) const = 0;
  // How many tokens' scores it needs room for; 0: the blocks' room is enough.
  virtual int ranked_tokens(const Layer& layer, const Task& task) const = 0;
  // Makes its own room in a scratch that has room for this many pages. May throw std::bad_alloc.
  virtual void reserve(int pages, int group, Scratch* scratch) const;

  // Writes what the task reads to the scratch.
  virtual Selection select(const Layer& layer, const Task& task, Scratch* scratch) const = 0;
  // Does the task. Writes o [G][D] and lse [G].
  virtual Selection run(const Layer& layer, const Task& task, Scratch* scratch, float* o, float* lse) const;
};

// Bits of the heads of a group that read something, that read everything, and that choose by scores; and how
// many units (blocks, tokens) each head reads.
struct Wanted {
  uint16_t active = 0;
  uint16_t whole = 0;
  uint16_t ranked = 0;
  int count[kMaxGroup];
};

// Leaves `ranked` 0.
FLUXION_API Wanted wanted_of(const Layer& layer, const Task& task, int tokens, int size, int units);

}  // namespace fluxion
