#pragma once

#include <immintrin.h>

#include "simd/types.h"

// See simd/scalar.h for the vocabulary.
namespace fluxion::FLUXION_ISA {
namespace {

using Vec = __m512;
inline constexpr int kLanes = 16;
inline constexpr int kRegisters = 32;

inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec in_register(Vec x) {
  asm("" : "+v"(x));
  return x;
}
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }

inline Vec keep(uint32_t bits, Vec x, Vec fill) {
  return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), fill, x);
}
inline uint32_t lanes_with(const uint16_t* p, uint16_t bits) {
  return _mm256_test_epi16_mask(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                                _mm256_set1_epi16(static_cast<int16_t>(bits)));
}
inline Vec zero_below(Vec x, Vec limit, Vec v) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), v);
}
inline uint32_t lanes_at_least(Vec x, Vec limit) { return _mm512_cmp_ps_mask(x, limit, _CMP_GE_OQ); }
inline void compare_bytes(const uint8_t* p, uint8_t limit, uint64_t* above, uint64_t* equal) {
  const __m512i x = _mm512_loadu_si512(p), all = _mm512_set1_epi8(static_cast<char>(limit));
  *above = _mm512_cmpgt_epu8_mask(x, all);
  *equal = _mm512_cmpeq_epi8_mask(x, all);
}
inline void or_lanes(uint16_t* p, uint32_t bits, uint16_t value) {
  __m256i* words = reinterpret_cast<__m256i*>(p);
  const __m256i chosen = _mm256_maskz_set1_epi16(static_cast<__mmask16>(bits), static_cast<int16_t>(value));
  _mm256_storeu_si256(words, _mm256_or_si256(_mm256_loadu_si256(words), chosen));
}
inline int pack_lanes(float* p, uint32_t bits, Vec x) {
  store(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(bits), x));
  return __builtin_popcount(bits);
}
inline Vec exp2_of_rounded(Vec t) {
  const __m512i shifted = _mm512_slli_epi32(_mm512_castps_si512(t), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(shifted, _mm512_set1_epi32(0x3f800000)));
}

