#pragma once

#include "kernels/table.h"
#include "simd/words.h"

namespace fluxion::FLUXION_ISA {
namespace {

// Whether vectors of pairs are multiplied, not only matrices of them.
template <class Words>
inline constexpr bool kMultipliesPairs = Words::kElements == 2 && requires { typename Words::Factor; };

// Adds to the sums what two neighbouring inputs contribute, in R rows.
template <class Words, int R, int N>
inline void add_inputs(const float* x, int64_t x_stride, int pair, const BF16* const (&weights)[N],
                       Vec (&sums)[R][N]) {
  if constexpr (kMultipliesPairs<Words>) {
    typename Words::Factor w[N];
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) w[j] = Words::factors(reinterpret_cast<const float*>(weights[j]));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const auto value = Words::factor_for_all(x + r * x_stride + pair);
#pragma GCC unroll 16
      for (int j = 0; j < N; ++j) sums[r][j] = Words::add(sums[r][j], value, w[j]);
    }
  } else {
    Vec even[N], odd[N];
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) load_pair(weights[j], even[j], odd[j]);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float* values = x + r * x_stride + 2 * pair;
      const Vec first = set1(values[0]), second = set1(values[1]);
#pragma GCC unroll 16
      for (int j = 0; j < N; ++j) sums[r][j] = fma(second, odd[j], fma(first, even[j], sums[r][j]));
    }
  }
}

// R rows times P panels of 16 outputs, all sums in registers. Every sum runs over the pairs of inputs in
// their order, so an output depends neither on the tile it falls into nor on the other rows.
template <int R, int P>
inline void dense_tile(const float* x, int64_t x_stride, int pairs, const BF16* weights, const float* bias,
                       bool relu, float* y, int64_t y_stride) {
  constexpr int kVectors = kDensePanel / kLanes, kSums = P * kVectors;
  Vec sums[R][kSums];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < kSums; ++j) sums[r][j] = load(bias + j * kLanes);
  }
  for (int i = 0; i < pairs; ++i) {
    const BF16* at[kSums];
#pragma GCC unroll 16
    for (int j = 0; j < kSums; ++j) {
      const int64_t row = j / kVectors * static_cast<int64_t>(pairs) + i;
      at[j] = weights + 2 * (row * kDensePanel + j % kVectors * kLanes);
    }
    add_inputs<WordsOf<BF16>>(x, x_stride, i, at, sums);
  }
  const Vec zero = set1(0.0f);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < kSums; ++j) {
      // A NaN in the second place of max stays NaN.
      store(y + r * y_stride + j * kLanes, relu ? max(zero, sums[r][j]) : sums[r][j]);
    }
  }
}

template <int R, int P>
inline void dense_panels(const float* x, int64_t x_stride, int rows, int pairs, const BF16* weights,
                         const float* bias, bool relu, float* y, int64_t y_stride) {
  for (; rows >= R; rows -= R, x += R * x_stride, y += R * y_stride)
    dense_tile<R, P>(x, x_stride, pairs, weights, bias, relu, y, y_stride);
  if constexpr (R > 1) {
    if (rows > 0) dense_panels<R / 2, P>(x, x_stride, rows, pairs, weights, bias, relu, y, y_stride);
  }
}

// Converts a row in place to the factors that are multiplied. An odd number of inputs is followed by a 0: the
// memory there may hold NaN, and NaN times a weight of 0 is NaN.
template <class Words>
inline void prepare_row(float* x, int in) {
  static_assert(kLanes <= kDensePanel);
  if (in % 2 != 0) x[in] = 0;
  if constexpr (kMultipliesPairs<Words>) {
    for (int i = 0; i < in; i += 2 * kLanes) {
      const Vec both[2] = {load(x + i), load(x + i + kLanes)};
      Words::template weights<2>(both, x + i / 2);
    }
  }
}

void dense(float* x, int64_t x_stride, int rows, int in, const uint16_t* weights, const float* bias,
           int panels, bool relu, float* y, int64_t y_stride) {
  // Sums, weights and broadcast values fit into the registers: of pairs 24 + 3 + 1 of 32; else 16 + 4 + 2 of
  // 32, or 8 + 4 + 2 of 16.
  constexpr int kRows = kLanes >= 16 ? 8 : kLanes >= 8 ? 4 : 1;
  constexpr int kPanels = kMultipliesPairs<WordsOf<BF16>> ? 3 : kLanes >= 16 ? 2 : 1;
  for (int r = 0; r < rows; ++r) prepare_row<WordsOf<BF16>>(x + r * x_stride, in);
  const int pairs = (in + 1) / 2;
  const auto at = [&](int panel) {
    return reinterpret_cast<const BF16*>(weights) + panel * static_cast<int64_t>(2 * pairs) * kDensePanel;
  };
  int p = 0;
  for (; p + kPanels <= panels; p += kPanels) {
    dense_panels<kRows, kPanels>(x, x_stride, rows, pairs, at(p), bias + p * kDensePanel, relu,
                                 y + p * kDensePanel, y_stride);
  }
  for (; p < panels; ++p) {
    dense_panels<kRows, 1>(x, x_stride, rows, pairs, at(p), bias + p * kDensePanel, relu, y + p * kDensePanel,
                           y_stride);
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
