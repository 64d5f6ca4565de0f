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

}  // namespace
}  // namespace fluxion::FLUXION_ISA
