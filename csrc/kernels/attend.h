#pragma once

#include "kernels/attend_int8.h"
#include "kernels/attend_part.h"
#include "kernels/attend_tiles.h"
#ifdef FLUXION_MATRIX_UNIT
#include "kernels/attend_matrix.h"
#endif
#ifdef FLUXION_PAIR_PRODUCTS
#include "kernels/attend_lanes.h"
#endif

namespace fluxion::FLUXION_ISA {
namespace {

// When parties take turns, all of them go through this many tiles before the next tiles begin. The tiles stay
// in the L2 cache meanwhile, together with prefetched ones. With more tiles a head more often has several to
// go through side by side.
inline constexpr int kTurnBytes = 128 << 10;
inline constexpr int kMaxTurnPages = 32;

// Heads go through a tile in parties of a power of two, filled up with idle heads. A tile is read from memory
// for the first party, and few turns of the others are best. If every head of a party wants all tokens of a
// tile, the party attends to it as a whole (attend_tiles.h). Otherwise each head attends to its own tokens
// (attend_part.h). For Int8 both are in attend_int8.h. Values: how values are summed (simd/mix.h).
template <class T, class Values, int kD>
struct Attention {
  using Query = typename Dot<T>::Query;
  // Whether a token can be read without the others of its tile.
  static constexpr bool kByTokens = sizeof(T) != sizeof(Int8);
  // Tiles that are read side by side for kHeads heads.
  template <int kHeads>
  static constexpr int kSide = kByTokens || kRegisters < 32 ? kTilesTogether<kHeads> : 4;
  static constexpr int kMaxParties = kMaxHeads;
  static constexpr int kMaxPlaces = 2 * kMaxHeads;  // fewer than half of a party's heads are idle

  struct Party {
    int first;
    int count;  // heads that are not idle
    int heads;
    int place;  // of the first head, in queries and out
  };

  int D, G;
  float cap;  // of logits (Scale)
  const T* tiles;
  const int32_t* pages;
  int known;        // listed pages: those to attend to, and those that follow
  float* page_lse;  // [.][G]: LSE of each page alone; nullptr: not wanted
  int parties = 0;
  Party party[kMaxParties];
  alignas(64) float top[kMaxParties][kLanes];
  alignas(64) float total[kMaxParties][kLanes];
  alignas(64) float used[kMaxParties][kLanes];
  alignas(64) float factor[kMaxParties][kLanes];
  alignas(64) Query queries[kMaxPlaces * kMaxHeadDim];
  alignas(64) float out[kMaxPlaces * kMaxHeadDim];

  int dim() const { return kD ? kD : D; }

  // masks: of the first n pages, or nullptr.
  Attention(const Model<T>* q, int group, int head_dim, Scale scale, const void* base, const int32_t* list,
            const uint16_t* masks, int n, int ahead, float* alone)
      : D(head_dim),
        G(group),
        cap(scale.cap),
        tiles(static_cast<const T*>(base)),
        pages(list),
        known(n + ahead),
        page_lse(alone) {
    form_parties(masks, n);
    for (int p = 0; p < parties; ++p) {
      store(top[p], set1(kNegInf));
      store(total[p], set1(0.0f));
      store(used[p], set1(0.0f));
      const Party& of = party[p];
      Query* packed = queries + of.place * dim();
      store(factor[p], set1(scale.factor));
      for (int h = 0; h < of.count; ++h) {
        const float units = Dot<T>::pack(q + (of.first + h) * dim(), dim(), packed + h * dim());
        for (int i = h; i < kLanes; i += of.heads) factor[p][i] = scale.factor * units;
      }
      __builtin_memset(packed + of.count * dim(), 0, (of.heads - of.count) * dim() * sizeof(Query));
      float* sums = out + of.place * dim();
      for (int d = 0; d < of.heads * dim(); d += kLanes) store(sums + d, set1(0.0f));
    }
  }

  // Forms parties of as many heads as fit. With more heads than that, they are of several requests, and the
  // heads of one request mostly want the same tokens of every page. Such heads form a party of their own, so
  // that it attends to few tiles by part.
  void form_parties(const uint16_t* masks, int n) {
    uint16_t apart[kMaxHeads + 1] = {};  // not 0: the head wants other tokens than the one before
    for (int64_t i = 0; masks && G > kHeadsTogether && i < n; ++i) {
      for (int g = 1; g < G; ++g) apart[g] |= masks[i * G + g] ^ masks[i * G + g - 1];
    }
    apart[G] = 1;
    for (int g = 0, place = 0; g < G; g += party[parties++].count) {
      const int most = smaller(G - g, kHeadsTogether);
      int count = 1;
      while (count < most && !apart[g + count]) ++count;
      // Heads that differ from their neighbours are taken in order.
      while (apart[g + 1] && count < most && apart[g + count] && apart[g + count + 1]) ++count;
      int heads = kHeadsTogether;
      while (heads / 2 >= count) heads /= 2;
      party[parties] = {g, count, heads, place};
      place += heads;
    }
  }

