// A score table of LFPS: what past attention has given to positions or to offsets, of one query head.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/table.h"

namespace fluxion {

// Sums of x, x^2, x^3, x^4 over the entries that count into a table's statistics.
struct PowerSums {
  double of[4] = {};

  void add(double x) { replace(0, x); }
  void replace(double from, double to) {
    double f = 1, t = 1;
    for (double& sum : of) sum += (t *= to) - (f *= from);
  }
  void multiply(double by) {
    double power = 1;
    for (double& sum : of) sum *= power *= by;
  }
};

// Values that an entry is compared with: it has to be above them.
struct Limits {
  float mean;
  float first;  // of initial candidates
};

// The mean, and the threshold that the paper's Eq. 8 draws from the "approximate kurtosis", reconstructed
// (policy/lfps.py has why): mean + (alpha + 3 / kurtosis) * sqrt(m4 / m2), m2 and m4 being the central
// moments. In float, to the nearest: of a table of equal entries no entry is above its mean.
inline Limits limits_of(const PowerSums& sums, int64_t n, double alpha) {
  if (n == 0) return {0, 0};
  double raw[4];
  for (int i = 0; i < 4; ++i) raw[i] = sums.of[i] / static_cast<double>(n);
  const double mean = raw[0], m2 = raw[1] - mean * mean;
  const double m4 = raw[3] - 4 * mean * raw[2] + 6 * mean * mean * raw[1] - 3 * mean * mean * mean * mean;
  // Flat, or as good as flat: the differences are rounding.
  if (!(m2 > 1e-9 * mean * mean) || !(m4 > 0)) return {static_cast<float>(mean), static_cast<float>(mean)};
  const double kurtosis = m4 / (m2 * m2);
  return {static_cast<float>(mean), static_cast<float>(mean + (alpha + 3 / kurtosis) * std::sqrt(m4 / m2))};
}

// Entries lie in memory of the owner. tops[i] is the largest of entries 16 i .. 16 i + 15: entries only grow
// until they are all multiplied. The statistics are those of the entries [begin, end).
struct ScoreTable {
  float* values;
  float* tops;
  PowerSums* sums;
  int begin, end;

  void add(int i, float amount) {
    const float old = values[i];
    values[i] = old + amount;
    float& top = tops[i / kPage];
    top = std::max(top, values[i]);
    if (begin <= i && i < end) sums->replace(old, values[i]);
  }
  // Entries [end, to) count, too.
  void extend(int to) {
    for (; end < to; ++end) sums->add(values[end]);
  }
  // A power of two, so that nothing is lost but what underflows.
  void multiply(int entries, float by) {
    for (int i = 0; i < entries; ++i) values[i] *= by;
    for (int i = 0; i < entries / kPage; ++i) tops[i] *= by;
    sums->multiply(by);
  }
  Limits limits(double alpha) const { return limits_of(*sums, std::max(0, end - begin), alpha); }
};

}  // namespace fluxion
