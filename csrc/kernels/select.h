#pragma once

#include "kernels/table.h"
#include "simd/types.h"

namespace fluxion::FLUXION_ISA {
namespace {

inline constexpr int kBuckets = 1024;

// Order-preserving map of floats to unsigned integers, with -0 equal to 0 and NaN equal to -inf.
inline uint32_t order_key(float x) {
  const uint32_t bits = x == x ? bits_of(x + 0.0f) : 0xff800000u;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The k-th largest of n keys, 1 <= k <= n; *above = how many are larger. A bucket select over the range the
// keys really span: scores lie close together, and buckets by leading bits would hold them all in one or two.
// Each round narrows the range 1024 times, so there are at most four, over ever fewer keys. Destroys keys.
inline uint32_t kth_largest(uint32_t* keys, int n, int k, uint32_t* counts, int* above) {
  *above = 0;
  for (;;) {
    uint32_t low = keys[0], high = keys[0];
    for (int i = 1; i < n; ++i) {
      low = keys[i] < low ? keys[i] : low;
      high = keys[i] > high ? keys[i] : high;
    }
    if (low == high) return low;
    const int bits = 32 - __builtin_clz(high - low);
    const int shift = bits > 10 ? bits - 10 : 0;
    for (int b = 0; b < kBuckets; ++b) counts[b] = 0;
    for (int i = 0; i < n; ++i) ++counts[(keys[i] - low) >> shift];
    uint32_t bucket = (high - low) >> shift;
    int larger = 0;
    while (larger + static_cast<int>(counts[bucket]) < k) larger += counts[bucket--];
    *above += larger;
    k -= larger;
    if (shift == 0) return low + bucket;
    int m = 0;
    for (int i = 0; i < n; ++i) {
      const uint32_t key = keys[i];
      keys[m] = key;
      m += (key - low) >> shift == bucket;
    }
    n = m;
  }
}

inline void select(const float* scores, int n, int k, uint16_t bit, uint16_t* heads, void* scratch) {
  if (k >= n) {
    for (int i = 0; i < n; ++i) heads[i] |= bit;
    return;
  }
  uint32_t* counts = static_cast<uint32_t*>(scratch);
  uint32_t* keys = counts + kBuckets;
  for (int i = 0; i < n; ++i) keys[i] = order_key(scores[i]);
  int above;
  const uint32_t threshold = kth_largest(keys, n, k, counts, &above);
  for (int i = 0; i < n; ++i) heads[i] |= order_key(scores[i]) > threshold ? bit : 0;
  for (int i = 0, ties = k - above; ties > 0; ++i) {
    if (order_key(scores[i]) == threshold) {
      heads[i] |= bit;
      --ties;
    }
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
