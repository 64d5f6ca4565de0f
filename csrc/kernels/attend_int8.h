#pragma once

#include "kernels/attend_tiles.h"
#include "kernels/int8.h"

// The same softmax over tiles of Int8, by integer products. One instruction multiplies two elements of kLanes
// keys, or kLanes elements of four values, as they lie in a tile (DType, kernels/table.h). So nothing is
// summed across lanes or reordered.
namespace fluxion::FLUXION_ISA {
namespace {

// Prefetches while tiles are read: line after line of all tiles, `ahead` rows in advance.
template <int kTiles, int kGap>
class Int8Fetch {
 public:
  Int8Fetch(const TileRows<Int8, kTiles>& tiles, int D) : ahead_(tiles.ahead * D), end_(2 * kPage * D) {
    for (int s = 0; s < kTiles; ++s) {
      now_[s] = tiles.now[s];
      // Without a next tile, the present one is prefetched again.
      next_[s] = tiles.next[s] != nullptr ? tiles.next[s] : tiles.now[s];
    }
  }

  // Prefetches for reads up to byte `to`, a multiple of a line.
  void until(int to) {
    for (; at_ < to; at_ += kLine) {
      const bool here = at_ + ahead_ < end_;
      const Int8* const* tiles = here ? now_ : next_;
      const int64_t offset = at_ + ahead_ - (here ? 0 : end_);
#pragma GCC unroll 4
      for (int s = 0; s < kTiles; ++s) prefetch(spaced_.next<kGap>(tiles[s] + offset));
    }
  }