  int tile_bytes() const { return static_cast<int>(TileOf<T>::size(dim()) * sizeof(T)); }
  const T* tile(int i) const { return tile_at<T>(tiles, pages[i], dim()); }
  HeadStates state(int p) {
    return {top[p], total[p], used[p], out + party[p].place * dim(), party[p].heads, factor[p], cap};
  }

  // Where the LSE of page i goes for the heads of party p.
  float* alone(int p, int i) const {
    return page_lse == nullptr ? nullptr : page_lse + i * static_cast<int64_t>(G) + party[p].first;
  }

  // Calls run<heads>() for the heads of a party.
  template <class Run>
  static void with_heads(int heads, Run&& run) {
    if constexpr (kHeadsTogether >= 8) {
      if (heads == 8) return run.template operator()<8>();
    }
    if constexpr (kHeadsTogether >= 4) {
      if (heads == 4) return run.template operator()<4>();
      if (heads == 2) return run.template operator()<2>();
    }
    run.template operator()<1>();
  }

  // A multiple of the rows that are read together, and less than a tile: in the next tile the same distances
  // are bad (simd/pace.h).
  template <int kTiles>
  static int rows_ahead(int D) {
    constexpr int kTogether = 4, kMost = 2 * kPage * 3 / 4;
    const int rows = Pace<kTiles>::kAheadBytes / (kTiles * D * static_cast<int>(sizeof(T)));
    return rows < kTogether ? kTogether : smaller(rows, kMost) / kTogether * kTogether;
  }

  // Attends to all tokens of the first n pages, for a single party. near: a cache has the pages.
  void add_pages(int n, bool near) {
    with_heads(party[0].heads, [&]<int kHeads>() {
      constexpr int kTiles = kSide<kHeads>;
      const int ahead = rows_ahead<kTiles>(dim());
      for (int s = 0; s < smaller(kTiles, n); ++s) fetch_scales(tile(s));
      for (int row = 0; row < ahead; ++row) {
        for (int s = 0; s < smaller(kTiles, n); ++s) fetch_row(tile(s) + row * dim());
      }
      const int steps = n / kTiles;
      const auto add = [&]<int kGap>(int first, int end) {
        for (int i = first * kTiles; i < end * kTiles; i += kTiles) {
          TileRows<T, kTiles> rows;
          rows.ahead = ahead;
          PageLse note{{}, G};
          for (int s = 0; s < kTiles; ++s) {
            note.of[s] = alone(0, i + s);
            rows.now[s] = tile(i + s);
            rows.next[s] = i + kTiles + s < known ? tile(i + kTiles + s) : nullptr;
          }
          add_tiles<kTiles, kHeads, kGap>(queries, rows, state(0), note);
        }
      };
      if (near) {
        add.template operator()<Pace<kTiles>::kGaps[0]>(0, steps);
      } else {
        throttled<kTiles>(steps, kTiles * tile_bytes() / kLine, add);
      }
      for (int i = steps * kTiles; i < n; ++i) {
        const TileRows<T, 1> rows{{tile(i)}, {i + 1 < known ? tile(i + 1) : nullptr}, 2 * kPage};
        add_tiles<1, kHeads>(queries, rows, state(0), {{alone(0, i)}, G});
      }
    });
  }

  // Attends to every token of tiles side by side.
  template <int kTiles, int kHeads, int kGap = Pace<kTiles>::kGaps[0]>
  void add_tiles(const Query* q, const TileRows<T, kTiles>& rows, const HeadStates& to, const PageLse& note) {
    if constexpr (kByTokens) {
      attend_tiles<T, Values, kD, kTiles, kHeads, kGap>(q, rows, D, to, note);
    } else {
      attend_int8<kD, kTiles, kHeads, false, kGap>(q, rows, nullptr, kHeads, D, to, note);
    }
  }

  // Attends to the tokens of a tile that each head wants.
  template <int kHeads>
  void add_part(const Query* q, const T* tile, const uint16_t* mask, int count, const HeadStates& to,
                const PageLse& note) {
    if constexpr (kByTokens) {
      attend_part<T, Values, kHeads>(q, tile, mask, count, dim(), to, note);
    } else {
      attend_int8<kD, 1, kHeads, true>(q, {{tile}, {nullptr}, 0}, mask, count, D, to, note);
    }
  }

