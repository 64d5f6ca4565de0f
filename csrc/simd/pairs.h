#pragma once

#include "simd/avx512.h"
#include "simd/words.h"

// Words of two bf16 elements (simd/words.h), for the ISAs of AVX-512 that multiply pairs of them.
namespace fluxion::FLUXION_ISA {
namespace {

struct PairWords {
  static constexpr int kElements = 2;

  // D: a multiple of 16.
  static void row(const BF16* from, int D, float* to) { __builtin_memcpy(to, from, D * sizeof(BF16)); }
  static void columns(const BF16* rows, int D, float* to, int64_t stride) {
    for (int d = 0; d < D; d += 8, to += 4 * stride) {
      Vec words[4];
      four_columns([&](int i) { return reinterpret_cast<const float*>(rows + i * D + d); }, words);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) store(to + j * stride, words[j]);
    }
  }
  static void rows(const BF16* rows, int D, float* to) {
    const __m512i low = order(0), high = order(16);
    for (int i = 0; i < 16; i += 2, to += D) {
      const BF16 *p = rows + i * D, *q = p + D;
      int d = 0;
      for (; d + 32 <= D; d += 32) {
        const __m512i x = _mm512_loadu_si512(p + d), y = _mm512_loadu_si512(q + d);
        _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(x, low, y));
        _mm512_storeu_si512(to + d + 16, _mm512_permutex2var_epi16(x, high, y));
      }
      if (d < D) {
        const auto half = [](const BF16* at) {
          return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
        };
        _mm512_storeu_si512(to + d, _mm512_or_si512(half(p + d), _mm512_slli_epi32(half(q + d), 16)));
      }
    }
  }

 private:
  // Puts element first + i of one vector beside that of the other.
  static __m512i order(int first) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i own = _mm512_add_epi32(lanes, _mm512_set1_epi32(first));
    return _mm512_or_si512(own, _mm512_slli_epi32(_mm512_add_epi32(own, _mm512_set1_epi32(32)), 16));
  }
};

}  // namespace
}  // namespace fluxion::FLUXION_ISA