 private:
  const Int8* now_[kTiles];
  const Int8* next_[kTiles];
  int at_ = 0, ahead_, end_;
  Spaced spaced_;
};

// Vectors of sums that are in registers at a time.
inline constexpr int kWordSums = kRegisters / 2;
// Vectors that hold the tokens of a tile.
inline constexpr int kTokenVecs = kPage / kLanes;

// sums[(s * kTokenVecs + v) * kHeads + h] = q_h . keys of tile s, unscaled.
template <int kD, int kTiles, int kHeads, int kGap>
inline void score_words(const int16_t* q, const TileRows<Int8, kTiles>& tiles, int head_dim,
                        Int8Fetch<kTiles, kGap>* ahead, Vec* sums) {
  constexpr int kVecs = kTiles * kTokenVecs, kTogether = smaller(kVecs, kWordSums / kHeads);
  static_assert(kVecs % kTogether == 0);
  const int D = kD ? kD : head_dim;
  for (int first = 0; first < kVecs; first += kTogether, sums += kTogether * kHeads) {
    Vec total[kTogether * kHeads];
#pragma GCC unroll 16
    for (int i = 0; i < kTogether * kHeads; ++i) total[i] = set1(0.0f);
    constexpr int kSteps = kLine / (2 * kPage);  // in a line of every tile
    for (int d = 0; d < D; d += 2 * kSteps) {
      ahead->until((first * D + d * kTogether) / kVecs * kPage / kLine * kLine + kLine);
#pragma GCC unroll 2
      for (int step = 0; step < kSteps; ++step) {
        Vec query[kHeads];
#pragma GCC unroll 16
        for (int h = 0; h < kHeads; ++h) query[h] = in_register(for_all_lanes(q + h * D + d + 2 * step));
#pragma GCC unroll 16
        for (int i = 0; i < kTogether; ++i) {
          const int s = (first + i) / kTokenVecs, v = (first + i) % kTokenVecs;
          const Vec key = in_register(words_at(tiles.now[s] + (d + 2 * step) * kPage + v * 2 * kLanes));
#pragma GCC unroll 16
          for (int h = 0; h < kHeads; ++h)
            total[i * kHeads + h] = add_words(total[i * kHeads + h], query[h], key);
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kTogether * kHeads; ++i) sums[i] = total[i];
  }
}

// Rows that are prefetched during the softmax, between keys and values.
inline constexpr int kSoftmaxRows = 4;

// out_h += units[h] * sum over tokens and tiles of weight * value; weights[(s * kHeads + h) * kPage + t].
template <int kD, int kTiles, int kHeads, int kGap>
inline void add_weighted(const uint8_t* weights, const float* units, const TileRows<Int8, kTiles>& tiles,
                         int head_dim, Int8Fetch<kTiles, kGap>* ahead, float* out) {
  constexpr int kTokens = kInt8Values;
  constexpr int kMost = kWordSums / kHeads;
  const int D = kD ? kD : head_dim;
  const int read = (kPage + kSoftmaxRows) * D / kLine * kLine;  // and prefetched during the softmax
  const auto add_at = [&]<int kVecs>(int first) {
    Vec total[kHeads * kVecs];
#pragma GCC unroll 16
    for (int i = 0; i < kHeads * kVecs; ++i) total[i] = set1(0.0f);
    for (int t = 0; t < kPage; t += kTokens) {
      const int at = (kPage + t) * D + kTokens * first;
      ahead->until(read +
                   (first * kPage + t * kVecs * kLanes) / kPage * (kPage - kSoftmaxRows) / kLine * kLine);
#pragma GCC unroll 4
      for (int s = 0; s < kTiles; ++s) {
        Vec value[kVecs];
#pragma GCC unroll 16
        for (int v = 0; v < kVecs; ++v)
          value[v] = in_register(bytes_at(tiles.now[s] + at + v * kTokens * kLanes));
#pragma GCC unroll 16
        for (int h = 0; h < kHeads; ++h) {
          const Vec weight = in_register(for_all_lanes(weights + (s * kHeads + h) * kPage + t));
#pragma GCC unroll 16
          for (int v = 0; v < kVecs; ++v)
            total[h * kVecs + v] = add_bytes(total[h * kVecs + v], weight, value[v]);
        }
      }
    }
#pragma GCC unroll 16
    for (int h = 0; h < kHeads; ++h) {
      const Vec unit = set1(units[h]);
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) {
        float* to = out + h * D + first + v * kLanes;
        store(to, fma(floats_of(total[h * kVecs + v]), unit, load(to)));
      }
    }
  };
  int d = 0;
  const auto down_to = [&]<int kVecs>() {
    if constexpr (kVecs <= kMost) {
      for (; d + kVecs * kLanes <= D; d += kVecs * kLanes) add_at.template operator()<kVecs>(d);
    }
  };
  down_to.template operator()<16>();
  down_to.template operator()<8>();
  down_to.template operator()<4>();
  down_to.template operator()<2>();
  down_to.template operator()<1>();
}

// Combines vectors of kHeads heads: lane i of the result belongs to head i % kHeads.
template <int kHeads, class Combine>
inline Vec fold_heads(Vec (&of)[kHeads], const Combine& combine) {
  if constexpr (kHeads >= 2) {
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; h += 2) {
      take_turns<1>(of[h], of[h + 1]);
      of[h] = combine(of[h], of[h + 1]);
    }
  }
  if constexpr (kHeads >= 4) {
#pragma GCC unroll 2
    for (int h = 0; h < kHeads; h += 4) {
      take_turns<2>(of[h], of[h + 2]);
      of[h] = combine(of[h], of[h + 2]);
    }
  }
  if constexpr (kHeads >= 8) {
    take_turns<4>(of[0], of[4]);
    of[0] = combine(of[0], of[4]);
  }
  static_assert(kHeads <= 8);
  return of[0];
}

// masks: of the first `count` heads and the only tile; the other heads attend to nothing. Without masks all
// heads attend to all tokens. A token that no head attends to may hold anything: integers are always numbers,
// and its scales are not used.
template <int kD, int kTiles, int kHeads, bool kMasked = false, int kGap = Pace<kTiles>::kGaps[0]>
[[gnu::noinline]] void attend_int8(const int16_t* q, const TileRows<Int8, kTiles>& tiles,
                                   const uint16_t* masks, int count, int head_dim, const HeadStates& state,
                                   const PageLse& page_lse) {
  constexpr int kVecs = kTiles * kTokenVecs;
  // Weights times the scales of values become 8-bit integers, with an error of at most 1/510 of the largest
  // product of these tiles. Products below kLeast are lost.
  constexpr float kMost = 255.0f, kLeast = 1e-35f;
  const auto larger = [](Vec a, Vec b) { return max(a, b); };
  const auto sum_of = [](Vec a, Vec b) { return add(a, b); };
  const int D = kD ? kD : head_dim;
  const auto wanted = [&](int h, int v) {
    return !kMasked ? kEveryLane : h < count ? (masks[h] >> v * kLanes) & kEveryLane : 0u;
  };
  for (int s = 0; s < kTiles; ++s) {
    if (tiles.next[s] != nullptr) fetch(scales_of(tiles.next[s], D), kScaleBytes);
  }
  Int8Fetch<kTiles, kGap> ahead(tiles, D);
  Vec scores[kVecs * kHeads];
  score_words<kD, kTiles, kHeads, kGap>(q, tiles, D, &ahead, scores);

  Vec scales[kVecs], of[kHeads];
#pragma GCC unroll 16
  for (int i = 0; i < kVecs; ++i)
    scales[i] = load_one(scales_of(tiles.now[i / kTokenVecs], D) + i % kTokenVecs * kLanes);
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
    const Vec factor = set1(state.factor[h]);
    of[h] = set1(kNegInf);
#pragma GCC unroll 16
    for (int i = 0; i < kVecs; ++i) {
      const Vec products = mul(floats_of(scores[i * kHeads + h]), scales[i]);
      // Bounded, an overflow to +inf stays a number; NaN stays NaN, and the maximum ignores it.
      const Vec x = min(set1(kMaxFloat), logits(products, factor, state.cap));
      scores[i * kHeads + h] = kMasked ? keep(wanted(h, i % kTokenVecs), x, set1(kNegInf)) : x;
      of[h] = max(scores[i * kHeads + h], of[h]);
    }
  }
  raise_tops(max_by_period<kHeads>(max(fold_heads(of, larger), load(state.top))), D, state);

