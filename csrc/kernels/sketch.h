#pragma once

#include "kernels/int8.h"
#include "kernels/logits.h"
#include "simd/mix.h"

// Keys in four bits, which tell the tokens that are heavy enough to be read. table.h has the layout.
namespace fluxion::FLUXION_ISA {
namespace {

// A code c stands for c - 7.5 scales. If only its upper two bits u are known, it is about 4 u + 1.5.
inline constexpr float kMiddleCode = 7.5f;
inline constexpr float kMostCode = 15.0f;
inline constexpr float kMiddleSkimmed = 6.0f;
// One and a half standard deviations of what the lower two bits add: 0 to 3, uniformly distributed.
inline constexpr float kSkimmedOff = 1.5f * 1.118034f;
// Smaller weights count as 0.
inline constexpr float kLeastWeight = 1.2e-38f;

// Whether the rotation flips the sign of element d. Pseudo-random, so that after it no key lies in one
// element alone.
inline bool flips(int d) { return static_cast<uint32_t>(d) * 0x9e3779b1u >> 31; }

// Elements that are mixed with one another: the largest power of two that divides D.
inline int mixed_together(int D) { return D & -D; }

// Signs, then a Hadamard transform. q.k of two rotated vectors is mixed_together(D) times as large, and large
// values of a few elements spread over many. Additions have a fixed order: the same on every ISA.
inline void rotate(float* x, int D) {
  for (int d = 0; d < D; ++d) x[d] = flips(d) ? -x[d] : x[d];
  for (int width = 1; width < mixed_together(D); width *= 2) {
    for (int d = 0; d < D; d += 2 * width) {
      for (int i = d; i < d + width; ++i) {
        const float a = x[i], b = x[i + width];
        x[i] = a + b;
        x[i + width] = a - b;
      }
    }
  }
}

// The largest magnitude; NaN if an element is not finite.
inline float largest_size(const float* x, int D) {
  float largest = 0.0f, zeros = 0.0f;
  for (int d = 0; d < D; ++d) {
    const float size = x[d] < 0.0f ? -x[d] : x[d];
    largest = size > largest ? size : largest;
    zeros += x[d] - x[d];
  }
  return largest + zeros;
}

// Elements of a token that share a byte are four apart, the first in its lowest bits.
inline int byte_of(int t, int d) { return d / 16 * (4 * kPage) + 4 * t + d % 4; }
inline int shift_of(int d) { return d % 16 / 4 * 2; }

// Offsets of the parts of a sketch after the upper bits.
inline int scales_at(int D) { return kPage * D / 4; }
inline int lower_at(int D) { return scales_at(D) + 2 * kPage; }

inline BF16* scales_of_sketch(uint8_t* sketch, int D) {
  return reinterpret_cast<BF16*>(sketch + scales_at(D));
}
inline const BF16* scales_of_sketch(const uint8_t* sketch, int D) {
  return reinterpret_cast<const BF16*>(sketch + scales_at(D));
}

template <class T>
void write_sketch(const void* tile, int D, void* out) {
  uint8_t* sketch = static_cast<uint8_t*>(out);
  __builtin_memset(sketch, 0, sketch_bytes(D));
  Model<T> keys[kPage * kMaxHeadDim];
  if constexpr (sizeof(T) == sizeof(Int8)) {
    unpack_keys(static_cast<const Int8*>(tile), D, keys);
  } else {
    __builtin_memcpy(keys, tile, kPage * D * sizeof(T));
  }
  for (int t = 0; t < kPage; ++t) {
    float x[kMaxHeadDim];
    for (int d = 0; d < D; ++d) x[d] = to_float(keys[t * D + d]);
    rotate(x, D);
    const float exact = largest_size(x, D) / kMiddleCode;
    BF16* scale = scales_of_sketch(sketch, D) + t;
    round_to(exact < kLeastScale ? kLeastScale : exact, scale);
    if (!(exact < kMaxFloat)) continue;  // NaN: every score of the key is NaN, too
    const float inverse = 1.0f / to_float(*scale);
    for (int d = 0; d < D; ++d) {
      const float code = x[d] * inverse + kMiddleCode;
      const int c = nearest_integer(code < 0.0f ? 0.0f : code > kMostCode ? kMostCode : code);
      uint8_t* upper = sketch + byte_of(t, d);
      upper[0] |= static_cast<uint8_t>(c >> 2 << shift_of(d));
      upper[lower_at(D)] |= static_cast<uint8_t>((c & 3) << shift_of(d));
    }
  }
}

// Queries as they are multiplied with sketches: rotated, in 8 bits.
struct SketchQueries {
  alignas(64) int8_t elements[kMaxGroup * kMaxHeadDim];
  float unit[kMaxGroup];  // integer products times it are q.k
  float sum[kMaxGroup];   // of the elements: an offset of all codes adds this times it
  float off[kMaxGroup];   // times a key's scale: how far q.k may exceed its estimate by upper bits

