#pragma once

#include "kernels/attend_part.h"
#include "kernels/attend_tiles.h"

namespace fluxion::FLUXION_ISA {
namespace {

inline constexpr int kAllTokens = 0xffff;
// Pages that all heads go through before the next ones are begun, where heads take turns: their tiles stay in
// the cache meanwhile.
inline constexpr int kTurnPages = 8;

// Heads go through a tile in parties of a power of two, which idle heads may fill up: a tile is read from
// memory for the first party, and the less often the others take turns the better. Where every head of a
// party wants all tokens of a tile, the party attends to it as a whole (attend_tiles.h), elsewhere each head
// to its own tokens (attend_part.h).
template <class T, int kD>
struct Attention {
  using Query = typename Dot<T>::Query;
  static constexpr int kMaxParties = (kMaxHeads + kHeadsTogether - 1) / kHeadsTogether;

  struct Party {
    int first;
    int count;  // heads that are not idle
    int heads;
  };

  int D, G;
  float scale;
  const T* tiles;
  const int32_t* pages;
  int known;        // pages that are listed: those to attend to, and those that follow
  float* page_lse;  // [.][G] what pages weigh by themselves; nullptr: nobody asks
  int parties = 0;
  Party party[kMaxParties];
  alignas(64) float top[kMaxParties][kLanes];
  alignas(64) float total[kMaxParties][kLanes];
  alignas(64) Query queries[kMaxHeads * kMaxHeadDim];
  alignas(64) float out[kMaxHeads * kMaxHeadDim];

  int dim() const { return kD ? kD : D; }

  Attention(const T* q, int group, int head_dim, float factor, const void* base, const int32_t* list,
            int count, float* alone)
      : D(head_dim),
        G(group),
        scale(factor),
        tiles(static_cast<const T*>(base)),
        pages(list),
        known(count),
        page_lse(alone) {
    for (int g = 0; g < G; g += kHeadsTogether) {
      const int count = smaller(G - g, kHeadsTogether);
      int heads = kHeadsTogether;
      while (heads / 2 >= count) heads /= 2;
      store(top[parties], set1(kNegInf));
      store(total[parties], set1(0.0f));
      party[parties++] = {g, count, heads};
    }
    const Party& last = party[parties - 1];
    const int zeros = (last.first + last.heads - G) * dim();
    __builtin_memset(queries + G * dim(), 0, zeros * sizeof(Query));
    for (int d = 0; d < G * dim() + zeros; d += kLanes) store(out + d, set1(0.0f));
    for (int g = 0; g < G; ++g) Dot<T>::pack(q + g * dim(), dim(), queries + g * dim());
  }

  const T* tile(int i) const { return tiles + pages[i] * (2 * kPage * static_cast<int64_t>(dim())); }
  HeadStates state(int p) { return {top[p], total[p], out + party[p].first * dim()}; }

  // For page i and the heads of party p.
  float* alone(int p, int i) const {
    return page_lse == nullptr ? nullptr : page_lse + i * static_cast<int64_t>(G) + party[p].first;
  }

  // Calls run<heads>() for the heads of a party.
  template <class Run>
  static void with_heads(int heads, Run&& run) {
    if constexpr (kHeadsTogether >= 8) {
      if (heads == 8) return run.template operator()<8>();
      if (heads == 4) return run.template operator()<4>();
      if (heads == 2) return run.template operator()<2>();
    }
    run.template operator()<1>();
  }

  template <int kTiles>
  static int rows_ahead(int D) {
    return smaller(kAheadBytes / (kTiles * D * static_cast<int>(sizeof(T))), 2 * kPage);
  }

