#pragma once

#include "kernels/tile.h"

// Rows of MX8 as they are multiplied. An ISA header has what is its own:
//
//   KeyBlock            the integers of a block as words of 16 bits
//   words_of(p, by)     those at p, each times 2^6 / 2^n and rounded; *by = shifts_at(n)
//   QueryBlock          a query's integers of a block
//   words_at(q)
//   add_words(sum, w, b)   adds the products of a block to integers that are in the lanes of `sum`
//   add_half(sum, q, p, by)   of a block of half the size, whose query is in its order
//   floats_of(sum)      those integers
//   word_order(i)       where in a whole block of a query its element i is
//   integers_at(p)      kLanes elements as floats, in their order
//   spread<n>(p)        lane i = p[i / n]; may read up to p[kLanes - 1]
//   powers_at(p)        lane i = 2^(p[i] - 127)
//   shifts_at(p)        bits for words_of, of p[i] up to kMostShift; 0 for 255, which makes words 0
namespace fluxion::FLUXION_ISA {
namespace {

// A row, and how its blocks are shifted, kStride words from one block to the next.
template <int kStride>
struct ShiftedRow {
  const MX8* at;
  const float* by;

  // d: a multiple of a block.
  ShiftedRow operator+(int d) const { return {at + d, by + d / kMXBlock * kStride}; }
};

// Products of integers, without a rounding between them. All blocks of a key take the exponent of its largest
// one, of whose last place they keep another kKeyBits; queries become integers of 14 bits. So kMaxHeadDim
// products fit into eight lanes of 32 bits. An element loses at most 2^-13 of the largest one.
inline constexpr int kKeyBits = 6;
// The largest shift of which words_of has bits: a block that is further down is 0.
inline constexpr int kMostShift = 13;
inline constexpr int kQueryMost = 8191;
static_assert(int64_t{kMaxHeadDim} / 8 * (128 << kKeyBits) * kQueryMost <= INT32_MAX);
template <>
struct Dot<MX8> {
  using Query = int16_t;
  static constexpr int kStep = kMXBlock;

  static float pack(const BF16* q, int n, Query* out) {
    float most = 0.0f, nothing = 0.0f;  // nothing: NaN where something is not finite
    for (int i = 0; i < n; ++i) {
      const float x = to_float(q[i]), size = x < 0.0f ? -x : x;
      most = size > most ? size : most;
      nothing += x - x;
    }
    const float inverse = most > 1e-30f ? static_cast<float>(kQueryMost) / most : 0.0f;
    for (int d = 0; d < n; d += kMXBlock) {
      const bool whole = d + kMXBlock <= n;
      for (int i = 0; i < (whole ? kMXBlock : n - d); ++i) {
        constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
        const float x = to_float(q[d + i]) * inverse + kRound;
        out[d + (whole ? word_order(i) : i)] =
            static_cast<int16_t>(static_cast<int32_t>(bits_of(x)) - 0x4b400000);
      }
    }
    return most / static_cast<float>(kQueryMost << kKeyBits) + nothing;
  }

