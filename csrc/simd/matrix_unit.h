#pragma once

#include "simd/types.h"

// The instructions of the matrix unit.
namespace fluxion::FLUXION_ISA {
namespace {

// Rows of a register of the matrix unit, and 32-bit elements of a row.
inline constexpr int kMatrixRows = 16, kMatrixColumns = 16;

// While this lives, the unit is ready to multiply full-size matrices. Afterwards it has its former
// configuration; the numbers that it held are lost.
class MatrixUnit {
 public:
  MatrixUnit() {
    asm volatile("sttilecfg %0" : "=m"(before_));
    const Config config = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~MatrixUnit() {
    // If left in use, its 8 KiB would be saved at every switch of threads.
    if (before_.palette == 0) {
      asm volatile("tilerelease" ::: "memory");
    } else {
      asm volatile("ldtilecfg %0" ::"m"(before_) : "memory");
    }
  }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;

 private:
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  Config before_;
};

// Loads 16 rows of 64 bytes, `stride` bytes apart, into register i. The compiler's own intrinsics do not
// declare that they read memory (in GCC 12), and writes are moved behind them.
template <int i>
inline void load_matrix(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(i) : "memory");
}
template <int i>
inline void store_matrix(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(i) : "memory");
}
template <int i>
inline void zero_matrix() {
  asm volatile("tilezero %%tmm%c0" ::"i"(i));
}
// sum[m][n] += a[m][2k] * b[k][2n] + a[m][2k + 1] * b[k][2n + 1] over k, of bf16: a has rows of 32, b has
// pairs side by side. Denormals count as 0.
template <int sum, int a, int b>
inline void multiply_matrices() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(a), "i"(b));
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
