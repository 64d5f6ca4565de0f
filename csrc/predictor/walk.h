// One head's walk through what it could read: the order, and when it has read enough.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/table.h"
#include "predictor/measure.h"

namespace fluxion {

// Indices of scores, the largest first and of equal scores the lower index, as KernelTable::select chooses
// them (NaN is -inf, -0 is 0). Sorted on demand, in pieces that double.
class Order {
 public:
  Order(const float* scores, int n, uint64_t* keys) : keys_(keys), n_(n) {
    for (int i = 0; i < n; ++i)
      keys[i] = static_cast<uint64_t>(~rank(scores[i])) << 32 | static_cast<uint32_t>(i);
  }

  // The i-th; called with i = 0, 1, 2, ...
  int operator[](int i) {
    if (i >= sorted_) {
      const int end = std::min(n_, std::max(256, 2 * sorted_));
      if (end < n_) std::nth_element(keys_ + sorted_, keys_ + end, keys_ + n_);
      std::sort(keys_ + sorted_, keys_ + end);
      sorted_ = end;
    }
    return static_cast<int>(keys_[i] & 0xffffffffu);
  }
  // The i-th, or the last that is sorted.
  int ahead(int i) const { return static_cast<int>(keys_[std::min(i, sorted_ - 1)] & 0xffffffffu); }

 private:
  static uint32_t rank(float score) {
    const uint32_t bits = std::isnan(score) ? 0xff800000u : std::bit_cast<uint32_t>(score + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
  }

  uint64_t* keys_;
  int n_;
  int sorted_ = 0;
};

// A bit for each criterion.
inline uint32_t every(int criteria) { return ~uint32_t{0} >> (32 - criteria); }

// The target of a head. All weights have one common unit.
struct Aim {
  const float* resident;   // [D]: its output from sinks and window alone
  const float* o;          // [D]: from everything
  double resident_weight;  // of sinks and window
  double total;            // of everything
  float resident_error;    // |resident - o| / largest
  float o_norm;            // |o|
  float largest;           // |o| of the largest head
  const float* criteria;   // [C][2]: kind, threshold
  int criterion_count;     // C, 1 to 32
};

// Starts with sinks and window. The output over all that was read differs from o by sum / weight.
class Walk {
 public:
  Walk(const Aim& aim, int D);

  // Criteria that are not met yet, a bit each.
  uint32_t open() const { return open_; }
  // [D]: sum of weight * (v - o) over what was read. The caller adds what it reads.
  float* sum() { return sum_; }
  // Call after reading more, of this weight; square = |sum|^2. Returns the criteria that are met now and no
  // longer open.
  uint32_t step(double weight, float square);

 private:
  Criterion kind(int c) const { return static_cast<Criterion>(static_cast<int>(aim_.criteria[2 * c])); }
  float threshold(int c) const { return aim_.criteria[2 * c + 1]; }

  const Aim& aim_;
  float sum_[kMaxHeadDim];
  double weight_;
  uint32_t open_ = 0;
};

inline Walk::Walk(const Aim& aim, int D) : aim_(aim), weight_(aim.resident_weight) {
  const float weight = static_cast<float>(weight_);
  for (int d = 0; d < D; ++d) sum_[d] = weight * (aim.resident[d] - aim.o[d]);
  for (int c = 0; c < aim.criterion_count; ++c) {
    bool met = false;
    switch (kind(c)) {
      case Criterion::kLayerError:
        met = aim.resident_error <= threshold(c);
        break;
      case Criterion::kHeadError:
        met = aim.resident_error * aim.largest <= threshold(c) * aim.o_norm;
        break;
      case Criterion::kMass:
        met = weight_ >= threshold(c) * aim.total;
        break;
    }
    if (!met) open_ |= 1u << c;
  }
}

inline uint32_t Walk::step(double weight, float square) {
  weight_ += weight;
  // If all that was read has weight 0 in float32, the error is unknown.
  if (!(weight_ > 0.0)) return 0;
  const double error = std::sqrt(static_cast<double>(square));
  uint32_t found = 0;
  for (uint32_t open = open_; open != 0; open &= open - 1) {
    const int c = std::countr_zero(open);
    bool met = false;
    switch (kind(c)) {
      case Criterion::kLayerError:
        met = error <= threshold(c) * weight_ * aim_.largest;
        break;
      case Criterion::kHeadError:
        met = error <= threshold(c) * weight_ * aim_.o_norm;
        break;
      case Criterion::kMass:
        met = weight_ >= threshold(c) * aim_.total;
        break;
    }
    if (met) found |= 1u << c;
  }
  open_ &= ~found;
  return found;
}

}  // namespace fluxion