  void fetch_scales(const T* tile) const {
    if constexpr (!kByTokens) fetch(scales_of(tile, dim()), kScaleBytes);
  }
  void fetch_row(const T* row) const { fetch(row, dim() * static_cast<int>(sizeof(T))); }

  int turn_pages() const {
    const int pages = kTurnBytes / tile_bytes();
    return pages < 1 ? 1 : smaller(pages, kMaxTurnPages);
  }

  // Pages first..end-1, by parties in turn. masks: [.][G], of page 0 on; nullptr: every token of all.
  void add_pages_in_turns(int first, int end, const uint16_t* masks) {
    Ahead ahead;
    look_ahead(first, end, masks, &ahead);
    for (const T* next; (next = ahead.take()) != nullptr;) {
      fetch_scales(next);
      for (int row = 0; row < 2 * kPage; ++row) fetch_row(next + row * dim());
    }
    for (int i = first; i < end; i += turn_pages()) {
      const int to = smaller(i + turn_pages(), end);
      look_ahead(to, masks ? end : known, masks, &ahead);
      for (int p = 0; p < parties; ++p) {
        // Every party prefetches its share of the next turn.
        ahead.limit = (ahead.count * (p + 1) + parties - 1) / parties;
        with_heads(party[p].heads, [&]<int kHeads>() { add_turn<kHeads>(p, i, to, masks, &ahead); });
      }
    }
  }

  // The tiles of the next turn.
  struct Ahead {
    const T* tiles[kMaxTurnPages];
    int count = 0, taken = 0, limit = kMaxTurnPages;

    const T* take() { return taken < smaller(count, limit) ? tiles[taken++] : nullptr; }
  };

  // Lists the tiles of one turn from page `first` on. A tile with few wanted tokens is not listed: its wanted
  // rows are prefetched instead.
  void look_ahead(int first, int end, const uint16_t* masks, Ahead* to) const {
    *to = Ahead{};
    for (int i = first; i < smaller(first + turn_pages(), end); ++i) {
      int any = masks ? 0 : kAllTokens;
      for (int g = 0; masks && g < G; ++g) any |= masks[static_cast<int64_t>(i) * G + g];
      if (__builtin_popcount(any) > (kByTokens ? kSparseTokens : 0)) {
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
    constexpr int kTiles = kSide<kHeads>;
    const Query* q = queries + party[p].place * dim();
    const HeadStates states = state(p);
    int whole[kMaxTurnPages], count = 0;
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
        add_part<kHeads>(q, tile(i), mask, party[p].count, states, {{alone(p, i)}, party[p].count});
      }
    }
    const auto add = [&]<int kTogether>(int i) {
      TileRows<T, kTogether> rows;
      rows.ahead = 2 * kPage;
      PageLse note{{}, party[p].count};
      for (int s = 0; s < kTogether; ++s) {
        note.of[s] = alone(p, whole[i + s]);
        rows.now[s] = tile(whole[i + s]);
        rows.next[s] = ahead->take();
      }
      add_tiles<kTogether, kHeads>(q, rows, states, note);
    };
    int i = 0;
    for (; i + kTiles <= count; i += kTiles) add.template operator()<kTiles>(i);
    if constexpr (kTiles > 2) {
      for (; i + 2 <= count; i += 2) add.template operator()<2>(i);
    }
    for (; i < count; ++i) add.template operator()<1>(i);
  }

