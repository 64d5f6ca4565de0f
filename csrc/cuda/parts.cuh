// Results of a list that was cut into parts.
#pragma once

#include "cuda/device.cuh"

namespace fluxion::device {

inline constexpr int kMergeThreads = 64;  // of a block that merges

// Merges one head's parts in order, by a block of kMergeThreads. o, lse (base 2): of the first part; each
// next one lies G heads further. lse_to: natural. Without parts: 0 and -inf.
__device__ __forceinline__ void merge_parts(const float* o, const float* lse, int parts, int G, int D,
                                            float* to, float* lse_to) {
  float top = minus_infinity();
  for (int p = 0; p < parts; ++p) top = fmaxf(top, lse[int64_t{p} * G]);
  const float base = reference(top);
  float total = 0.0f;
  for (int p = 0; p < parts; ++p) total += exp2f(lse[int64_t{p} * G] - base);
  for (int d = threadIdx.x; d < D; d += kMergeThreads) {
    float sum = 0.0f;
    // Loads several parts at once. A part without tokens has weight 0, and its stale output is not used.
#pragma unroll 8
    for (int p = 0; p < parts; ++p) {
      const float weight = exp2f(lse[int64_t{p} * G] - base), x = o[int64_t{p} * G * D + d];
      sum = fmaf(weight, weight == 0.0f ? 0.0f : x, sum);
    }
    to[d] = total == 0.0f ? 0.0f : sum / total;
  }
  if (threadIdx.x == 0) *lse_to = lse_of(top, total) * kLn2;
}

}  // namespace fluxion::device