inline float reduce_max(Vec x) { return _mm512_reduce_max_ps(x); }
inline float reduce_add(Vec x) { return _mm512_reduce_add_ps(x); }
template <int kPeriod>
inline Vec max_by_period(Vec x) {
  if constexpr (kPeriod <= 8) x = max(x, _mm512_shuffle_f32x4(x, x, 0x4e));
  if constexpr (kPeriod <= 4) x = max(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  if constexpr (kPeriod <= 2) x = max(x, _mm512_permute_ps(x, 0x4e));
  if constexpr (kPeriod == 1) x = max(x, _mm512_permute_ps(x, 0xb1));
  return x;
}
// Interleaves a and b, kPeriod lanes of each in turn.
template <int kPeriod>
inline void take_turns(Vec& a, Vec& b) {
  const Vec x = a, y = b;
  const __m512d p = _mm512_castps_pd(x), q = _mm512_castps_pd(y);
  if constexpr (kPeriod == 1) {
    a = _mm512_unpacklo_ps(x, y);
    b = _mm512_unpackhi_ps(x, y);
  } else if constexpr (kPeriod == 2) {
    a = _mm512_castpd_ps(_mm512_unpacklo_pd(p, q));
    b = _mm512_castpd_ps(_mm512_unpackhi_pd(p, q));
  } else {
    static_assert(kPeriod == 4);
    a = _mm512_castpd_ps(_mm512_permutex2var_pd(p, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), q));
    b = _mm512_castpd_ps(_mm512_permutex2var_pd(p, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), q));
  }
}
template <class Two>
inline Vec fold_rows(const Vec (&rows)[kLanes], const Two& two) {
  // Each step joins halves of two vectors and halves the number of vectors; the final order of lanes is the
  // order of rows.
  Vec pairs[8], fours[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const Vec a = rows[2 * i], b = rows[2 * i + 1];
    pairs[i] = two(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] = two(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  // fours[i]: every 128-bit lane holds parts of rows 4i..4i+3.
  const auto fold = [&](Vec a, Vec b) {
    return two(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return fold(fold(fours[0], fours[1]), fold(fours[2], fours[3]));
}

inline Vec load_one(const float* p) { return load(p); }
inline Vec load_one(const BF16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline void load_pair(const float* p, Vec& a, Vec& b) {
  a = load(p);
  b = load(p + kLanes);
}
inline void load_pair(const BF16* p, Vec& even, Vec& odd) {
  const __m512i both = _mm512_loadu_si512(p);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
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
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  store(p, _mm512_permutex2var_ps(even, low, odd));
  store(p + kLanes, _mm512_permutex2var_ps(even, high, odd));
}

// For kernels/int8.h.
inline Vec words_at(const Int8* p) {
  return _mm512_castsi512_ps(_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
inline Vec add_words(Vec sum, Vec a, Vec b) {
#ifdef __AVX512VNNI__
  // Not the intrinsic: around it GCC copies every sum twice.
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
#else
  const __m512i products = _mm512_madd_epi16(_mm512_castps_si512(a), _mm512_castps_si512(b));
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(sum), products));
#endif
}
inline Vec add_words_at(Vec sum, Vec a, const int16_t* x) {
#ifdef __AVX512VNNI__
  // A separate broadcast would double the number of instructions.
  asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(*reinterpret_cast<const int32_t*>(x)));
  return sum;
#else
  float parts;
  __builtin_memcpy(&parts, x, sizeof(parts));
  return add_words(sum, a, set1(parts));
#endif
}
inline Vec floats_of(Vec sum) { return _mm512_cvtepi32_ps(_mm512_castps_si512(sum)); }
inline Vec bytes_at(const Int8* p) { return load(reinterpret_cast<const float*>(p)); }
inline Vec add_bytes(Vec sum, Vec a, Vec b) {
#ifdef __AVX512VNNI__
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
#else
  // Products of bytes would overflow 16-bit words: the first and third of four bytes become words, then the
  // others.
  const __m512i x = _mm512_castps_si512(a), y = _mm512_castps_si512(b);
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(x, _mm512_set1_epi16(0xff)),
                                         _mm512_srai_epi16(_mm512_slli_epi16(y, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(x, 8), _mm512_srai_epi16(y, 8));
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(sum), _mm512_add_epi32(even, odd)));
#endif
}
// For kernels/linear_quantised.h.
template <int kFrom>
inline Vec nibbles(Vec x) {
  const __m512i moved = _mm512_srli_epi16(_mm512_castps_si512(x), kFrom);
  return _mm512_castsi512_ps(kFrom == 12 ? moved : _mm512_and_si512(moved, _mm512_set1_epi16(15)));
}
inline Vec low_bytes(Vec x) {
  return _mm512_castsi512_ps(_mm512_srai_epi16(_mm512_slli_epi16(_mm512_castps_si512(x), 8), 8));
}
inline Vec high_bytes(Vec x) { return _mm512_castsi512_ps(_mm512_srai_epi16(_mm512_castps_si512(x), 8)); }
inline Vec halves_at(const char* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
template <int kFrom>
inline Vec two_bits(Vec x) {
  const __m512i moved = _mm512_srli_epi16(_mm512_castps_si512(x), kFrom);
  return _mm512_castsi512_ps(_mm512_and_si512(moved, _mm512_set1_epi8(3)));
}
inline Vec four_bits(Vec high, Vec low) {
  const __m512i moved = _mm512_slli_epi16(_mm512_castps_si512(high), 2);
  return _mm512_castsi512_ps(_mm512_or_si512(moved, _mm512_castps_si512(low)));
}
inline void store_bytes(Vec x, uint8_t* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}

// The order of 32 weights [rows][kAcross] that puts the weights of two rows side by side.
template <int kAcross>
struct PairOrder {
  alignas(64) uint16_t from[2 * kLanes];
  constexpr PairOrder() : from() {
    for (int i = 0; i < 2 * kLanes; ++i)
      from[i] = static_cast<uint16_t>((i / 2 / kAcross * 2 + i % 2) * kAcross + i / 2 % kAcross);
  }
};
template <int kAcross>
inline constexpr PairOrder<kAcross> kPairOrder;

inline void store_one(float* p, Vec x) { store(p, x); }
inline void store_one(BF16* p, Vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), last);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i high = _mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
}

// Four columns of 16 rows, as rows: lane i of to[j] is element j of row(i).
template <class Row>
inline void four_columns(Row row, Vec (&to)[4]) {
  __m512 of[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    of[i] = _mm512_castps128_ps512(_mm_loadu_ps(row(i)));
    of[i] = _mm512_insertf32x4(of[i], _mm_loadu_ps(row(i + 4)), 1);
    of[i] = _mm512_insertf32x4(of[i], _mm_loadu_ps(row(i + 8)), 2);
    of[i] = _mm512_insertf32x4(of[i], _mm_loadu_ps(row(i + 12)), 3);
  }
  const __m512 low01 = _mm512_unpacklo_ps(of[0], of[1]), high01 = _mm512_unpackhi_ps(of[0], of[1]);
  const __m512 low23 = _mm512_unpacklo_ps(of[2], of[3]), high23 = _mm512_unpackhi_ps(of[2], of[3]);
  to[0] = _mm512_shuffle_ps(low01, low23, 0x44);
  to[1] = _mm512_shuffle_ps(low01, low23, 0xee);
  to[2] = _mm512_shuffle_ps(high01, high23, 0x44);
  to[3] = _mm512_shuffle_ps(high01, high23, 0xee);
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