  template <class M>
  SketchQueries(const M* q, int G, int D) {
    for (int g = 0; g < G; ++g) {
      float x[kMaxHeadDim];
      for (int d = 0; d < D; ++d) x[d] = to_float(q[g * D + d]);
      rotate(x, D);
      const float largest = largest_size(x, D);
      const float inverse = largest > 1e-30f ? kMostInteger / largest : 0.0f;
      int total = 0, squares = 0;
      for (int d = 0; d < D; ++d) {
        const int integer = largest < kMaxFloat ? nearest_integer(x[d] * inverse) : 0;
        elements[g * D + d] = static_cast<int8_t>(integer);
        total += integer;
        squares += integer * integer;
      }
      unit[g] = largest / kMostInteger / static_cast<float>(mixed_together(D));
      sum[g] = static_cast<float>(total);
      off[g] = kSkimmedOff * __builtin_sqrtf(static_cast<float>(squares)) * unit[g];
    }
  }
};

// Calls body<first bit>() for the four elements of a byte.
template <class Body>
inline void for_fields(const Body& body) {
  body.template operator()<0>();
  body.template operator()<2>();
  body.template operator()<4>();
  body.template operator()<6>();
}

// Calls body<heads>(first head) for all G heads, as many at a time as registers allow, up to kMost.
template <int kMost, class Body>
inline void for_heads(int G, const Body& body) {
  int g = 0;
  if constexpr (kRegisters >= 32) {
    if constexpr (kMost >= 8) {
      for (; g + 8 <= G; g += 8) body.template operator()<8>(g);
    }
    for (; g + 4 <= G; g += 4) body.template operator()<4>(g);
  }
  for (; g + 2 <= G; g += 2) body.template operator()<2>(g);
  if (g < G) body.template operator()<1>(g);
}

// Integer products of kHeads heads from head `first` on with the codes of kLanes tokens in each of kPages
// sketches: all four bits, or the upper two. They are below 2^24, so they are exact in float32, too.
template <int kHeads, int kPages, bool kWhole>
inline void multiply_codes(const SketchQueries& q, int first, const uint8_t* const* sketches, int D, int v,
                           Vec (&products)[kPages][kHeads]) {
  // Additions wait for one another: two chains for every sum if there are few sums.
  constexpr int kChains = kHeads * kPages < 8 ? 2 : 1;
  Vec sums[kPages][kHeads][kChains];
#pragma GCC unroll 2
  for (int p = 0; p < kPages; ++p) {
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 2
      for (int c = 0; c < kChains; ++c) sums[p][h][c] = set1(0.0f);
    }
  }
  for (int d = 0; d < D; d += 16) {
    Vec upper[kPages], lower[kPages];
#pragma GCC unroll 2
    for (int p = 0; p < kPages; ++p) {
      const uint8_t* at = sketches[p] + d / 16 * (4 * kPage) + 4 * v;
      upper[p] = bytes_at(reinterpret_cast<const Int8*>(at));
      if constexpr (kWhole) lower[p] = bytes_at(reinterpret_cast<const Int8*>(at + lower_at(D)));
    }
    for_fields([&]<int kFrom>() {
      Vec codes[kPages];
#pragma GCC unroll 2
      for (int p = 0; p < kPages; ++p) {
        codes[p] = two_bits<kFrom>(upper[p]);
        if constexpr (kWhole) codes[p] = four_bits(codes[p], two_bits<kFrom>(lower[p]));
        codes[p] = in_register(codes[p]);
      }
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        const Vec query = in_register(for_all_lanes(q.elements + (first + h) * D + d + 2 * kFrom));
#pragma GCC unroll 2
        for (int p = 0; p < kPages; ++p) {
          Vec& sum = sums[p][h][kFrom / 2 % kChains];
          sum = add_bytes(sum, codes[p], query);
        }
      }
    });
  }
#pragma GCC unroll 2
  for (int p = 0; p < kPages; ++p) {
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      products[p][h] = floats_of(sums[p][h][0]);
      if constexpr (kChains == 2) products[p][h] = add(products[p][h], floats_of(sums[p][h][1]));
    }
  }
}

