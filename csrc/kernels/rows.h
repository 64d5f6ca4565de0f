#pragma once

#include "kernels/table.h"

// Dot products of one query with kLanes rows at a time, shared by score.h and attend.h.
namespace fluxion::FLUXION_ISA {
namespace {

inline constexpr int kLine = 64;  // bytes of a cache line

inline constexpr int smaller(int a, int b) { return a < b ? a : b; }

// Prefetches the line at p, which need not be mapped, into the L1 cache. Not the compiler's builtin: GCC sees
// no effect in it and drops it from loops.
inline void prefetch(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht0 %0" ::"m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p);
#endif
}

// Prefetches all lines of `bytes` bytes.
inline void fetch(const void* from, int bytes) {
  for (int b = 0; b < bytes; b += kLine) prefetch(static_cast<const char*>(from) + b);
}

// Prefetches one line into the L2 cache, for more than the L1 cache holds. In L1 it would hold up other
// reads.
inline void prefetch_near(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 %0" ::"m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p, 0, 2);
#endif
}

// Prefetches one line that is read once: into the L1 cache, past the others if the core can do so.
inline void prefetch_once(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetchnta %0" ::"m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p, 0, 0);
#endif
}

// Prefetches the line at p for a write. A write that misses delays all writes after it.
inline void prefetch_to_write(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p, 1);
#endif
}

// Lane i = sum of the lanes of rows[i].
inline Vec reduce_rows(const Vec (&rows)[kLanes]) {
  return fold_rows(rows, [](Vec a, Vec b) { return add(a, b); });
}

template <class T>
struct StridedRows {
  const T* base;
  int64_t stride;  // elements
  const T* operator()(int i) const { return base + i * stride; }
};

template <class T>
struct ListedRows {
  const T* const* rows;
  const T* operator()(int i) const { return rows[i]; }
};

// Lane i = q . rows(i) over n elements.
template <class T, class Rows>
inline Vec dot_rows(const typename Dot<T>::Query* q, const Rows& rows, int n) {
  constexpr int kStep = Dot<T>::kStep;
  Vec sums[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) sums[i] = set1(0.0f);
  int d = 0;
  for (; d + kStep <= n; d += kStep) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) sums[i] = Dot<T>::step(sums[i], q + d, rows(i) + d);
  }
  if (d < n) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) sums[i] = Dot<T>::tail(sums[i], q + d, rows(i) + d);
  }
  return reduce_rows(sums);
}

template <class T, class Row>
inline float dot_row(const typename Dot<T>::Query* q, const Row& row, int n) {
  constexpr int kStep = Dot<T>::kStep;
  Vec sum = set1(0.0f);
  int d = 0;
  for (; d + kStep <= n; d += kStep) sum = Dot<T>::step(sum, q + d, row + d);
  if (d < n) sum = Dot<T>::tail(sum, q + d, row + d);
  return reduce_add(sum);
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
