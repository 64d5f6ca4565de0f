#pragma once

#include "kernels/rows.h"
#include "simd/pace.h"

// A loop that finds its lines in the L1 cache reads faster than memory delivers. It then prefetches more
// lines than a core can have in flight, and the excess prefetches are dropped. Later the core stalls on those
// lines, and runs ahead again. Prefetches that are spaced apart are not dropped.
namespace fluxion::FLUXION_ISA {
namespace {

// Each address is ready kGap multiplications, of three cycles each, after the one before.
class Spaced {
 public:
  template <int kGap>
  const char* next(const void* p) {
#if defined(__x86_64__)
#pragma GCC unroll 4
    for (int i = 0; i < kGap; ++i) asm("imul %0, %0" : "+r"(zero_));
#endif
    return static_cast<const char*>(p) + zero_;
  }

 private:
  int64_t zero_ = 0;
};

// Finds the fastest of kWays, as hardware prefetchers find their distance (Srinath et al., "Feedback Directed
// Prefetching", HPCA 2007): the bandwidth that other cores leave changes by the minute. The other ways are
// tried now and then.
template <int kWays>
class Throttle {
 public:
  int choose() {
    int best = 0;
    for (int i = 1; i < kWays; ++i) {
      if (ticks_[i] < ticks_[best]) best = i;
    }
    if (++calls_ % kTry != 0) return best;
    return (best + 1 + static_cast<int>(calls_ / kTry % (kWays - 1))) % kWays;
  }
  // Records the time of a line. Most disturbances make it longer; lines from a cache make it shorter.
  void note(int way, float ticks) {
    float& usual = ticks_[way];
    usual = usual == 0 ? ticks : usual + (ticks - usual) / (ticks < usual ? 2 : 8);
  }

 private:
  static constexpr uint32_t kTry = 32;

  uint32_t calls_ = 0;
  float ticks_[kWays] = {};
};

// Calls run<kGap>(first, end) for all of 0..units-1, in order. A unit reads `lines` lines of memory from
// kSide lists.
template <int kSide, class Run>
void throttled(int units, int lines, const Run& run) {
  constexpr auto& kGaps = Pace<kSide>::kGaps;
#if defined(__x86_64__)
  constexpr int kWays = sizeof(kGaps) / sizeof(kGaps[0]);
  static_assert(kWays == 1 || kWays == 3);
  if constexpr (kWays == 3) {
    constexpr int kTurn = 4096;  // lines; fewer than half as many say little
    static thread_local Throttle<kWays> throttle;
    const int turn = (kTurn + lines - 1) / lines;
    int first = 0;
    for (int end; units - first >= (turn + 1) / 2; first = end) {
      end = units - first < 2 * turn ? units : first + turn;
      const int way = throttle.choose();
      const uint64_t start = __builtin_ia32_rdtsc();
      if (way == 0) run.template operator()<kGaps[0]>(first, end);
      if (way == 1) run.template operator()<kGaps[1]>(first, end);
      if (way == 2) run.template operator()<kGaps[2]>(first, end);
      const auto ticks = static_cast<float>(__builtin_ia32_rdtsc() - start);
      throttle.note(way, ticks / (static_cast<float>(end - first) * static_cast<float>(lines)));
    }
    if (first == units) return;
  }
#endif
  run.template operator()<kGaps[0]>(0, units);
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
