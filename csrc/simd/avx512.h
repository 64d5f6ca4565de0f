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
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
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
inline Vec reduce_rows(const Vec (&rows)[kLanes]) {
  // Each step adds two halves of two vectors and so halves their number; the last order of lanes is the order
  // of rows.
  Vec pairs[8], fours[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const Vec a = rows[2 * i], b = rows[2 * i + 1];
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] =
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  // fours[i]: every 128-bit lane holds partial sums of rows 4i..4i+3.
  const Vec low = _mm512_add_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x88),
                                _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
  const Vec high = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2], fours[3], 0x88),
                                 _mm512_shuffle_f32x4(fours[2], fours[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
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
using KeyBlock = __m512i;
using QueryBlock = __m512i;
inline KeyBlock words_of(const Int8* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline QueryBlock words_at(const int16_t* q) { return _mm512_loadu_si512(q); }
inline constexpr int word_order(int i) { return i; }
inline Vec add_words(Vec sum, __m512i a, __m512i b) {
#ifdef __AVX512VNNI__
  // Not the intrinsic: around it GCC copies every sum twice.
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "vm"(b));
  return sum;
#else
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(sum), _mm512_madd_epi16(a, b)));
#endif
}
inline Vec add_half(Vec sum, const int16_t* q, const Int8* p) {
  const __m256i half = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
  return add_words(sum, _mm512_zextsi256_si512(half), _mm512_zextsi256_si512(words));
}
inline Vec floats_of(Vec sum) { return _mm512_cvtepi32_ps(_mm512_castps_si512(sum)); }
inline Vec integers_at(const Int8* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
template <int kEach>
inline Vec spread(const float* p) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(lane, __builtin_ctz(kEach)), load(p));
}

// Which of 32 weights [rows][kAcross] goes where, for the weights of two rows to lie side by side.
template <int kAcross>
struct PairOrder {
  alignas(64) uint16_t from[2 * kLanes];
  // each: numbers of 16 bits that a weight takes; the first one is wanted.
  constexpr explicit PairOrder(int each) : from() {
    for (int i = 0; i < 2 * kLanes; ++i)
      from[i] = static_cast<uint16_t>(each * ((i / 2 / kAcross * 2 + i % 2) * kAcross + i / 2 % kAcross));
  }
};
template <int kAcross>
inline constexpr PairOrder<kAcross> kPairOrder(1);
template <int kAcross>
inline constexpr PairOrder<kAcross> kWordOrder(2);

// Products of weights with two rows of values at once, for attend_tiles.h.
#define FLUXION_WORD_PRODUCTS
// 32 weights [rows][kAcross] as integers of 16 bits, those of two rows side by side.
template <int kAcross>
inline Vec word_pairs(Vec a, Vec b) {
  const __m512i order = _mm512_load_si512(kWordOrder<kAcross>.from);
  return _mm512_castsi512_ps(_mm512_permutex2var_epi16(_mm512_cvtps_epi32(a), order, _mm512_cvtps_epi32(b)));
}
inline Vec add_words(Vec sum, __m512i a, Vec b) { return add_words(sum, a, _mm512_castps_si512(b)); }
// The elements of a block of two rows in turn: 0..7 and 16..23 of the rows, and the others.
struct RowPairs {
  __m512i low, high;
};
inline RowPairs pairs_of(const Int8* p, const Int8* q) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
  return {_mm512_cvtepi8_epi16(_mm256_unpacklo_epi8(x, y)), _mm512_cvtepi8_epi16(_mm256_unpackhi_epi8(x, y))};
}
inline __m512i half_pairs_of(const Int8* p, const Int8* q) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
  return _mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(x, y), _mm_unpacklo_epi8(x, y)));
}
// Of sums of such pairs the first and the last kLanes elements.
inline Vec first_of(Vec low, Vec high) { return _mm512_shuffle_f32x4(low, high, 0x44); }
inline Vec last_of(Vec low, Vec high) { return _mm512_shuffle_f32x4(low, high, 0xee); }

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
