#pragma once

#include "kernels/table.h"
#include "kernels/tile.h"

namespace fluxion::FLUXION_ISA {
namespace {

// x rounded down or up to bfloat16; x itself if it is a bfloat16 number.
inline BF16 round_down(float x) {
  const uint32_t bits = bits_of(x);
  return {static_cast<uint16_t>((bits + (bits >> 31 ? 0xffffu : 0u)) >> 16)};
}
inline BF16 round_up(float x) {
  const uint32_t bits = bits_of(x);
  return {static_cast<uint16_t>((bits + (bits >> 31 ? 0u : 0xffffu)) >> 16)};
}

template <class T>
void page_minmax(const void* tile, int D, void* entry) {
  const T* keys = static_cast<const T*>(tile);
  Model<T>* out = static_cast<Model<T>*>(entry);
  if constexpr (sizeof(T) == sizeof(Int8)) {
    // Rounded to nearest, a product with a scale might not be a bound.
    float scale[kPage];
    for (int t = 0; t < kPage; ++t) scale[t] = to_float(scales_of(keys, D)[t]);
    for (int d = 0; d < D; ++d) {
      const auto key = [&](int t) { return static_cast<float>(keys[int8_at(t, d, D)].bits) * scale[t]; };
      float low = key(0), high = low;
      for (int t = 1; t < kPage; ++t) {
        const float k = key(t);
        low = low < k ? low : k;
        high = high > k ? high : k;
      }
      out[d] = round_down(low);
      out[D + d] = round_up(high);
    }
  } else {
    // A minimum of KV-dtype numbers is one of them, so storing it back in the KV dtype is exact.
    for (int d = 0; d < D; d += kLanes) {
      Vec low = load_one(keys + d), high = low;
      for (int t = 1; t < kPage; ++t) {
        const Vec k = load_one(keys + t * D + d);
        low = min(low, k);
        high = max(high, k);
      }
      store_one(out + d, low);
      store_one(out + D + d, high);
    }
  }
}

template <class T>
void merge_minmax(void* entry, const void* other, int D) {
  T* out = static_cast<T*>(entry);
  const T* from = static_cast<const T*>(other);
  for (int d = 0; d < D; d += kLanes) {
    store_one(out + d, min(load_one(out + d), load_one(from + d)));
    store_one(out + D + d, max(load_one(out + D + d), load_one(from + D + d)));
  }
}

// Plain loops in a fixed order of additions, and products of at most 48 bits, exact in float64: every ISA
// gives the same bits however the compiler vectorises them.
template <class T>
void half_moments(const T* rows, int D, double* sums, double* norms) {
  for (int d = 0; d < D; ++d) sums[d] = 0.0;
  for (int i = 0; i < 4; ++i) norms[i] = 0.0;
  for (int t = 0; t < kPage; ++t) {
    const T* row = rows + t * D;
    double squares[16] = {};
    for (int d = 0; d < D; d += 16) {
      for (int i = 0; i < 16; ++i) {
        const double x = to_float(row[d + i]);
        sums[d + i] += x;
        squares[i] += x * x;
      }
    }
    for (int width = 8; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) squares[i] += squares[i + width];
    }
    const double square = squares[0], norm = __builtin_sqrt(square);
    norms[0] += norm;
    norms[1] += square;
    norms[2] += square * norm;
    norms[3] += square * square;
  }
}

template <class T>
void page_moments(const void* tile, int D, double* sums) {
  if constexpr (sizeof(T) == sizeof(Int8)) {
    Unpacked<1> room(D);
    room.take(0, static_cast<const Int8*>(tile), 0, 2 * kPage);
    return page_moments<BF16>(room.tiles(), D, sums);
  } else {
    const T* keys = static_cast<const T*>(tile);
    half_moments(keys, D, sums, sums + 2 * D);
    half_moments(keys + kPage * D, D, sums + D, sums + 2 * D + 4);
  }
}

template <class T>
float merge_state(const float* o_a, float lse_a, const float* o_b, float lse_b, int D, void* out) {
  T* o = static_cast<T*>(out);
  if (lse_a == kNegInf || lse_b == kNegInf) {
    const float* only = lse_a != kNegInf ? o_a : lse_b != kNegInf ? o_b : nullptr;
    for (int d = 0; d < D; d += kLanes) store_one(o + d, only == nullptr ? set1(0.0f) : load(only + d));
    return lse_a == kNegInf ? lse_b : lse_a;
  }
  const float top = lse_a > lse_b ? lse_a : lse_b;
  const float a = __builtin_expf(lse_a - top), b = __builtin_expf(lse_b - top);
  const Vec weight_a = set1(a / (a + b)), weight_b = set1(b / (a + b));
  for (int d = 0; d < D; d += kLanes) {
    const Vec more = o_b == nullptr ? set1(0.0f) : mul(load(o_b + d), weight_b);
    store_one(o + d, fma(load(o_a + d), weight_a, more));
  }
  return top + __builtin_logf(a + b);
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