  using Pair = KeyBlock;
  static QueryBlock query_pair(const Query* q) { return words_at(q); }
  template <int kStride>
  static Pair row_pair(const ShiftedRow<kStride>& row) {
    return words_of(row.at, row.by);
  }
  static Vec add(Vec sum, const QueryBlock& q, const Pair& k) { return add_words(sum, q, k); }
  template <int kStride>
  static Vec step(Vec sum, const Query* q, const ShiftedRow<kStride>& row) {
    return add(sum, query_pair(q), row_pair(row));
  }
  template <int kStride>
  static Vec tail(Vec sum, const Query* q, const ShiftedRow<kStride>& row) {
    return add_half(sum, q, row.at, row.by);
  }
  static Vec floats(Vec sum) { return floats_of(sum); }
};

// Sums are in the order of the elements. Weights are divided by as they are: what add_word_values rounds is
// off to both sides.
template <>
struct Mix<MX8> {
  static Vec rounded(Vec weights) { return weights; }
  template <int kAcross, int kCount>
  static Vec to_words(float*, Vec sum) {
    return sum;
  }
  static void store_sums(float* p, Vec a, Vec b) { store_pair<float>(p, a, b); }
};

// Where kernels find the rows of kTiles tiles side by side, and what they are multiplied by.
template <class T, int kTiles>
struct TileScales {
  TileScales(const T* const*, int) {}
  const T* row(const T* tile, int row, int, int D) const { return tile + row * D; }
  // Sums of products with keys from row t on, for kHeads heads in turn; and of a single one.
  template <int kHeads>
  Vec scores(Vec sums, int) const {
    return sums;
  }
  float score(float sum, int) const { return sum; }
  static void fetch_of(const T*, int) {}  // of a tile, what is not in its rows
};

using Bytes = uint8_t __attribute__((vector_size(16)));

// The bytes of a and b in turn: *a has the first of them, *b the others.
inline void zip(Bytes* a, Bytes* b) {
#if defined(__clang__)
  const Bytes low = __builtin_shufflevector(*a, *b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  *b = __builtin_shufflevector(*a, *b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
  const Bytes low = __builtin_shuffle(*a, *b, Bytes{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
  *b = __builtin_shuffle(*a, *b, Bytes{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
#endif
  *a = low;
}

template <int kTiles>
struct TileScales<MX8, kTiles> {
  static constexpr int kStride = kPage * kTiles, kBlocks = kMaxHeadDim / kMXBlock;
  // Each [kPage][kTiles], and room to read a vector. Of keys: their factors, and the shifts of their blocks;
  // of values the factors of their blocks.
  alignas(64) float keys[kStride + kLanes];
  alignas(64) float shifts[kBlocks * kStride];
  alignas(64) float values[kBlocks * kStride + kLanes];
  bool no_numbers[kBlocks];  // of the values of a block, some are none

  TileScales(const MX8* const* tiles, int D) {
    Bytes top[kTiles] = {};
    for (int b = 0; b < mx_blocks(D); ++b) {
      for (int s = 0; s < kTiles; ++s) {
        const Bytes of = exponents(tiles[s], D, b, 0);
        top[s] = of > top[s] ? of : top[s];
      }
    }
    for (int b = 0; b < mx_blocks(D); ++b) {
      Bytes lower[kTiles], of[kTiles], none = {};
      for (int s = 0; s < kTiles; ++s) {
        // Of a key that is no number nothing is added up, so that 0 times infinity is left.
        const Bytes shift = top[s] - exponents(tiles[s], D, b, 0);
        lower[s] = (shift > kMostShift) | (top[s] == kNoNumbers) ? Bytes{} + 255 : shift;
        of[s] = exponents(tiles[s], D, b, kPage);
        none |= of[s] == kNoNumbers ? Bytes{} + 1 : Bytes{};
      }
      uint64_t found[2];
      __builtin_memcpy(found, &none, sizeof(found));
      no_numbers[b] = (found[0] | found[1]) != 0;
      in_turn(lower, shifts + b * kStride, [](const uint8_t* p) { return shifts_at(p); });
      in_turn(of, values + b * kStride, [](const uint8_t* p) { return powers_at(p); });
    }
    in_turn(top, keys, [](const uint8_t* p) { return powers_at(p); });
  }
  // Row `row` of tile s, which is `tile`.
  ShiftedRow<kStride> row(const MX8* tile, int row, int s, int D) const {
    return {tile + row * D, shifts + row * kTiles + s};
  }
  template <int kHeads>
  Vec scores(Vec sums, int t) const {
    return mul(sums, spread<kHeads>(keys + t * kTiles));
  }
  float score(float sum, int t) const { return sum * keys[t * kTiles]; }
  static void fetch_of(const MX8* tile, int D) { fetch(exponents_of(tile, D), mx_blocks(D) * 2 * kPage); }

 private:
  static Bytes exponents(const MX8* tile, int D, int block, int row) {
    Bytes of;
    __builtin_memcpy(&of, exponents_of(tile, D) + block * 2 * kPage + row, sizeof(of));
    return of;
  }
  // Those of one row of all tiles come to lie side by side.
  template <class At>
  static void in_turn(Bytes (&of)[kTiles], float* to, const At& at) {
    if constexpr (kTiles == 4) {
      zip(&of[0], &of[2]);
      zip(&of[1], &of[3]);
      zip(&of[0], &of[1]);
      zip(&of[2], &of[3]);
    } else if constexpr (kTiles == 2) {
      zip(&of[0], &of[1]);
    }
    for (int s = 0; s < kTiles; ++s, to += kPage) {
      uint8_t bytes[sizeof(Bytes)];
      __builtin_memcpy(bytes, &of[s], sizeof(bytes));
      for (int i = 0; i < kPage; i += kLanes) store(to + i, at(bytes + i));
    }
  }
};

}  // namespace
}  // namespace fluxion::FLUXION_ISA
