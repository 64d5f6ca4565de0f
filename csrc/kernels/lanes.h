#pragma once

#include "kernels/rows.h"

// What the kernels for many heads at once share (attend_lanes.h, attend_matrix.h).
namespace fluxion::FLUXION_ISA {
namespace {

// The arguments of `attend` (kernels/table.h).
class AttendCall {
 public:
  AttendCall(const BF16* q, int G, int D, Scale scale, const BF16* tiles, const int32_t* pages,
             const uint16_t* masks, int n, int known, float* page_lse)
      : q(q),
        G(G),
        D(D),
        scale(scale),
        tiles(tiles),
        pages(pages),
        masks(masks),
        n(n),
        known(known),
        page_lse(page_lse) {
    for (float& x : factor) x = scale.factor;
  }
  // Continues with `count` pages of other tiles, for the same queries.
  void go_on(const BF16* other, const int32_t* list, const uint16_t* wanted, int count, float* alone) {
    tiles = other;
    pages = list;
    masks = wanted;
    n = known = count;
    page_lse = alone;
  }

 protected:
  const BF16* q;
  int G, D;
  Scale scale;
  const BF16* tiles;
  const int32_t* pages;
  const uint16_t* masks;
  int n, known;     // pages to attend to; with those that follow
  float* page_lse;  // [n][G]; nullptr: not wanted
  float factor[kLanes];

  const BF16* tile(int i) const { return tiles + pages[i] * (2 * kPage * static_cast<int64_t>(D)); }
};

// Packs queries of up to kLanes heads, [count][size], into to[size / 2][kLanes]: pairs of elements by heads.
// Lanes beyond `count` repeat the last head. size is a multiple of 32.
inline void pack_heads(const BF16* q, int count, int size, float* to) {
  static_assert(kLanes == 16);
  for (int d = 0; d < size; d += 8, to += 4 * kLanes) {
    const auto row = [&](int i) {
      return reinterpret_cast<const float*>(q + smaller(i, count - 1) * static_cast<int64_t>(size) + d);
    };
    Vec columns[4];
    four_columns(row, columns);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) store(to + j * kLanes, columns[j]);
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
