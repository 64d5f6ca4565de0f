#pragma once

#include "kernels/int8.h"
#include "kernels/logits.h"

// Keys in four bits, and what they are good for: which tokens weigh enough to be read. Layout and meaning are
// in table.h.
namespace fluxion::FLUXION_ISA {
namespace {

// A code c stands for c - 7.5 scales.
inline constexpr float kMiddleCode = 7.5f;
inline constexpr float kMostCode = 15.0f;

// Whether the rotation flips the sign of element d: as if by chance, so that no key is all in one element
// after it.
inline bool flips(int d) { return static_cast<uint32_t>(d) * 0x9e3779b1u >> 31; }

// Elements that are mixed with one another: the largest power of two that divides D.
inline int mixed_together(int D) { return D & -D; }

// Signs, then a Hadamard transform: q.k of two that were rotated is mixed_together(D) times what it was, and
// what was large in a few elements is spread over many. Additions in a fixed order: the same on every ISA.
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

// The largest magnitude; NaN where an element is not finite.
inline float largest_size(const float* x, int D) {
  float largest = 0.0f, zeros = 0.0f;
  for (int d = 0; d < D; ++d) {
    const float size = x[d] < 0.0f ? -x[d] : x[d];
    largest = size > largest ? size : largest;
    zeros += x[d] - x[d];
  }
  return largest + zeros;
}

// A byte has element d of a token below, and element d + 4 above, for d of 0, 1, 2, 3, 8, ...
inline int code_at(int t, int d) { return d / 8 * (4 * kPage) + 4 * t + d % 4; }

inline BF16* scales_of_sketch(uint8_t* sketch, int D) {
  return reinterpret_cast<BF16*>(sketch + kPage * D / 2);
}
inline const BF16* scales_of_sketch(const uint8_t* sketch, int D) {
  return reinterpret_cast<const BF16*>(sketch + kPage * D / 2);
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
    if (!(exact < kMaxFloat)) continue;  // a NaN: so is every score
    const float inverse = 1.0f / to_float(*scale);
    for (int d = 0; d < D; ++d) {
      const float code = x[d] * inverse + kMiddleCode;
      const float inside = code < 0.0f ? 0.0f : code > kMostCode ? kMostCode : code;
      sketch[code_at(t, d)] |= static_cast<uint8_t>(nearest_integer(inside) << (d % 8 / 4 * 4));
    }
  }
}

// Queries as sketches are multiplied with: rotated, in 8 bits.
struct SketchQueries {
  alignas(64) int8_t elements[kMaxGroup * kMaxHeadDim];
  float unit[kMaxGroup];  // of the integers' products: times it, they are q.k
  float base[kMaxGroup];  // 7.5 times the sum of the elements: what the codes' offset adds to a product

  template <class M>
  SketchQueries(const M* q, int G, int D) {
    for (int g = 0; g < G; ++g) {
      float x[kMaxHeadDim];
      for (int d = 0; d < D; ++d) x[d] = to_float(q[g * D + d]);
      rotate(x, D);
      const float largest = largest_size(x, D);
      const float inverse = largest > 1e-30f ? kMostInteger / largest : 0.0f;
      int sum = 0;
      for (int d = 0; d < D; ++d) {
        const int integer = largest < kMaxFloat ? nearest_integer(x[d] * inverse) : 0;
        elements[g * D + d] = static_cast<int8_t>(integer);
        sum += integer;
      }
      unit[g] = largest / kMostInteger / static_cast<float>(mixed_together(D));
      base[g] = kMiddleCode * static_cast<float>(sum);
    }
  }
};

// q.k of the 16 tokens of each of kPages sketches for kHeads heads from head `first` on. Products are
// integers below 2^24, so that the sums are exact in float32, too.
template <int kHeads, int kPages>
inline void score_sketch(const SketchQueries& q, int first, const uint8_t* const* sketches, int D, float* out,
                         int64_t stride) {
  for (int v = 0; v < kPage / kLanes; ++v) {
    Vec low[kPages][kHeads], high[kPages][kHeads];
#pragma GCC unroll 2
    for (int p = 0; p < kPages; ++p) {
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) low[p][h] = high[p][h] = set1(0.0f);
    }
    for (int d = 0; d < D; d += 8) {
      Vec below[kPages], above[kPages];
#pragma GCC unroll 2
      for (int p = 0; p < kPages; ++p) {
        const uint8_t* at = sketches[p] + d / 8 * (4 * kPage) + 4 * v * kLanes;
        const Vec both = bytes_at(reinterpret_cast<const Int8*>(at));
        below[p] = in_register(low_halves(both));
        above[p] = in_register(high_halves(both));
      }
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        const int8_t* query = q.elements + (first + h) * D + d;
        const Vec of_low = in_register(for_all_lanes(query)), of_high = in_register(for_all_lanes(query + 4));
#pragma GCC unroll 2
        for (int p = 0; p < kPages; ++p) {
          low[p][h] = add_bytes(low[p][h], below[p], of_low);
          high[p][h] = add_bytes(high[p][h], above[p], of_high);
        }
      }
    }
#pragma GCC unroll 2
    for (int p = 0; p < kPages; ++p) {
      const Vec scales = load_one(scales_of_sketch(sketches[p], D) + v * kLanes);
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        const Vec products = sub(add(floats_of(low[p][h]), floats_of(high[p][h])), set1(q.base[first + h]));
        store(out + h * stride + p * kPage + v * kLanes, mul(mul(products, scales), set1(q.unit[first + h])));
      }
    }
  }
}

