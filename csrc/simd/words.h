#pragma once

#include "simd/types.h"

// How matrices of T are laid out to be multiplied. They consist of words of 32 bits: of one element, widened
// to a float, or, where the ISA multiplies pairs, of two neighbours in the direction of the sum.
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
  // Of 16 rows, word d of row i: to[d * stride + i].
  static void columns(const T* rows, int D, float* to, int64_t stride) {
    for (int i = 0; i < 16; ++i) {
      for (int d = 0; d < D; ++d) to[d * stride + i] = to_float(rows[i * D + d]);
    }
  }
  // Of 16 rows, which are summed up: to[i / kElements][D].
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
