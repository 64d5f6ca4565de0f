#pragma once

#include "simd/types.h"

// The layout of a query for dot products with rows of T. This version is for every ISA that multiplies
// floats; an ISA that multiplies bf16 specialises it.
namespace fluxion::FLUXION_ISA {
namespace {

template <class T>
struct Dot {
  using Query = float;
  static constexpr int kStep = 2 * kLanes;  // elements that are multiplied at a time

  // n is a multiple of 16. Returns the factor to multiply products by.
  static float pack(const T* q, int n, Query* out) {
    int i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
      Vec a, b;
      load_pair(q + i, a, b);
      store(out + i, a);
      store(out + i + kLanes, b);
    }
    if (i < n) store(out + i, load_one(q + i));
    return 1.0f;
  }
  // Adds the products of one step.
  static Vec step(Vec sum, const Query* q, const T* k) {
    Vec a, b;
    load_pair(k, a, b);
    return fma(load(q), a, fma(load(q + kLanes), b, sum));
  }
  // The same in three steps, for products of several queries with several rows.
  struct Pair {
    Vec a, b;
  };
  static Pair query_pair(const Query* q) { return {in_register(load(q)), in_register(load(q + kLanes))}; }
  static Pair row_pair(const T* k) {
    Pair pair;
    load_pair(k, pair.a, pair.b);
    return {in_register(pair.a), in_register(pair.b)};
  }
  static Vec add(Vec sum, const Pair& q, const Pair& k) { return fma(q.a, k.a, fma(q.b, k.b, sum)); }
  // The last elements of a row whose length is no multiple of a step: half of one.
  static Vec tail(Vec sum, const Query* q, const T* k) { return fma(load(q), load_one(k), sum); }
};

}  // namespace
}  // namespace fluxion::FLUXION_ISA
