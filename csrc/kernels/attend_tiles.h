#pragma once

#include "kernels/logits.h"
#include "kernels/rows.h"
#include "kernels/throttle.h"

// Online softmax in float32 over tiles without masks, several tiles side by side: a row of each in turn, in
// the order of addresses, keys first. This gives the best memory throughput (kernels/probe.h). All of these
// tiles together take one maximum, one correction and one pass over the output rows.
namespace fluxion::FLUXION_ISA {
namespace {

inline constexpr uint32_t kEveryLane = (1u << kLanes) - 1;
inline constexpr int kAllTokens = 0xffff;

// Heads that go through a tile together at most: more would not fit into the registers.
inline constexpr int kHeadsTogether = smaller(kLanes, kRegisters / 4);
// Tiles that are read side by side for kHeads heads: their scores of one token, or of several, fill a vector.
template <int kHeads>
inline constexpr int kTilesTogether = smaller(4, kLanes / kHeads);
// Steps of values (simd/mix.h) that are in registers at once.
inline constexpr int kValueSteps = smaller(4, kLanes / 4);

// State of kHeads heads that go together. Lane i of a vector belongs to head i % kHeads.
struct HeadStates {
  float* top;    // [kLanes] running maximum of the scores, in every lane of its head
  float* total;  // [kLanes] running sum of the weights, spread over the lanes of its head
  float* used;   // [kLanes] the same of the weights as rounded for values
  float* out;    // [rows][D] output so far, not normalised, in Mix's order; row r is of head r % kHeads
  int rows;
  const float* factor;  // [kLanes] scores are products of queries and keys times this
  float cap;            // of logits (Scale)
};

// Where to write the LSE of each tile alone, for the first `count` heads; nullptr: not wanted.
struct PageLse {
  float* of[4] = {};
  int count = 0;
};

inline float lse_of(float top, float sum) { return sum == 0.0f ? kNegInf : top + __builtin_logf(sum); }

// The rows of tiles side by side, and what to prefetch meanwhile.
template <class T, int kTiles>
struct TileRows {
  const T* now[kTiles];
  const T* next[kTiles];  // the tiles that follow; nullptr: nothing to fetch
  int ahead;              // in rows, a multiple of those read together, at most the 2 * kPage of a tile

  // The data `ahead` rows after row `row`, one stretch of each tile.
  class Stretch {
   public:
    Stretch(const TileRows& tiles, int row, int D) {
      const int to = row + tiles.ahead;
      const bool here = to < 2 * kPage;
      const int64_t offset = (here ? to : to - 2 * kPage) * static_cast<int64_t>(D);
#pragma GCC unroll 4
      for (int s = 0; s < kTiles; ++s) {
        const T* tile = here ? tiles.now[s] : tiles.next[s];
        from_[s] = tile == nullptr ? nullptr : reinterpret_cast<const char*>(tile + offset);
      }
    }

    // Prefetches kBytes of it from byte `at` on; a line is fetched with its first bytes.
    template <int kBytes, int kGap>
    void fetch(int at, Spaced* spaced) const {
      if (kBytes < kLine && at % kLine != 0) return;
#pragma GCC unroll 4
      for (int s = 0; s < kTiles; ++s) {
        if (from_[s] == nullptr) continue;
        for (int b = 0; b < kBytes; b += kLine) prefetch(spaced->next<kGap>(from_[s] + at + b));
      }
    }