template <class M>
void score_sketches(const void* query, int G, int D, const void* sketches, const int32_t* pages, int n,
                    float* out, int64_t out_stride) {
  constexpr int kTogether = kRegisters >= 32 ? 4 : 2;  // heads, of two pages side by side
  constexpr int kAhead = 8;                            // pages
  const SketchQueries q(static_cast<const M*>(query), G, D);
  const uint8_t* base = static_cast<const uint8_t*>(sketches);
  const int size = static_cast<int>(sketch_bytes(D));
  const auto at = [&](int i) { return base + static_cast<int64_t>(pages[i]) * size; };
  for (int i = 0; i < n; i += 2) {
    for (int next = i + kAhead; next < smaller(i + kAhead + 2, n); ++next) fetch(at(next), size);
    const bool alone = i + 1 == n;
    const uint8_t* const two[2] = {at(i), alone ? nullptr : at(i + 1)};
    int g = 0;
    const auto go = [&]<int kHeads>() {
      for (; g + kHeads <= G; g += kHeads) {
        float* to = out + g * out_stride + i * kPage;
        if (alone) {
          score_sketch<kHeads, 1>(q, g, two, D, to, out_stride);
        } else {
          score_sketch<kHeads, 2>(q, g, two, D, to, out_stride);
        }
      }
    };
    go.template operator()<kTogether>();
    if constexpr (kTogether > 2) go.template operator()<2>();
    go.template operator()<1>();
  }
}

// The bound of the weights is looked for in so many steps at most. It is near enough when what is below it is
// this share of what may be.
inline constexpr int kMassSteps = 8;
inline constexpr float kMassEnough = 0.9f;

// Sums of weights that four chains of additions share.
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

inline void keep_mass(float* scores, int n, Scale scale, float lse, float left, uint16_t* masks,
                      float* room) {
  const auto logit = [&](int i) { return logits(load(scores + i), scale); };
  Vec highest = set1(kNegInf);
  for (int i = 0; i < n; i += kLanes) highest = max(logit(i), highest);
  const float top = reduce_max(highest);
  const float larger = top > lse ? top : lse;
  const float unit = larger == kNegInf ? 0.0f : larger > kMaxFloat ? kMaxFloat : larger;
  const float all = sum_of(n, [&](int i) {
    const Vec x = sub(logit(i), set1(unit));
    const Vec weight = exp_nonpositive(max(min(set1(0.0f), x), set1(kNegInf)));  // NaN: -inf
    store(scores + i, weight);
    return weight;
  });
  const float allowed = left * (all + (lse == kNegInf ? 0.0f : __builtin_expf(lse - unit)));
  if (!(all > allowed)) return;
  // Tokens below the first bound may be left out, were they all of them. It is the others that are looked at
  // again, and mostly they are few.
  float low = allowed / static_cast<float>(n), high = 1.0f;
  int many = 0;
  const float light = sum_of(n, [&](int i) {
    const Vec weight = load(scores + i), least = set1(low);
    many += pack_lanes(room + many, lanes_at_least(weight, least), weight);
    return sub(weight, zero_below(weight, least, weight));
  });
  for (int i = 0; i < 4 * kLanes; i += kLanes) store(room + many + i, set1(0.0f));
  for (int step = 0; step < kMassSteps && low < high; ++step) {
    const float middle = __builtin_sqrtf(low) * __builtin_sqrtf(high);
    const Vec limit = set1(middle);
    const float below = light + sum_of((many + kLanes - 1) / kLanes * kLanes, [&](int i) {
                          const Vec weight = load(room + i);
                          return sub(weight, zero_below(weight, limit, weight));
                        });
    (below <= allowed ? low : high) = middle;
    if (below <= allowed && below > kMassEnough * allowed) break;
  }
  const Vec limit = set1(low);
  for (int p = 0; p < n / kPage; ++p) {
    uint32_t kept = 0;
    for (int v = 0; v < kPage; v += kLanes) kept |= lanes_at_least(load(scores + p * kPage + v), limit) << v;
    masks[p] = static_cast<uint16_t>(masks[p] | kept);
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
