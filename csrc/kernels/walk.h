#pragma once

#include "kernels/exp.h"
#include "kernels/table.h"
#include "kernels/tile.h"

// The arithmetic of predictor/measure.cc: what each page and token contributes to attention.
namespace fluxion::FLUXION_ISA {
namespace {

// out[h] = sum over the 16 tokens of weight * v, for kH heads.
template <class T, int kH>
void sum_values(const T* v, int D, const float* const* weights, float* const* out) {
  int d = 0;
  for (; d + 2 * kLanes <= D; d += 2 * kLanes) {
    Vec sums[kH][2];
#pragma GCC unroll 4
    for (int h = 0; h < kH; ++h) sums[h][0] = sums[h][1] = set1(0.0f);
    for (int t = 0; t < kPage; ++t) {
      Vec a, b;
      load_pair(v + t * D + d, a, b);
#pragma GCC unroll 4
      for (int h = 0; h < kH; ++h) {
        const Vec weight = set1(weights[h][t]);
        sums[h][0] = fma(weight, a, sums[h][0]);
        sums[h][1] = fma(weight, b, sums[h][1]);
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < kH; ++h) store_pair<T>(out[h] + d, sums[h][0], sums[h][1]);
  }
  if (d == D) return;
  for (int h = 0; h < kH; ++h) {
    Vec sum = set1(0.0f);
    for (int t = 0; t < kPage; ++t) sum = fma(set1(weights[h][t]), load_one(v + t * D + d), sum);
    store(out[h] + d, sum);
  }
}

template <class T>
void page_values(const float* scores, int64_t stride, int G, int D, float scale, const float* lse,
                 const void* tiles, const int32_t* pages, int n, float* weights, float* out,
                 int64_t out_stride) {
  if constexpr (sizeof(T) == sizeof(Int8)) {
    constexpr int kMost = 4;
    Unpacked<kMost> room(D);
    by_parts<kMost>(n, [&](int first, int count) {
      for (int i = 0; i < count; ++i) room.take(i, tile_at<Int8>(tiles, pages[first + i], D), kPage, kPage);
      page_values<BF16>(scores + first * kPage, stride, G, D, scale, lse, room.tiles(), room.pages(), count,
                        weights + first * kPage, out + first * static_cast<int64_t>(D), out_stride);
    });
    return;
  } else {
    for (int i = 0; i < n; ++i) {
      const T* values = tile_at<T>(tiles, pages[i], D) + kPage * D;
      for (int g = 0; g < G; ++g) {
        const int64_t at = g * stride + i * kPage;
        const Vec total = set1(lse[g]);
        for (int t = 0; t < kPage; t += kLanes) {
          const Vec x = min(set1(kMaxFloat), mul(load(scores + at + t), set1(scale)));
          // Rounding may leave a token that has all the weight a little above 0.
          store(weights + at + t, exp_nonpositive(min(set1(0.0f), sub(x, total))));
        }
      }
      for (int g = 0; g < G;) {
        const float* from[4];
        float* to[4];
        for (int h = 0; h < 4 && g + h < G; ++h) {
          from[h] = weights + (g + h) * stride + i * kPage;
          to[h] = out + (g + h) * out_stride + i * static_cast<int64_t>(D);
        }
        if (g + 4 <= G) {
          sum_values<T, 4>(values, D, from, to);
          g += 4;
        } else {
          sum_values<T, 1>(values, D, from, to);
          g += 1;
        }
      }
    }
  }
}

inline float add_rows(const float* rows, int n, float weight, const float* target, int D, float* sum) {
  Vec square = set1(0.0f);
  for (int d = 0; d < D; d += kLanes) {
    Vec x = fma(set1(-weight), load(target + d), load(sum + d));
    for (int i = 0; i < n; ++i) x = add(x, load(rows + i * static_cast<int64_t>(D) + d));
    store(sum + d, x);
    square = fma(x, x, square);
  }
  return reduce_add(square);
}

template <class T>
float add_value(const void* tile, int token, float weight, const float* target, int D, float* sum) {
  if constexpr (sizeof(T) == sizeof(Int8)) {
    Unpacked<1> room(D);
    room.take(0, static_cast<const Int8*>(tile), kPage + token, 1);
    return add_value<BF16>(room.tiles(), token, weight, target, D, sum);
  } else {
    const T* v = static_cast<const T*>(tile) + (kPage + token) * D;
    Vec square = set1(0.0f);
    for (int d = 0; d < D; d += kLanes) {
      const Vec x = fma(set1(weight), sub(load_one(v + d), load(target + d)), load(sum + d));
      store(sum + d, x);
      square = fma(x, x, square);
    }
    return reduce_add(square);
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