   private:
    const char* from_[kTiles];
  };
};

// scores[(t * kTiles + s) * kHeads + h] = q_h . key t of tile s, scaled. Returns the maximum of these and of
// `highest`, by lane.
template <class T, int kD, int kTiles, int kHeads, int kGap>
inline Vec score_tiles(const typename Dot<T>::Query* q, const TileRows<T, kTiles>& tiles, int head_dim,
                       Vec factor, float cap, float* scores, Vec highest) {
  constexpr int kRows = kLanes / (kTiles * kHeads), kPair = Dot<T>::kStep;
  static_assert(kRows * kTiles * kHeads == kLanes);
  constexpr int kBytes = kPair * static_cast<int>(sizeof(T));
  const int D = kD ? kD : head_dim;
  const auto row = [&](int i, int t, int d) { return tiles.now[i % kTiles] + (t + i / kTiles) * D + d; };
  Spaced spaced;
  for (int t = 0; t < kPage; t += kRows) {
    const typename TileRows<T, kTiles>::Stretch ahead(tiles, t, D);
    Vec sums[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) sums[i] = set1(0.0f);
    int d = 0;
    for (; d + kPair <= D; d += kPair) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r)
        ahead.template fetch<kBytes, kGap>((d / kPair * kRows + r) * kBytes, &spaced);
      // The smaller set of operands is kept in registers.
      if constexpr (kHeads <= kRows * kTiles) {
        decltype(Dot<T>::query_pair(q)) queries[kHeads];
#pragma GCC unroll 16
        for (int h = 0; h < kHeads; ++h) queries[h] = Dot<T>::query_pair(q + h * D + d);
#pragma GCC unroll 16
        for (int i = 0; i < kRows * kTiles; ++i) {
          const auto key = Dot<T>::row_pair(row(i, t, d));
#pragma GCC unroll 16
          for (int h = 0; h < kHeads; ++h)
            sums[i * kHeads + h] = Dot<T>::add(sums[i * kHeads + h], queries[h], key);
        }
      } else {
        typename Dot<T>::Pair keys[kRows * kTiles];
#pragma GCC unroll 16
        for (int i = 0; i < kRows * kTiles; ++i) keys[i] = Dot<T>::row_pair(row(i, t, d));
#pragma GCC unroll 16
        for (int h = 0; h < kHeads; ++h) {
          const auto query = Dot<T>::query_pair(q + h * D + d);
#pragma GCC unroll 16
          for (int i = 0; i < kRows * kTiles; ++i)
            sums[i * kHeads + h] = Dot<T>::add(sums[i * kHeads + h], query, keys[i]);
        }
      }
    }
    if (d < D) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        sums[i] = Dot<T>::tail(sums[i], q + i % kHeads * D + d, row(i / kHeads, t, d));
      }
    }
    const Vec products = reduce_rows(sums);
    // Bounded, an overflow to +inf stays a number. NaN stays NaN: the maximum ignores it, so it reaches the
    // output.
    const Vec x = min(set1(kMaxFloat), logits(products, factor, cap));
    store(scores + t * kTiles * kHeads, x);
    highest = max(x, highest);
  }
  return highest;
}

// Raises the maxima to `next` and rescales the sums.
inline void raise_tops(Vec next, int D, const HeadStates& state) {
  const Vec top = load(state.top);
  if (lanes_at_least(top, next) == kEveryLane) return;
  const Vec factors = exp_nonpositive(sub(top, max(next, set1(-kMaxFloat))));
  store(state.top, next);
  store(state.total, mul(load(state.total), factors));
  store(state.used, mul(load(state.used), factors));
  float factor[kLanes];
  store(factor, factors);
  for (int r = 0; r < state.rows; ++r) {
    if (factor[r] == 1.0f) continue;
    for (int d = 0; d < D; d += kLanes) {
      float* at = state.out + r * D + d;
      store(at, mul(load(at), set1(factor[r])));
    }
  }
}

// Exponents are relative to this: a head whose scores are all -inf gets weights 0, not NaN.
inline Vec reference(Vec top) { return keep(lanes_at_least(top, set1(-kMaxFloat)), top, set1(0.0f)); }

// out_h += sum over tokens and tiles of weight * value. Takes as many heads and rows at a time as fit into
// the registers with weights and values; outputs are loaded from the cache and stored back. words[(t /
// Values::kRows * kTiles + s) * kHeads + h]: the weights of head h for rows t.. of tile s.
template <class T, class Values, int kD, int kTiles, int kHeads, int kGap>
inline void add_values(const float* words, const TileRows<T, kTiles>& tiles, int head_dim, float* out) {
  constexpr int kPair = 2 * kLanes;
  constexpr int kSteps = (kValueSteps > kTiles ? kValueSteps / kTiles : 1), kRows = kSteps * Values::kRows;
  constexpr int kPart = smaller(kHeads, 4), kParts = kHeads / kPart;
  constexpr int kBytes = kPair * static_cast<int>(sizeof(T));
  // The work on values spaces the prefetches far enough, except where memory is slow.
  constexpr int kValueGap = kGap > 2 ? kGap : 0;
  const int D = kD ? kD : head_dim;
  Spaced spaced;
  for (int t = 0; t < kPage; t += kRows, words += kSteps * kTiles * kHeads) {
    const int row = kPage + t;
    const typename TileRows<T, kTiles>::Stretch ahead(tiles, row, D);
    const auto first = [&](int i, int d) {
      return tiles.now[i % kTiles] + (row + i / kTiles * Values::kRows) * D + d;
    };
    const int last = (Values::kRows - 1) * D;
    for (int part = 0; part < kParts; ++part) {
      typename Values::Weight weight[kSteps * kTiles * kPart];
#pragma GCC unroll 16
      for (int i = 0; i < kSteps * kTiles; ++i) {
#pragma GCC unroll 16
        for (int h = 0; h < kPart; ++h)
          weight[i * kPart + h] = Values::weight(words + i * kHeads + part * kPart + h);
      }
      int d = 0;
      for (; d + kPair <= D; d += kPair) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          if (r % kParts == part)
            ahead.template fetch<kBytes, kValueGap>((d / kPair * kRows + r) * kBytes, &spaced);
        }
        typename Values::Pair value[kSteps * kTiles];
#pragma GCC unroll 16
        for (int i = 0; i < kSteps * kTiles; ++i) value[i] = Values::pair(first(i, d), first(i, d) + last);
#pragma GCC unroll 16
        for (int h = 0; h < kPart; ++h) {
          float* at = out + (part * kPart + h) * D + d;
          Vec x = load(at), y = load(at + kLanes);
#pragma GCC unroll 16
          for (int i = 0; i < kSteps * kTiles; ++i) {
            x = Values::add(x, weight[i * kPart + h], value[i].a);
            y = Values::add(y, weight[i * kPart + h], value[i].b);
          }
          store(at, x);
          store(at + kLanes, y);
        }
      }
      if (d < D) {
        for (int h = 0; h < kPart; ++h) {
          float* at = out + (part * kPart + h) * D + d;
          Vec x = load(at);
          for (int i = 0; i < kSteps * kTiles; ++i)
            x = Values::add(x, weight[i * kPart + h], Values::tail(first(i, d), first(i, d) + last));
          store(at, x);
        }
      }
    }
  }
}

