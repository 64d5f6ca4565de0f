#pragma once

#include "simd/avx512.h"
#include "simd/dot.h"

namespace fluxion::FLUXION_ISA {
namespace {

// Multiplies bf16 as it lies in memory. The instruction reads and writes denormals as 0, far below any
// tolerance.
template <>
struct Dot<BF16> {
  using Query = BF16;

  static void pack(const BF16* q, int n, Query* out) {
    for (int i = 0; i < n; ++i) out[i] = q[i];
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

}  // namespace
}  // namespace fluxion::FLUXION_ISA
