#pragma once

#include "kernels/table.h"

namespace fluxion::FLUXION_ISA {
namespace {

// R rows times P panels of 16 outputs, all sums in registers. Every sum runs over the inputs in their order,
// so an output depends neither on the tile it falls into nor on the other rows.
template <int R, int P>
inline void dense_tile(const float* x, int64_t x_stride, int in, const float* weights, const float* bias,
                       bool relu, float* y, int64_t y_stride) {
  constexpr int kVectors = kDensePanel / kLanes;
  Vec sums[R][P * kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < P * kVectors; ++j) sums[r][j] = load(bias + j * kLanes);
  }
  for (int i = 0; i < in; ++i) {
    Vec w[P * kVectors];
#pragma GCC unroll 16
    for (int j = 0; j < P * kVectors; ++j) {
      w[j] =
          load(weights + (j / kVectors * static_cast<int64_t>(in) + i) * kDensePanel + j % kVectors * kLanes);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec value = set1(x[r * x_stride + i]);
#pragma GCC unroll 16
      for (int j = 0; j < P * kVectors; ++j) sums[r][j] = fma(value, w[j], sums[r][j]);
    }
  }
  const Vec zero = set1(0.0f);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < P * kVectors; ++j) {
      // A NaN in the second place of max stays NaN.
      store(y + r * y_stride + j * kLanes, relu ? max(zero, sums[r][j]) : sums[r][j]);
    }
  }
}

template <int R, int P>
inline void dense_panels(const float* x, int64_t x_stride, int rows, int in, const float* weights,
                         const float* bias, bool relu, float* y, int64_t y_stride) {
  for (; rows >= R; rows -= R, x += R * x_stride, y += R * y_stride)
    dense_tile<R, P>(x, x_stride, in, weights, bias, relu, y, y_stride);
  if constexpr (R > 1) {
    if (rows > 0) dense_panels<R / 2, P>(x, x_stride, rows, in, weights, bias, relu, y, y_stride);
  }
}

void dense(const float* x, int64_t x_stride, int rows, int in, const float* weights, const float* bias,
           int panels, bool relu, float* y, int64_t y_stride) {
  // Sums, weights and one broadcast value fit into the registers: 24 + 3 of 32, or 8 + 2 of 16.
  constexpr int kRows = kLanes >= 16 ? 8 : kLanes >= 8 ? 4 : 1;
  constexpr int kPanels = kLanes >= 16 ? 3 : 1;
  int p = 0;
  const auto at = [&](int panel) { return weights + static_cast<int64_t>(panel) * in * kDensePanel; };
  for (; p + kPanels <= panels; p += kPanels) {
    dense_panels<kRows, kPanels>(x, x_stride, rows, in, at(p), bias + p * kDensePanel, relu,
                                 y + p * kDensePanel, y_stride);
  }
  for (; p < panels; ++p) {
    dense_panels<kRows, 1>(x, x_stride, rows, in, at(p), bias + p * kDensePanel, relu, y + p * kDensePanel,
                           y_stride);
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
