#pragma once

#include "kernels/attend_part.h"
#include "kernels/matrix.h"

// Attention by matrix products: keys times queries, weights times values. Keys and values are factors as they
// lie in memory.
//
// A product sums pairs of neighbours in a row. In a row of keys these are pairs of dimensions, as required.
// Rows of values must not be summed in pairs, so each weight is paired with a 0, once before it and once
// after it. This gives the sums of the even and of the odd dimensions: the layout of pairs (simd/avx512.h).
// Weights are split into two bf16 numbers (Split).
namespace fluxion::FLUXION_ISA {
namespace {

template <int kD>
class MatrixAttention : public AttendCall {
 public:
  explicit MatrixAttention(const AttendCall& call)
      : AttendCall(call), parties((G + kMatrixHeads - 1) / kMatrixHeads) {
    for (int p = 0; p < parties; ++p) {
      Party& of = party[p];
      of.first = p * kMatrixHeads;
      of.count = smaller(G - of.first, kMatrixHeads);
      pack_heads(q + of.first * dim(), of.count, dim(), of.queries[0][0]);
      store(of.top, set1(kNegInf));
      store(of.total, set1(0.0f));
      store(of.used, set1(0.0f));
      for (int i = 0; i < kMatrixRows * dim(); i += kLanes) store(of.out + i, set1(0.0f));
    }
    // Products use the rows of all heads of a party, missing ones included.
    __builtin_memset(weights, 0, sizeof(weights));
    ahead.lines = static_cast<int>(2 * kPage * row_bytes() / kLine);
  }

  void run() {
    int seen = 0;
    for (int i = 0; i < n; ++i) {
      if (i % kSide == 0) {
        while (seen < smaller(i + kLead, known)) look_at(seen++);
        if (seen == known) ahead.close();
        // Prefetches what is read too soon for the gradual prefetch.
        ahead.fetch_to(place[i % kPlaces], ahead.lines * 3 / 4);
      }
      for (int p = 0; p < parties; ++p) {
        const int tokens = any(i, party[p].first, party[p].count);
        if (tokens == kAllTokens) {
          party[p].pages[party[p].waiting++] = i;
          if (party[p].waiting == kSide) attend_to_waiting(&party[p]);
        } else if (tokens) {
          finish_work();
          add_part(&party[p], i);
        }
      }
    }
    for (int p = 0; p < parties; ++p) {
      if (party[p].waiting) attend_to_waiting(&party[p]);
    }
    finish_work();
    ahead.fetch_to(ahead.added, 0);
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
        float* to = o + (of.first + h) * dim();
        for (int d = 0; d < dim(); d += 2 * kLanes) {
          Vec a = load(from + d), b = load(from + d + kLanes);
          if (of.few()) {
            const float* low = from + kFew * dim() + d;
            a = add(a, load(low));
            b = add(b, load(low + kLanes));
          }
          a = mul(a, factor);
          b = mul(b, factor);
          zeros = add(zeros, add(sub(a, a), sub(b, b)));
          store_pair<BF16>(to + d, a, b);
        }
      }
    }
    return lanes_at_least(zeros, set1(0.0f)) == kEveryLane;
  }

 private:
  static constexpr int kSide = 2;  // tiles that the unit multiplies side by side
  static constexpr int kMaxParties = kMaxHeads / kMatrixHeads;
  static constexpr int kMaxDepth = kMaxHeadDim / kMatrixDepth;
  static constexpr int kFew = kMatrixHeads / 2;
  static constexpr int kLead = 8;  // pages that are looked at ahead of attention
  static constexpr int kPlaces = 2 * kLead;

  // Up to 16 heads. With up to 8, rows h and 8 + h of the sums belong to head h: for the high and the low
  // parts of its weights.
  struct Party {
    int first, count;
    int waiting = 0;  // pages to attend to once there are kSide of them
    int pages[kSide];
    alignas(64) float top[kLanes], total[kLanes], used[kLanes];
    alignas(64) Matrix queries[kMaxDepth];
    alignas(64) float out[kMatrixRows * kMaxHeadDim];

    bool few() const { return count <= kFew; }
  };

  // Tiles for a party. Some head of it wants every token: unwanted tokens may hold NaN.
  struct Work {
    Party* party = nullptr;
    int count;  // tiles; the last one stands in for missing ones
    int pages[kSide];
    const BF16* tiles[kSide];
    uint16_t wanted[kSide][kMatrixHeads];
  };

  int dim() const { return kD ? kD : D; }
  int64_t row_bytes() const { return dim() * static_cast<int64_t>(sizeof(BF16)); }

  // The tokens of page i that some of `count` heads want.
  int any(int i, int first, int count) const {
    if (masks == nullptr) return kAllTokens;
    int tokens = 0;
    for (int h = 0; h < count; ++h) tokens |= masks[static_cast<int64_t>(i) * G + first + h];
    return tokens;
  }

