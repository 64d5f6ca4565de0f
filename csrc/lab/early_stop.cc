#include "lab/early_stop.h"

#include <cmath>
#include <stdexcept>
#include <string>

namespace fluxion {

void EarlyStop::check_shape(const LayerPlan& plan) const {
  if (shares_.batch == plan.batch && shares_.kv_heads == plan.kv_heads) return;
  throw std::invalid_argument("stop has the shape [" + std::to_string(shares_.batch) + ", " +
                              std::to_string(shares_.kv_heads) + "] and must have [" +
                              std::to_string(plan.batch) + ", " + std::to_string(plan.kv_heads) + "].");
}

// 0 and 1: the heads read their budgets.
bool EarlyStop::takes(const Layer& layer, const Task& task) const {
  const float stop = shares_.stop[layer.index(task)];
  return !(stop == 0 || stop == 1);
}

std::string EarlyStop::wrong(const Layer& layer, const Task& task) const {
  const float stop = shares_.stop[layer.index(task)], spread = shares_.spread[layer.index(task)];
  if (!(stop >= 0 && stop <= 1)) {
    return "is to stop at the share " + std::to_string(stop) + " of its attention; a share is 0 to 1";
  }
  if (!(spread >= 0 && spread <= 1))
    return "is to score blocks with the spread " + std::to_string(spread) + "; a spread is 0 to 1";
  return Progressive::wrong(layer, task);
}

float EarlyStop::spread(const Layer& layer, const Task& task) const {
  return shares_.spread[layer.index(task)];
}

// False for NaN, and before anything was chosen.
bool EarlyStop::enough(const Layer& layer, const Task& task, int, const Head& head) const {
  const double rest = head.least + std::log(static_cast<double>(head.left));
  return 1 / (1 + std::exp(rest - head.known())) >= shares_.stop[layer.index(task)];
}

}  // namespace fluxion
