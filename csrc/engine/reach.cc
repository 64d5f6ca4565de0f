#include "engine/reach.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>

#include "engine/chunks.h"

namespace fluxion {

double logit_of(Scale scale, float score) {
  const double logit = static_cast<double>(scale.factor) * score;
  return scale.cap > 0 ? scale.cap * std::tanh(logit / scale.cap) : logit;
}

void Reach::check_shape(const LayerPlan& plan) const {
  if (of_.batch == plan.batch && of_.q_heads == plan.q_heads) return;
  throw std::invalid_argument("reach has the shape [" + std::to_string(of_.batch) + ", " +
                              std::to_string(of_.q_heads) + "] and must have [" + std::to_string(plan.batch) +
                              ", " + std::to_string(plan.q_heads) + "].");
}

bool Reach::takes(const Layer& layer, const Task& task) const {
  return !std::isnan(of_.reach[layer.state(task)]);
}

std::string Reach::wrong(const Layer& layer, const Task& task) const {
  const int64_t state = layer.state(task);
  for (int g = 0; g < layer.group; ++g) {
    if (std::isnan(of_.reach[state + g]) || std::isnan(of_.gate[state + g]))
      return "has a head without a reach or without a gate; give all heads of a group both";
  }
  if (layer.blk(task) != kPage) {
    return "reads by reach in blocks of " + std::to_string(layer.blk(task)) + " tokens; reaches are of 16";
  }
  return Progressive::wrong(layer, task);
}

// A head that the comparison says nothing of, for a NaN, is one.
uint16_t Reach::candidates(const Layer& layer, const Task& task, uint16_t heads, Scratch* s,
                           int64_t* bytes) const {
  const int64_t state = layer.state(task), stride = s->stride(layer.group);
  const float* gate = of_.gate + state;
  uint16_t found = 0;
  for (int g = 0; g < layer.group; ++g)
    found |= gate[g] == std::numeric_limits<float>::infinity() ? 1u << g : 0;
  found &= heads;
  if (found == heads) return found;
  const Blocks at(kReachGateBlk, layer.step.sink_pages(), layer.step.request(task.request).window_page);
  *bytes += score_blocks(layer, task, at, layer.query(task), layer.group, kReachGateSpread, s->scores.data(),
                         stride, s);
  for (unsigned rest = heads & ~found; rest != 0; rest &= rest - 1) {
    const int g = std::countr_zero(rest);
    const float* scores = &s->scores[g * stride];
    const float top = *std::max_element(scores, scores + at.count);
    if (!(logit_of(layer.in.scale, top) < static_cast<double>(layer.res_lse[state + g]) - gate[g]))
      found |= static_cast<uint16_t>(1u << g);
  }
  return found;
}

bool Reach::enough(const Layer& layer, const Task& task, int g, const Head& head) const {
  return logit_of(layer.in.scale, head.next) < head.own - of_.reach[layer.state(task) + g];
}

}  // namespace fluxion