  // All of the first n pages, for a single party.
  void add_pages(int n) {
    with_heads(party[0].heads, [&]<int kHeads>() {
      constexpr int kTiles = kTilesTogether<kHeads>;
      const int ahead = rows_ahead<kTiles>(dim());
      for (int row = 0; row < ahead; ++row) {
        for (int s = 0; s < smaller(kTiles, n); ++s) fetch_row(tile(s) + row * dim());
      }
      int i = 0;
      for (; i + kTiles <= n; i += kTiles) {
        TileRows<T, kTiles> rows;
        rows.ahead = ahead;
        PageLse note{{}, G};
        for (int s = 0; s < kTiles; ++s) {
          note.of[s] = alone(0, i + s);
          rows.now[s] = tile(i + s);
          rows.next[s] = i + kTiles + s < known ? tile(i + kTiles + s) : nullptr;
        }
        attend_tiles<T, kD, kTiles, kHeads>(queries, rows, D, scale, state(0), note);
      }
      for (; i < n; ++i) {
        const TileRows<T, 1> rows{{tile(i)}, {i + 1 < known ? tile(i + 1) : nullptr}, 2 * kPage};
        attend_tiles<T, kD, 1, kHeads>(queries, rows, D, scale, state(0), {{alone(0, i)}, G});
      }
    });
  }

  void fetch_row(const T* row) const {
    const char* p = reinterpret_cast<const char*>(row);
    for (int64_t b = 0; b < dim() * static_cast<int64_t>(sizeof(T)); b += kLine) prefetch(p + b);
  }

  // Pages first..end-1, by parties in turn. masks: [.][G], of page 0 on; nullptr: every token of all.
  void add_pages_in_turns(int first, int end, const uint16_t* masks) {
    Ahead ahead;
    look_ahead(first, end, masks, &ahead);
    for (const T* next; (next = ahead.take()) != nullptr;) {
      for (int row = 0; row < 2 * kPage; ++row) fetch_row(next + row * dim());
    }
    for (int i = first; i < end; i += kTurnPages) {
      const int to = smaller(i + kTurnPages, end);
      look_ahead(to, masks ? end : known, masks, &ahead);
      for (int p = 0; p < parties; ++p) {
        // Every party fetches its share of what comes next.
        ahead.limit = (ahead.count * (p + 1) + parties - 1) / parties;
        with_heads(party[p].heads, [&]<int kHeads>() { add_turn<kHeads>(p, i, to, masks, &ahead); });
      }
    }
  }

  // The tiles of the turn that comes next.
  struct Ahead {
    const T* tiles[kTurnPages];
    int count = 0, taken = 0, limit = kTurnPages;

    const T* take() { return taken < smaller(count, limit) ? tiles[taken++] : nullptr; }
  };

  // Lists the tiles of one turn from page `first` on. Tiles of which little is wanted are not listed: the
  // rows that are wanted are fetched.
  void look_ahead(int first, int end, const uint16_t* masks, Ahead* to) const {
    *to = Ahead{};
    for (int i = first; i < smaller(first + kTurnPages, end); ++i) {
      int any = masks ? 0 : kAllTokens;
      for (int g = 0; masks && g < G; ++g) any |= masks[static_cast<int64_t>(i) * G + g];
      if (__builtin_popcount(any) > kSparseTokens) {
        to->tiles[to->count++] = tile(i);
        continue;
      }
      for (int bits = any; bits; bits &= bits - 1) {
        const T* row = tile(i) + __builtin_ctz(bits) * dim();
        fetch_row(row);
        fetch_row(row + kPage * dim());
      }
    }
  }

