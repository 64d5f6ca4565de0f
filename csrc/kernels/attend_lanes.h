#pragma once

#include "kernels/attend_part.h"
#include "kernels/lanes.h"

// Attention for many heads, where arithmetic takes longer than memory, with one head in every lane. One
// instruction multiplies an element pair of a key with those of 16 heads; nothing is summed across lanes.
// Every head has processed a tile before the next one is read. The keys of a tile are multiplied with all
// heads, its values only with quads of heads of which one wants the tile. Meanwhile the next tile is
// prefetched evenly, whatever share of it is wanted.
namespace fluxion::FLUXION_ISA {
namespace {

template <int kD>
class LaneAttention : public AttendCall {
 public:
  explicit LaneAttention(const AttendCall& call) : AttendCall(call), parties((G + kLanes - 1) / kLanes) {
    for (int p = 0; p < parties; ++p) {
      Party& of = party[p];
      of.first = p * kLanes;
      of.count = smaller(G - of.first, kLanes);
      pack_heads(q + of.first * static_cast<int64_t>(dim()), of.count, dim(), of.queries);
      store(of.top, set1(kNegInf));
      store(of.total, set1(0.0f));
      store(of.used, set1(0.0f));
      for (int i = 0; i < kLanes * dim(); i += kLanes) store(of.out + i, set1(0.0f));
    }
  }

  void run() {
    if (n > 0) fetch(tile(0), static_cast<int>(tile_bytes()));
    for (int i = 0; i < n; ++i) {
      const bool more = i + 1 < known;
      ahead = ahead_end = more ? reinterpret_cast<const char*>(tile(i + 1)) : nullptr;
      for (int p = 0; p < parties; p += 2) {
        if (more) ahead_end += tile_bytes() / pairs();
        const uint32_t wanted[2] = {look_at(i, p), p + 1 < parties ? look_at(i, p + 1) : 0};
        if (wanted[0] && wanted[1]) {
          attend_to<2>(i, p, wanted);
        } else {
          for (int s = 0; s < 2; ++s) {
            if (wanted[s]) attend_to<1>(i, p + s, wanted + s);
          }
        }
        while (ahead != ahead_end) fetch_line();
      }
    }
  }

  // Writes what `attend` does. Returns false if an output is not a number: it may come from a value that the
  // head did not want, times weight 0.
  bool finish(float* o, float* lse) const {
    Vec zeros = set1(0.0f);
    for (int p = 0; p < parties; ++p) {
      const Party& of = party[p];
      for (int h = 0; h < of.count; ++h) {
        lse[of.first + h] = lse_of(of.top[h], of.total[h]);
        const Vec factor = set1(of.used[h] == 0.0f ? 0.0f : 1.0f / of.used[h]);
        const float* from = of.out + h * dim();
        float* to = o + (of.first + h) * static_cast<int64_t>(dim());
        for (int d = 0; d < dim(); d += 2 * kLanes) {
          const Vec a = mul(load(from + d), factor), b = mul(load(from + d + kLanes), factor);
          zeros = add(zeros, add(sub(a, a), sub(b, b)));
          Values::store_sums(to + d, a, b);
        }
      }
    }
    return lanes_at_least(zeros, set1(0.0f)) == kEveryLane;
  }

 private:
  using Values = typename ManyHeads<BF16>::Values;
  static constexpr int kMaxParties = kMaxHeads / kLanes;
  static constexpr int kQuad = 4;  // heads whose values are summed together

  // Up to kLanes heads, a lane each.
  struct Party {
    int first, count;
    alignas(64) float top[kLanes], total[kLanes], used[kLanes];
    alignas(64) float queries[kMaxHeadDim / 2 * kLanes];
    alignas(64) float out[kLanes * kMaxHeadDim];
  };

  int dim() const { return kD ? kD : D; }
  int64_t tile_bytes() const { return 2 * kPage * dim() * static_cast<int64_t>(sizeof(BF16)); }

  // Parties are processed in pairs.
  int pairs() const { return (parties + 1) / 2; }

  // Prefetches a line of a pair's share of the next tile, if any is left.
  void fetch_line() {
    if (ahead == ahead_end) return;
    prefetch(ahead);
    ahead += kLine;
  }

  // Returns the heads of party p that want page i, a bit each. If a head wants only a part of it, attends to
  // the page here and returns 0, because other tokens may hold anything.
  uint32_t look_at(int i, int p) {
    Party& of = party[p];
    if (masks == nullptr) return (1u << of.count) - 1;
    const int64_t at = static_cast<int64_t>(i) * G + of.first;
    uint16_t wanted[kLanes] = {}, others[kLanes];
    __builtin_memcpy(wanted, masks + at, of.count * sizeof(uint16_t));
    for (int h = 0; h < kLanes; ++h) others[h] = static_cast<uint16_t>(~wanted[h]);
    const uint32_t some = lanes_with(wanted, kAllTokens);
    if ((some & lanes_with(others, kAllTokens)) == 0) return some;
    attend_part<BF16, Values, kLanes>(q + of.first * static_cast<int64_t>(dim()), tile(i), masks + at,
                                      of.count, dim(),
                                      {of.top, of.total, of.used, of.out, kLanes, factor, scale.cap},
                                      {{page_lse ? page_lse + at : nullptr}, of.count});
    return 0;
  }

