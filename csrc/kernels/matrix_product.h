#pragma once

#include "kernels/rows.h"
#include "simd/words.h"

// Products of matrices that lie in the nearest caches: a [rows][steps] times b [steps][columns], in words
// (simd/words.h).
namespace fluxion::FLUXION_ISA {
namespace {

// By vectors, unless a matrix unit specialises this for T. A strip is the rows that are multiplied together.
template <class T>
struct Product {
  using W = WordsOf<T>;
  struct Unit {};  // lives while products are made

  // As many rows as fit into the registers, with kVecs vectors of columns.
  static constexpr int kRows = 6;
  static constexpr int kVecs = kRegisters >= 32 ? 4 : 2;

  // c [kRows][columns] = a b, plus c with kAdd. Strides in words. columns: a multiple of 16, the same as
  // kColumns if that is not 0.
  template <int kColumns, bool kAdd>
  static void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int steps,
                       int columns, float* c, int64_t c_stride) {
    const int count = kColumns ? kColumns : columns;
    constexpr int kWide = kVecs * kLanes;
    int n = 0;
    for (; n + kWide <= count; n += kWide)
      multiply_columns<kVecs, kAdd>(a, a_stride, b + n, b_stride, steps, c + n, c_stride);
    if constexpr (kWide > 16 && (kColumns == 0 || kColumns % kWide != 0)) {
      for (; n < count; n += kLanes)
        multiply_columns<1, kAdd>(a, a_stride, b + n, b_stride, steps, c + n, c_stride);
    }
  }

 private:
  template <int kCount, bool kAdd>
  static void multiply_columns(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int steps,
                               float* c, int64_t c_stride) {
    Vec sums[kRows][kCount];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kCount; ++v) sums[r][v] = kAdd ? load(c + r * c_stride + v * kLanes) : set1(0.0f);
    }
    for (int s = 0; s < steps; ++s, b += b_stride) {
      typename W::Factor right[kCount];
#pragma GCC unroll 4
      for (int v = 0; v < kCount; ++v) right[v] = W::factors(b + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const typename W::Factor left = W::factor_for_all(a + r * a_stride + s);
#pragma GCC unroll 4
        for (int v = 0; v < kCount; ++v) sums[r][v] = W::add(sums[r][v], left, right[v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kCount; ++v) store(c + r * c_stride + v * kLanes, sums[r][v]);
    }
  }
};

#ifdef FLUXION_MATRIX_UNIT
// Two by two products of the unit at a time, each of 16 words of a row. steps: a multiple of 16.
template <>
struct Product<BF16> {
  using Unit = MatrixUnit;
  static constexpr int kRows = 2 * kMatrixRows;

  template <int, bool kAdd>
  static void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int steps,
                       int columns, float* c, int64_t c_stride) {
    const int64_t a_bytes = a_stride * 4, b_bytes = b_stride * 4, c_bytes = c_stride * 4;
    const float* a_low = a + kMatrixRows * a_stride;
    for (int n = 0; n < columns; n += 2 * kMatrixColumns) {
      const bool two = n + kMatrixColumns < columns;
      float *high = c + n, *low = high + kMatrixRows * c_stride;
      zero_matrix<0>();
      zero_matrix<1>();
      zero_matrix<2>();
      zero_matrix<3>();
      if constexpr (kAdd) {
        load_matrix<0>(high, c_bytes);
        load_matrix<2>(low, c_bytes);
        if (two) {
          load_matrix<1>(high + kMatrixColumns, c_bytes);
          load_matrix<3>(low + kMatrixColumns, c_bytes);
        }
      }
      for (int s = 0; s < steps; s += kMatrixColumns) {
        load_matrix<4>(a + s, a_bytes);
        load_matrix<5>(a_low + s, a_bytes);
        load_matrix<6>(b + s * b_stride + n, b_bytes);
        multiply_matrices<0, 4, 6>();
        multiply_matrices<2, 5, 6>();
        if (!two) continue;
        load_matrix<7>(b + s * b_stride + n + kMatrixColumns, b_bytes);
        multiply_matrices<1, 4, 7>();
        multiply_matrices<3, 5, 7>();
      }
      store_matrix<0>(high, c_bytes);
      store_matrix<2>(low, c_bytes);
      if (!two) continue;
      store_matrix<1>(high + kMatrixColumns, c_bytes);
      store_matrix<3>(low + kMatrixColumns, c_bytes);
    }
  }
};
#endif

}  // namespace
}  // namespace fluxion::FLUXION_ISA
