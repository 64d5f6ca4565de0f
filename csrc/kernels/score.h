#pragma once

#include "kernels/throttle.h"
#include "kernels/tile.h"
#ifdef FLUXION_MATRIX_UNIT
#include "kernels/score_matrix.h"
#endif

namespace fluxion::FLUXION_ISA {
namespace {

// Heads that share one read of an entry. With kH heads, kLanes / kH entries are scored at a time, so that the
// sums stay in registers and reduce to one vector.
inline constexpr int kScoreHeads = kLanes < 4 ? kLanes : 4;
// The entries of a list are read as four lists side by side, an entry of each in turn (kernels/probe.h),
// kScoreSteps of each in a block. They are prefetched one block ahead.
inline constexpr int kScoreStreams = 4, kScoreSteps = 4;
inline constexpr int kScoreBlock = kScoreStreams * kScoreSteps;
inline constexpr int kLineScores = kLine / static_cast<int>(sizeof(float));

// Entries of `bytes` each in one of the lists that n entries are read as. Memory is slower if all lists are
// at the same place of a 4 KiB page.
inline int list_length(int n, int bytes) {
  constexpr int kApart = 2048;
  const int part = (n + kScoreStreams - 1) / kScoreStreams;
  const bool alike = part >= 64 && part * static_cast<int64_t>(bytes) % (2 * kApart) == 0;
  return alike ? part + kApart / bytes : part;
}

// The columns of a matrix of kScoreSteps rows. Loads are as wide as the stores, because a load that spans
// several stores waits for the cache.
struct Transposed {
  using Four = float __attribute__((vector_size(16)));
  Four of[kScoreStreams];

  explicit Transposed(const float* from) {
    static_assert(kScoreStreams == 4 && kScoreSteps == 4);
    Four row[4];
    for (int p = 0; p < 4; ++p) __builtin_memcpy(&row[p], from + 4 * p, sizeof(row[p]));
    const Four low02 = pick<0, 4, 1, 5>(row[0], row[2]);
    const Four low13 = pick<0, 4, 1, 5>(row[1], row[3]);
    const Four high02 = pick<2, 6, 3, 7>(row[0], row[2]);
    const Four high13 = pick<2, 6, 3, 7>(row[1], row[3]);
    of[0] = pick<0, 4, 1, 5>(low02, low13);
    of[1] = pick<2, 6, 3, 7>(low02, low13);
    of[2] = pick<0, 4, 1, 5>(high02, high13);
    of[3] = pick<2, 6, 3, 7>(high02, high13);
  }

