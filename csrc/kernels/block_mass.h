#pragma once

#include "kernels/logits.h"

namespace fluxion::FLUXION_ISA {
namespace {

// Calls take(logits, chosen) for kLanes blocks at a time. logits: the log of each block's weight over the
// tokens of a whole block. chosen: one bit a lane. Lanes past the end: -inf.
template <class Take>
inline void visit_blocks(const float* scores, const uint16_t* heads, uint16_t bits, int n, const Scale& scale,
                         float log_first, float log_last, Take&& take) {
  const auto bounded = [](Vec x) { return max(min(set1(kMaxFloat), x), set1(kNegInf)); };  // NaN: -inf
  for (int i = 0; i < n; i += kLanes) {
    if (i > 0 && i + kLanes < n) {
      take(bounded(logits(load(scores + i), scale)), lanes_with(heads + i, bits));
      continue;
    }
    // Only the first and the last block can be cut.
    float score[kLanes], cut[kLanes];
    uint16_t chosen[kLanes];
    for (int j = 0; j < kLanes; ++j) {
      const int at = i + j;
      score[j] = at < n ? scores[at] : 0.0f;
      cut[j] = at >= n ? kNegInf : at == 0 ? log_first : at == n - 1 ? log_last : 0.0f;
      chosen[j] = at < n ? heads[at] : 0;
    }
    take(bounded(add(bounded(logits(load(score), scale)), load(cut))), lanes_with(chosen, bits));
  }
}

// Two passes, maxima and then sums, with one exponential a block.
inline void block_mass(const float* scores, const uint16_t* heads, uint16_t bits, int n, Scale scale,
                       int tokens, int first_tokens, int last_tokens, float* mass) {
  const float whole = static_cast<float>(tokens);
  const float log_first = __builtin_logf(static_cast<float>(first_tokens) / whole);
  const float log_last = __builtin_logf(static_cast<float>(last_tokens) / whole);
  const Vec nothing = set1(kNegInf), zero = set1(0.0f);
  Vec highest[2] = {nothing, nothing};
  visit_blocks(scores, heads, bits, n, scale, log_first, log_last, [&](Vec x, uint32_t chosen) {
    highest[0] = max(keep(chosen, x, nothing), highest[0]);
    highest[1] = max(keep(chosen, nothing, x), highest[1]);
  });
  float top[2];
  for (int i = 0; i < 2; ++i) {
    const float found = reduce_max(highest[i]);
    top[i] = found == kNegInf ? 0.0f : found;  // no blocks: any number keeps the weights at 0
  }
  Vec sums[2] = {zero, zero};
  visit_blocks(scores, heads, bits, n, scale, log_first, log_last, [&](Vec x, uint32_t chosen) {
    const Vec weight = exp_nonpositive(sub(x, keep(chosen, set1(top[0]), set1(top[1]))));
    sums[0] = add(sums[0], keep(chosen, weight, zero));
    sums[1] = add(sums[1], keep(chosen, zero, weight));
  });
  for (int i = 0; i < 2; ++i) {
    const float sum = reduce_add(sums[i]);
    mass[i] = sum == 0.0f ? kNegInf : top[i] + __builtin_logf(sum * whole);
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
