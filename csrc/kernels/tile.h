#pragma once

#include "kernels/rows.h"

// How tiles lie in memory (DType, kernels/table.h), and how they are written and read whole. What reads rows
// where they lie, because it waits for memory, is in attend_*.h; whatever else reads tiles of Int8 unpacks
// them first, and does the same as with tiles of bfloat16.
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

inline constexpr float kMostInteger = 127.0f;
// Of a row of smaller numbers; its inverse is a number, too.
inline constexpr float kLeastScale = 1e-37f;

// One row; returns its scale. Plain loops without sums of products, the same on every ISA. No element is off
// by more than half a scale: rounding the scale moves the largest integer, which is 127, by a quarter.
inline BF16 pack_row(const BF16* from, int D, Int8* to) {
  uint32_t largest = 0;  // of the absolute values, whose order is that of their bits
  for (int i = 0; i < D; ++i) {
    const uint32_t bits = from[i].bits & 0x7fffu;
    largest = bits > largest ? bits : largest;
  }
  if (largest >= 0x7f80) {
    for (int i = 0; i < D; ++i) to[i].bits = 0;
    return {0x7fc0};
  }
  const float exact = float_of(largest << 16) / kMostInteger;
  BF16 scale;
  round_to(exact < kLeastScale ? kLeastScale : exact, &scale);
  const float inverse = 1.0f / to_float(scale);
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: the sum's last bits are the nearest integer
  for (int i = 0; i < D; ++i) {
    const float x = to_float(from[i]) * inverse;
    const float inside = x > kMostInteger ? kMostInteger : x < -kMostInteger ? -kMostInteger : x;
    to[i].bits = static_cast<int8_t>(static_cast<int32_t>(bits_of(inside + kRound)) - 0x4b400000);
  }
  return scale;
}

// Row `row` of the 2 * kPage of a tile, rounded.
inline void unpack_row(const Int8* tile, int row, int D, BF16* to) {
  const float scale = to_float(scales_of(tile, D)[row]);
  const Int8* from = tile + row * D;
  for (int i = 0; i < D; ++i) {
    const uint32_t bits = bits_of(static_cast<float>(from[i].bits) * scale);
    to[i].bits = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
}
inline void unpack_rows(const Int8* tile, int first, int count, int D, BF16* to) {
  for (int i = 0; i < count; ++i) unpack_row(tile, first + i, D, to + i * static_cast<int64_t>(D));
}

template <class T>
void write_token(const void* k, const void* v, int D, int offset, void* tile) {
  if constexpr (sizeof(T) == sizeof(Int8)) {
    Int8* elements = static_cast<Int8*>(tile);
    BF16* scales = scales_of(elements, D);
    const void* const parts[] = {k, v};
    for (int part = 0; part < 2; ++part) {
      const int row = part * kPage + offset;
      scales[row] = pack_row(static_cast<const BF16*>(parts[part]), D, elements + row * D);
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

// Tiles of bfloat16 that tiles of Int8 are unpacked into, a few at a time: their numbers are 0, 1, 2, ...
template <int kTiles>
class Unpacked {
 public:
  explicit Unpacked(int head_dim) : D_(head_dim) {}

  BF16* tile(int i) { return tiles_ + i * TileOf<BF16>::size(D_); }
  const BF16* tiles() const { return tiles_; }
  const int32_t* pages() const { return kOrder.number; }
  // Rows first..first + count - 1 of a tile, as those of tile i.
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
