// Four numbers that describe a population: mean, variance, skewness and kurtosis.
#pragma once

#include <algorithm>
#include <cmath>

namespace fluxion {

// From its central moments.
inline void write_shape(double mean, double m2, double m3, double m4, float* out) {
  const bool flat = !(m2 > 1e-12 * mean * mean);
  out[0] = static_cast<float>(mean);
  out[1] = static_cast<float>(std::max(m2, 0.0));
  out[2] = flat ? 0.0f : static_cast<float>(m3 / (m2 * std::sqrt(m2)));
  out[3] = flat ? 0.0f : static_cast<float>(m4 / (m2 * m2));
}

// sums: of the first four powers of n numbers.
inline void shape_of_sums(const double* sums, double n, float* out) {
  const double mean = sums[0] / n, square = sums[1] / n, cube = sums[2] / n, fourth = sums[3] / n;
  const double mean2 = mean * mean;
  write_shape(mean, square - mean2, cube - 3 * mean * square + 2 * mean * mean2,
              fourth - 4 * mean * cube + 6 * mean2 * square - 3 * mean2 * mean2, out);
}

// Describes the numbers factor * scores[n].
inline void shape_of_scores(const float* scores, int n, double factor, float* out) {
  double sum = 0.0;
  for (int i = 0; i < n; ++i) sum += scores[i];
  const double mean = sum / n;
  double m2 = 0.0, m3 = 0.0, m4 = 0.0;
  for (int i = 0; i < n; ++i) {
    const double x = scores[i] - mean, square = x * x;
    m2 += square;
    m3 += square * x;
    m4 += square * square;
  }
  const double f2 = factor * factor;
  write_shape(mean * factor, m2 / n * f2, m3 / n * f2 * factor, m4 / n * f2 * f2, out);
}

}  // namespace fluxion
