#pragma once

#include "simd/types.h"

// The vocabulary of the kernels, here with one lane; the other headers of this folder define the same names.
// A "pair" is 2 * kLanes consecutive elements held in two vectors. Each ISA has its own order of elements in
// lanes (for bf16 the even ones and the odd ones, which costs one instruction a vector); only load_pair and
// store_pair may assume it. min and max are (a < b ? a : b) and (a > b ? a : b): a NaN in either gives b.
namespace fluxion::FLUXION_ISA {
namespace {

using Vec = float;
inline constexpr int kLanes = 1;
inline constexpr int kRegisters = 16;  // that hold a Vec

inline Vec set1(float x) { return x; }
inline Vec load(const float* p) { return *p; }
// x, which the compiler must keep in a register. It would load x again to save registers, and code with two
// loads an instruction waits for loads.
inline Vec in_register(Vec x) { return x; }
inline void store(float* p, Vec x) { *p = x; }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

// x where bit i of `bits` is set for lane i, `fill` elsewhere.
inline Vec keep(uint32_t bits, Vec x, Vec fill) { return bits & 1 ? x : fill; }
// Bit i: whether p[i] shares a bit with `bits`; of kLanes consecutive words.
inline uint32_t lanes_with(const uint16_t* p, uint16_t bits) { return (*p & bits) != 0; }
// 0 where x < limit, v elsewhere (also where x is NaN).
inline Vec zero_below(Vec x, Vec limit, Vec v) { return x < limit ? 0.0f : v; }
// Bit i: whether lane i of x is at least that of limit; not where either is NaN.
inline uint32_t lanes_at_least(Vec x, Vec limit) { return x >= limit; }
// Bit i: whether p[i] is above, or equal to, the limit; of 64 consecutive bytes.
inline void compare_bytes(const uint8_t* p, uint8_t limit, uint64_t* above, uint64_t* equal) {
  *above = *equal = 0;
  for (int i = 0; i < 64; ++i) {
    *above |= static_cast<uint64_t>(p[i] > limit) << i;
    *equal |= static_cast<uint64_t>(p[i] == limit) << i;
  }
}
// p[i] |= value where bit i of `bits` is set, of kLanes consecutive words.
inline void or_lanes(uint16_t* p, uint32_t bits, uint16_t value) { *p |= bits & 1 ? value : 0; }
// Writes the lanes of x with set bits one after another, and anything up to p[kLanes - 1]. Returns how many.
inline int pack_lanes(float* p, uint32_t bits, Vec x) {
  *p = x;
  return bits & 1;
}
// 2^n for t = n + 1.5 * 2^23 as a float add leaves it, -126 <= n <= 127.
inline Vec exp2_of_rounded(Vec t) { return float_of((bits_of(t) << 23) + 0x3f800000u); }

inline float reduce_max(Vec x) { return x; }
inline float reduce_add(Vec x) { return x; }
// Lane i = the maximum of all lanes j with j % kPeriod == i % kPeriod; kPeriod is a power of two.
template <int kPeriod>
inline Vec max_by_period(Vec x) {
  return x;
}
// A single lane has nothing to interleave.
template <int kPeriod>
inline void take_turns(Vec&, Vec&) {}
// Lane i: the lanes of rows[i], combined by `two`, two at a time.
template <class Two>
inline Vec fold_rows(const Vec (&rows)[kLanes], const Two&) {
  return rows[0];
}

// kLanes consecutive elements, lane i = element i.
template <class T>
inline Vec load_one(const T* p) {
  return to_float(*p);
}
template <class T>
inline void load_pair(const T* p, Vec& a, Vec& b) {
  a = to_float(p[0]);
  b = to_float(p[1]);
}
// Writes the floats of a pair of elements of T in their natural order.
template <class T>
inline void store_pair(float* p, Vec a, Vec b) {
  p[0] = a;
  p[1] = b;
}

// For kernels/int8.h. A word is half of the bits of a float, a byte a quarter.
inline Vec words_at(const Int8* p) {
  return float_of(static_cast<uint16_t>(p[0].bits) | static_cast<uint32_t>(p[1].bits) << 16);
}
inline Vec add_words(Vec sum, Vec a, Vec b) {
  const auto low = [](Vec x) { return int32_t{static_cast<int16_t>(bits_of(x))}; };
  const auto high = [](Vec x) { return int32_t{static_cast<int16_t>(bits_of(x) >> 16)}; };
  return float_of(bits_of(sum) + static_cast<uint32_t>(low(a) * low(b) + high(a) * high(b)));
}
inline Vec add_words_at(Vec sum, Vec a, const int16_t* x) {
  float both;
  __builtin_memcpy(&both, x, sizeof(both));
  return add_words(sum, a, both);
}
inline Vec floats_of(Vec sum) { return static_cast<float>(static_cast<int32_t>(bits_of(sum))); }
inline Vec bytes_at(const Int8* p) {
  float four;
  __builtin_memcpy(&four, p, sizeof(four));
  return four;
}
inline Vec add_bytes(Vec sum, Vec a, Vec b) {
  uint32_t total = bits_of(sum);
  for (int i = 0; i < 32; i += 8)
    total += static_cast<uint32_t>(static_cast<int32_t>(bits_of(a) >> i & 0xff) *
                                   static_cast<int8_t>(bits_of(b) >> i));
  return float_of(total);
}
// For kernels/linear_quantised.h.
template <int kFrom>
inline Vec nibbles(Vec x) {
  return float_of(bits_of(x) >> kFrom & 0x000f000fu);
}
inline Vec low_bytes(Vec x) {
  const auto wide = [](uint32_t byte) {
    return static_cast<uint32_t>(static_cast<uint16_t>(static_cast<int8_t>(byte)));
  };
  return float_of(wide(bits_of(x) & 0xff) | wide(bits_of(x) >> 16 & 0xff) << 16);
}
inline Vec high_bytes(Vec x) { return low_bytes(float_of(bits_of(x) >> 8 & 0x00ff00ffu)); }
inline Vec halves_at(const char* p) {
  uint16_t half;
  __builtin_memcpy(&half, p, sizeof(half));
  // The exponent is 112 too small; a product with 2^112 makes subnormal ones normal, too.
  const float size = float_of(static_cast<uint32_t>(half & 0x7fff) << 13) * float_of((112 + 127) << 23);
  return half & 0x8000 ? -size : size;
}
template <int kFrom>
inline Vec two_bits(Vec x) {
  return float_of(bits_of(x) >> kFrom & 0x03030303u);
}
inline Vec four_bits(Vec high, Vec low) { return float_of(bits_of(high) << 2 | bits_of(low)); }
// For x up to 255: with 1.5 * 2^23 added, the last bits of the float are the nearest integer.
inline void store_bytes(Vec x, uint8_t* to) { *to = static_cast<uint8_t>(bits_of(x + 12582912.0f)); }

inline void store_one(float* p, Vec x) { *p = x; }
// Rounds to nearest even; NaN stays NaN.
inline void store_one(BF16* p, Vec x) {
  const uint32_t bits = bits_of(x);
  p->bits = static_cast<uint16_t>(x != x ? (bits >> 16) | 0x40u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
