#pragma once

#include "kernels/exp.h"
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

inline void weights(const float* scores, int n, float scale, float lse, float* out) {
  const auto weight = [&](Vec score) {
    return exp_nonpositive(min(set1(0.0f), sub(mul(score, set1(scale)), set1(lse))));
  };
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, weight(load(scores + i)));
  float rest[kLanes] = {};
  for (int j = i; j < n; ++j) rest[j - i] = scores[j];
  if (i < n) store(rest, weight(load(rest)));
  for (int j = i; j < n; ++j) out[j] = rest[j - i];
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