// Calls body for two sketches of pages `from` to `to` side by side, or for one. Prefetches `bytes` of each
// following sketch, up to n.
template <class Body>
inline void by_pairs(const uint8_t* base, const int32_t* pages, int from, int to, int n, int D, int bytes,
                     const Body& body) {
  constexpr int kAhead = 16;  // pages
  const int64_t size = static_cast<int64_t>(sketch_bytes(D));
  for (int i = from; i < to; i += 2) {
    for (int next = i + kAhead; next < smaller(i + kAhead + 2, n); ++next)
      fetch(base + pages[next] * size, bytes);
    const bool alone = i + 1 == to;
    const uint8_t* const two[2] = {base + pages[i] * size, alone ? nullptr : base + pages[i + 1] * size};
    if (alone) {
      body.template operator()<1>(i, two);
    } else {
      body.template operator()<2>(i, two);
    }
  }
}

template <class M>
void score_sketches(const void* query, int G, int D, const void* sketches, const int32_t* pages, int n,
                    float* out, int64_t out_stride) {
  const SketchQueries q(static_cast<const M*>(query), G, D);
  const uint8_t* base = static_cast<const uint8_t*>(sketches);
  const int size = static_cast<int>(sketch_bytes(D));
  by_pairs(base, pages, 0, n, n, D, size, [&]<int kPages>(int i, const auto& two) {
    for_heads<8>(G, [&]<int kHeads>(int g) {
      for (int v = 0; v < kPage; v += kLanes) {
        Vec products[kPages][kHeads];
        multiply_codes<kHeads, kPages, true>(q, g, two, D, v, products);
        for (int p = 0; p < kPages; ++p) {
          const Vec scales = load_one(scales_of_sketch(two[p], D) + v);
          for (int h = 0; h < kHeads; ++h) {
            const Vec codes = sub(products[p][h], set1(kMiddleCode * q.sum[g + h]));
            store(out + (g + h) * out_stride + (i + p) * kPage + v,
                  mul(mul(codes, scales), set1(q.unit[g + h])));
          }
        }
      }
    });
  });
}

// The largest lane of every page's vectors, ignoring NaN, for kLanes pages at a time.
inline Vec highest_of(const Vec (&pages)[kLanes]) {
  return fold_rows(pages, [](Vec a, Vec b) { return max(a, b); });
}

template <class M>
void skim_sketches(const void* query, int G, int D, const void* sketches, const int32_t* pages, int n,
                   float* about, float* most, int64_t out_stride) {
  const SketchQueries q(static_cast<const M*>(query), G, D);
  const uint8_t* base = static_cast<const uint8_t*>(sketches);
  const Vec none = set1(kNegInf);
  for (int first = 0; first < (n + kPage - 1) / kPage * kPage; first += kLanes) {
    Vec widest[kLanes], highest[kMaxGroup][kLanes];
    for (int i = 0; i < kLanes; ++i) {
      widest[i] = set1(0.0f);
      for (int g = 0; g < G; ++g) highest[g][i] = none;
    }
    const int end = smaller(first + kLanes, n);
    by_pairs(base, pages, first, end, n, D, lower_at(D), [&]<int kPages>(int page, const auto& two) {
      const int i = page - first;
      for_heads<8>(G, [&]<int kHeads>(int g) {
        for (int v = 0; v < kPage; v += kLanes) {
          Vec products[kPages][kHeads];
          multiply_codes<kHeads, kPages, false>(q, g, two, D, v, products);
#pragma GCC unroll 2
          for (int p = 0; p < kPages; ++p) {
            const Vec scales = load_one(scales_of_sketch(two[p], D) + v);
            widest[i + p] = max(scales, widest[i + p]);
#pragma GCC unroll 8
            for (int h = 0; h < kHeads; ++h) {
              const Vec codes = sub(mul(products[p][h], set1(4.0f)), set1(kMiddleSkimmed * q.sum[g + h]));
              Vec& top = highest[g + h][i + p];
              top = max(mul(mul(codes, scales), set1(q.unit[g + h])), top);
            }
          }
        }
      });
    });
    const Vec wide = highest_of(widest);
    for (int g = 0; g < G; ++g) {
      const Vec top = highest_of(highest[g]);
      store(about + g * out_stride + first, top);
      store(most + g * out_stride + first, max(add(top, mul(wide, set1(q.off[g]))), none));
    }
  }
}

// The search for the bound of the weights takes at most this many steps. It ends early when the weight below
// the bound is this share of what is allowed.
inline constexpr int kBoundSteps = 8;
inline constexpr float kBoundEnough = 0.9f;

