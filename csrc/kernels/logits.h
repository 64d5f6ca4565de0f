#pragma once

#include "kernels/exp.h"
#include "kernels/table.h"

namespace fluxion::FLUXION_ISA {
namespace {

// cap * tanh(x / cap), to 2e-7 of the cap; NaN stays NaN. Not inlined: without a cap it costs one branch.
[[gnu::noinline, gnu::cold]] Vec cap_logits(Vec x, float cap) {
  const Vec y = mul(x, set1(1.0f / cap)), size = max(y, sub(set1(0.0f), y));
  float of[kLanes], power[kLanes];
  store(of, y);
  store(power, exp_nonpositive(mul(size, set1(-2.0f))));
  for (int i = 0; i < kLanes; ++i) {
    const float square = of[i] * of[i];
    // Near 0 by its series, because the difference from 1 would have few digits.
    const float far = (1.0f - power[i]) / (1.0f + power[i]);
    const float near = of[i] * (1.0f - square * (1.0f / 3 - square * (2.0f / 15 - square * (17.0f / 315))));
    of[i] = cap * (square < 0.0156f ? near : of[i] < 0 ? -far : far);
  }
  return load(of);
}

// Turns scores q.k into logits: times the factor, and capped unless the cap is 0.
inline Vec logits(Vec scores, Vec factor, float cap) {
  const Vec x = mul(scores, factor);
  if (cap == 0.0f) [[likely]]
    return x;
  return cap_logits(x, cap);
}
inline Vec logits(Vec scores, const Scale& scale) { return logits(scores, set1(scale.factor), scale.cap); }

}  // namespace
}  // namespace fluxion::FLUXION_ISA
