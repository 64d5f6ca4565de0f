#pragma once

#include "kernels/tile.h"

// Int8 as it is multiplied. An ISA header has what is its own:
//
//   words_at(p)            2 * kLanes integers as words of 16 bits, two in every lane
//   add_words(sum, a, b)   adds the products of the words to the integers that are in the lanes of `sum`
//   floats_of(sum)         those integers
//   store_words(x, to)     kLanes floats, rounded to words
namespace fluxion::FLUXION_ISA {
namespace {

// The two words at p in every lane.
inline Vec words_for_all(const int16_t* p) {
  float both;
  __builtin_memcpy(&both, p, sizeof(both));
  return set1(both);
}

// Queries become integers of 16 bits, which loses at most 2^-16 of their largest element: products need no
// rounding between them, and kMaxHeadDim of them fit into a lane.
inline constexpr int kQueryMost = 32767;
static_assert(int64_t{kMaxHeadDim} * 128 * kQueryMost <= INT32_MAX);
template <>
struct Dot<Int8> {
  using Query = int16_t;

  static float pack(const BF16* q, int n, Query* out) {
    const uint32_t largest = largest_bits(q, n);
    const float most = float_of(largest << 16);
    const float inverse = most > 1e-30f ? static_cast<float>(kQueryMost) / most : 0.0f;
    for (int i = 0; i < n; ++i) out[i] = static_cast<int16_t>(nearest_integer(to_float(q[i]) * inverse));
    // NaN where something is not finite.
    return largest < kNotFinite ? most / static_cast<float>(kQueryMost) : float_of(0x7fc00000);
  }
};

// Sums are in the order of the elements.
template <>
struct Mix<Int8> {
  static void store_sums(float* p, Vec a, Vec b) { store_pair<float>(p, a, b); }
};

}  // namespace
}  // namespace fluxion::FLUXION_ISA
