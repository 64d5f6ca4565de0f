#pragma once

#include "kernels/exp.h"
#include "kernels/rows.h"

// Online softmax over tiles in float32. Per page: the scores of all its heads, one rescaling factor a head,
// then the values, accumulated in registers across the 16 tokens.
namespace fluxion::FLUXION_ISA {
namespace {

inline constexpr int kAllTokens = 0xffff;
// A page with at most this many wanted tokens is read token by token: its other rows would be fetched for
// nothing.
inline constexpr int kSparseTokens = 4;
// How far ahead of its use a tile is fetched: far enough to cover the latency of memory, near enough to be
// still in L2.
inline constexpr int kAheadBytes = 24 * 1024;
inline constexpr int kMaxAhead = 4;

// Fetches tiles that are needed soon, a few lines at each step of the arithmetic: a burst would fill the miss
// buffers of the core and stall it.
struct Fetcher {
  const char* at = nullptr;
  const char* end = nullptr;
  int lines_per_step = 0;

  void aim(const void* from, int64_t bytes, int steps) {
    at = static_cast<const char*>(from);
    end = at + bytes;
    lines_per_step = static_cast<int>((bytes / kLine + steps - 1) / (steps > 0 ? steps : 1));
  }
  void step() {
    for (int i = 0; i < lines_per_step && at < end; ++i, at += kLine) __builtin_prefetch(at, 0, 2);
  }
  void finish() {
    for (; at < end; at += kLine) __builtin_prefetch(at, 0, 2);
  }
};

// Heads of one page that go through the values together.
struct Heads {
  const float* weights[kValueHeads];  // [16] each
  float* out[kValueHeads];            // [D] each, in pair layout
  float rescale[kValueHeads];
};

// out = out * rescale + sum over tokens of weight * v, for kH heads and kP pairs of columns.
template <class T, int kH, int kP>
inline void add_values_pairs(const T* v, int D, const Heads& heads, int column, const uint8_t* tokens,
                             int count, Fetcher& fetcher) {
  Vec sums[kH][2 * kP];
#pragma GCC unroll 16
  for (int h = 0; h < kH; ++h) {
#pragma GCC unroll 16
    for (int c = 0; c < 2 * kP; ++c)
      sums[h][c] = mul(load(heads.out[h] + column + c * kLanes), set1(heads.rescale[h]));
  }
  for (int i = 0; i < count; ++i) {
    const int t = tokens ? tokens[i] : i;
    const T* row = v + t * D + column;
    Vec values[2 * kP];
#pragma GCC unroll 16
    for (int c = 0; c < kP; ++c) load_pair(row + 2 * c * kLanes, values[2 * c], values[2 * c + 1]);
#pragma GCC unroll 16
    for (int h = 0; h < kH; ++h) {
      const Vec weight = set1(heads.weights[h][t]);
#pragma GCC unroll 16
      for (int c = 0; c < 2 * kP; ++c) sums[h][c] = fma(weight, values[c], sums[h][c]);
    }
    fetcher.step();
  }
#pragma GCC unroll 16
  for (int h = 0; h < kH; ++h) {
#pragma GCC unroll 16
    for (int c = 0; c < 2 * kP; ++c) store(heads.out[h] + column + c * kLanes, sums[h][c]);
  }
}

template <class T, int kH>
inline void add_values_last(const T* v, int D, const Heads& heads, int column, const uint8_t* tokens,
                            int count) {
  for (int h = 0; h < kH; ++h) {
    Vec sum = mul(load(heads.out[h] + column), set1(heads.rescale[h]));
    for (int i = 0; i < count; ++i) {
      const int t = tokens ? tokens[i] : i;
      sum = fma(set1(heads.weights[h][t]), load_one(v + t * D + column), sum);
    }
    store(heads.out[h] + column, sum);
  }
}

template <class T, int kD, int kH>
void add_values(const T* v, int head_dim, const Heads& heads, const uint8_t* tokens, int count,
                Fetcher& fetcher) {
  const int D = kD ? kD : head_dim;
  constexpr int kWide = 2 * kLanes * kValuePairs, kPair = 2 * kLanes;
  int column = 0;
  for (; column + kWide <= D; column += kWide) {
    add_values_pairs<T, kH, kValuePairs>(v, D, heads, column, tokens, count, fetcher);
  }
  for (; column + kPair <= D; column += kPair) {
    add_values_pairs<T, kH, 1>(v, D, heads, column, tokens, count, fetcher);
  }
  if (column < D) add_values_last<T, kH>(v, D, heads, column, tokens, count);
}

template <class T, int kD>
void add_values_of(int count_heads, const T* v, int head_dim, const Heads& heads, Fetcher& fetcher) {
  static_assert(kValueHeads <= 4);
  if constexpr (kValueHeads >= 4) {
    if (count_heads == 4) return add_values<T, kD, 4>(v, head_dim, heads, nullptr, kPage, fetcher);
  }
  if constexpr (kValueHeads >= 3) {
    if (count_heads == 3) return add_values<T, kD, 3>(v, head_dim, heads, nullptr, kPage, fetcher);
  }
  if constexpr (kValueHeads >= 2) {
    if (count_heads == 2) return add_values<T, kD, 2>(v, head_dim, heads, nullptr, kPage, fetcher);
  }
  add_values<T, kD, 1>(v, head_dim, heads, nullptr, kPage, fetcher);
}

template <class T, int kD>
struct Attention {
  using Query = typename Dot<T>::Query;

