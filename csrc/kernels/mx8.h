#pragma once

#include "kernels/tile.h"

// Rows of MX8 as they are multiplied. An ISA header has what is its own:
//
//   KeyBlock            the integers of a block, widened
//   widen(p)         those at p
//   QueryBlock            a query's integers of a block
//   words_at(q)
//   products(w, b)   float, by lanes sums of the products of a block: exact
//   half_products(q, p)   of a block of half the size, whose query is in its order
//   word_order(i)    where in a whole block of a query its element i is
//   integers_at(p)   kLanes elements as floats, in their order
//   spread<n>(p)     lane i = p[i / n]; may read up to p[kLanes - 1]
//   powers_at(p)     lane i = 2^(p[i] - 127)
namespace fluxion::FLUXION_ISA {
namespace {

// A row, and what its blocks are multiplied by, kStride floats from one block to the next.
template <int kStride>
struct ScaledRow {
  const MX8* at;
  const float* scale;

  // d: a multiple of a block.
  ScaledRow operator+(int d) const { return {at + d, scale + d / kMXBlock * kStride}; }
};

// Queries become integers of 16 bits: sums of their products with a block are exact.
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
    const float inverse = most > 1e-30f ? 32767.0f / most : 0.0f;
    for (int d = 0; d < n; d += kMXBlock) {
      const bool whole = d + kMXBlock <= n;
      for (int i = 0; i < (whole ? kMXBlock : n - d); ++i) {
        constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
        const float x = to_float(q[d + i]) * inverse + kRound;
        out[d + (whole ? word_order(i) : i)] =
            static_cast<int16_t>(static_cast<int32_t>(bits_of(x)) - 0x4b400000);
      }
    }
    return most / 32767.0f + nothing;
  }

  struct Pair {
    KeyBlock integers;
    Vec scale;
  };
  static QueryBlock query_pair(const Query* q) { return words_at(q); }
  template <int kStride>
  static Pair row_pair(const ScaledRow<kStride>& row) {
    return {widen(row.at), set1(*row.scale)};
  }
  static Vec add(Vec sum, const QueryBlock& q, const Pair& k) {
    return fma(products(q, k.integers), k.scale, sum);
  }
  template <int kStride>
  static Vec step(Vec sum, const Query* q, const ScaledRow<kStride>& row) {
    return add(sum, query_pair(q), row_pair(row));
  }
  template <int kStride>
  static Vec tail(Vec sum, const Query* q, const ScaledRow<kStride>& row) {
    return fma(half_products(q, row.at), set1(*row.scale), sum);
  }
};

// Weights are not rounded, and sums are in the order of the elements.
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
inline void powers_of_two(Bytes exponents, float* to) {
  uint8_t bytes[sizeof(Bytes)];
  __builtin_memcpy(bytes, &exponents, sizeof(bytes));
  for (int i = 0; i < kPage; i += kLanes) store(to + i, powers_at(bytes + i));
}

template <int kTiles>
struct TileScales<MX8, kTiles> {
  static constexpr int kStride = 2 * kPage * kTiles;
  // [blocks of a row][2 * kPage][kTiles], and room to read a vector.
  alignas(64) float scale[kMaxHeadDim / kMXBlock * kStride + kLanes];

  TileScales(const MX8* const* tiles, int D) {
    for (int b = 0; b < mx_blocks(D); ++b) {
      for (int row = 0; row < 2 * kPage; row += kPage) {
        Bytes of[kTiles];
        for (int s = 0; s < kTiles; ++s)
          __builtin_memcpy(&of[s], exponents_of(tiles[s], D) + b * 2 * kPage + row, sizeof(Bytes));
        // Those of one row of all tiles come to lie side by side.
        if constexpr (kTiles == 4) {
          zip(&of[0], &of[2]);
          zip(&of[1], &of[3]);
          zip(&of[0], &of[1]);
          zip(&of[2], &of[3]);
        } else if constexpr (kTiles == 2) {
          zip(&of[0], &of[1]);
        }
        float* to = scale + b * kStride + row * kTiles;
        for (int s = 0; s < kTiles; ++s, to += kPage) powers_of_two(of[s], to);
      }
    }
  }
  // Row `row` of tile s, which is `tile`.
  ScaledRow<kStride> row(const MX8* tile, int row, int s, int D) const {
    return {tile + row * D, scale + row * kTiles + s};
  }
  static void fetch_of(const MX8* tile, int D) { fetch(exponents_of(tile, D), mx_blocks(D) * 2 * kPage); }
};

}  // namespace
}  // namespace fluxion::FLUXION_ISA
