#pragma once

#include "kernels/rows.h"

// The layout of tiles in memory (DType, kernels/table.h), and how they are written and read whole.
// Memory-bound kernels, which read rows in place, are in attend_*.h. All other readers of Int8 tiles unpack
// them to bfloat16 first.
namespace fluxion::FLUXION_ISA {
namespace {

template <class T>
struct TileOf {
  // Elements of T from one tile to the next.
  static constexpr int64_t size(int D) { return 2 * kPage * static_cast<int64_t>(D); }
};
template <>
struct TileOf<Int8> {
  static constexpr int64_t size(int D) { return 2 * kPage * stored_bytes(DType::kInt8, D); }
};

template <class T>
inline const T* tile_at(const void* tiles, int page, int D) {
  return static_cast<const T*>(tiles) + page * TileOf<T>::size(D);
}

// The scales of a tile: [2 * kPage].
inline BF16* scales_of(Int8* tile, int D) { return reinterpret_cast<BF16*>(tile + 2 * kPage * D); }
inline const BF16* scales_of(const Int8* tile, int D) {
  return reinterpret_cast<const BF16*>(tile + 2 * kPage * D);
}

// The bits of the largest absolute value; they order as the values do.
inline uint32_t largest_bits(const BF16* x, int n) {
  uint32_t largest = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = x[i].bits & 0x7fffu;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}
inline constexpr uint32_t kNotFinite = 0x7f80;  // such bits, or more
// For |x| up to 2^22.
inline int32_t nearest_integer(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: the sum's last bits are the integer
  return static_cast<int32_t>(bits_of(x + kRound)) - 0x4b400000;
}

inline constexpr float kMostInteger = 127.0f;
// The scale of a row of smaller numbers; its inverse is a number, too.
inline constexpr float kLeastScale = 1e-37f;

// Packs one row; returns its scale. Plain loops without sums of products: the same on every ISA. No element
// is off by more than half a scale: rounding the scale moves the largest integer, 127, by a quarter.
inline BF16 pack_row(const BF16* from, int row, int D, Int8* tile) {
  const uint32_t largest = largest_bits(from, D);
  if (largest >= kNotFinite) {
    for (int i = 0; i < D; ++i) tile[int8_at(row, i, D)].bits = 0;
    return {0x7fc0};
  }
  const float exact = float_of(largest << 16) / kMostInteger;
  BF16 scale;
  round_to(exact < kLeastScale ? kLeastScale : exact, &scale);
  const float inverse = 1.0f / to_float(scale);
  for (int i = 0; i < D; ++i) {
    const float x = to_float(from[i]) * inverse;
    const float inside = x > kMostInteger ? kMostInteger : x < -kMostInteger ? -kMostInteger : x;
    tile[int8_at(row, i, D)].bits = static_cast<int8_t>(nearest_integer(inside));
  }
  return scale;
}

// The nearest bfloat16 number; NaN stays NaN.
inline uint32_t rounded_bits(float x) {
  const uint32_t bits = bits_of(x);
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

// Unpacks row `row` of the 2 * kPage of a tile, rounded.
inline void unpack_row(const Int8* tile, int row, int D, BF16* to) {
  const float scale = to_float(scales_of(tile, D)[row]);
  for (int d = 0; d < D; ++d)
    to[d].bits =
        static_cast<uint16_t>(rounded_bits(static_cast<float>(tile[int8_at(row, d, D)].bits) * scale));
}

using Four = uint32_t __attribute__((vector_size(16)));
// Interleaves elements of a and b: the first two of each, or the last two.
inline Four zipped(Four a, Four b, bool last) {
#if defined(__clang__)
  return last ? __builtin_shufflevector(a, b, 2, 6, 3, 7) : __builtin_shufflevector(a, b, 0, 4, 1, 5);
#else
  return last ? __builtin_shuffle(a, b, Four{2, 6, 3, 7}) : __builtin_shuffle(a, b, Four{0, 4, 1, 5});
#endif
}

// All keys of a tile: [kPage][D].
inline void unpack_keys(const Int8* tile, int D, BF16* to) {
  constexpr int kSide = 4;  // pairs of elements, and tokens, of a square that is transposed
  float scale[kPage];
  for (int t = 0; t < kPage; ++t) scale[t] = to_float(scales_of(tile, D)[t]);
  for (int d = 0; d < D; d += 2 * kSide) {
    alignas(64) uint32_t pairs[kSide][kPage];
    for (int i = 0; i < kSide; ++i) {
      const Int8* from = tile + (d / 2 + i) * 2 * kPage;
      for (int t = 0; t < kPage; ++t) {
        const uint32_t a = rounded_bits(static_cast<float>(from[2 * t].bits) * scale[t]);
        const uint32_t b = rounded_bits(static_cast<float>(from[2 * t + 1].bits) * scale[t]);
        pairs[i][t] = a | b << 16;
      }
    }
    for (int t = 0; t < kPage; t += kSide) {
      Four row[kSide], half[kSide];
      for (int i = 0; i < kSide; ++i) __builtin_memcpy(&row[i], pairs[i] + t, sizeof(Four));
      for (int i = 0; i < kSide; ++i) half[i] = zipped(row[i % 2], row[i % 2 + 2], i / 2 == 1);
      for (int i = 0; i < kSide; ++i) {
        const Four turned = zipped(half[i / 2 * 2], half[i / 2 * 2 + 1], i % 2 == 1);
        __builtin_memcpy(to + (t + i) * D + d, &turned, sizeof(Four));
      }
    }
  }
}

// All values of a tile: [kPage][D].
inline void unpack_values(const Int8* tile, int D, BF16* to) {
  for (int t = 0; t < kPage; ++t) {
    const Int8* from = tile + int8_at(kPage + t, 0, D);
    const float scale = to_float(scales_of(tile, D)[kPage + t]);
    BF16* row = to + t * D;
    for (int d = 0; d < D; ++d)
      row[d].bits =
          static_cast<uint16_t>(rounded_bits(static_cast<float>(from[kInt8Values * d].bits) * scale));
  }
}

inline void unpack_rows(const Int8* tile, int first, int count, int D, BF16* to) {
  for (int row = first; row < first + count;) {
    BF16* at = to + (row - first) * static_cast<int64_t>(D);
    if (row % kPage == 0 && row + kPage <= first + count) {
      row < kPage ? unpack_keys(tile, D, at) : unpack_values(tile, D, at);
      row += kPage;
    } else {
      unpack_row(tile, row, D, at);
      row += 1;
    }
  }
}

template <class T>
void write_token(const void* k, const void* v, int D, int offset, void* tile) {
  if constexpr (sizeof(T) == sizeof(Int8)) {
    Int8* elements = static_cast<Int8*>(tile);
    BF16* scales = scales_of(elements, D);
    const void* const parts[] = {k, v};
    for (int part = 0; part < 2; ++part) {
      const int row = part * kPage + offset;
      scales[row] = pack_row(static_cast<const BF16*>(parts[part]), row, D, elements);
    }
  } else {
    T* elements = static_cast<T*>(tile);
    __builtin_memcpy(elements + offset * D, k, D * sizeof(T));
    __builtin_memcpy(elements + (kPage + offset) * D, v, D * sizeof(T));
  }
}

template <class T>
void read_tile(const void* tile, int D, int tokens, void* out) {
  if constexpr (sizeof(T) == sizeof(Int8)) {
    const Int8* from = static_cast<const Int8*>(tile);
    BF16* to = static_cast<BF16*>(out);
    unpack_rows(from, 0, tokens, D, to);
    unpack_rows(from, kPage, tokens, D, to + kPage * D);
  } else {
    __builtin_memcpy(out, tile, TileOf<T>::size(D) * sizeof(T));
  }
}

template <class T>
void read_token(const void* tile, int D, int offset, void* out) {
  Model<T>* to = static_cast<Model<T>*>(out);
  for (int row = offset; row < 2 * kPage; row += kPage) {
    if constexpr (sizeof(T) == sizeof(Int8)) {
      unpack_row(static_cast<const Int8*>(tile), row, D, to + row * D);
    } else {
      __builtin_memcpy(to + row * D, static_cast<const T*>(tile) + row * D, D * sizeof(T));
    }
  }
}

// bfloat16 tiles that tiles of Int8 are unpacked into, a few at a time: their numbers are 0, 1, 2, ...
template <int kTiles>
class Unpacked {
 public:
  explicit Unpacked(int head_dim) : D_(head_dim) {}

  BF16* tile(int i) { return tiles_ + i * TileOf<BF16>::size(D_); }
  const BF16* tiles() const { return tiles_; }
  const int32_t* pages() const { return kOrder.number; }
  // Unpacks rows first..first + count - 1 of a tile into tile i.
  void take(int i, const Int8* from, int first, int count) {
    unpack_rows(from, first, count, D_, tile(i) + first * D_);
  }

 private:
  struct Order {
    int32_t number[kTiles];
    constexpr Order() : number() {
      for (int i = 0; i < kTiles; ++i) number[i] = i;
    }
  };
  static constexpr Order kOrder{};

  int D_;
  alignas(64) BF16 tiles_[kTiles * 2 * kPage * kMaxHeadDim];
};

// Calls run(first, count) for 0..n-1, kMost at a time.
template <int kMost, class Run>
inline void by_parts(int n, Run&& run) {
  for (int i = 0; i < n; i += kMost) run(i, smaller(n - i, kMost));
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
