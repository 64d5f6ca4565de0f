// A score table of LFPS: the past attention of one query head to positions or to offsets.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

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

// An entry counts if it is above a limit.
struct Limits {
  float mean;
  float first;  // of initial candidates
};

// The mean, and the threshold of the paper's Eq. 8 from the "approximate kurtosis", reconstructed
// (lab/lfps.py has why): mean + (alpha + 3 / kurtosis) * sqrt(m4 / m2), with the central moments m2 and m4.
// Rounded to float: in a table of equal entries no entry is above its mean.
inline Limits limits_of(const PowerSums& sums, int64_t n, double alpha) {
  if (n == 0) return {0, 0};
  double raw[4];
  for (int i = 0; i < 4; ++i) raw[i] = sums.of[i] / static_cast<double>(n);
  const double mean = raw[0], m2 = raw[1] - mean * mean;
  const double m4 = raw[3] - 4 * mean * raw[2] + 6 * mean * mean * raw[1] - 3 * mean * mean * mean * mean;
  // Flat, up to rounding.
  if (!(m2 > 1e-9 * mean * mean) || !(m4 > 0)) return {static_cast<float>(mean), static_cast<float>(mean)};
  const double kurtosis = m4 / (m2 * m2);
  return {static_cast<float>(mean), static_cast<float>(mean + (alpha + 3 / kurtosis) * std::sqrt(m4 / m2))};
}

// Eight-bit codes that keep the order of floats from 0 on: a larger number has no smaller code. A code is the
// exponent and the first three binary digits, less a base, and limited to 0 to 255. Different codes decide a
// comparison of their numbers; equal codes do not.
class Codes {
 public:
  // Numbers from half of `mean` to 2^30 times it have codes of their own.
  static Codes around(float mean) { return Codes(std::max(0, digits(mean) - kBelow)); }
  Codes() = default;  // all have 0

  uint8_t of(float x) const { return static_cast<uint8_t>(std::clamp(digits(x) - base_, 0, 255)); }
  // Whether numbers as large as these limits have codes of their own.
  bool fit(const Limits& limits) const { return of(limits.mean) > 0 && of(limits.first) < 255; }
  bool operator==(const Codes&) const = default;

 private:
  static constexpr int kBelow = 8;  // an octave
  static constexpr int kNone = 1 << 12;
  explicit Codes(int base) : base_(base) {}
  // A NaN counts as infinity at least; negative numbers, which no entry is, as 0.
  static int digits(float x) {
    return x <= 0 ? 0 : static_cast<int>(std::bit_cast<uint32_t>(x) >> 20 & 0x7ff);
  }

  int base_ = kNone;
};

// What a table has beside its entries.
struct TableStatistics {
  PowerSums sums;
  Codes code;
};

// The owner has the memory of entries and codes. The statistics are those of the entries [begin, end).
// Entries only grow until they are all multiplied, so codes made for an earlier mean serve for a hundred
// steps and more.
struct ScoreTable {
  float* values;
  uint8_t* codes;
  TableStatistics* statistics;
  int begin, end;

  void add(int i, float amount) {
    const float old = values[i];
    values[i] = old + amount;
    codes[i] = statistics->code.of(values[i]);
    if (begin <= i && i < end) statistics->sums.replace(old, values[i]);
  }
  // Entries [end, to) count, too.
  void extend(int to) {
    for (; end < to; ++end) statistics->sums.add(values[end]);
  }
  // by: a power of two, so that only underflow loses anything.
  void multiply(int entries, float by) {
    for (int i = 0; i < entries; ++i) values[i] *= by;
    statistics->sums.multiply(by);
    statistics->code = Codes();
  }
  // Makes new codes if the present ones do not fit the limits.
  void encode(int entries, const Limits& limits) {
    if (statistics->code.fit(limits)) return;
    const Codes code = Codes::around(limits.mean);
    if (code == statistics->code) return;
    for (int i = 0; i < entries; ++i) codes[i] = code.of(values[i]);
    statistics->code = code;
  }
  Limits limits(double alpha) const { return limits_of(statistics->sums, std::max(0, end - begin), alpha); }
};

}  // namespace fluxion
