#pragma once

#include "kernels/select.h"
#include "kernels/table.h"

namespace fluxion::FLUXION_ISA {
namespace {

inline void above(const float* values, int pages, float limit, uint16_t* masks) {
  // More than the limit is at least the next float; -0 and 0 are one number, and after inf comes a NaN, which
  // nothing reaches.
  const Vec least = set1(float_of_key(order_key(limit + 0.0f) + 1));
  for (int i = 0; i < pages; ++i) {
    uint32_t mask = 0;
    for (int t = 0; t < kPage; t += kLanes) mask |= lanes_at_least(load(values + i * kPage + t), least) << t;
    masks[i] = static_cast<uint16_t>(mask);
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
