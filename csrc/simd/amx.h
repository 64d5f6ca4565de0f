#pragma once

#include "simd/avx512.h"
#include "simd/dot.h"
#include "simd/matrix_unit.h"
#include "simd/mix.h"
#include "simd/pairs.h"

// AVX-512 and a matrix unit. Vectors are multiplied as floats, because these cores take longer for bf16.
#define FLUXION_MATRIX_UNIT

namespace fluxion::FLUXION_ISA {
namespace {

// x, at least 0, as a sum of bf16 numbers for the matrix unit. The error is at most 2^-16 of it (2^-126 if
// that is more). NaN stays NaN.
struct Split {
  // As the second number of a pair whose first is 0, and as the first of a pair whose second is 0.
  Vec high_second, high_first, low_second, low_first;

  explicit Split(Vec x) {
    const __m512i cut = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const __m512i high = _mm512_and_si512(_mm512_castps_si512(x), cut);
    const __m512i rest = _mm512_castps_si512(_mm512_sub_ps(x, _mm512_castsi512_ps(high)));
    const __m512i low = _mm512_and_si512(_mm512_add_epi32(rest, _mm512_set1_epi32(0x8000)), cut);
    high_second = _mm512_castsi512_ps(high);
    high_first = _mm512_castsi512_ps(_mm512_srli_epi32(high, 16));
    low_second = _mm512_castsi512_ps(low);
    low_first = _mm512_castsi512_ps(_mm512_srli_epi32(low, 16));
  }
};

// For the matrix unit alone. Rows are padded with zeros to a multiple of what one product takes.
template <>
struct WordsOf<BF16> : PairWords {
  static int depth(int D) { return (D / 2 + kMatrixColumns - 1) / kMatrixColumns * kMatrixColumns; }
  static void row(const BF16* from, int D, float* to) {
    PairWords::row(from, D, to);
    for (int i = D / 2; i < depth(D); ++i) to[i] = 0.0f;
  }
  static void columns(const BF16* rows, int D, float* to, int64_t stride) {
    PairWords::columns(rows, D, to, stride);
    for (int i = D / 2; i < depth(D); ++i) store(to + i * stride, set1(0.0f));
  }
  template <int kCount>
  static Vec weights(const Vec (&x)[kCount], float* to) {
    Vec sum = set1(0.0f);
#pragma GCC unroll 16
    for (int j = 0; j < kCount; ++j) {
      BF16* words = reinterpret_cast<BF16*>(to) + j * kLanes;
      store_one(words, x[j]);
      sum = add(sum, load_one(words));
    }
    return sum;
  }
};

inline void copy_line(const BF16* from, BF16* to) { _mm512_storeu_si512(to, _mm512_loadu_si512(from)); }

}  // namespace
}  // namespace fluxion::FLUXION_ISA
