#include "engine/task_kind.h"

#include "engine/chunks.h"

namespace fluxion {

void TaskKind::reserve(int, int, Scratch*) const {}

Selection TaskKind::run(const Layer& layer, const Task& task, Scratch* scratch, float* o, float* lse) const {
  const Selection chosen = select(layer, task, scratch);
  attend(layer, task, chosen, scratch, o, lse);
  return chosen;
}

Wanted wanted_of(const Layer& layer, const Task& task, int tokens, int size, int units) {
  Wanted wanted;
  const float* budget = layer.budget(task);
  for (int g = 0; g < layer.group; ++g) {
    if (!(budget[g] > 0)) continue;
    wanted.active |= 1u << g;
    wanted.count[g] = budget[g] >= 1 ? units : units_of_budget(budget[g], tokens, size, units);
    if (wanted.count[g] == units) wanted.whole |= 1u << g;
  }
  return wanted;
}

}  // namespace fluxion
