#pragma once

#include "simd/types.h"

// The matrix unit in plain C, instead of csrc/simd/matrix_unit.h, for CPUs without one.
namespace fluxion::FLUXION_ISA {
namespace {

inline constexpr int kMatrixRows = 16, kMatrixColumns = 16;

using Register = uint32_t[kMatrixRows][kMatrixColumns];
thread_local Register registers[8];
thread_local int units = 0;

// Registers hold nothing valid before and after the unit's lifetime.
class MatrixUnit {
 public:
  MatrixUnit() { poison(units++); }
  ~MatrixUnit() { poison(--units); }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;

 private:
  static void poison(int) { __builtin_memset(registers, 0xff, sizeof(registers)); }
};

template <int i>
inline void load_matrix(const void* from, int64_t stride) {
  if (units == 0) __builtin_trap();
  for (int r = 0; r < kMatrixRows; ++r)
    __builtin_memcpy(registers[i][r], static_cast<const char*>(from) + r * stride, sizeof(registers[i][r]));
}
template <int i>
inline void store_matrix(void* to, int64_t stride) {
  for (int r = 0; r < kMatrixRows; ++r)
    __builtin_memcpy(static_cast<char*>(to) + r * stride, registers[i][r], sizeof(registers[i][r]));
}
template <int i>
inline void zero_matrix() {
  __builtin_memset(registers[i], 0, sizeof(registers[i]));
}
// Denormals count as 0, as factors and as sums.
inline float flushed(uint32_t bits) { return (bits & 0x7f800000u) == 0 ? 0.0f : float_of(bits); }
template <int sum, int a, int b>
inline void multiply_matrices() {
  for (int m = 0; m < kMatrixRows; ++m) {
    for (int k = 0; k < kMatrixColumns; ++k) {
      const uint32_t pair = registers[a][m][k];
      const float even = flushed(pair << 16), odd = flushed(pair & 0xffff0000u);
      for (int n = 0; n < kMatrixColumns; ++n) {
        const uint32_t other = registers[b][k][n];
        const float more = even * flushed(other << 16) + odd * flushed(other & 0xffff0000u);
        registers[sum][m][n] = bits_of(flushed(bits_of(float_of(registers[sum][m][n]) + more)));
      }
    }
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
