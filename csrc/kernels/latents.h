#pragma once

#include "kernels/extend.h"

// A decode step of multi-head latent attention, in absorbed form: a prototype that nothing that serves calls
// (docs/mla.md).
//
// A token has one latent for all heads: all of it is the key, its first kLatentValues elements are the value.
// So a latent is read once, and what it costs is arithmetic: both products of a head go over it. Some tokens
// are laid out at a time, as keys and as values, and stay in the second nearest cache while all heads are
// multiplied with them, part by part, so that a part stays in the nearest one.
namespace fluxion::FLUXION_ISA {
namespace {

template <class T>
class Latents {
  using W = WordsOf<T>;
  using P = Product<T>;
  static constexpr int kStrip = P::kRows;
  static constexpr int kWordKeys = kKeys / W::kElements;  // words of a row of weights
  static constexpr int kLines = kPage * kLatent * static_cast<int>(sizeof(T)) / kLine;  // of a tile
  // A part, which stays in the nearest cache: words of the keys, columns of the values. A latent has a
  // multiple of these words, be they 288 or 576, and a matrix unit takes 16 of them.
  static constexpr int kDepth = 96, kColumns = 64;
  static_assert(kLatentValues % kColumns == 0 && kDepth % 16 == 0);

 public:
  Latents(const LatentArgs& args, void* scratch) : a_(args), depth_(W::depth(kLatent)) {
    rows_ = (a_.H + kStrip - 1) / kStrip * kStrip;
    float* at = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) & ~uintptr_t{63});
    const auto take = [&at](int64_t floats) {
      float* taken = at;
      at += (floats + 15) & ~int64_t{15};
      return taken;
    };
    keys_ = take(int64_t{depth_} * kKeys);
    values_ = take(int64_t{kWordKeys} * kLatent);
    tile_ = take(kPage * kLatent);
    queries_ = take(int64_t{rows_} * depth_);
    scores_ = take(int64_t{rows_} * kKeys);
    weights_ = take(int64_t{rows_} * kWordKeys);
    out_ = take(int64_t{rows_} * kLatentValues);
    total_ = take(int64_t{rows_} * kLanes);
    top_ = take(rows_);
    for (int h = 0; h < a_.H; ++h) {
      W::row(static_cast<const T*>(a_.q) + int64_t{h} * kLatent, kLatent, queries_ + int64_t{h} * depth_);
      top_[h] = kNegInf;
    }
    // Rows without a head weigh nothing.
    __builtin_memset(queries_ + int64_t{a_.H} * depth_, 0, (rows_ - a_.H) * depth_ * sizeof(float));
    __builtin_memset(weights_, 0, int64_t{rows_} * kWordKeys * sizeof(float));
    __builtin_memset(out_, 0, int64_t{rows_} * kLatentValues * sizeof(float));
    __builtin_memset(total_, 0, int64_t{rows_} * kLanes * sizeof(float));
  }

  void run() {
    [[maybe_unused]] const typename P::Unit unit;
    for (int key = 0; key < a_.keys; key += kKeys) {
      const int count = smaller(a_.keys - key, kKeys);
      lay_out(key, count);
      begin_fetch(key + kKeys);
      multiply<true>(0);
      for (int word = kDepth; word < depth_; word += kDepth) multiply<false>(word);
      for (int h = 0; h < a_.H; ++h) weigh(h, count);
      for (int column = 0; column < kLatentValues; column += kColumns) add_values(column);
    }
  }

  void finish(float* o, float* lse) const {
    for (int h = 0; h < a_.H; ++h) {
      const float total = reduce_add(load(total_ + h * kLanes));
      lse[h] = lse_of(top_[h], total);
      const Vec factor = set1(total == 0.0f ? 0.0f : 1.0f / total);
      const int64_t at = int64_t{h} * kLatentValues;
      for (int d = 0; d < kLatentValues; d += kLanes) store(o + at + d, mul(load(out_ + at + d), factor));
    }
  }

 private:
  const T* tile_of(int key) const {
    return static_cast<const T*>(a_.tiles) + a_.pages[key / kPage] * int64_t{kPage * kLatent};
  }