  // Attends to page i for kSide parties from p on, for the heads in `wanted` of each.
  template <int kSide>
  void attend_to(int i, int p, const uint32_t* wanted) {
    alignas(64) float scores[kSide][kPage * kLanes];
    Vec highest[kSide];
    multiply_keys<kSide>(&party[p], tile(i), wanted, scores, highest);
    for (int side = 0; side < kSide; ++side) {
      weigh(&party[p + side], wanted[side], i, highest[side], scores[side]);
      add_values(&party[p + side], tile(i) + kPage * dim(), wanted[side], scores[side]);
    }
  }

  // scores[side][t][h] = q_h . key t, scaled, -inf for heads that do not want it.
  template <int kSide>
  [[gnu::noinline]] void multiply_keys(const Party* of, const BF16* keys, const uint32_t* wanted,
                                       float (*scores)[kPage * kLanes], Vec* highest) {
    constexpr int kTokens = kPage / kSide;
    // Prefetches half of the pair's share of the next tile in half of the work.
    const char* from = ahead;
    const bool fetches = ahead_end - ahead == tile_bytes() / pairs();
    const int every = 2 * kSide * pairs() - 1;
#pragma GCC unroll 2
    for (int s = 0; s < kSide; ++s) highest[s] = load(of[s].top);
    for (int t = 0; t < kPage; t += kTokens) {
      Vec sums[kPage];
#pragma GCC unroll 16
      for (int j = 0; j < kPage; ++j) sums[j] = set1(0.0f);
      for (int d = 0; d < dim(); d += 2) {
        if (fetches && (d & every) == 0) {
          prefetch(from);
          from += kLine;
        }
        ElementPair queries[kSide];
#pragma GCC unroll 2
        for (int s = 0; s < kSide; ++s) queries[s] = pairs_of_heads(of[s].queries + d * (kLanes / 2));
#pragma GCC unroll 16
        for (int j = 0; j < kTokens; ++j) {
          const ElementPair key = pair_for_all(keys + (t + j) * dim() + d);
#pragma GCC unroll 2
          for (int s = 0; s < kSide; ++s)
            sums[j * kSide + s] = add_products(sums[j * kSide + s], queries[s], key);
        }
      }
#pragma GCC unroll 16
      for (int j = 0; j < kTokens; ++j) {
#pragma GCC unroll 2
        for (int s = 0; s < kSide; ++s) {
          // As in attend_tiles.h: bounded, and the maximum ignores NaN.
          const Vec bounded = min(set1(kMaxFloat), logits(sums[j * kSide + s], scale));
          const Vec x = keep(wanted[s], bounded, set1(kNegInf));
          store(scores[s] + (t + j) * kLanes, x);
          highest[s] = max(x, highest[s]);
        }
      }
    }
    ahead = from;
  }

  // Turns the scores of page i into weights, in the form that Values takes.
  [[gnu::noinline]] void weigh(Party* of, uint32_t wanted, int i, Vec highest, float* scores) {
    raise_tops(highest, dim(), {of->top, of->total, of->used, of->out, kLanes, factor, scale.cap});
    const Vec base = reference(load(of->top));
    Vec sum = set1(0.0f);
    for (int t = 0; t < kPage; ++t) {
      fetch_line();
      const Vec w = exp_nonpositive(sub(load(scores + t * kLanes), base));
      store(scores + t * kLanes, w);
      sum = add(sum, w);
    }
    store(of->total, add(load(of->total), sum));
    const Vec used = Values::template to_words<kLanes, kPage * kLanes>(scores, sum);
    store(of->used, add(load(of->used), used));
    if (page_lse == nullptr) return;
    float alone[kLanes];
    store(alone, sum);
    for (int h = 0; h < of->count; ++h) {
      if (wanted >> h & 1)
        page_lse[static_cast<int64_t>(i) * G + of->first + h] = lse_of(of->top[h], alone[h]);
    }
  }

  [[gnu::noinline]] void add_values(Party* of, const BF16* values, uint32_t wanted, const float* words) {
    for (int first = 0; first < of->count; first += kQuad) {
      if ((wanted >> first & ((1u << kQuad) - 1)) == 0) continue;
      for (int d = 0; d < dim(); d += 2 * kLanes) {
        fetch_line();
        float* at[kQuad];
        Vec x[kQuad], y[kQuad];
#pragma GCC unroll 4
        for (int h = 0; h < kQuad; ++h) {
          at[h] = of->out + (first + h) * dim() + d;
          x[h] = load(at[h]);
          y[h] = load(at[h] + kLanes);
        }
#pragma GCC unroll 16
        for (int t = 0; t < kPage; t += Values::kRows) {
          const BF16* row = values + t * dim() + d;
          const auto value = Values::pair(row, row + (Values::kRows - 1) * dim());
#pragma GCC unroll 4
          for (int h = 0; h < kQuad; ++h) {
            const auto weight = Values::weight(words + t / Values::kRows * kLanes + first + h);
            x[h] = Values::add(x[h], weight, value.a);
            y[h] = Values::add(y[h], weight, value.b);
          }
        }
#pragma GCC unroll 4
        for (int h = 0; h < kQuad; ++h) {
          store(at[h], x[h]);
          store(at[h] + kLanes, y[h]);
        }
      }
    }
  }

  int parties;
  const char *ahead = nullptr, *ahead_end = nullptr;  // the rest of the next tile to prefetch
  Party party[kMaxParties];
};

}  // namespace
}  // namespace fluxion::FLUXION_ISA
