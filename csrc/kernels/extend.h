#pragma once

#include "kernels/attend_tiles.h"
#include "kernels/matrix_product.h"
#include "kernels/tile.h"

// Causal attention of many queries, for prefill. Keys and values are laid out once for all rows of a block of
// queries; scores and output are matrix products. Online softmax, some keys at a time (FlashAttention-2).
namespace fluxion::FLUXION_ISA {
namespace {

inline constexpr int kKeys = kExtendKeys;  // that are laid out together
inline constexpr int kKeyTiles = kKeys / kPage;

// Bits of the first `count` lanes, from none to all.
inline uint32_t first_lanes(int count) {
  return count <= 0 ? 0 : count >= kLanes ? kEveryLane : (1u << count) - 1;
}

// One call of `extend` (kernels/table.h). A row is a query of one head: row r is head r % G of token r / G.
// Tiles are of Stored, and are multiplied as T.
template <class Stored, class T = Model<Stored>>
class Extend {
  using W = WordsOf<T>;
  using P = Product<T>;
  static constexpr int kStrip = P::kRows;
  static constexpr int kWordKeys = kKeys / W::kElements;  // words of a row of weights

 public:
  Extend(const ExtendArgs& args, void* scratch)
      : a_(args), rows_(args.tokens * args.G), factor_(args.scale.cap == 0.0f ? args.scale.factor : 1.0f) {
    depth_ = W::depth(a_.D);
    const int padded = (rows_ + kStrip - 1) / kStrip * kStrip;
    float* at = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) & ~uintptr_t{63});
    const auto take = [&at](int64_t floats) {
      float* taken = at;
      at += (floats + 15) & ~int64_t{15};
      return taken;
    };
    keys_ = take(int64_t{depth_} * kKeys);
    values_ = take(int64_t{kWordKeys} * a_.D);
    scores_ = take(kStrip * kKeys);
    weights_ = take(kStrip * kWordKeys);
    tile_ = take(kPage * a_.D);
    queries_ = take(int64_t{padded} * depth_);
    out_ = take(int64_t{padded} * a_.D);
    total_ = take(int64_t{padded} * kLanes);
    top_ = take(padded);
    for (int r = 0; r < padded; ++r) {
      top_[r] = kNegInf;
      if (r < rows_) {
        const char* token = static_cast<const char*>(a_.q) + r / a_.G * a_.q_stride;
        W::row(reinterpret_cast<const T*>(token) + r % a_.G * a_.D, a_.D, queries_ + int64_t{r} * depth_);
      } else {
        __builtin_memset(queries_ + int64_t{r} * depth_, 0, depth_ * sizeof(float));
      }
    }
    for (int64_t i = 0; i < int64_t{padded} * a_.D; i += kLanes) store(out_ + i, set1(0.0f));
    for (int64_t i = 0; i < int64_t{padded} * kLanes; i += kLanes) store(total_ + i, set1(0.0f));
  }

  void run() {
    [[maybe_unused]] const typename P::Unit unit;
    const int last = smaller(a_.keys, a_.first + a_.tokens);  // end of the keys that some row sees
    const int start = least_hidden(0, 0) / kKeys * kKeys;
    for (int key = start; key < last; key += kKeys) {
      lay_out(key, smaller(last - key, kKeys));
      // Rows before the first token that sees these keys are skipped, and those after the last one.
      const int before = key - a_.first;
      const int from = before > 0 ? before * a_.G / kStrip * kStrip : 0;
      for (int row = from; row < rows_; row += kStrip) {
        if (least_hidden(row, key) < kKeys) add_strip(row, key);
      }
    }
  }

  // lse[r * blocks + i]: the LSE of row r over the i-th kKeys keys, for every row.
  void note_blocks(float* lse) {
    [[maybe_unused]] const typename P::Unit unit;
    const int blocks = (a_.keys + kKeys - 1) / kKeys;
    for (int b = 0; b < blocks; ++b) {
      const int count = smaller(a_.keys - b * kKeys, kKeys);
      lay_out(b * kKeys, count, false);
      for (int row = 0; row < rows_; row += kStrip) {
        score_strip(row);
        for (int r = row; r < smaller(row + kStrip, rows_); ++r)
          lse[int64_t{r} * blocks + b] = lse_of_scores(scores_ + (r - row) * kKeys, count);
      }
    }
  }