  int D, G;
  float scale;
  // Per head: the running maximum (-inf past G), the lanes of the running sum and the output so far, in pair
  // layout; of the page at hand the scores (later weights), the new maximum and the factor for what came
  // before, exp(old maximum less new).
  alignas(64) float top[kMaxHeads];
  alignas(64) float next_top[kMaxHeads];
  alignas(64) float rescale[kMaxHeads];
  alignas(64) float total[kMaxHeads][kLanes];
  alignas(64) float weights[kMaxHeads][kPage];
  alignas(64) Query queries[kMaxHeads * kMaxHeadDim];
  alignas(64) float out[kMaxHeads * kMaxHeadDim];

  int dim() const { return kD ? kD : D; }

  Attention(const T* q, int group, int head_dim, float factor) : D(head_dim), G(group), scale(factor) {
    for (int g = 0; g < kMaxHeads; ++g) top[g] = next_top[g] = kNegInf;
    for (int g = 0; g < G; ++g) {
      Dot<T>::pack(q + g * dim(), dim(), queries + g * dim());
      store(total[g], set1(0.0f));
      for (int d = 0; d < dim(); d += kLanes) store(out + g * dim() + d, set1(0.0f));
    }
  }

  // An exponent is taken from this, so that a head whose scores are all -inf gets weights 0, not NaN.
  static float reference(float maximum) { return maximum == kNegInf ? 0.0f : maximum; }

  void score_page(int g, const T* k, int wanted, Fetcher& fetcher) {
    const Query* q = queries + g * dim();
    if (__builtin_popcount(wanted) <= kSparseTokens) {
      for (int bits = wanted; bits; bits &= bits - 1) {
        const int t = __builtin_ctz(bits);
        weights[g][t] = dot_row<T>(q, k + t * dim(), dim());
      }
      return;
    }
    for (int t = 0; t < kPage; t += kLanes) {
      const StridedRows<T> rows{k + t * dim(), dim()};
      store(weights[g] + t, dot_rows<T>(q, rows, dim(), [&] { fetcher.step(); }));
    }
  }

  // Scales, masks and bounds the scores. Bounded, an overflow to +inf stays a number; NaN stays NaN and is
  // passed over by the maximum, and so reaches the output.
  void find_top(int g, int mask) {
    Vec highest = set1(top[g]);
    for (int t = 0; t < kPage; t += kLanes) {
      Vec x = mul(load(weights[g] + t), set1(scale));
      x = keep(static_cast<uint32_t>(mask) >> t, min(set1(kMaxFloat), x), set1(kNegInf));
      store(weights[g] + t, x);
      highest = max(x, highest);
    }
    next_top[g] = reduce_max(highest);
  }

  void find_rescale() {
    for (int g = 0; g < G; g += kLanes) {
      const Vec next = load(next_top + g);
      const Vec lowest = set1(-kMaxFloat);
      store(rescale + g, exp_nonpositive(sub(load(top + g), max(next, lowest))));
      store(top + g, next);
    }
  }

  void find_weights(int g) {
    const Vec base = set1(reference(top[g]));
    Vec sum = mul(load(total[g]), set1(rescale[g]));
    for (int t = 0; t < kPage; t += kLanes) {
      const Vec w = exp_nonpositive(sub(load(weights[g] + t), base));
      store(weights[g] + t, w);
      sum = add(sum, w);
    }
    store(total[g], sum);
  }

