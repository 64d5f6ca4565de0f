#pragma once

#include "simd/types.h"

// The layout of matrices of T for products. They consist of 32-bit words: one element, widened to a float,
// or, if the ISA multiplies pairs, two neighbours in the direction of the sum.
namespace fluxion::FLUXION_ISA {
namespace {

template <class T>
struct WordsOf {
  static constexpr int kElements = 1;
  using Factor = Vec;

  static Factor factors(const float* words) { return load(words); }
  static Factor factor_for_all(const float* word) { return set1(*word); }
  static Vec add(Vec sum, Factor a, Factor b) { return fma(a, b, sum); }

  // Words of a row of D elements.
  static int depth(int D) { return D; }
  static void row(const T* from, int D, float* to) {
    for (int d = 0; d < D; d += kLanes) store(to + d, load_one(from + d));
  }
  // Transposes 16 rows: word d of row i goes to to[d * stride + i].
  static void columns(const T* rows, int D, float* to, int64_t stride) {
    for (int i = 0; i < 16; ++i) {
      for (int d = 0; d < D; ++d) to[d * stride + i] = to_float(rows[i * D + d]);
    }
  }
  // Lays out 16 rows that are summed over: to[i / kElements][D].
  static void rows(const T* rows, int D, float* to) {
    for (int d = 0; d < 16 * D; d += kLanes) store(to + d, load_one(rows + d));
  }
  // kCount vectors of weights as words; returns their sum by lanes, as they are in the words.
  template <int kCount>
  static Vec weights(const Vec (&x)[kCount], float* to) {
    Vec sum = x[0];
    store(to, x[0]);
#pragma GCC unroll 16
    for (int j = 1; j < kCount; ++j) {
      store(to + j * kLanes, x[j]);
      sum = ::fluxion::FLUXION_ISA::add(sum, x[j]);
    }
    return sum;
  }
};

}  // namespace
}  // namespace fluxion::FLUXION_ISA
