#pragma once

#include "kernels/lanes.h"

// What the kernels for CPUs with a matrix unit (simd/amx.h) share. One product takes 16 rows as they lie in
// memory, 32 elements of each, for up to 16 heads.
namespace fluxion::FLUXION_ISA {
namespace {

inline constexpr int kMatrixHeads = kMatrixColumns;      // of one product
inline constexpr int kMatrixDepth = 2 * kMatrixColumns;  // elements of a row in one product
inline constexpr int kMatrixRowBytes = 4 * kMatrixColumns;

using Matrix = float[kMatrixRows][kMatrixColumns];

// Pieces to prefetch, four side by side, a line of each in turn, which gives the best memory throughput. They
// are added some time before they are fetched, and are fetched gradually.
struct FetchQueue {
  static constexpr int kSide = 4;
  static constexpr int kMax = 64;  // pieces that are not fetched yet; a power of two
  const char* pieces[kMax];
  int lines = 0;  // of a piece
  int added = 0;
  int first = 0, line = 0;  // the next of four pieces from `first` on

  void add(const void* piece) { pieces[added++ % kMax] = static_cast<const char*>(piece); }
  // Call after the last piece: repeats it until its group has four.
  void close() {
    while (added % kSide) add(pieces[(added - 1) % kMax]);
  }

  // Fetches `times` lines of each of four pieces; nothing of an incomplete group.
  void fetch(int times) {
    while (times > 0 && first + kSide <= added) {
      const char* const* from = pieces + first % kMax;
      const int end = smaller(line + times, lines);
      times -= end - line;
      for (int64_t at = line * int64_t{kLine}; at < end * int64_t{kLine}; at += kLine) {
#pragma GCC unroll 4
        for (int s = 0; s < kSide; ++s) prefetch_near(from[s] + at);
      }
      line = end;
      if (line == lines) {
        line = 0;
        first += kSide;
      }
    }
  }

  // Fetches the lines before line `to` of a piece and of its group.
  void fetch_to(int piece, int to) { fetch((piece / kSide * kSide - first) / kSide * lines + to - line); }
};

}  // namespace
}  // namespace fluxion::FLUXION_ISA