// The same for few registers, where add_values would pass over the outputs too often. The sums of all heads
// stay in registers over kRows rows, and the weights come from the cache.
template <class T, class Values, int kD, int kTiles, int kHeads, int kGap>
inline void add_values_by_rows(const float* words, const TileRows<T, kTiles>& tiles, int head_dim,
                               float* out) {
  constexpr int kPair = 2 * kLanes, kRows = 4;
  constexpr int kBytes = kPair * static_cast<int>(sizeof(T));
  static_assert(Values::kRows == 1 && kMinHeadDim % kPair == 0 && kPage % kPair == 0);
  const int D = kD ? kD : head_dim;
  Spaced spaced;
  for (int row = kPage; row < 2 * kPage; row += kRows, words += kRows * kTiles * kHeads) {
    const typename TileRows<T, kTiles>::Stretch ahead(tiles, row, D);
    for (int d = 0; d < D; d += kPair) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
        ahead.template fetch<kBytes, kGap>((d / kPair * kRows + r) * kBytes, &spaced);
      Vec x[kHeads], y[kHeads];
#pragma GCC unroll 16
      for (int h = 0; h < kHeads; ++h) {
        x[h] = load(out + h * D + d);
        y[h] = load(out + h * D + d + kLanes);
      }
      // Otherwise the compiler builds vectors of all weights in advance, which are more to load.
      asm volatile("" : "+r"(words));
#pragma GCC unroll 16
      for (int i = 0; i < kRows * kTiles; ++i) {
        const T* at = tiles.now[i % kTiles] + (row + i / kTiles) * D + d;
        const auto value = Values::pair(at, at);
#pragma GCC unroll 16
        for (int h = 0; h < kHeads; ++h) {
          const auto weight = Values::weight(words + i * kHeads + h);
          x[h] = Values::add(x[h], weight, value.a);
          y[h] = Values::add(y[h], weight, value.b);
        }
      }
#pragma GCC unroll 16
      for (int h = 0; h < kHeads; ++h) {
        store(out + h * D + d, x[h]);
        store(out + h * D + d + kLanes, y[h]);
      }
    }
  }
}

template <class T, class Values, int kD, int kTiles, int kHeads, int kGap = Pace<kTiles>::kGaps[0]>
[[gnu::noinline]] void attend_tiles(const typename Dot<T>::Query* q, const TileRows<T, kTiles>& tiles, int D,
                                    const HeadStates& state, const PageLse& page_lse) {
  constexpr int kScores = kPage * kTiles * kHeads;
  alignas(64) float weights[kScores];
  const Vec highest = score_tiles<T, kD, kTiles, kHeads, kGap>(q, tiles, D, load(state.factor), state.cap,
                                                               weights, load(state.top));
  raise_tops(max_by_period<kHeads>(highest), kD ? kD : D, state);
  const Vec base = reference(load(state.top));
  Vec sum = set1(0.0f);
  for (int i = 0; i < kScores; i += kLanes) {
    const Vec w = exp_nonpositive(sub(load(weights + i), base));
    store(weights + i, w);
    sum = add(sum, w);
  }
  store(state.total, add(load(state.total), sum));
  const Vec used = Values::template to_words<kTiles * kHeads, kScores>(weights, sum);
  store(state.used, add(load(state.used), used));
  if (page_lse.of[0] != nullptr) {
    float lanes[kLanes];
    store(lanes, sum);
    for (int s = 0; s < kTiles; ++s) {
      for (int h = 0; h < page_lse.count; ++h) {
        float alone = 0;
        for (int i = s * kHeads + h; i < kLanes; i += kTiles * kHeads) alone += lanes[i];
        page_lse.of[s][h] = lse_of(state.top[h], alone);
      }
    }
  }
  // With fewer heads than four, one addition would wait for another.
  if constexpr (kRegisters < 32 && kHeads == 4) {
    add_values_by_rows<T, Values, kD, kTiles, kHeads, kGap>(weights, tiles, D, state.out);
  } else {
    add_values<T, Values, kD, kTiles, kHeads, kGap>(weights, tiles, D, state.out);
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