  void add_page(const T* tile, const uint16_t* masks, Fetcher& fetcher) {
    int whole[kMaxHeads], part[kMaxHeads], any = 0, wholes = 0, parts = 0;
    for (int g = 0; g < G; ++g) {
      const int mask = masks ? masks[g] : kAllTokens;
      any |= mask;
      if (mask == kAllTokens) {
        whole[wholes++] = g;
      } else if (mask) {
        part[parts++] = g;
      }
    }
    if (!any) return;
    for (int i = 0; i < wholes; ++i) score_page(whole[i], tile, kAllTokens, fetcher);
    for (int i = 0; i < parts; ++i) score_page(part[i], tile, masks[part[i]], fetcher);
    for (int i = 0; i < wholes; ++i) find_top(whole[i], kAllTokens);
    for (int i = 0; i < parts; ++i) find_top(part[i], masks[part[i]]);
    find_rescale();
    for (int i = 0; i < wholes; ++i) find_weights(whole[i]);
    for (int i = 0; i < parts; ++i) find_weights(part[i]);

    const T* values = tile + kPage * dim();
    for (int i = 0; i < wholes; i += kValueHeads) {
      const int count = wholes - i < kValueHeads ? wholes - i : kValueHeads;
      Heads heads;
      for (int h = 0; h < count; ++h) set_head(heads, h, whole[i + h]);
      add_values_of<T, kD>(count, values, D, heads, fetcher);
    }
    // Only the tokens of its own mask are read for a head: weight 0 would not stop a NaN in the others.
    for (int i = 0; i < parts; ++i) {
      uint8_t tokens[kPage];
      int count = 0;
      for (int bits = masks[part[i]]; bits; bits &= bits - 1)
        tokens[count++] = static_cast<uint8_t>(__builtin_ctz(bits));
      Heads heads;
      set_head(heads, 0, part[i]);
      add_values<T, kD, 1>(values, D, heads, tokens, count, fetcher);
    }
  }

  void set_head(Heads& heads, int h, int g) {
    heads.weights[h] = weights[g];
    heads.out[h] = out + g * dim();
    heads.rescale[h] = rescale[g];
  }

  void finish(float* o, float* lse) {
    for (int g = 0; g < G; ++g) {
      const float sum = reduce_add(load(total[g]));
      const bool none = sum == 0.0f;
      lse[g] = none ? kNegInf : top[g] + __builtin_logf(sum);
      const Vec factor = set1(none ? 0.0f : 1.0f / sum);
      const float* from = out + g * dim();
      float* to = o + g * dim();
      int d = 0;
      for (; d + 2 * kLanes <= dim(); d += 2 * kLanes) {
        store_pair<T>(to + d, mul(load(from + d), factor), mul(load(from + d + kLanes), factor));
      }
      if (d < dim()) store(to + d, mul(load(from + d), factor));
    }
  }
};

template <class T, int kD>
void attend_tiles(const T* q, int G, int head_dim, float scale, const T* tiles, const int32_t* pages,
                  const uint16_t* masks, int n, int ahead, float* o, float* lse) {
  Attention<T, kD> attention(q, G, head_dim, scale);
  const int D = attention.dim();
  const int64_t tile_size = 2 * kPage * static_cast<int64_t>(D);
  const int64_t tile_bytes = tile_size * sizeof(T);
  const int64_t row_bytes = D * static_cast<int64_t>(sizeof(T));
  const int distance =
      kAheadBytes / tile_bytes < kMaxAhead ? static_cast<int>(kAheadBytes / tile_bytes) : kMaxAhead;
  const int steps_of_head = (kPage / kLanes + kPage / kValuePairs / kValueHeads) * (D / (2 * kLanes));

  for (int i = -distance; i < n; ++i) {
    Fetcher fetcher;
    const int next = i + distance;
    if (next < n + ahead) {
      const char* tile = reinterpret_cast<const char*>(tiles + pages[next] * tile_size);
      int any = masks ? 0 : kAllTokens;
      for (int g = 0; masks && g < G; ++g) any |= masks[static_cast<int64_t>(next) * G + g];
      if (__builtin_popcount(any) > kSparseTokens) {
        fetcher.aim(tile, tile_bytes, steps_of_head * G);
      } else {
        for (int bits = any; bits; bits &= bits - 1) {
          const char* row = tile + __builtin_ctz(bits) * row_bytes;
          for (int64_t b = 0; b < row_bytes; b += kLine) {
            __builtin_prefetch(row + b, 0, 2);
            __builtin_prefetch(row + kPage * row_bytes + b, 0, 2);
          }
        }
      }
    }
    if (i >= 0) {
      attention.add_page(tiles + pages[i] * tile_size, masks ? masks + static_cast<int64_t>(i) * G : nullptr,
                         fetcher);
    }
    fetcher.finish();
  }
  attention.finish(o, lse);
}

template <class T>
void attend(const void* q, int G, int D, float scale, const void* tiles, const int32_t* pages,
            const uint16_t* masks, int n, int ahead, float* o, float* lse) {
  const T* queries = static_cast<const T*>(q);
  const T* base = static_cast<const T*>(tiles);
  switch (D) {
    case 64:
      return attend_tiles<T, 64>(queries, G, D, scale, base, pages, masks, n, ahead, o, lse);
    case 128:
      return attend_tiles<T, 128>(queries, G, D, scale, base, pages, masks, n, ahead, o, lse);
    default:
      return attend_tiles<T, 0>(queries, G, D, scale, base, pages, masks, n, ahead, o, lse);
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