  alignas(64) float base[kLanes], units[kLanes], inverse[kHeads];
  store(base, reference(load(state.top)));
  Vec most[kHeads];
  uint32_t no_numbers = 0;  // bits of heads
#pragma GCC unroll 16
  for (int i = 0; i < kVecs; ++i)
    scales[i] = load_one(scales_of(tiles.now[i / kTokenVecs], D) + kPage + i % kTokenVecs * kLanes);
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
    ahead.until((kPage + kSoftmaxRows * (h + 1) / kHeads) * D / kLine * kLine);
    of[h] = most[h] = set1(0.0f);
#pragma GCC unroll 4
    for (int s = 0; s < kTiles; ++s) {
      Vec of_tile = set1(0.0f);
#pragma GCC unroll 16
      for (int v = 0; v < kTokenVecs; ++v) {
        const int i = s * kTokenVecs + v;
        const uint32_t lanes = wanted(h, v);
        const Vec w = exponential<Int8>(sub(scores[i * kHeads + h], set1(base[h])));
        if (kMasked || h == 0) {
          if ((lanes_at_least(scales[i], set1(0.0f)) & lanes) != lanes) no_numbers |= kMasked ? 1u << h : ~0u;
        }
        const Vec x = kMasked ? keep(lanes, mul(w, scales[i]), set1(0.0f)) : mul(w, scales[i]);
        scores[i * kHeads + h] = x;
        most[h] = max(x, most[h]);
        of_tile = add(of_tile, w);
      }
      of[h] = add(of[h], of_tile);
      if (page_lse.of[0] != nullptr && h < page_lse.count && (!kMasked || masks[h] != 0))
        page_lse.of[s][h] = lse_of(state.top[h], reduce_add(of_tile));
    }
  }
  const Vec sum = fold_heads(of, sum_of);
  store(state.total, add(load(state.total), sum));
  store(state.used, add(load(state.used), sum));
  const Vec largest = max(max_by_period<kHeads>(fold_heads(most, larger)), set1(kLeast));
  store(units, mul(largest, set1(1.0f / kMost)));
  for (int h = 0; h < kHeads; ++h) inverse[h] = 1.0f / units[h];
  // If a value is not finite, the weights become 0 and the unit infinite: their product is NaN.
  for (int h = 0; no_numbers != 0 && h < kHeads; ++h) {
    if (no_numbers >> h & 1) units[h] = -kNegInf, inverse[h] = 0.0f;
  }
  alignas(64) uint8_t weights[kTiles * kHeads * kPage];
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 16
    for (int i = 0; i < kVecs; ++i) {
      uint8_t* to = weights + (i / kTokenVecs * kHeads + h) * kPage + i % kTokenVecs * kLanes;
      store_bytes(mul(scores[i * kHeads + h], set1(inverse[h])), to);
    }
  }
  add_weighted<kD, kTiles, kHeads, kGap>(weights, units, tiles, D, &ahead, state.out);
  ahead.until(2 * kPage * D);
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