  void finish(float* o, float* lse) const {
    for (int r = 0; r < rows_; ++r) {
      const float total = reduce_add(load(total_ + r * kLanes));
      lse[r] = lse_of(top_[r], total);
      const Vec factor = set1(total == 0.0f ? 0.0f : 1.0f / total);
      for (int d = 0; d < a_.D; d += kLanes)
        store(o + int64_t{r} * a_.D + d, mul(load(out_ + int64_t{r} * a_.D + d), factor));
    }
  }

 private:
  // How many keys from `key` on lie before the window of a query at place `at` of the list.
  int hidden_at(int64_t at, int key) const {
    const int64_t count = at + 1 - a_.window - key;
    return count > 0 ? static_cast<int>(count) : 0;
  }
  // The same for this row.
  int hidden(int row, int key) const {
    const int t = row / a_.G;
    if (a_.tree == nullptr) return hidden_at(int64_t{a_.first} + t, key);
    return hidden_at(int64_t{a_.root} + __builtin_popcountll(a_.tree[t]) - 1, key);
  }
  // A lower bound for this row and all after it. Nodes of a tree have any order.
  int least_hidden(int row, int key) const {
    return hidden_at(a_.tree == nullptr ? int64_t{a_.first} + row / a_.G : a_.root, key);
  }
  // An upper bound for this row and all before it.
  int most_hidden(int row, int key) const { return hidden_at(int64_t{a_.first} + row / a_.G, key); }

  // Bits of the kKeys keys from `key` on that lie before the tree, or in this row's part of it.
  uint64_t in_tree(int row, int key) const {
    const int before = a_.root - key;
    if (a_.tree == nullptr || before >= kKeys) return ~uint64_t{0};
    const uint64_t nodes = a_.tree[row / a_.G];
    if (before >= 0) return nodes << before | ((uint64_t{1} << before) - 1);
    return -before < 64 ? nodes >> -before : 0;
  }

  // Lays out keys and values of `count` keys from `key` on. The rest of their last tile may hold anything and
  // counts as 0, as do further keys up to kKeys.
  void lay_out(int key, int count, bool with_values = true) {
    for (int t = 0; t < kKeyTiles; ++t) {
      const int tokens = smaller(count - t * kPage, kPage);
      const Stored* tile = tokens > 0 ? tile_at<Stored>(a_.tiles, a_.pages[key / kPage + t], a_.D) : nullptr;
      float* values = values_ + t * (kPage / W::kElements) * int64_t{a_.D};
      W::columns(rows(tile, 0, tokens), a_.D, keys_ + t * kPage, kKeys);
      if (with_values) W::rows(rows(tile, kPage, tokens), a_.D, values);
      // Prefetches the next keys while these are multiplied.
      if (key + kKeys + t * kPage < a_.keys) {
        const Stored* next = tile_at<Stored>(a_.tiles, a_.pages[(key + kKeys) / kPage + t], a_.D);
        for (int64_t b = 0; b < TileOf<Stored>::size(a_.D) * static_cast<int>(sizeof(Stored)); b += kLine)
          prefetch_near(reinterpret_cast<const char*>(next) + b);
      }
    }
  }

  // 16 rows; the first `tokens` are those of the tile from `first` on.
  const T* rows(const Stored* tile, int first, int tokens) {
    tokens = smaller(tokens, kPage);
    T* room = reinterpret_cast<T*>(tile_);
    if constexpr (sizeof(Stored) == sizeof(T)) {
      if (tokens == kPage) return tile + first * a_.D;
      if (tokens > 0) __builtin_memcpy(room, tile + first * a_.D, tokens * a_.D * sizeof(T));
    } else {
      if (tokens > 0) unpack_rows(tile, first, tokens, a_.D, room);
    }
    const int kept = tokens > 0 ? tokens : 0;
    __builtin_memset(room + kept * a_.D, 0, (kPage - kept) * a_.D * sizeof(T));
    return room;
  }

  // Computes the scores of a strip; scores_ times factor_ are logits.
  void score_strip(int row) {
    P::template multiply<kKeys, false>(queries_ + int64_t{row} * depth_, depth_, keys_, kKeys, depth_, kKeys,
                                       scores_, kKeys);
    if (a_.scale.cap == 0.0f) [[likely]]
      return;
    for (int i = 0; i < kStrip * kKeys; i += kLanes) store(scores_ + i, logits(load(scores_ + i), a_.scale));
  }