  // Queues page i for prefetching. If few of its tokens are wanted, their rows are prefetched at once
  // instead.
  void look_at(int i) {
    place[i % kPlaces] = ahead.added;
    const int tokens = any(i, 0, G);
    if (__builtin_popcount(tokens) > kSparseTokens) {
      ahead.add(tile(i));
      return;
    }
    for (int bits = tokens; bits; bits &= bits - 1) {
      const BF16* row = tile(i) + __builtin_ctz(bits) * dim();
      fetch(row, static_cast<int>(row_bytes()));
      fetch(row + kPage * dim(), static_cast<int>(row_bytes()));
    }
  }

  HeadStates state(Party* of) {
    return {of->top, of->total, of->used, of->out, kMatrixRows, factor, scale.cap};
  }

  // Attends to a page with tokens that no head wants, which may hold anything: by vectors, head by head.
  void add_part(Party* of, int i) {
    alignas(64) typename Dot<BF16>::Query packed[kMatrixHeads * kMaxHeadDim];
    for (int h = 0; h < of->count; ++h)
      Dot<BF16>::pack(q + (of->first + h) * dim(), dim(), packed + h * dim());
    const int64_t at = static_cast<int64_t>(i) * G + of->first;
    const PageLse note{{page_lse ? page_lse + at : nullptr}, of->count};
    const auto run =
        of->few() ? attend_part<BF16, Mix<BF16>, kFew> : attend_part<BF16, Mix<BF16>, kMatrixHeads>;
    run(packed, tile(i), masks + at, of->count, dim(), state(of), note);
  }

  void attend_to_waiting(Party* of) {
    Work& next = works[1 - current];
    next.party = of;
    next.count = of->waiting;
    of->waiting = 0;
    for (int s = 0; s < kSide; ++s) {
      const bool here = s < next.count;
      const int i = of->pages[here ? s : next.count - 1];
      next.pages[s] = i;
      next.tiles[s] = tile(i);
      const uint16_t* mask = masks ? masks + static_cast<int64_t>(i) * G + of->first : nullptr;
      for (int h = 0; h < kMatrixHeads; ++h) {
        next.wanted[s][h] = 0;
        if (here && h < of->count) next.wanted[s][h] = mask ? mask[h] : kAllTokens;
      }
    }
    if (works[current].party) {
      advance<true, true>(works[current], next);
    } else {
      advance<false, true>(works[current], next);
    }
    current = 1 - current;
  }

  void finish_work() {
    if (works[current].party == nullptr) return;
    advance<true, false>(works[current], works[current]);
    works[current].party = nullptr;
  }

  // The second half of the work of `now` and the first half of that of `next`. The unit multiplies for one
  // while the scores of the other become weights; lines are prefetched all the time.
  template <bool kNow, bool kNext>
  [[gnu::noinline]] void advance(const Work& now, const Work& next) {
    multiply_keys<kNow, kNext>(now, next);
    multiply_values<kNow, kNext>(now, next);
    if constexpr (kNext) {
      const Party& of = *next.party;
      if (of.few()) __builtin_memcpy(next_top + kFew, next_top, kFew * sizeof(float));
      raise_tops(load(next_top), dim(), state(next.party));
    }
  }

  // One party's share of the lines to prefetch; all parties together prefetch as much as they use.
  int share(int all) const { return (all + parties - 1) / parties; }

  // products[s][t][h] = q_h . key t of tile s of `next`; scores of `now` become weights.
  template <bool kNow, bool kNext>
  void multiply_keys(const Work& now, const Work& next) {
    const int depth = dim() / kMatrixDepth;
    int weighed = 0, step = 0;
    zero_matrix<0>();
    zero_matrix<1>();
    for (int c = 0; c < depth; ++c) {
      if constexpr (kNext) load_matrix<2>(next.party->queries[c], kMatrixRowBytes);
      const auto tile_step = [&]<int s>() {
        if constexpr (kNext) {
          load_matrix<3 + s>(next.tiles[s] + c * kMatrixDepth, row_bytes());
          multiply_matrices<s, 3 + s, 2>();
        }
        ahead.fetch(share(4));
        ++step;
        if constexpr (kNow) {
          for (; weighed * kSide * depth < step * now.party->count; ++weighed) weigh(now, weighed);
        }
      };
      tile_step.template operator()<0>();
      tile_step.template operator()<1>();
    }
    if constexpr (kNext) {
      store_matrix<0>(products[0], kMatrixRowBytes);
      store_matrix<1>(products[1], kMatrixRowBytes);
    }
  }

