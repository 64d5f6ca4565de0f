#include "engine/guard.h"

#include <bit>
#include <cmath>

namespace fluxion {

double left_out(float read, float unread, float res_lse, float mid_lse) {
  const double share = 1 / (1 + std::exp(static_cast<double>(res_lse) - mid_lse));
  return std::exp(static_cast<double>(unread) - read) * share;
}

uint16_t heads_to_widen(const KernelTable& kernels, const BlocksRead& task, uint16_t heads, double guard) {
  const Blocks& at = task.blocks;
  const auto tokens_of = [&](int i) { return (at.to(i) - at.from(i)) * kPage; };
  const int first = tokens_of(0), last = tokens_of(at.count - 1);
  uint16_t widen = 0;
  for (unsigned left = heads; left != 0; left &= left - 1) {
    const int g = std::countr_zero(left);
    const uint16_t bit = static_cast<uint16_t>(1u << g);
    float mass[2];
    kernels.block_mass(task.scores + g * task.stride, task.chosen, task.together ? uint16_t{0xffff} : bit,
                       at.count, task.scale, kPage << at.level, first, last, mass);
    // False for NaN.
    if (left_out(mass[0], mass[1], task.res_lse[g], task.mid_lse[g]) > guard) widen |= bit;
  }
  return widen;
}

}  // namespace fluxion