  // The latents of `count` tokens from `key` on. What lies behind them in their tile may be anything, and
  // counts as 0, as do tokens up to kKeys.
  void lay_out(int key, int count) {
    for (int t = 0; t < kKeys; t += kPage) {
      const int tokens = count - t;
      const T* rows = reinterpret_cast<const T*>(tile_);
      if (tokens >= kPage) {
        rows = tile_of(key + t);
      } else {
        const int64_t kept = tokens > 0 ? int64_t{tokens} * kLatent * static_cast<int>(sizeof(T)) : 0;
        if (kept > 0) __builtin_memcpy(tile_, tile_of(key + t), kept);
        __builtin_memset(reinterpret_cast<char*>(tile_) + kept, 0, kLines * kLine - kept);
      }
      W::columns(rows, kLatent, keys_ + t, kKeys);
      // The part beyond the values is laid out, too, and not multiplied: that of rows 512 words apart all
      // would lie in few sets of the nearest cache.
      W::rows(rows, kLatent, values_ + t / W::kElements * int64_t{kLatent});
    }
  }

  // The tiles from `key` on are fetched while what is laid out is multiplied, a share with every strip:
  // memory takes few requests at once. A line of each tile in turn: so memory gives most.
  void begin_fetch(int key) {
    fetched_ = 0;
    lines_ = key < a_.keys ? kKeyTiles * kLines : 0;
    const int strips = rows_ / kStrip * (depth_ / kDepth + kLatentValues / kColumns);
    share_ = (lines_ + strips - 1) / strips;
    for (int t = 0; t < kKeyTiles && lines_ > 0; ++t)
      next_[t] = reinterpret_cast<const char*>(tile_of(smaller(key + t * kPage, a_.keys - 1)));
  }
  void fetch_share() {
    for (const int end = smaller(fetched_ + share_, lines_); fetched_ < end; ++fetched_)
      prefetch_near(next_[fetched_ % kKeyTiles] + fetched_ / kKeyTiles * kLine);
  }

  // Scores of all heads, by kDepth words of the keys.
  template <bool kFirst>
  void multiply(int word) {
    for (int row = 0; row < rows_; row += kStrip) {
      fetch_share();
      P::template multiply<kKeys, !kFirst>(queries_ + int64_t{row} * depth_ + word, depth_,
                                           keys_ + int64_t{word} * kKeys, kKeys, kDepth, kKeys,
                                           scores_ + row * kKeys, kKeys);
    }
  }

  // Outputs of all heads, kColumns of them.
  void add_values(int column) {
    for (int row = 0; row < rows_; row += kStrip) {
      fetch_share();
      P::template multiply<kColumns, true>(weights_ + row * kWordKeys, kWordKeys, values_ + column, kLatent,
                                           kWordKeys, kColumns, out_ + int64_t{row} * kLatentValues + column,
                                           kLatentValues);
    }
  }

  // Scores of a head become weights, of the first `count` tokens.
  void weigh(int h, int count) {
    constexpr int kVecs = kKeys / kLanes;
    Vec x[kVecs], highest = set1(top_[h]);
#pragma GCC unroll 16
    for (int j = 0; j < kVecs; ++j) {
      x[j] = mul(load(scores_ + h * kKeys + j * kLanes), set1(a_.scale));
      if (count < kKeys) x[j] = keep(first_lanes(count - j * kLanes), x[j], set1(kNegInf));
      highest = max(x[j], highest);  // passes over a NaN
    }
    const float top = reduce_max(highest);
    if (top > top_[h]) raise_top(h, top);
    const Vec base = reference(set1(top));
#pragma GCC unroll 16
    for (int j = 0; j < kVecs; ++j) x[j] = exponential<T>(sub(x[j], base));
    float* total = total_ + h * kLanes;
    store(total, add(load(total), W::weights(x, weights_ + h * kWordKeys)));
  }

  void raise_top(int h, float top) {
    const Vec factor = exp_nonpositive(set1(top_[h] - top));
    top_[h] = top;
    store(total_ + h * kLanes, mul(load(total_ + h * kLanes), factor));
    float* out = out_ + int64_t{h} * kLatentValues;
    for (int d = 0; d < kLatentValues; d += kLanes) store(out + d, mul(load(out + d), factor));
  }

  const LatentArgs& a_;
  int depth_, rows_;            // words of a latent; heads, filled up to whole strips
  float *keys_, *values_;       // words [depth][kKeys], [kWordKeys][kLatent]
  float* tile_;                 // of which not all tokens count
  float* queries_;              // words [rows][depth]
  float *scores_, *weights_;    // [rows][kKeys], words [rows][kWordKeys]
  float *out_, *total_, *top_;  // [rows][kLatentValues], not normalised; [rows][kLanes], sums of the weights;
                                // [rows], highest scores
  const char* next_[kKeyTiles];
  int fetched_, lines_, share_;  // lines of next_
};

template <class T>
void attend_latents(const LatentArgs& args, void* scratch, float* o, float* lse) {
  Latents<T> of(args, scratch);
  of.run();
  of.finish(o, lse);
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