// Sums of weights by four chains of additions.
template <class Term>
inline float sum_of(int n, Term&& term) {
  Vec sums[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
  int i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sums[j] = add(sums[j], term(i + j * kLanes));
  }
  for (; i < n; i += kLanes) sums[0] = add(sums[0], term(i));
  return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

inline float weigh(float* scores, int n, Scale scale, float lse, float* unit) {
  // A cap would make a finite logit of -inf.
  const Vec none = set1(kNegInf), least = set1(-kMaxFloat);
  const auto logit = [&](int i) {
    const Vec score = load(scores + i), x = logits(score, scale);
    return scale.cap > 0.0f ? keep(lanes_at_least(score, least), x, none) : x;
  };
  Vec highest = none;
  for (int i = 0; i < n; i += kLanes) highest = max(logit(i), highest);
  const float top = reduce_max(highest);
  const float larger = top > lse ? top : lse;
  *unit = larger > kMaxFloat ? kMaxFloat : larger >= -kMaxFloat ? larger : 0.0f;
  const Vec base = set1(*unit);
  return sum_of(n, [&](int i) {
    const Vec x = sub(logit(i), base);
    // Sketches are less exact than BF16. NaN becomes -inf. Subnormal weights are dropped: the inverse of
    // their sum might be infinite.
    const Vec exact = exponential<BF16>(max(min(set1(0.0f), x), none));
    const Vec weight = zero_below(exact, set1(kLeastWeight), exact);
    store(scores + i, weight);
    return weight;
  });
}

inline void light_bounds(const float* weights, int n, const float* allowed, int count, float* room,
                         float* bounds) {
  // All tokens that weigh less than an equal part of what is allowed may be left out. Only the others, which
  // are mostly few, are searched.
  const auto part = [&](int j) {
    const float exact = allowed[j] / static_cast<float>(n > 0 ? n : 1);
    return exact > kLeastWeight ? exact : kLeastWeight;
  };
  const float least = part(0);
  int many = 0;
  const float light = sum_of(n, [&](int i) {
    const Vec weight = load(weights + i), limit = set1(least);
    many += pack_lanes(room + many, lanes_at_least(weight, limit), weight);
    return sub(weight, zero_below(weight, limit, weight));
  });
  for (int i = 0; i < 4 * kLanes; i += kLanes) store(room + many + i, set1(0.0f));
  const auto below = [&](float bound) {
    const Vec limit = set1(bound);
    return light + sum_of((many + kLanes - 1) / kLanes * kLanes, [&](int i) {
             const Vec weight = load(room + i);
             return sub(weight, zero_below(weight, limit, weight));
           });
  };
  float low = least;
  for (int j = 0; j < count; ++j) {
    float high = 2.0f;  // above all weights
    low = low > part(j) ? low : part(j);
    if (below(high) <= allowed[j]) low = high;
    for (int step = 0; step < kBoundSteps && low < high; ++step) {
      const float middle = __builtin_sqrtf(low) * __builtin_sqrtf(high), left = below(middle);
      (left <= allowed[j] ? low : high) = middle;
      if (left <= allowed[j] && left > kBoundEnough * allowed[j]) break;
    }
    bounds[j] = low;
  }
}

inline void mark_heavy(const float* weights, int n, float bound, uint16_t* masks) {
  const Vec limit = set1(bound);
  for (int p = 0; p < n / kPage; ++p) {
    uint32_t heavy = 0;
    for (int v = 0; v < kPage; v += kLanes)
      heavy |= lanes_at_least(load(weights + p * kPage + v), limit) << v;
    masks[p] = static_cast<uint16_t>(heavy);
  }
}

// A block of tokens and their weights, as Values takes them. Its values stay in the L1 cache while all heads
// read them.
template <class M, class Values>
struct WeighedRows {
  static constexpr int kMost = 64;
  static constexpr M kNothing[kMaxHeadDim] = {};

  int count = 0;  // rows; zeros follow
  const M* rows[kMost + Values::kRows];
  alignas(64) float weights[kMaxGroup][kMost + kLanes];

  // Takes rows of pages from `page` on, as many as there is room for, and prefetches them. Returns the first
  // page that is left.
  int take(const float* from, int64_t stride, const int32_t* at, int G, int D, const M* tiles,
           const int32_t* pages, const uint16_t* masks, int page, int n) {
    for (count = 0; page < n && count + kPage <= kMost; ++page) {
      const uint32_t mask = masks[page];
      for (int g = 0; g < G; ++g) {
        const float* own = from + g * stride + int64_t{at[page]} * kPage;
        float* to = weights[g] + count;
        for (int v = 0; v < kPage; v += kLanes) to += pack_lanes(to, mask >> v & kEveryLane, load(own + v));
      }
      const M* values = tiles + (int64_t{2} * pages[page] + 1) * kPage * D;
      for (uint32_t bits = mask; bits; bits &= bits - 1) {
        rows[count] = values + __builtin_ctz(bits) * D;
        fetch(rows[count++], D * static_cast<int>(sizeof(M)));
      }
    }
    for (int i = 0; i < Values::kRows; ++i) rows[count + i] = kNothing;
    return page;
  }

  // Turns the weights of head g into words of Values. Returns their sum.
  float form_words(int g) {
    float* own = weights[g];
    for (int i = count; i < kMost; i += kLanes) store(own + i, set1(0.0f));
    Vec sum = set1(0.0f);
    for (int i = 0; i < kMost; i += kLanes) sum = add(sum, load(own + i));
    return reduce_add(Values::template to_words<1, kMost>(own, sum));
  }

  // Adds to o[h * D + d], in the order of Values: kHeads heads from g on, kPairs pairs of vectors from d on.
  template <int kHeads, int kPairs>
  void add_pairs(int g, int d, int D, float* o) const {
    Vec x[kHeads][kPairs], y[kHeads][kPairs];
    const auto place = [&](int h, int i) { return o + (g + h) * D + d + i * 2 * kLanes; };
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
      for (int i = 0; i < kPairs; ++i) x[h][i] = load(place(h, i)), y[h][i] = load(place(h, i) + kLanes);
    }
    for (int row = 0, word = 0; row < count; row += Values::kRows, ++word) {
      const M *first = rows[row] + d, *last = rows[row + Values::kRows - 1] + d;
      typename Values::Pair value[kPairs];
#pragma GCC unroll 4
      for (int i = 0; i < kPairs; ++i) value[i] = Values::pair(first + i * 2 * kLanes, last + i * 2 * kLanes);
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) {
        const auto weight = Values::weight(weights[g + h] + word);
#pragma GCC unroll 4
        for (int i = 0; i < kPairs; ++i) {
          x[h][i] = Values::add(x[h][i], weight, value[i].a);
          y[h][i] = Values::add(y[h][i], weight, value[i].b);
        }
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
      for (int i = 0; i < kPairs; ++i) store(place(h, i), x[h][i]), store(place(h, i) + kLanes, y[h][i]);
    }
  }

  // Adds the rest of a row, less than a pair.
  void add_tail(int g, int d, int D, float* o) const {
    Vec sum = load(o + g * D + d);
    for (int row = 0, word = 0; row < count; row += Values::kRows, ++word) {
      sum = Values::add(sum, Values::weight(weights[g] + word),
                        Values::tail(rows[row] + d, rows[row + Values::kRows - 1] + d));
    }
    store(o + g * D + d, sum);
  }
};

