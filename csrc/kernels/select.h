#pragma once

#include "kernels/table.h"
#include "simd/types.h"

// Selection in the order of floats, with -0 equal to 0 and NaN equal to -inf, by compares alone: scores need
// no conversion, and no branch depends on scores.
namespace fluxion::FLUXION_ISA {
namespace {

// Scores that share a maximum: enough that few scores pass the bound from the maxima, and that the maxima are
// few. With less than kGroups maxima for every wanted score, that bound is not used.
inline constexpr int kGroupScores = 8;
inline constexpr int kGroups = 2;

// Numbers that order as the floats do. -inf is the lowest, and no NaN lies between -inf and inf.
inline uint32_t order_key(float x) {
  const uint32_t bits = bits_of(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
inline float float_of_key(uint32_t key) { return float_of(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// The chosen scores: every one >= limit, and the first `ties` of those that equal `tied`.
struct Threshold {
  float limit;
  float tied;
  int ties;
};

inline int count_at_least(const float* scores, int n, float limit) {
  const Vec least = set1(limit), one = set1(1.0f);
  Vec even = set1(0.0f), odd = set1(0.0f);  // whole numbers below 2^24
  int i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    even = add(even, zero_below(load(scores + i), least, one));
    odd = add(odd, zero_below(load(scores + i + kLanes), least, one));
  }
  if (i < n) even = add(even, zero_below(load(scores + i), least, one));
  return static_cast<int>(reduce_add(add(even, odd)));
}

// The k largest of n scores without NaN; at least k are in [low, high], none above. n: a multiple of kLanes.
// Halves the range until it has one number, or k scores reach its middle.
inline Threshold threshold_of(const float* scores, int n, int k, float low, float high) {
  uint32_t from = order_key(low + 0.0f), to = order_key(high + 0.0f);
  int above = 0;  // scores of larger keys than `to`
  while (from < to) {
    const uint32_t middle = to - (to - from) / 2;
    const int count = count_at_least(scores, n, float_of_key(middle));
    if (count == k) return {float_of_key(middle), 0.0f, 0};
    if (count > k) {
      from = middle;
    } else {
      to = middle - 1;
      above = count;
    }
  }
  // The number after inf is a NaN, which no score reaches.
  const float tied = float_of_key(from) + 0.0f;
  return {float_of_key(order_key(tied) + 1), tied, k - above};
}

// Copies scores to `clean`, with NaN as -inf, and -inf up to a multiple of kLanes. Returns the largest.
// Writes `groups` maxima (a multiple of kLanes; 0: none): group i has the scores i, i + groups, and so on.
inline float clean_scores(const float* scores, int n, float* clean, float* maxima, int groups) {
  const Vec least = set1(kNegInf);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(clean + i, max(load(scores + i), least));
  if (i < n) {
    store(clean + i, least);
    for (int j = i; j < n; ++j) clean[j] = scores[j] > kNegInf ? scores[j] : kNegInf;
    i += kLanes;
  }
  Vec top = least;
  if (groups == 0) {
    for (int j = 0; j < i; j += kLanes) top = max(load(clean + j), top);
  }
  for (int g = 0; g < groups; g += kLanes) {
    Vec most = least;
    for (int j = g; j < i; j += groups) most = max(load(clean + j), most);
    store(maxima + g, most);
    top = max(most, top);
  }
  return reduce_max(top);
}

// Packs the scores >= limit in order, and -inf up to a multiple of kLanes. Returns how many in all.
inline int pack_at_least(const float* scores, int n, float limit, float* out) {
  const Vec least = set1(limit);
  int count = 0;
  for (int i = 0; i < n; i += kLanes) {
    const Vec x = load(scores + i);
    count += pack_lanes(out + count, lanes_at_least(x, least), x);
  }
  store(out + count, set1(kNegInf));
  return (count + kLanes - 1) / kLanes * kLanes;
}

inline Threshold find_threshold(const float* scores, int n, int k, float* scratch) {
  const int padded = (n + kLanes - 1) / kLanes * kLanes;
  const int groups = n / kGroupScores / kLanes * kLanes;
  float* clean = scratch;
  float* maxima = clean + padded;
  if (groups < kGroups * k) {
    const float high = clean_scores(scores, n, clean, nullptr, 0);
    return threshold_of(clean, padded, k, kNegInf, high);
  }
  const float high = clean_scores(scores, n, clean, maxima, groups);
  // k groups have a maximum of at least this, so at least k scores do.
  const Threshold bound = threshold_of(maxima, groups, k, kNegInf, high);
  const float low = bound.ties > 0 ? bound.tied : bound.limit;
  const int candidates = pack_at_least(clean, padded, low, maxima);
  return threshold_of(maxima, candidates, k, low, high);
}

inline void select(const float* scores, int n, int k, uint16_t bit, uint16_t* heads, void* scratch) {
  if (k >= n) {
    for (int i = 0; i < n; ++i) heads[i] |= bit;
    return;
  }
  float* clean = static_cast<float*>(scratch);
  const Threshold t = find_threshold(scores, n, k, clean);
  const Vec limit = set1(t.limit), tied = set1(t.tied);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) or_lanes(heads + i, lanes_at_least(load(clean + i), limit), bit);
  for (; i < n; ++i) heads[i] |= clean[i] >= t.limit ? bit : 0;
  for (int j = 0, ties = t.ties; ties > 0; j += kLanes) {
    uint32_t equal = lanes_at_least(load(clean + j), tied) & ~lanes_at_least(load(clean + j), limit);
    for (; equal != 0 && ties > 0; equal &= equal - 1, --ties) heads[j + __builtin_ctz(equal)] |= bit;
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
