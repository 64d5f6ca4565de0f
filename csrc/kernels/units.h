// How many blocks or tokens a budget buys.
#pragma once

#include <algorithm>
#include <cmath>

namespace fluxion {

// Units that a head reads of `units`, which hold `tokens` tokens in units of `size`: ceil(budget * tokens /
// size), at least one, at most all. Reduced by a millionth, so that a budget which float32 rounds up (0.05)
// does not buy one unit too many.
inline int units_of_budget(float budget, int tokens, int size, int units) {
  const double wanted = std::ceil(static_cast<double>(budget) * tokens / size * (1 - 1e-6));
  return static_cast<int>(std::clamp(wanted, 1.0, static_cast<double>(units)));
}

}  // namespace fluxion
