#pragma once

#include "kernels/attend_tiles.h"

// The same softmax for a tile in which each head attends to its own tokens.
namespace fluxion::FLUXION_ISA {
namespace {

// A tile with at most this many wanted tokens is read token by token, which spares its other rows.
inline constexpr int kSparseTokens = 4;

// out += sum over the listed tokens of weight * value. weights: as Values rounds them.
template <class T, class Values>
inline void add_listed_values(const float* weights, const T* values, int D, const uint8_t* tokens, int count,
                              float* out) {
  static constexpr T kNothing[kMaxHeadDim] = {};
  // For every step: the first row, the last row, and the weights. A missing row is zeros.
  const T *first[kPage], *last[kPage];
  float words[kPage];
  int steps = 0;
  for (int i = 0; i < count; i += Values::kRows, ++steps) {
    const int p = tokens[i], end = i + Values::kRows - 1;
    first[steps] = values + p * D;
    last[steps] = end < count ? values + tokens[end] * D : kNothing;
    words[steps] = Values::word(weights[p], end < count ? weights[tokens[end]] : 0.0f);
  }
  int d = 0;
  for (; d + 2 * kLanes <= D; d += 2 * kLanes) {
    Vec x = load(out + d), y = load(out + d + kLanes);
    for (int i = 0; i < steps; ++i) {
      const auto weight = Values::weight(words + i);
      const auto value = Values::pair(first[i] + d, last[i] + d);
      x = Values::add(x, weight, value.a);
      y = Values::add(y, weight, value.b);
    }
    store(out + d, x);
    store(out + d + kLanes, y);
  }
  if (d == D) return;
  Vec x = load(out + d);
  for (int i = 0; i < steps; ++i)
    x = Values::add(x, Values::weight(words + i), Values::tail(first[i] + d, last[i] + d));
  store(out + d, x);
}

// Scaled scores of the tokens of the mask; -inf for the others, which are not read. Returns the maximum of
// these and `top`.
template <class T>
inline float score_part(const typename Dot<T>::Query* q, const T* tile, int mask, int D, const Scale& scale,
                        float top, float* scores) {
  if (__builtin_popcount(mask) <= kSparseTokens) {
    for (int t = 0; t < kPage; t += kLanes) store(scores + t, set1(0.0f));
    for (int bits = mask; bits; bits &= bits - 1) {
      const int t = __builtin_ctz(bits);
      scores[t] = dot_row<T>(q, tile + t * D, D);
    }
  } else {
    for (int t = 0; t < kPage; t += kLanes) {
      const StridedRows<T> rows{tile + t * D, D};
      store(scores + t, dot_rows<T>(q, rows, D));
    }
  }
  Vec highest = set1(top);
  for (int t = 0; t < kPage; t += kLanes) {
    const Vec x = min(set1(kMaxFloat), logits(load(scores + t), scale));
    const Vec kept = keep(static_cast<uint32_t>(mask) >> t, x, set1(kNegInf));
    store(scores + t, kept);
    highest = max(kept, highest);
  }
  return reduce_max(highest);
}

// masks: of the first `count` of kHeads heads; any may be 0. For a head, only the tokens of its own mask are
// read: weight 0 would not stop a NaN in the others.
template <class T, class Values, int kHeads>
void attend_part(const typename Dot<T>::Query* q, const T* tile, const uint16_t* masks, int count, int D,
                 const HeadStates& state, const PageLse& page_lse) {
  alignas(64) float scores[kHeads][kPage];
  alignas(64) float next[kLanes];
  store(next, load(state.top));
  for (int h = 0; h < count; ++h) {
    if (masks[h] == 0) continue;
    const float top =
        score_part<T>(q + h * D, tile, masks[h], D, {state.factor[h], state.cap}, state.top[h], scores[h]);
    for (int i = h; i < kLanes; i += kHeads) next[i] = top;
  }
  raise_tops(load(next), D, state);
  for (int h = 0; h < count; ++h) {
    if (masks[h] == 0) continue;
    const Vec base = reference(set1(state.top[h]));
    Vec sum = set1(0.0f), used = set1(0.0f);
    for (int t = 0; t < kPage; t += kLanes) {
      const Vec w = exp_nonpositive(sub(load(scores[h] + t), base));
      const Vec rounded = Values::rounded(w);
      store(scores[h] + t, rounded);
      sum = add(sum, w);
      used = add(used, rounded);
    }
    const float alone = reduce_add(sum);
    state.total[h] += alone;
    state.used[h] += reduce_add(used);
    if (page_lse.of[0] != nullptr) page_lse.of[0][h] = lse_of(state.top[h], alone);
  }
  for (int h = 0; h < count; ++h) {
    uint8_t tokens[kPage];
    int listed = 0;
    for (int bits = masks[h]; bits; bits &= bits - 1)
      tokens[listed++] = static_cast<uint8_t>(__builtin_ctz(bits));
    if (listed == 0) continue;
    add_listed_values<T, Values>(scores[h], tile + kPage * D, D, tokens, listed, state.out + h * D);
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
