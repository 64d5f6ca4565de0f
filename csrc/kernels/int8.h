#pragma once

#include "kernels/tile.h"

// Rows of Int8 as they are multiplied. An ISA header has what is its own:
//
//   KeyBlock            kWordBlock integers of a key as words of 16 bits
//   words_of(p)         those at p
//   QueryBlock          a query's words of a block
//   words_at(q)
//   add_words(sum, w, b)   adds the products of a block to integers that are in the lanes of `sum`
//   add_half(sum, q, p)    of half a block, whose query is in its order
//   floats_of(sum)      those integers
//   word_order(i)       where in a whole block of a query its element i is
//   integers_at(p)      kLanes elements as floats, in their order
//   spread<n>(p)        lane i = p[i / n]; may read up to p[kLanes - 1]
namespace fluxion::FLUXION_ISA {
namespace {

// Products of integers, without a rounding between them: queries become integers of 16 bits, which loses at
// most 2^-16 of their largest element. kMaxHeadDim products fit into eight lanes of 32 bits.
inline constexpr int kWordBlock = 32;
inline constexpr int kQueryMost = 32767;
static_assert(int64_t{kMaxHeadDim} / 8 * 128 * kQueryMost <= INT32_MAX);
template <>
struct Dot<Int8> {
  using Query = int16_t;
  static constexpr int kStep = kWordBlock;

  static float pack(const BF16* q, int n, Query* out) {
    float most = 0.0f, nothing = 0.0f;  // nothing: NaN where something is not finite
    for (int i = 0; i < n; ++i) {
      const float x = to_float(q[i]), size = x < 0.0f ? -x : x;
      most = size > most ? size : most;
      nothing += x - x;
    }
    const float inverse = most > 1e-30f ? static_cast<float>(kQueryMost) / most : 0.0f;
    for (int d = 0; d < n; d += kWordBlock) {
      const bool whole = d + kWordBlock <= n;
      for (int i = 0; i < (whole ? kWordBlock : n - d); ++i) {
        constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
        const float x = to_float(q[d + i]) * inverse + kRound;
        out[d + (whole ? word_order(i) : i)] =
            static_cast<int16_t>(static_cast<int32_t>(bits_of(x)) - 0x4b400000);
      }
    }
    return most / static_cast<float>(kQueryMost) + nothing;
  }

  using Pair = KeyBlock;
  static QueryBlock query_pair(const Query* q) { return words_at(q); }
  static Pair row_pair(const Int8* row) { return words_of(row); }
  static Vec add(Vec sum, const QueryBlock& q, const Pair& k) { return add_words(sum, q, k); }
  static Vec step(Vec sum, const Query* q, const Int8* row) { return add(sum, query_pair(q), row_pair(row)); }
  static Vec tail(Vec sum, const Query* q, const Int8* row) { return add_half(sum, q, row); }
  static Vec floats(Vec sum) { return floats_of(sum); }
};

// Sums are in the order of the elements. Weights are divided by as they are: what add_word_values rounds is
// off to both sides.
template <>
struct Mix<Int8> {
  static Vec rounded(Vec weights) { return weights; }
  template <int kAcross, int kCount>
  static Vec to_words(float*, Vec sum) {
    return sum;
  }
  static void store_sums(float* p, Vec a, Vec b) { store_pair<float>(p, a, b); }
};

// What the rows of kTiles tiles side by side are multiplied by.
template <class T, int kTiles>
struct TileScales {
  TileScales(const T* const*, int) {}
  // Sums of products with keys from row t on, for kHeads heads in turn; and of a single one.
  template <int kHeads>
  Vec scores(Vec sums, int) const {
    return sums;
  }
  float score(float sum, int) const { return sum; }
  static void fetch_of(const T*, int) {}  // of a tile, what is not in its rows
};

template <int kTiles>
struct TileScales<Int8, kTiles> {
  // Each [kPage][kTiles], and room to read a vector.
  alignas(64) float keys[kPage * kTiles + kLanes];
  alignas(64) float values[kPage * kTiles + kLanes];
  bool no_numbers;  // some values are none

  TileScales(const Int8* const* tiles, int D) {
    uint32_t none = 0;
    for (int s = 0; s < kTiles; ++s) {
      const BF16* of = scales_of(tiles[s], D);
      for (int t = 0; t < kPage; ++t) {
        keys[t * kTiles + s] = to_float(of[t]);
        values[t * kTiles + s] = to_float(of[kPage + t]);
        none |= static_cast<uint32_t>(of[kPage + t].bits >= 0x7f80);
      }
    }
    no_numbers = none != 0;
  }
  template <int kHeads>
  Vec scores(Vec sums, int t) const {
    return mul(sums, spread<kHeads>(keys + t * kTiles));
  }
  float score(float sum, int t) const { return sum * keys[t * kTiles]; }
  static void fetch_of(const Int8* tile, int D) { fetch(scales_of(tile, D), 2 * kPage * sizeof(BF16)); }
};

}  // namespace
}  // namespace fluxion::FLUXION_ISA
