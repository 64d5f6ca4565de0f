#include "engine/resident_parts.h"

#include <algorithm>
#include <cmath>

namespace fluxion {

namespace {

// In float64 and a fixed order: no ISA changes the result for the same x.
float norm_of(const float* x, int D) {
  double sums[16] = {};
  for (int d = 0; d < D; d += 16) {
    for (int i = 0; i < 16; ++i) sums[i] += static_cast<double>(x[d + i]) * x[d + i];
  }
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  }
  return static_cast<float>(std::sqrt(sums[0]));
}

void attend_run(const KernelTable& kernels, const void* q, int G, int D, Scale scale, const TileRun& run,
                uint16_t* masks, float* o, float* lse) {
  const bool whole = run.count == 0 || run.last_tokens == kPage;
  if (!whole) {
    const int before = (run.count - 1) * G;
    std::fill_n(masks, before, uint16_t{0xffff});
    std::fill_n(masks + before, G, static_cast<uint16_t>((1u << run.last_tokens) - 1));
  }
  kernels.attend(q, G, D, scale, run.tiles, run.pages, whole ? nullptr : masks, run.count, 0, o, lse);
}

}  // namespace

void resident_parts(const KernelTable& kernels, const KernelTable& exact, const void* q, int G, int D,
                    Scale scale, const TileRun& sinks, const TileRun& local, uint16_t* masks, float* o,
                    float* lse, float* parts) {
  alignas(64) float o_sink[kMaxGroup * kMaxHeadDim], o_local[kMaxGroup * kMaxHeadDim];
  float lse_sink[kMaxGroup], lse_local[kMaxGroup];
  attend_run(kernels, q, G, D, scale, sinks, masks, o_sink, lse_sink);
  attend_run(kernels, q, G, D, scale, local, masks, o_local, lse_local);
  for (int g = 0; g < G; ++g, parts += kParts) {
    float* merged = o + g * D;
    lse[g] = exact.merge_state(o_sink + g * D, lse_sink[g], o_local + g * D, lse_local[g], D, merged);
    parts[kPartLseSink] = lse_sink[g];
    parts[kPartLseLocal] = lse_local[g];
    parts[kPartOSink] = norm_of(o_sink + g * D, D);
    parts[kPartOLocal] = norm_of(o_local + g * D, D);
    parts[kPartOMerged] = norm_of(merged, D);
  }
}

}  // namespace fluxion
