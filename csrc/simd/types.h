#pragma once

#include <cstdint>

// Everything below simd/ and kernels/ that is compiled once an ISA lives in an unnamed namespace inside a
// namespace named by the ISA, and uses nothing of std: a template or inline function with external linkage
// would be a weak symbol, of which the linker keeps one copy for the whole library, possibly the one with AVX
// instructions.
namespace fluxion::FLUXION_ISA {
namespace {

struct BF16 {
  uint16_t bits;
};
// An element of a tile of DType::kInt8, without its scale.
struct Int8 {
  int8_t bits;
};

// The KV dtype for storage type T.
template <class T>
struct ModelOf {
  using Type = T;
};
template <>
struct ModelOf<Int8> {
  using Type = BF16;
};
template <class T>
using Model = typename ModelOf<T>::Type;

inline constexpr float kNegInf = -__builtin_inff();
inline constexpr float kMaxFloat = 3.40282346638528859812e+38f;

inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

inline float to_float(float x) { return x; }
inline float to_float(BF16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

// Rounds to the nearest, ties to even.
inline void round_to(float x, float* out) { *out = x; }
inline void round_to(float x, BF16* out) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
  out->bits = static_cast<uint16_t>(rounded >> 16);
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
