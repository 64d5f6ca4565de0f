#pragma once

#include <immintrin.h>

#include "simd/types.h"

// See simd/scalar.h for the vocabulary.
namespace fluxion::FLUXION_ISA {
namespace {

using Vec = __m256;
inline constexpr int kLanes = 8;
inline constexpr int kRegisters = 16;

inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec in_register(Vec x) {
  asm("" : "+x"(x));
  return x;
}
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }

inline Vec keep(uint32_t bits, Vec x, Vec fill) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i chosen = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane);
  return _mm256_blendv_ps(fill, x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(chosen, lane)));
}
inline uint32_t lanes_with(const uint16_t* p, uint16_t bits) {
  const __m128i shared = _mm_and_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)),
                                       _mm_set1_epi16(static_cast<int16_t>(bits)));
  const __m128i none = _mm_cmpeq_epi16(shared, _mm_setzero_si128());
  return static_cast<uint32_t>(~_mm_movemask_epi8(_mm_packs_epi16(none, none))) & 0xff;
}
inline Vec zero_below(Vec x, Vec limit, Vec v) {
  return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), v);
}
inline uint32_t lanes_at_least(Vec x, Vec limit) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x, limit, _CMP_GE_OQ)));
}
inline void compare_bytes(const uint8_t* p, uint8_t limit, uint64_t* above, uint64_t* equal) {
  const __m256i least = _mm256_set1_epi8(static_cast<char>(limit));
  uint64_t reach = 0;
  *equal = 0;
  for (int i = 0; i < 64; i += 32) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i));
    const auto bits = [&](__m256i lanes) {
      return static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_epi8(lanes))) << i;
    };
    reach |= bits(_mm256_cmpeq_epi8(_mm256_max_epu8(x, least), x));
    *equal |= bits(_mm256_cmpeq_epi8(x, least));
  }
  *above = reach & ~*equal;
}
inline void or_lanes(uint16_t* p, uint32_t bits, uint16_t value) {
  __m128i* words = reinterpret_cast<__m128i*>(p);
  const __m128i lane = _mm_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128);
  const __m128i chosen =
      _mm_cmpeq_epi16(_mm_and_si128(_mm_set1_epi16(static_cast<int16_t>(bits)), lane), lane);
  const __m128i values = _mm_and_si128(chosen, _mm_set1_epi16(static_cast<int16_t>(value)));
  _mm_storeu_si128(words, _mm_or_si128(_mm_loadu_si128(words), values));
}
// Byte j of entry b: the lane of the j-th bit of b that is set.
struct PackOrder {
  uint64_t lanes[256];
  constexpr PackOrder() : lanes() {
    for (int b = 0; b < 256; ++b) {
      int j = 0;
      for (int lane = 0; lane < 8; ++lane) {
        if (b >> lane & 1) lanes[b] |= static_cast<uint64_t>(lane) << 8 * j++;
      }
    }
  }
};
inline constexpr PackOrder kPackOrder;
inline int pack_lanes(float* p, uint32_t bits, Vec x) {
  const __m128i order = _mm_cvtsi64_si128(static_cast<int64_t>(kPackOrder.lanes[bits]));
  store(p, _mm256_permutevar8x32_ps(x, _mm256_cvtepu8_epi32(order)));
  return __builtin_popcount(bits);
}
inline Vec exp2_of_rounded(Vec t) {
  const __m256i shifted = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(shifted, _mm256_set1_epi32(0x3f800000)));
}

