#pragma once

#include "kernels/rows.h"

namespace fluxion::FLUXION_ISA {
namespace {

// Blocks of rows between the one fetched and the one in use.
inline constexpr int kRowsAhead = 2 * kLanes;

// Fetches kLanes entries, a few lines at each step of the arithmetic (see Fetcher in attend.h). Also where
// entries follow one another: the hardware does not see a stream in rows read column by column.
struct RowFetcher {
  const char* rows[kLanes];
  int64_t row_bytes;
  int lines_per_step;
  int row = 0;
  int64_t offset = 0;

  void step() {
    for (int i = 0; i < lines_per_step && row < kLanes; ++i) {
      __builtin_prefetch(rows[row] + offset, 0, 2);
      offset += kLine;
      if (offset >= row_bytes) {
        offset = 0;
        ++row;
      }
    }
  }
};

// sum_d q_d * (min_d + max_d) / 2 + spread * |q_d| * (max_d - min_d) / 2 is one dot product of length 2D: an
// entry {min, max} with {q-, q+}, where q- = (q - spread * |q|) / 2 and q+ = (q + spread * |q|) / 2.
template <class T, int kD>
void score_blocks(const typename Dot<T>::Query* queries, int G, int head_dim, const T* entries,
                  const int32_t* index, int n, float* out, int64_t out_stride) {
  const int size = 2 * (kD ? kD : head_dim);
  const int64_t row_bytes = size * static_cast<int64_t>(sizeof(T));
  const int steps = G * (size / (2 * kLanes));
  const int lines = static_cast<int>((row_bytes + kLine - 1) / kLine) * kLanes;
  const T* rows[kLanes];
  float bounds[kLanes];
  for (int i = 0; i < n; i += kLanes) {
    const int count = n - i < kLanes ? n - i : kLanes;
    RowFetcher fetcher{{}, row_bytes, (lines + steps - 1) / steps};
    bool run = true;
    for (int j = 0; j < kLanes; ++j) {
      // Past the end the last entry stands in: its bounds are dropped, and to fetch it again costs nothing.
      const int at = i + j < n ? i + j : n - 1;
      const int next = i + j + kRowsAhead < n ? i + j + kRowsAhead : n - 1;
      rows[j] = entries + index[at] * static_cast<int64_t>(size);
      fetcher.rows[j] = reinterpret_cast<const char*>(entries + index[next] * static_cast<int64_t>(size));
      run &= rows[j] == rows[0] + j * static_cast<int64_t>(size);
    }
    for (int g = 0; g < G; ++g) {
      const auto* q = queries + static_cast<int64_t>(g) * size;
      const auto between = [&] { fetcher.step(); };
      store(bounds, run ? dot_rows<T>(q, StridedRows<T>{rows[0], size}, size, between)
                        : dot_rows<T>(q, ListedRows<T>{rows}, size, between));
      for (int j = 0; j < count; ++j) out[g * out_stride + i + j] = bounds[j];
    }
  }
}

template <class T>
void score(const void* q, int G, int D, const void* entries, const int32_t* index, int n, float spread,
           float* out, int64_t out_stride) {
  const T* queries = static_cast<const T*>(q);
  T split[2 * kMaxHeadDim];
  alignas(64) typename Dot<T>::Query packed[kMaxHeads * 2 * kMaxHeadDim];
  for (int g = 0; g < G; ++g) {
    for (int d = 0; d < D; ++d) {
      const float half = 0.5f * to_float(queries[g * D + d]);
      const float wide = spread * (half < 0.0f ? -half : half);
      round_to(half - wide, &split[d]);
      round_to(half + wide, &split[D + d]);
    }
    Dot<T>::pack(split, 2 * D, packed + g * 2 * D);
  }
  const T* base = static_cast<const T*>(entries);
  switch (D) {
    case 64:
      return score_blocks<T, 64>(packed, G, D, base, index, n, out, out_stride);
    case 128:
      return score_blocks<T, 128>(packed, G, D, base, index, n, out, out_stride);
    default:
      return score_blocks<T, 0>(packed, G, D, base, index, n, out, out_stride);
  }
}

// Exact scores of tokens. A measure of what block bounds lose, not a fast path: it reads every key.
template <class T>
void score_tokens(const void* q, int G, int D, const void* tiles, const int32_t* pages, int n, float* out,
                  int64_t out_stride) {
  const T* queries = static_cast<const T*>(q);
  const T* base = static_cast<const T*>(tiles);
  alignas(64) typename Dot<T>::Query packed[kMaxGroup * kMaxHeadDim];
  for (int g = 0; g < G; ++g) Dot<T>::pack(queries + g * D, D, packed + g * D);
  const int64_t tile_size = 2 * kPage * static_cast<int64_t>(D);
  for (int i = 0; i < n; ++i) {
    const T* keys = base + pages[i] * tile_size;
    const char* next = reinterpret_cast<const char*>(base + pages[i + 1 < n ? i + 1 : i] * tile_size);
    for (int64_t b = 0; b < tile_size / 2 * static_cast<int64_t>(sizeof(T)); b += kLine)
      __builtin_prefetch(next + b, 0, 2);
    for (int g = 0; g < G; ++g) {
      for (int t = 0; t < kPage; t += kLanes) {
        const StridedRows<T> rows{keys + t * D, D};
        store(out + g * out_stride + i * kPage + t, dot_rows<T>(packed + g * D, rows, D, [] {}));
      }
    }
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
