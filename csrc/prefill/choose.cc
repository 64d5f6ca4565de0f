#include "prefill/choose.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fluxion {
namespace {

// The class of a block whose log weight (natural) is `below` less than that of all together, at least 0.
int class_of(float below) {
  constexpr float kScale = 8 * 1.4426950408889634f;
  return static_cast<int>(std::min(below * kScale, kShareClasses - 1.0f));
}

// Log of the sum of exp(lse[i]); not finite if one is NaN or all are -inf.
float sum_of(const float* lse, int64_t count) {
  float top = -std::numeric_limits<float>::infinity(), sum = 0;
  for (int64_t i = 0; i < count; ++i) top = std::max(top, lse[i]);
  for (int64_t i = 0; i < count; ++i) sum += std::exp(lse[i] - top);
  return top + std::log(sum);
}

// Keeps `left` of the blocks of rank `last`, evenly distributed, and none of a higher rank.
void cut(uint16_t last, int64_t count, int64_t left, int64_t blocks, uint16_t* rank) {
  for (int64_t b = 0, i = 0; b < blocks; ++b) {
    if (rank[b] < last) continue;
    const bool kept = rank[b] == last && (i + 1) * left / count > i * left / count;
    i += rank[b] == last;
    if (!kept) rank[b] = kShareClasses;
  }
}

}  // namespace

void choose_blocks(const float* lse, int rows, int64_t blocks, float keep, int64_t most, uint16_t* rank) {
  std::fill_n(rank, blocks, uint16_t{kShareClasses});
  for (int r = 0; r < rows; ++r, lse += blocks) {
    const float all = sum_of(lse, blocks);
    if (!std::isfinite(all)) {
      std::fill_n(rank, blocks, uint16_t{0});
      return;
    }
    float held[kShareClasses] = {};
    const auto below = [&](int64_t b) { return std::max(all - lse[b], 0.0f); };
    for (int64_t b = 0; b < blocks; ++b) held[class_of(below(b))] += std::exp(-below(b));
    int last = 0;
    for (float kept = held[0]; kept < keep && last < kShareClasses - 1;) kept += held[++last];
    for (int64_t b = 0; b < blocks; ++b) {
      const int own = class_of(below(b));
      if (own <= last) rank[b] = std::min(rank[b], static_cast<uint16_t>(own));
    }
  }
  int64_t counts[kShareClasses + 1] = {};
  for (int64_t b = 0; b < blocks; ++b) ++counts[rank[b]];
  int64_t left = most;
  for (int c = 0; c < kShareClasses; left -= counts[c++]) {
    if (counts[c] > left) return cut(static_cast<uint16_t>(c), counts[c], left, blocks, rank);
  }
}

}  // namespace fluxion
