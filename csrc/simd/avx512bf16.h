#pragma once

#include "simd/avx512.h"
#include "simd/dot.h"
#include "simd/mix.h"
#include "simd/pace.h"
#include "simd/pairs.h"

namespace fluxion::FLUXION_ISA {
namespace {

// Multiplies bf16 as it lies in memory. The instruction reads and writes denormals as 0, far below any
// tolerance.
template <>
struct Dot<BF16> {
  using Query = BF16;
  static constexpr int kStep = 2 * kLanes;

  static float pack(const BF16* q, int n, Query* out) {
    __builtin_memcpy(out, q, n * sizeof(BF16));
    return 1.0f;
  }
  static Vec step(Vec sum, const Query* q, const BF16* k) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_loadu_si512(q)),
                            reinterpret_cast<__m512bh>(_mm512_loadu_si512(k)));
  }
  using Pair = __m512bh;
  static Pair query_pair(const Query* q) { return reinterpret_cast<Pair>(_mm512_loadu_si512(q)); }
  static Pair row_pair(const BF16* k) { return reinterpret_cast<Pair>(_mm512_loadu_si512(k)); }
  static Vec add(Vec sum, Pair q, Pair k) { return _mm512_dpbf16_ps(sum, q, k); }
  static Vec tail(Vec sum, const Query* q, const BF16* k) { return _mm512_dpbf16_ps(sum, half(q), half(k)); }

 private:
  static __m512bh half(const BF16* p) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return reinterpret_cast<__m512bh>(_mm512_zextsi256_si512(low));
  }
};

// A pair of elements in every lane: of one head each, or the same pair for all.
#define FLUXION_PAIR_PRODUCTS
using ElementPair = __m512bh;
inline ElementPair pairs_of_heads(const float* p) { return reinterpret_cast<ElementPair>(load(p)); }
inline ElementPair pair_for_all(const BF16* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof(pair));
  return reinterpret_cast<ElementPair>(_mm512_set1_epi32(pair));
}
inline Vec add_products(Vec sum, ElementPair a, ElementPair b) { return _mm512_dpbf16_ps(sum, a, b); }

// Mix (simd/mix.h) that multiplies bf16 as it lies in memory, two rows in one instruction. Weights are
// rounded to bf16, by 2^-9 of each at most; sums are float32.
struct PairMix {
  static constexpr int kRows = 2;
  using Weight = __m512bh;
  using Part = __m512bh;

  // Unpacking goes by lanes of 128 bits: a has elements 0..3 of every eight, b the others.
  struct Pair {
    Part a, b;
  };
  static Pair pair(const BF16* p, const BF16* q) {
    const __m512i x = _mm512_loadu_si512(p), y = _mm512_loadu_si512(q);
    return {reinterpret_cast<Part>(_mm512_unpacklo_epi16(x, y)),
            reinterpret_cast<Part>(_mm512_unpackhi_epi16(x, y))};
  }
  static Part tail(const BF16* p, const BF16* q) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)));
    return reinterpret_cast<Part>(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
  static Vec add(Vec sum, Weight weight, Part part) { return _mm512_dpbf16_ps(sum, weight, part); }
  static void store_sums(float* p, Vec a, Vec b) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    store(p, _mm512_permutex2var_ps(a, low, b));
    store(p + kLanes, _mm512_permutex2var_ps(a, high, b));
  }

  static Vec rounded(Vec weights) {
    const __m256i bits = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(weights));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static float word(float p, float q) { return float_of(bits_of(p) >> 16 | bits_of(q)); }
  static Weight weight(const float* word) { return reinterpret_cast<Weight>(set1(*word)); }
  template <int kAcross, int kCount>
  static Vec to_words(float* weights, Vec) {
    const __m512i order = _mm512_load_si512(kPairOrder<kAcross>.from);
    const Weight ones = reinterpret_cast<Weight>(_mm512_set1_epi16(0x3f80));
    Vec used = set1(0.0f);
    for (int i = 0; i < kCount; i += 2 * kLanes) {
      const Vec upper = i + kLanes < kCount ? load(weights + i + kLanes) : set1(0.0f);
      const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(upper, load(weights + i)));
      const __m512i words = _mm512_permutexvar_epi16(order, both);
      _mm512_storeu_si512(weights + i / 2, words);
      used = _mm512_dpbf16_ps(used, reinterpret_cast<Weight>(words), ones);
    }
    return used;
  }
};

// e^x for x <= 0 within 2^-18, for weights that are rounded to 16 bits or fewer: 2^t = 2^floor(t) 2^r, and
// a polynomial in r.
#define FLUXION_EXP_FOR_BF16
inline Vec exp_for_bf16(Vec x) {
  const Vec t = mul(x, set1(1.44269504088896341f));
  const Vec r = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF);
  Vec y = set1(1.34267066e-2f);
  y = fma(y, r, set1(5.22424361e-2f));
  y = fma(y, r, set1(2.41280224e-1f));
  y = fma(y, r, set1(6.93044842e-1f));
  y = fma(y, r, set1(1.0f));
  return _mm512_scalef_ps(y, t);
}

template <>
struct WordsOf<BF16> : PairWords {
  using Factor = ElementPair;

  static Factor factors(const float* words) { return pairs_of_heads(words); }
  static Factor factor_for_all(const float* word) { return reinterpret_cast<Factor>(set1(*word)); }
  static Vec add(Vec sum, Factor a, Factor b) { return add_products(sum, a, b); }

  static int depth(int D) { return D / 2; }
  template <int kCount>
  static Vec weights(const Vec (&x)[kCount], float* to) {
    const Factor ones = reinterpret_cast<Factor>(_mm512_set1_epi16(0x3f80));
    Vec sum = set1(0.0f);
#pragma GCC unroll 16
    for (int j = 0; j < kCount; j += 2) {
      const Factor both = reinterpret_cast<Factor>(_mm512_cvtne2ps_pbh(x[j + 1], x[j]));
      _mm512_storeu_si512(to + j / 2 * kLanes, reinterpret_cast<__m512i>(both));
      sum = add_products(sum, both, ones);
    }
    return sum;
  }
};

// Measured on Zen 5, which gets a line from memory every 7 to 12 cycles; Zen 4 chooses this ISA, too.
// Prefetching nearly 4 KiB, or a multiple of it, ahead in each list is slower.
template <>
struct Pace<4> {
  static constexpr int kAheadBytes = 20 << 10;
  static constexpr int kGaps[] = {0, 2, 3};
};

template <>
struct ManyHeads<BF16> {
  using Values = PairMix;
};

}  // namespace
}  // namespace fluxion::FLUXION_ISA
