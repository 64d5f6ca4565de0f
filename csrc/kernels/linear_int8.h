#pragma once

#include "kernels/int8.h"
#include "kernels/linear.h"

// Linear layers whose weights are integers of 8 bits, kInt8Group inputs of an output with one scale. x
// becomes integers of 16 bits with a scale of its own for as many inputs, which loses at most 2^-16 of their
// largest; the products of a group are exact.
namespace fluxion::FLUXION_ISA {
namespace {

inline constexpr int kGroupVecs = kInt8Group / (2 * kLanes);
static_assert(kInt8Group % (2 * kLanes) == 0);
static_assert(int64_t{kInt8Group} * 127 * kQueryMost <= INT32_MAX);

// Bytes of a row of x: the integers and the scales.
inline constexpr int64_t int8_row_bytes(int in) {
  return int64_t{in} * 2 + static_cast<int64_t>(in / kInt8Group) * 4;
}

inline uint32_t largest_bits(const float* x, int n) {
  uint32_t largest = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(x[i]) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest >> 16 | (largest > 0x7f800000);  // as of bfloat16, rounded down; NaN stays one
}

// Integers of a group; returns their scale, NaN where something is not finite.
template <class T>
float pack_words(const T* x, int16_t* out) {
  float most = 0.0f;
  const bool finite = largest_bits(x, kInt8Group) < kNotFinite;
  for (int i = 0; i < kInt8Group; ++i) {
    const float size = __builtin_fabsf(to_float(x[i]));
    most = size > most ? size : most;
  }
  const float inverse = finite && most > 1e-30f ? static_cast<float>(kQueryMost) / most : 0.0f;
  for (int i = 0; i < kInt8Group; ++i)
    out[i] = finite ? static_cast<int16_t>(nearest_integer(to_float(x[i]) * inverse)) : int16_t{0};
  return finite ? most / static_cast<float>(kQueryMost) : float_of(0x7fc00000);
}

// Rows in groups of kLinearRows, padded as of pack_linear: integers [in / kInt8Group][rows][kInt8Group], then
// scales [in / kInt8Group][rows].
template <class T>
void pack_int8(const void* x, int64_t x_stride, int rows, int in, void* packed) {
  const int groups = in / kInt8Group;
  for (int first = 0; first < rows; first += kLinearRows) {
    const int count = smaller(rows - first, kLinearRows), across = across_of(count);
    char* to = static_cast<char*>(packed) + first * int8_row_bytes(in);
    auto* words = reinterpret_cast<int16_t*>(to);
    auto* scales = reinterpret_cast<float*>(to + int64_t{across} * in * 2);
    for (int g = 0; g < groups; ++g) {
      for (int r = 0; r < across; ++r, words += kInt8Group, ++scales) {
        const T* from = static_cast<const T*>(x) + (first + r) * x_stride + int64_t{g} * kInt8Group;
        if (r < count) {
          *scales = pack_words(from, words);
        } else {
          *scales = 0.0f;
          for (int i = 0; i < kInt8Group; ++i) words[i] = 0;
        }
      }
    }
  }
}

// sums[m * kLinearOutputs + i]: row m of kX rows of x times row i of `count` rows of weights, kSide of them
// at a time. An output adds its groups in their order, whatever kX and kSide are.
template <int kX, int kSide, bool kOnce>
void multiply_int8(const char* packed, const Int8* weights, const BF16* scales, int in, int count,
                   float* sums) {
  const int groups = in / kInt8Group;
  const char* x_scales = packed + int64_t{kX} * in * 2;
  for (int row = 0; row < count; row += kSide) {
    Vec total[kSide * kX];
#pragma GCC unroll 32
    for (int i = 0; i < kSide * kX; ++i) total[i] = set1(0.0f);
    const Int8* from = weights + int64_t{row} * in;
    const BF16* scale = scales + int64_t{row} * groups;
    for (int g = 0; g < groups; ++g) {
      Vec w[kSide][kGroupVecs], unit[kSide];
#pragma GCC unroll 2
      for (int s = 0; s < kSide; ++s) {
        const Int8* at = from + int64_t{s} * in + int64_t{g} * kInt8Group;
        const char* ahead = reinterpret_cast<const char*>(at) + kLinearAhead;
        kOnce ? prefetch_once(ahead) : prefetch(ahead);
#pragma GCC unroll 32
        for (int v = 0; v < kGroupVecs; ++v) w[s][v] = words_at(at + v * 2 * kLanes);
        unit[s] = set1(to_float(scale[int64_t{s} * groups + g]));
      }
#pragma GCC unroll 8
      for (int m = 0; m < kX; ++m) {
        const auto* x = reinterpret_cast<const float*>(packed + (int64_t{g} * kX + m) * kInt8Group * 2);
        const Vec x_scale = for_all_lanes(reinterpret_cast<const float*>(x_scales) + g * kX + m);
        Vec sum[kSide];
#pragma GCC unroll 2
        for (int s = 0; s < kSide; ++s) sum[s] = set1(0.0f);
#pragma GCC unroll 32
        for (int v = 0; v < kGroupVecs; ++v) {
          const Vec q = load(x + v * kLanes);
#pragma GCC unroll 2
          for (int s = 0; s < kSide; ++s) sum[s] = add_words(sum[s], w[s][v], q);
        }
#pragma GCC unroll 2
        for (int s = 0; s < kSide; ++s)
          total[s * kX + m] = fma(floats_of(sum[s]), mul(unit[s], x_scale), total[s * kX + m]);
      }
    }
    float each[padded_sums<kSide * kX>];
    reduce_sums<kSide * kX>(total, each);
#pragma GCC unroll 32
    for (int i = 0; i < kSide * kX; ++i) sums[i % kX * kLinearOutputs + row + i / kX] = each[i];
  }
}

template <class T>
void linear_int8(const LinearArgs& args, int64_t first, int count, void* out) {
  const auto* weights = static_cast<const Int8*>(args.weights) + first * args.in;
  const auto* scales = static_cast<const BF16*>(args.scales) + first * (args.in / kInt8Group);
  for (int begin = 0; begin < count; begin += kLinearOutputs) {
    const int size = smaller(count - begin, kLinearOutputs);
    for_groups(args, [&]<int kX, bool kOnce>(int group) {
      const char* packed = static_cast<const char*>(args.x) + group * int8_row_bytes(args.in);
      const Int8* rows = weights + int64_t{begin} * args.in;
      const BF16* units = scales + int64_t{begin} * (args.in / kInt8Group);
      float sums[kX * kLinearOutputs];
      // Rows side by side read x half as often.
      constexpr int kSide = kX >= 2 && kRegisters >= 32 ? 2 : 1;
      const int even = size / kSide * kSide;
      multiply_int8<kX, kSide, kOnce>(packed, rows, units, args.in, even, sums);
      if (even < size)
        multiply_int8<kX, 1, kOnce>(packed, rows + int64_t{even} * args.in,
                                    units + int64_t{even} * (args.in / kInt8Group), args.in, 1, sums + even);
      store_sums<T, kX>(args, group, first + begin, size, sums, static_cast<T*>(out) + begin);
    });
  }
}

template <class T>
void widen_int8(const void* weights, const void* scales, int in, void* out) {
  const auto* from = static_cast<const Int8*>(weights);
  auto* to = static_cast<T*>(out);
  for (int g = 0; g < in / kInt8Group; ++g) {
    const float scale = to_float(static_cast<const BF16*>(scales)[g]);
    for (int i = 0; i < kInt8Group; ++i, ++from, ++to) round_to(scale * static_cast<float>(from->bits), to);
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
