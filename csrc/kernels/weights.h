#pragma once

#include "kernels/exp.h"
#include "kernels/table.h"

namespace fluxion::FLUXION_ISA {
namespace {

// sum = keep * sum + take * e^min(0, scale * score - lse); a score that is NaN weighs nothing.
inline void add_weights(const float* scores, int n, float scale, float lse, float keep, float take,
                        float* sum) {
  const auto blend = [&](Vec score, Vec old) {
    const Vec x = sub(mul(score, set1(scale)), set1(lse));
    const Vec weight = exp_nonpositive(max(min(set1(0.0f), x), set1(kNegInf)));  // NaN: -inf
    return keep == 0.0f ? mul(set1(take), weight) : fma(set1(take), weight, mul(set1(keep), old));
  };
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(sum + i, blend(load(scores + i), load(sum + i)));
  if (i >= n) return;
  float last[2][kLanes] = {};
  for (int j = 0; j < n - i; ++j) {
    last[0][j] = scores[i + j];
    last[1][j] = sum[i + j];
  }
  store(last[1], blend(load(last[0]), load(last[1])));
  for (int j = 0; j < n - i; ++j) sum[i + j] = last[1][j];
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