  void finish(float* o, float* lse) const {
    for (int p = 0; p < parties; ++p) {
      for (int h = 0; h < party[p].count; ++h) {
        float sum = 0, divisor = 0;
        for (int i = h; i < kLanes; i += party[p].heads) {
          sum += total[p][i];
          divisor += used[p][i];
        }
        const int g = party[p].first + h;
        lse[g] = lse_of(top[p][h], sum);
        const Vec factor = set1(divisor == 0.0f ? 0.0f : 1.0f / divisor);
        const float* from = out + (party[p].place + h) * dim();
        float* to = o + g * dim();
        int d = 0;
        for (; d + 2 * kLanes <= dim(); d += 2 * kLanes)
          Values::store_sums(to + d, mul(load(from + d), factor), mul(load(from + d + kLanes), factor));
        if (d < dim()) store(to + d, mul(load(from + d), factor));
      }
    }
  }
};

template <class T, class Values, int kD>
void attend_with(const Model<T>* q, int G, int D, Scale scale, const void* tiles, const int32_t* pages,
                 const uint16_t* masks, int n, int ahead, bool near, float* o, float* lse, float* page_lse) {
  Attention<T, Values, kD> attention(q, G, D, scale, tiles, pages, masks, n, ahead, page_lse);
  for (int64_t i = 0; page_lse && i < static_cast<int64_t>(n) * G; ++i) page_lse[i] = kNegInf;
  // Pages before the first one with a masked token need no masks.
  int plain = n;
  for (int64_t i = 0; masks && i < static_cast<int64_t>(n) * G; ++i) {
    if (masks[i] != kAllTokens) {
      plain = static_cast<int>(i / G);
      break;
    }
  }
  if (attention.parties == 1) {
    attention.add_pages(plain, near);
  } else {
    attention.add_pages_in_turns(0, plain, nullptr);
  }
  if (plain < n) attention.add_pages_in_turns(plain, n, masks);
  attention.finish(o, lse);
}

#if defined(FLUXION_MATRIX_UNIT) || defined(FLUXION_PAIR_PRODUCTS)
// As attend, but returns false if the work has to be done in another way.
template <class Way, class T>
bool attend_by(const BF16* q, int G, int D, Scale scale, const T* tiles, const int32_t* pages,
               const uint16_t* masks, int n, int ahead, float* o, float* lse, float* page_lse) {
  for (int64_t i = 0; page_lse && i < static_cast<int64_t>(n) * G; ++i) page_lse[i] = kNegInf;
  if constexpr (sizeof(T) == sizeof(Int8)) {
    // With this many heads, arithmetic takes longer than memory: a tile is unpacked once for all of them.
    constexpr int kMost = 8;
    Unpacked<kMost> room(D);
    Way attention({q, G, D, scale, room.tiles(), room.pages(), masks, 0, 0, page_lse});
    by_parts<kMost>(n, [&](int first, int count) {
      for (int i = 0; i < count; ++i) {
        const int next = first + i + kMost / 2;
        if (next < n + ahead)
          fetch(tile_at<T>(tiles, pages[next], D), static_cast<int>(TileOf<T>::size(D) * sizeof(T)));
        room.take(i, tile_at<T>(tiles, pages[first + i], D), 0, 2 * kPage);
      }
      const int64_t at = static_cast<int64_t>(first) * G;
      attention.go_on(room.tiles(), room.pages(), masks ? masks + at : nullptr, count,
                      page_lse ? page_lse + at : nullptr);
      attention.run();
    });
    return attention.finish(o, lse);
  } else {
    Way attention({q, G, D, scale, tiles, pages, masks, n, n + ahead, page_lse});
    attention.run();
    return attention.finish(o, lse);
  }
}
#endif

template <class T, int kD>
void attend_dim(const Model<T>* q, int G, int D, Scale scale, const void* tiles, const int32_t* pages,
                const uint16_t* masks, int n, int ahead, bool near, float* o, float* lse, float* page_lse) {
#if defined(FLUXION_MATRIX_UNIT) || defined(FLUXION_PAIR_PRODUCTS)
  if constexpr (sizeof(Model<T>) == sizeof(BF16)) {
#ifdef FLUXION_MATRIX_UNIT
    using Way = MatrixAttention<kD>;
    constexpr int kMost = kVectorHeads, kDepth = kMatrixDepth;
#else
    using Way = LaneAttention<kD>;
    constexpr int kMost = kMaxGroup, kDepth = 2 * kLanes;
#endif
    if (G > kMost && D % kDepth == 0 &&
        attend_by<Way, T>(q, G, D, scale, static_cast<const T*>(tiles), pages, masks, n, ahead, o, lse,
                          page_lse))
      return;
  }
#endif
  // More heads than a group can have are of several requests.
  const auto run =
      G > kMaxGroup ? attend_with<T, typename ManyHeads<T>::Values, kD> : attend_with<T, Mix<T>, kD>;
  run(q, G, D, scale, tiles, pages, masks, n, ahead, near, o, lse, page_lse);
}

template <class T>
void attend_listed(const void* q, int G, int D, Scale scale, const void* tiles, const int32_t* pages,
                   const uint16_t* masks, int n, int ahead, bool near, float* o, float* lse,
                   float* page_lse) {
  const Model<T>* queries = static_cast<const Model<T>*>(q);
  const auto run = [&]<int kD>() {
    attend_dim<T, kD>(queries, G, D, scale, tiles, pages, masks, n, ahead, near, o, lse, page_lse);
  };
  // The scalar ISA gains nothing from a known size, and is for reference.
  if constexpr (kLanes > 1) {
    if (D == 64) return run.template operator()<64>();
    if (D == 128) return run.template operator()<128>();
  }
  run.template operator()<0>();
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