  template <int kHeads>
  void add_turn(int p, int first, int end, const uint16_t* masks, Ahead* ahead) {
    constexpr int kTiles = kTilesTogether<kHeads>;
    const Query* q = queries + party[p].first * dim();
    const HeadStates states = state(p);
    int whole[kTurnPages], count = 0;
    for (int i = first; i < end; ++i) {
      const uint16_t* mask = masks ? masks + static_cast<int64_t>(i) * G + party[p].first : nullptr;
      int all = kAllTokens;
      int any = mask == nullptr;
      for (int h = 0; mask && h < party[p].count; ++h) {
        all &= mask[h];
        any |= mask[h];
      }
      if (all == kAllTokens) {
        whole[count++] = i;
      } else if (any) {
        attend_part<T, kHeads>(q, tile(i), mask, party[p].count, dim(), scale, states,
                               {{alone(p, i)}, party[p].count});
      }
    }
    const auto add = [&]<int kSide>(int i) {
      TileRows<T, kSide> rows;
      rows.ahead = 2 * kPage;
      PageLse note{{}, party[p].count};
      for (int s = 0; s < kSide; ++s) {
        note.of[s] = alone(p, whole[i + s]);
        rows.now[s] = tile(whole[i + s]);
        rows.next[s] = ahead->take();
      }
      attend_tiles<T, kD, kSide, kHeads>(q, rows, D, scale, states, note);
    };
    int i = 0;
    for (; i + kTiles <= count; i += kTiles) add.template operator()<kTiles>(i);
    for (; i < count; ++i) add.template operator()<1>(i);
  }

  void finish(float* o, float* lse) const {
    for (int p = 0; p < parties; ++p) {
      for (int h = 0; h < party[p].count; ++h) {
        float sum = 0;
        for (int i = h; i < kLanes; i += party[p].heads) sum += total[p][i];
        const int g = party[p].first + h;
        lse[g] = lse_of(top[p][h], sum);
        const Vec factor = set1(sum == 0.0f ? 0.0f : 1.0f / sum);
        const float* from = out + g * dim();
        float* to = o + g * dim();
        int d = 0;
        for (; d + 2 * kLanes <= dim(); d += 2 * kLanes)
          store_pair<T>(to + d, mul(load(from + d), factor), mul(load(from + d + kLanes), factor));
        if (d < dim()) store(to + d, mul(load(from + d), factor));
      }
    }
  }
};

template <class T, int kD>
void attend_dim(const T* q, int G, int D, float scale, const void* tiles, const int32_t* pages,
                const uint16_t* masks, int n, int ahead, float* o, float* lse, float* page_lse) {
  Attention<T, kD> attention(q, G, D, scale, tiles, pages, n + ahead, page_lse);
  for (int64_t i = 0; page_lse && i < static_cast<int64_t>(n) * G; ++i) page_lse[i] = kNegInf;
  // Up to the first page of which some head does not want everything there are no masks to look at.
  int plain = n;
  for (int64_t i = 0; masks && i < static_cast<int64_t>(n) * G; ++i) {
    if (masks[i] != kAllTokens) {
      plain = static_cast<int>(i / G);
      break;
    }
  }
  if (attention.parties == 1) {
    attention.add_pages(plain);
  } else {
    attention.add_pages_in_turns(0, plain, nullptr);
  }
  if (plain < n) attention.add_pages_in_turns(plain, n, masks);
  attention.finish(o, lse);
}

template <class T>
void attend_pages(const void* q, int G, int D, float scale, const void* tiles, const int32_t* pages,
                  const uint16_t* masks, int n, int ahead, float* o, float* lse, float* page_lse) {
  const T* queries = static_cast<const T*>(q);
  switch (D) {
    case 64:
      return attend_dim<T, 64>(queries, G, D, scale, tiles, pages, masks, n, ahead, o, lse, page_lse);
    case 128:
      return attend_dim<T, 128>(queries, G, D, scale, tiles, pages, masks, n, ahead, o, lse, page_lse);
    default:
      return attend_dim<T, 0>(queries, G, D, scale, tiles, pages, masks, n, ahead, o, lse, page_lse);
  }
}

template <class T>
void attend(const void* q, int G, int D, float scale, const void* tiles, const int32_t* pages,
            const uint16_t* masks, int n, int ahead, float* o, float* lse) {
  attend_pages<T>(q, G, D, scale, tiles, pages, masks, n, ahead, o, lse, nullptr);
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