inline float reduce_max(Vec x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
inline float reduce_add(Vec x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
template <int kPeriod>
inline Vec max_by_period(Vec x) {
  if constexpr (kPeriod <= 4) x = max(x, _mm256_permute2f128_ps(x, x, 0x01));
  if constexpr (kPeriod <= 2) x = max(x, _mm256_permute_ps(x, 0x4e));
  if constexpr (kPeriod == 1) x = max(x, _mm256_permute_ps(x, 0xb1));
  return x;
}
// Interleaves a and b, kPeriod lanes of each in turn.
template <int kPeriod>
inline void take_turns(Vec& a, Vec& b) {
  const Vec x = a, y = b;
  const __m256d p = _mm256_castps_pd(x), q = _mm256_castps_pd(y);
  static_assert(kPeriod <= 2);
  a = kPeriod == 1 ? _mm256_unpacklo_ps(x, y) : _mm256_castpd_ps(_mm256_unpacklo_pd(p, q));
  b = kPeriod == 1 ? _mm256_unpackhi_ps(x, y) : _mm256_castpd_ps(_mm256_unpackhi_pd(p, q));
}
// Not by horizontal additions, each of which is several micro-operations.
template <class Two>
inline Vec fold_rows(const Vec (&rows)[kLanes], const Two& two) {
  const auto fold = [&](Vec a, Vec b) { return two(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)); };
  const auto fold_pairs = [&](Vec a, Vec b) {
    const __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
    return two(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  };
  const Vec a = fold_pairs(fold(rows[0], rows[1]), fold(rows[2], rows[3]));
  const Vec b = fold_pairs(fold(rows[4], rows[5]), fold(rows[6], rows[7]));
  return two(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

inline Vec load_one(const float* p) { return load(p); }
inline Vec load_one(const BF16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline void load_pair(const float* p, Vec& a, Vec& b) {
  a = load(p);
  b = load(p + kLanes);
}
inline void load_pair(const BF16* p, Vec& even, Vec& odd) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

template <class T>
inline void store_pair(float* p, Vec a, Vec b);
template <>
inline void store_pair<float>(float* p, Vec a, Vec b) {
  store(p, a);
  store(p + kLanes, b);
}
template <>
inline void store_pair<BF16>(float* p, Vec even, Vec odd) {
  const Vec low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
  store(p, _mm256_permute2f128_ps(low, high, 0x20));
  store(p + kLanes, _mm256_permute2f128_ps(low, high, 0x31));
}

// For kernels/int8.h.
inline Vec words_at(const Int8* p) {
  return _mm256_castsi256_ps(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Vec add_words(Vec sum, Vec a, Vec b) {
  const __m256i products = _mm256_madd_epi16(_mm256_castps_si256(a), _mm256_castps_si256(b));
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum), products));
}
inline Vec add_words_at(Vec sum, Vec a, const int16_t* x) {
  float both;
  __builtin_memcpy(&both, x, sizeof(both));
  return add_words(sum, a, set1(both));
}
inline Vec floats_of(Vec sum) { return _mm256_cvtepi32_ps(_mm256_castps_si256(sum)); }
inline Vec bytes_at(const Int8* p) { return load(reinterpret_cast<const float*>(p)); }
// AVX2 adds products of bytes in 16-bit words, which would overflow. The first and third of four bytes become
// words, then the others.
inline Vec add_bytes(Vec sum, Vec a, Vec b) {
  const __m256i x = _mm256_castps_si256(a), y = _mm256_castps_si256(b);
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0xff)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(x, 8), _mm256_srai_epi16(y, 8));
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum), _mm256_add_epi32(even, odd)));
}
// For kernels/linear_quantised.h.
template <int kFrom>
inline Vec nibbles(Vec x) {
  const __m256i moved = _mm256_srli_epi16(_mm256_castps_si256(x), kFrom);
  return _mm256_castsi256_ps(kFrom == 12 ? moved : _mm256_and_si256(moved, _mm256_set1_epi16(15)));
}
inline Vec low_bytes(Vec x) {
  return _mm256_castsi256_ps(_mm256_srai_epi16(_mm256_slli_epi16(_mm256_castps_si256(x), 8), 8));
}
inline Vec high_bytes(Vec x) { return _mm256_castsi256_ps(_mm256_srai_epi16(_mm256_castps_si256(x), 8)); }
inline Vec halves_at(const char* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
template <int kFrom>
inline Vec two_bits(Vec x) {
  const __m256i moved = _mm256_srli_epi16(_mm256_castps_si256(x), kFrom);
  return _mm256_castsi256_ps(_mm256_and_si256(moved, _mm256_set1_epi8(3)));
}
inline Vec four_bits(Vec high, Vec low) {
  const __m256i moved = _mm256_slli_epi16(_mm256_castps_si256(high), 2);
  return _mm256_castsi256_ps(_mm256_or_si256(moved, _mm256_castps_si256(low)));
}
inline void store_bytes(Vec x, uint8_t* to) {
  const __m256i wide = _mm256_cvtps_epi32(x);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(wide, wide), 0x08);
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_castsi256_si128(words));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), bytes);
}

inline void store_one(float* p, Vec x) { store(p, x); }
inline void store_one(BF16* p, Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
