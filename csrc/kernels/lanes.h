#pragma once

#include "kernels/rows.h"

// What the ways to attend for many heads at once have in common (attend_lanes.h, attend_matrix.h).
namespace fluxion::FLUXION_ISA {
namespace {

// The arguments of `attend` (kernels/table.h).
struct AttendCall {
  const BF16* q;
  int G, D;
  Scale scale;
  const BF16* tiles;
  const int32_t* pages;
  const uint16_t* masks;
  int n, known;     // pages to attend to; these and those that follow
  float* page_lse;  // [n][G]; nullptr: nobody asks

  const BF16* tile(int i) const { return tiles + pages[i] * (2 * kPage * static_cast<int64_t>(D)); }
};

// Queries of up to kLanes heads, [count][size], as to[size / 2][kLanes]: pairs of elements by heads. Beyond
// `count` heads, the last one again. size is a multiple of 32.
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