  // Adds the values of `now` times their weights; products of `next` become scores. Two times 32 dimensions
  // at a time, as long as possible.
  template <bool kNow, bool kNext>
  void multiply_values(const Work& now, const Work& next) {
    const int depth = dim() / kMatrixDepth, steps = (depth + 1) / 2 * kSide;
    const int64_t out_bytes = dim() * static_cast<int64_t>(sizeof(float));
    int scored = 0, step = 0;
    if constexpr (kNext) store(next_top, load(next.party->top));
    for (int c = 0; c < depth; c += 2) {
      const bool two = c + 1 < depth;
      float* out = kNow ? now.party->out + c * kMatrixDepth : nullptr;
      if constexpr (kNow) {
        load_matrix<0>(out, out_bytes);
        load_matrix<1>(out + kMatrixColumns, out_bytes);
        if (two) {
          load_matrix<2>(out + kMatrixDepth, out_bytes);
          load_matrix<3>(out + kMatrixDepth + kMatrixColumns, out_bytes);
        }
      }
      for (int s = 0; s < kSide; ++s) {
        if constexpr (kNow) add_values(now, s, c, two);
        ahead.fetch(share(two ? 8 : 4));
        ++step;
        if constexpr (kNext) {
          for (; scored * steps < step * next.party->count; scored += 4) take_scores(next, scored);
        }
      }
      if constexpr (kNow) {
        store_matrix<0>(out, out_bytes);
        store_matrix<1>(out + kMatrixColumns, out_bytes);
        if (two) {
          store_matrix<2>(out + kMatrixDepth, out_bytes);
          store_matrix<3>(out + kMatrixDepth + kMatrixColumns, out_bytes);
        }
      }
    }
  }

  // Adds 32 dimensions of tile s from 32 * c on, or 64 with `two`.
  void add_values(const Work& of, int s, int c, bool two) const {
    const BF16* values = of.tiles[s] + kPage * dim() + c * kMatrixDepth;
    load_matrix<4>(values, row_bytes());
    if (two) load_matrix<5>(values + kMatrixDepth, row_bytes());
    for (int part = 0; part < (of.party->few() ? 1 : 2); ++part) {
      load_matrix<6>(weights[s][2 * part], kMatrixRowBytes);
      load_matrix<7>(weights[s][2 * part + 1], kMatrixRowBytes);
      multiply_matrices<0, 6, 4>();
      multiply_matrices<1, 7, 4>();
      if (two) {
        multiply_matrices<2, 6, 5>();
        multiply_matrices<3, 7, 5>();
      }
    }
  }

  // scores[h][s * 16 + t] = q_h . key t of tile s, scaled, and their next_top: four heads from h on.
  void take_scores(const Work& of, int h) {
    Vec highest[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) highest[j] = set1(of.party->top[h + j]);
#pragma GCC unroll 2
    for (int s = 0; s < kSide; ++s) {
      Vec columns[4];
      four_columns([&](int t) { return products[s][t] + h; }, columns);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        // As in attend_tiles.h: bounded, and the maximum ignores NaN.
        const Vec x = min(set1(kMaxFloat), logits(columns[j], scale));
        const Vec kept = keep(of.wanted[s][h + j], x, set1(kNegInf));
        store(scores[h + j] + s * kPage, kept);
        highest[j] = max(kept, highest[j]);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) next_top[h + j] = reduce_max(highest[j]);
  }

  // Turns the scores of head h into weights.
  void weigh(const Work& of, int h) {
    const Vec base = reference(set1(of.party->top[h]));
    float* to = weights[0][0][h];
    const int low = of.party->few() ? kFew * kMatrixColumns : 2 * kMatrixRows * kMatrixColumns;
    Vec sum = set1(0.0f), used = set1(0.0f);
#pragma GCC unroll 2
    for (int s = 0; s < kSide; ++s, to += 4 * kMatrixRows * kMatrixColumns) {
      const Vec w = exp_nonpositive(sub(load(scores[h] + s * kPage), base));
      sum = add(sum, w);
      const Split split(w);
      used = add(used, add(split.high_second, split.low_second));
      store(to, split.high_first);
      store(to + kMatrixRows * kMatrixColumns, split.high_second);
      store(to + low, split.low_first);
      store(to + low + kMatrixRows * kMatrixColumns, split.low_second);
      if (page_lse && s < of.count)
        page_lse[static_cast<int64_t>(of.pages[s]) * G + of.party->first + h] =
            lse_of(of.party->top[h], reduce_add(w));
    }
    of.party->total[h] += reduce_add(sum);
    of.party->used[h] += reduce_add(used);
  }

  int parties;
  FetchQueue ahead;
  int place[kPlaces];  // of looked-at pages, in the prefetch queue
  MatrixUnit unit;
  Party party[kMaxParties];
  Work works[2];
  int current = 0;  // index in works: its scores are taken, its values are not yet added
  alignas(64) Matrix products[kSide];
  alignas(64) float scores[kMatrixHeads][kSide * kPage];
  alignas(64) float next_top[kLanes];
  // [2 * part + side]: weights before a 0 and after it. part: high (with few heads, both), low.
  alignas(64) Matrix weights[kSide][4];
};

}  // namespace
}  // namespace fluxion::FLUXION_ISA
