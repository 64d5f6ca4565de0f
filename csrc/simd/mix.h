#pragma once

#include "simd/types.h"

// How rows of T are multiplied by weights and summed.
namespace fluxion::FLUXION_ISA {
namespace {

// In float32. A step of a sum takes kRows consecutive rows; their weights, kept as one float, are its `word`.
template <class T>
struct Mix {
  static constexpr int kRows = 1;
  using Weight = Vec;  // a word in every lane
  using Part = Vec;    // kLanes elements of each row of a step

  // 2 * kLanes consecutive elements of each row of a step; p and q: of the first row and of the last one.
  struct Pair {
    Part a, b;
  };
  static Pair pair(const T* p, const T*) {
    Pair pair;
    load_pair(p, pair.a, pair.b);
    return pair;
  }
  // The last kLanes elements of rows whose length is no multiple of a pair, in their order.
  static Part tail(const T* p, const T*) { return load_one(p); }
  static Vec add(Vec sum, Weight weight, Part part) { return fma(weight, part, sum); }
  // Writes the sums of a pair in the order of the elements.
  static void store_sums(float* p, Vec a, Vec b) { store_pair<T>(p, a, b); }

  // The weights, rounded as `add` uses them.
  static Vec rounded(Vec weights) { return weights; }
  // The word of two rounded weights, of the first row and of the last one.
  static float word(float p, float) { return p; }
  static Weight weight(const float* word) { return set1(*word); }
  // weights[rows][kAcross], kCount in all, become words[rows / kRows][kAcross] in the same place. sum: of the
  // weights, by lanes; returns that of the rounded ones.
  template <int kAcross, int kCount>
  static Vec to_words(float*, Vec sum) {
    return sum;
  }
};

// The Mix of compute-bound kernels, which have many heads to a row. An ISA that multiplies bf16 has its own.
template <class T>
struct ManyHeads {
  using Values = Mix<T>;
};

}  // namespace
}  // namespace fluxion::FLUXION_ISA