template <class M>
void add_values(const float* weights, int64_t stride, const int32_t* at, int G, int D, const void* tiles,
                const int32_t* pages, const uint16_t* masks, int n, float* o, float* sums) {
  using Values = typename ManyHeads<M>::Values;
  constexpr int kPair = 2 * kLanes;
  WeighedRows<M, Values> blocks[2];
  __builtin_memset(o, 0, sizeof(float) * G * D);
  __builtin_memset(sums, 0, sizeof(float) * G);
  const auto take = [&](int block, int page) {
    return blocks[block].take(weights, stride, at, G, D, static_cast<const M*>(tiles), pages, masks, page, n);
  };
  int taken = take(0, 0);
  for (int i = 0; blocks[i].count > 0; i = 1 - i) {
    taken = take(1 - i, taken);  // prefetched while block i is added
    auto& block = blocks[i];
    for (int g = 0; g < G; ++g) sums[g] += block.form_words(g);
    for_heads<4>(G, [&]<int kHeads>(int g) {
      int d = 0;
      for (; d + 2 * kPair <= D; d += 2 * kPair) block.template add_pairs<kHeads, 2>(g, d, D, o);
      if (d + kPair <= D) {
        block.template add_pairs<kHeads, 1>(g, d, D, o);
        d += kPair;
      }
      for (int h = g; d < D && h < g + kHeads; ++h) block.add_tail(h, d, D, o);
    });
  }
  for (int g = 0; g < G; ++g) {
    for (int d = 0; d + kPair <= D; d += kPair) {
      float* to = o + g * D + d;
      Values::store_sums(to, load(to), load(to + kLanes));
    }
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