 private:
  // Four of the eight floats of a and b.
  template <int i, int j, int k, int l>
  static Four pick(Four a, Four b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, i, j, k, l);
#else  // GCC has that from version 12 on
    using Indices = int32_t __attribute__((vector_size(16)));
    return __builtin_shuffle(a, b, Indices{i, j, k, l});
#endif
  }
};

// In place of a gap: the pass prefetches a share of the rows, without gaps.
inline constexpr int kShare = -1;

// bounds[h][i] of kScoreBlock rows and kH heads. next: as many rows to prefetch, or `more` of them if kGap is
// kShare. A sum runs over the elements in order, whatever rows and heads share its registers.
template <class T, int kD, int kH, int kGap>
[[gnu::noinline]] void score_heads(const typename Dot<T>::Query* q, int size, const T* const* rows,
                                   const T* const* next, int more, float (*bounds)[kScoreBlock]) {
  constexpr int kR = kLanes / kH, kStep = 2 * kLanes;
  constexpr int kBytes = kStep * static_cast<int>(sizeof(T));
  const int n = kD ? 2 * kD : size;
  Spaced spaced;
  for (int first = 0; first < kScoreBlock; first += kR) {
    const int shared = kGap == kShare ? more * first / kScoreBlock : 0;
    const int end = kGap == kShare ? more * (first + kR) / kScoreBlock : 0;
    Vec sums[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) sums[i] = set1(0.0f);
    for (int d = 0; d < n; d += kStep) {
      if (kBytes >= kLine || d * static_cast<int>(sizeof(T)) % kLine == 0) {
        if constexpr (kGap == kShare) {
          for (int r = shared; r < end; ++r) fetch(next[r] + d, kBytes);
        } else {
#pragma GCC unroll 16
          for (int r = 0; r < kR; ++r) fetch(spaced.next<kGap>(next[first + r] + d), kBytes);
        }
      }
      if constexpr (kH == 1) {
#pragma GCC unroll 16
        for (int r = 0; r < kR; ++r) sums[r] = Dot<T>::step(sums[r], q + d, rows[first + r] + d);
      } else {
        typename Dot<T>::Pair pairs[kR];
#pragma GCC unroll 16
        for (int r = 0; r < kR; ++r) pairs[r] = Dot<T>::row_pair(rows[first + r] + d);
#pragma GCC unroll 16
        for (int h = 0; h < kH; ++h) {
          const typename Dot<T>::Pair weights = Dot<T>::query_pair(q + h * n + d);
#pragma GCC unroll 16
          for (int r = 0; r < kR; ++r) sums[h * kR + r] = Dot<T>::add(sums[h * kR + r], weights, pairs[r]);
        }
      }
    }
    float out[kLanes];
    store(out, reduce_rows(sums));
#pragma GCC unroll 16
    for (int h = 0; h < kH; ++h) __builtin_memcpy(bounds[h] + first, out + h * kR, kR * sizeof(float));
  }
}

// split: [G][2 * head_dim], the weights of {min, max}.
template <class T, int kD>
void score_blocks(const T* split, int G, int head_dim, const T* entries, const int32_t* index, int n,
                  float* out, int64_t out_stride) {
  if (n == 0) return;
  const int size = 2 * (kD ? kD : head_dim);
  const int part = list_length(n, size * static_cast<int>(sizeof(T)));
#ifdef FLUXION_MATRIX_UNIT
  if constexpr (sizeof(T) == sizeof(BF16))
    return MatrixScores<kD>(split, G, head_dim, entries, index, n, part, out, out_stride).run();
#endif
  // Heads are scored kScoreHeads at a time; missing ones are zero.
  alignas(64) typename Dot<T>::Query queries[kMaxHeads * 2 * kMaxHeadDim];
  const int padded = (G + kScoreHeads - 1) / kScoreHeads * kScoreHeads;
  for (int g = 0; g < G; ++g) Dot<T>::pack(split + g * size, size, queries + g * size);
  for (int i = G * size; i < padded * size; ++i) queries[i] = {};
  const T* rows[2][kScoreBlock];
  float bounds[kScoreHeads][kScoreBlock];
  // Row p * kScoreStreams + s is entry first + p of list s. Past the end, the last entry of the list, or of
  // all, stands in: its bounds are dropped, and fetching it again costs nothing.
  const auto find = [&](int first, const T** to) {
    for (int p = 0; p < kScoreSteps; ++p) {
      for (int s = 0; s < kScoreStreams; ++s) {
        const int at = s * part + smaller(first + p, part - 1);
        *to++ = entries + index[smaller(at, n - 1)] * static_cast<int64_t>(size);
      }
    }
  };
  find(0, rows[0]);
  const int blocks = (part + kScoreSteps - 1) / kScoreSteps;
  const int lines = kScoreBlock * size * static_cast<int>(sizeof(T)) / kLine;
  const auto score = [&]<int kGap>(int first, int end) {
    for (int block = first; block < end; ++block) {
      const int i = block * kScoreSteps, now = block % 2;
      find(i + kScoreSteps, rows[1 - now]);
      for (int g = 0; i % kLineScores == 0 && g < G; ++g) {
        for (int s = 0; s < kScoreStreams; ++s)
          prefetch_to_write(out + g * out_stride + s * static_cast<int64_t>(part) + i + 2 * kLineScores - 1);
      }
      const auto heads = [&]<int kH>(int g) {
        const typename Dot<T>::Query* q = queries + static_cast<int64_t>(g) * size;
        if (g == 0 && kGap != kShare) {
          score_heads<T, kD, kH, kGap>(q, size, rows[now], rows[1 - now], 0, bounds);
        } else {
          const int from = kScoreBlock * g / padded;
          const int more = kGap == kShare ? kScoreBlock * (g + kScoreHeads) / padded - from : 0;
          score_heads<T, kD, kH, kShare>(q, size, rows[now], rows[1 - now] + from, more, bounds);
        }
        for (int h = 0; h < kH && g + h < G; ++h) {
          const Transposed columns(bounds[h]);
          float* to = out + (g + h) * out_stride + i;
          for (int s = 0; s < kScoreStreams; ++s, to += part) {
            const int count = smaller(smaller(part, n - s * part) - i, kScoreSteps);
            if (count == kScoreSteps) {
              __builtin_memcpy(to, &columns.of[s], sizeof(columns.of[s]));
            } else {
              for (int p = 0; p < count; ++p) to[p] = columns.of[s][p];
            }
          }
        }
      };
      int g = 0;
      for (; g + 1 < G; g += kScoreHeads) heads.template operator()<kScoreHeads>(g);
      if (g < G) heads.template operator()<1>(g);
    }
  };
  // With more heads arithmetic dominates, and every pass over the rows prefetches a share of the next ones.
  constexpr int kPacedHeads = 2 * kScoreHeads;
  if (G <= kPacedHeads) return throttled<kScoreStreams>(blocks, lines, score);
  score.template operator()<kShare>(0, blocks);
}

// sum_d q_d * (min_d + max_d) / 2 + spread * |q_d| * (max_d - min_d) / 2 is one dot product of length 2D: an
// entry {min, max} with {q-, q+}, where q- = (q - spread * |q|) / 2 and q+ = (q + spread * |q|) / 2.
template <class T>
void score(const void* q, int G, int D, const void* entries, const int32_t* index, int n, float spread,
           float* out, int64_t out_stride) {
  const T* queries = static_cast<const T*>(q);
  T split[kMaxHeads * 2 * kMaxHeadDim];
  for (int g = 0; g < G; ++g) {
    T* weights = split + g * 2 * D;
    for (int d = 0; d < D; d += kLanes) {
      const Vec half = mul(load_one(queries + g * D + d), set1(0.5f));
      const Vec wide = mul(max(half, sub(set1(0.0f), half)), set1(spread));
      store_one(weights + d, sub(half, wide));
      store_one(weights + D + d, add(half, wide));
    }
  }
  const T* base = static_cast<const T*>(entries);
  switch (D) {
    case 64:
      return score_blocks<T, 64>(split, G, D, base, index, n, out, out_stride);
    case 128:
      return score_blocks<T, 128>(split, G, D, base, index, n, out, out_stride);
    default:
      return score_blocks<T, 0>(split, G, D, base, index, n, out, out_stride);
  }
}

// Exact scores of tokens. It measures what block bounds lose; it is slow, because it reads every key.
template <class T>
void score_tokens(const void* q, int G, int D, const void* tiles, const int32_t* pages, int n, float* out,
                  int64_t out_stride) {
  if constexpr (sizeof(T) == sizeof(Int8)) {
    constexpr int kMost = 4;
    Unpacked<kMost> room(D);
    by_parts<kMost>(n, [&](int first, int count) {
      for (int i = 0; i < count; ++i) room.take(i, tile_at<Int8>(tiles, pages[first + i], D), 0, kPage);
      score_tokens<BF16>(q, G, D, room.tiles(), room.pages(), count, out + first * kPage, out_stride);
    });
    return;
  } else {
    const T* queries = static_cast<const T*>(q);
    const T* base = static_cast<const T*>(tiles);
    alignas(64) typename Dot<T>::Query packed[kMaxGroup * kMaxHeadDim];
    for (int g = 0; g < G; ++g) Dot<T>::pack(queries + g * D, D, packed + g * D);
    const int64_t tile_size = 2 * kPage * static_cast<int64_t>(D);
    for (int i = 0; i < n; ++i) {
      const T* keys = base + pages[i] * tile_size;
      const char* next = reinterpret_cast<const char*>(base + pages[i + 1 < n ? i + 1 : i] * tile_size);
      for (int64_t b = 0; b < tile_size / 2 * static_cast<int64_t>(sizeof(T)); b += kLine) prefetch(next + b);
      for (int g = 0; g < G; ++g) {
        for (int t = 0; t < kPage; t += kLanes) {
          const StridedRows<T> rows{keys + t * D, D};
          store(out + g * out_stride + i * kPage + t, dot_rows<T>(packed + g * D, rows, D));
        }
      }
    }
  }
}

// The same for single tokens: kLanes keys at a time, wherever they lie.
template <class T>
void score_rows(const void* q, int G, int D, const void* tiles, const int32_t* tokens, int n, float* out,
                int64_t out_stride) {
  if constexpr (sizeof(T) == sizeof(Int8)) {
    constexpr int kMost = 4;
    Unpacked<kMost> room(D);
    int32_t order[kMost * kPage];
    for (int i = 0; i < kMost * kPage; ++i) order[i] = i;
    by_parts<kMost * kPage>(n, [&](int first, int count) {
      for (int i = 0; i < count; ++i) {
        const int32_t token = tokens[first + i];
        unpack_row(tile_at<Int8>(tiles, token / kPage, D), token % kPage, D,
                   room.tile(i / kPage) + i % kPage * D);
      }
      score_rows<BF16>(q, G, D, room.tiles(), order, count, out + first, out_stride);
    });
    return;
  } else {
    const T* queries = static_cast<const T*>(q);
    const T* base = static_cast<const T*>(tiles);
    alignas(64) typename Dot<T>::Query packed[kMaxGroup * kMaxHeadDim];
    for (int g = 0; g < G; ++g) Dot<T>::pack(queries + g * D, D, packed + g * D);
    const auto row = [&](int i) {
      const int32_t token = tokens[i < n ? i : n - 1];
      return base + (token / kPage * int64_t{2 * kPage} + token % kPage) * D;
    };
    const T* rows[kLanes];
    for (int i = 0; i < n; i += kLanes) {
      for (int j = 0; j < kLanes; ++j) {
        rows[j] = row(i + j);
        fetch(row(i + j + 2 * kScoreBlock), D * static_cast<int>(sizeof(T)));
      }
      for (int g = 0; g < G; ++g) {
        const Vec scores = dot_rows<T>(packed + g * D, ListedRows<T>{rows}, D);
        float* to = out + g * out_stride + i;
        if (i + kLanes <= n) {
          store(to, scores);
          continue;
        }
        float last[kLanes];
        store(last, scores);
        for (int j = 0; j < n - i; ++j) to[j] = last[j];
      }
    }
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