  // The LSE of the first `count` scores.
  float lse_of_scores(const float* scores, int count) const {
    constexpr int kVecs = kKeys / kLanes;
    Vec x[kVecs], highest = set1(kNegInf), sum = set1(0.0f);
#pragma GCC unroll 16
    for (int j = 0; j < kVecs; ++j) {
      x[j] =
          keep(first_lanes(count - j * kLanes), mul(load(scores + j * kLanes), set1(factor_)), set1(kNegInf));
      highest = max(x[j], highest);
    }
    const float top = reduce_max(highest);
    const Vec base = reference(set1(top));
#pragma GCC unroll 16
    for (int j = 0; j < kVecs; ++j) sum = add(sum, exponential<T>(sub(x[j], base)));
    return lse_of(top, reduce_add(sum));
  }

  // Adds keys from `key` on to the strip of rows from `row` on.
  void add_strip(int row, int key) {
    score_strip(row);
    const int64_t sees = a_.first + int64_t{row / a_.G} + 1 - key;  // of these keys, by the first row
    const bool before_tree = a_.tree == nullptr || key + kKeys <= a_.root;
    if (sees >= kKeys && key + kKeys <= a_.keys && before_tree && most_hidden(row + kStrip - 1, key) == 0) {
      weigh<false>(row, key);
    } else {
      weigh<true>(row, key);
    }
    P::template multiply<0, true>(weights_, kWordKeys, values_, a_.D, kWordKeys, a_.D,
                                  out_ + int64_t{row} * a_.D, a_.D);
  }

  // Turns the scores of a strip into weights.
  template <bool kMasked>
  void weigh(int row, int key) {
    constexpr int kVecs = kKeys / kLanes;
    const Vec scale = set1(factor_);
    for (int i = 0; i < kStrip; ++i) {
      float* scores = scores_ + i * kKeys;
      float* words = weights_ + i * kWordKeys;
      const int r = row + i;
      // A padding row has scores of 0, and its result is not read.
      const int sees =
          kMasked && r < rows_ ? smaller(smaller(a_.first + r / a_.G + 1, a_.keys) - key, kKeys) : kKeys;
      const int left = kMasked && r < rows_ ? smaller(hidden(r, key), kKeys) : 0;
      const uint64_t tree = kMasked && r < rows_ ? in_tree(r, key) : ~uint64_t{0};
      Vec x[kVecs], highest = set1(top_[r]);
#pragma GCC unroll 16
      for (int j = 0; j < kVecs; ++j) {
        x[j] = mul(load(scores + j * kLanes), scale);
        if constexpr (kMasked) {
          const uint32_t seen = first_lanes(sees - j * kLanes) & ~first_lanes(left - j * kLanes) &
                                static_cast<uint32_t>(tree >> j * kLanes);
          x[j] = keep(seen, x[j], set1(kNegInf));
        }
        highest = max(x[j], highest);  // ignores NaN
      }
      const float top = reduce_max(highest);
      if (top > top_[r]) raise_top(r, top);
      const Vec base = reference(set1(top));
#pragma GCC unroll 16
      for (int j = 0; j < kVecs; ++j) x[j] = exponential<T>(sub(x[j], base));
      float* total = total_ + r * kLanes;
      store(total, add(load(total), W::weights(x, words)));
    }
  }

  void raise_top(int r, float top) {
    const Vec factor = exp_nonpositive(set1(top_[r] - top));
    top_[r] = top;
    store(total_ + r * kLanes, mul(load(total_ + r * kLanes), factor));
    float* out = out_ + int64_t{r} * a_.D;
    for (int d = 0; d < a_.D; d += kLanes) store(out + d, mul(load(out + d), factor));
  }

  const ExtendArgs& a_;
  int rows_, depth_;
  float factor_;
  float *keys_, *values_;     // words [depth][kKeys], [kWordKeys][D]
  float *scores_, *weights_;  // of a strip: [kStrip][kKeys], words [kStrip][kWordKeys]
  float* tile_;               // for tiles that are unpacked, or have unused tokens
  float *queries_, *out_;     // words [rows][depth]; [rows][D], not normalised
  float *total_, *top_;       // [rows][kLanes], sums of the weights; [rows], highest scores
};

template <class T>
void extend(const ExtendArgs& args, void* scratch, float* o, float* lse) {
  Extend<T> block(args, scratch);
  block.run();
  block.finish(o, lse);
}

template <class T>
void extend_blocks(const ExtendArgs& args, void* scratch, float* lse) {
  Extend<T>(args, scratch).note_blocks(lse);
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
