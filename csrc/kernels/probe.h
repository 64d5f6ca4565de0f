#pragma once

#include "kernels/rows.h"

// Measures memory throughput: reads a list of pieces and does nothing else. This is the upper bound for every
// kernel that reads the same list.
namespace fluxion::FLUXION_ISA {
namespace {

// As wide as the ISA loads. Sums of 32-bit words are the same on every ISA and in any order.
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
inline constexpr int kWordsPerLine = kLine / static_cast<int>(sizeof(Words));

struct PieceList {
  const char* base;
  const int32_t* pieces;  // nullptr: 0, 1, 2, ...
  int64_t piece_bytes;    // a multiple of a line
  int64_t count;

  const char* at(int64_t i) const { return base + (pieces ? pieces[i] : i) * piece_bytes; }
};

// The lines of pieces first, first + step, ... of a list; past its end, those of the last one again.
struct LineCursor {
  int64_t piece, step;
  int64_t offset = 0;

  const char* next(const PieceList& list) {
    const char* line = list.at(piece) + offset;
    offset += kLine;
    if (offset == list.piece_bytes) {
      offset = 0;
      if (piece + step < list.count) piece += step;
    }
    return line;
  }
};

inline void add_line(const char* line, Words (&sums)[kWordsPerLine]) {
#pragma GCC unroll 16
  for (int w = 0; w < kWordsPerLine; ++w) {
    Words words;
    __builtin_memcpy(&words, line + w * sizeof(Words), sizeof(Words));
    sums[w] += words;
  }
}

// Reads kStreams pieces side by side, a line of each in turn: a single piece keeps too few memory banks and
// hardware prefetchers busy. Every stream is prefetched `ahead` lines before its use.
template <int kStreams>
uint32_t read_list(const PieceList& list, int64_t ahead) {
  Words sums[kWordsPerLine] = {};
  LineCursor fetched[kStreams];
  for (int s = 0; s < kStreams; ++s) fetched[s] = {s < list.count ? s : list.count - 1, kStreams};
  for (int64_t i = 0; i < ahead; ++i) {
    for (LineCursor& cursor : fetched) prefetch(cursor.next(list));
  }
  int64_t i = 0;
  for (; i + kStreams <= list.count; i += kStreams) {
    const char* piece[kStreams];
    for (int s = 0; s < kStreams; ++s) piece[s] = list.at(i + s);
    for (int64_t b = 0; b < list.piece_bytes; b += kLine) {
#pragma GCC unroll 8
      for (int s = 0; s < kStreams; ++s) {
        if (ahead > 0) prefetch(fetched[s].next(list));
        add_line(piece[s] + b, sums);
      }
    }
  }
  for (; i < list.count; ++i) {
    for (int64_t b = 0; b < list.piece_bytes; b += kLine) add_line(list.at(i) + b, sums);
  }
  uint32_t total = 0;
  for (int w = 0; w < kWordsPerLine; ++w) {
    for (int lane = 0; lane < kLanes; ++lane) total += sums[w][lane];
  }
  return total;
}

inline uint32_t read(const void* base, const int32_t* pieces, int64_t piece_bytes, int64_t n, int streams,
                     int64_t ahead) {
  if (n == 0) return 0;
  const PieceList list{static_cast<const char*>(base), pieces, piece_bytes, n};
  if (streams >= 4) return read_list<4>(list, ahead);
  return streams >= 2 ? read_list<2>(list, ahead) : read_list<1>(list, ahead);
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
