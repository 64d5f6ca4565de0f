#pragma once

#include "kernels/tile.h"

// How Int8 is multiplied. Every ISA header defines:
//
//   words_at(p)            2 * kLanes integers as words of 16 bits, two in every lane
//   add_words(sum, a, b)   adds the products of the words to the integers that are in the lanes of `sum`
//   floats_of(sum)         those integers
//   bytes_at(p)            4 * kLanes integers as they are, four in every lane
//   add_bytes(sum, a, b)   adds the products of the bytes, those of a unsigned, to the integers
//   two_bits<kFrom>(x)     two bits of every byte from bit kFrom on, as a byte
//   four_bits(high, low)   the bytes 4 * high + low, of bytes of two bits
//   store_bytes(x, to)     kLanes floats from 0 to 255, rounded to unsigned bytes
namespace fluxion::FLUXION_ISA {
namespace {

// The two words, or the four bytes, at p in every lane.
template <class Part>
inline Vec for_all_lanes(const Part* p) {
  float parts;
  __builtin_memcpy(&parts, p, sizeof(parts));
  return set1(parts);
}

// Queries become 16-bit integers, with an error of at most 2^-16 of their largest element. Products need no
// rounding in between, and the sum of kMaxHeadDim of them fits into a lane.
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
    // NaN if an element is not finite.
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
