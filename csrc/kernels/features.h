#pragma once

#include "kernels/feature_index.h"
#include "kernels/table.h"

namespace fluxion::FLUXION_ISA {
namespace {

// Products of a query with itself, with the anchor query and with the mean key.
struct QueryProducts {
  double self;
  double anchor;
  double anchor_self;
  double mean_k;
};

// Plain loops in a fixed order of additions, and products of at most 48 bits, exact in float64 (see
// half_moments): the network gets the same bits on every ISA, that of its training included.
template <class T>
inline QueryProducts products(const T* q, const T* anchor, const float* mean_k, int D) {
  double self[16] = {}, both[16] = {}, other[16] = {}, mean[16] = {};
  for (int d = 0; d < D; d += 16) {
    for (int i = 0; i < 16; ++i) {
      const double x = to_float(q[d + i]), y = to_float(anchor[d + i]), k = mean_k[d + i];
      self[i] += x * x;
      both[i] += x * y;
      other[i] += y * y;
      mean[i] += x * k;
    }
  }
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      self[i] += self[i + width];
      both[i] += both[i + width];
      other[i] += other[i + width];
      mean[i] += mean[i + width];
    }
  }
  return {self[0], both[0], other[0], mean[0]};
}

inline float finite_lse(float lse) { return lse == kNegInf ? kEmptyLse : lse; }

template <class T>
void features(const FeatureArgs& a) {
  const int G = a.q_heads / a.kv_heads, D = a.head_dim, sink_pages = a.sinks / kPage;
  for (int b = 0; b < a.batch; ++b) {
    const int n = a.seq_lens[b];
    const int pages = n > a.window ? (n - a.window) / kPage : 0;
    const int middle = pages > sink_pages ? (pages - sink_pages) * kPage : 0;
    const float cpu_tokens = static_cast<float>(__builtin_log1p(middle));
    const float gpu_tokens = static_cast<float>(__builtin_log1p(n - middle));
    const double log_middle = middle > 0 ? __builtin_log(middle) : 0.0;
    const T* q = reinterpret_cast<const T*>(static_cast<const char*>(a.q) + b * a.q_stride);
    const float* parts = a.parts + static_cast<int64_t>(b) * a.q_heads * kParts;
    float* out = a.out + static_cast<int64_t>(b) * a.q_heads * kFeatures;
    const int64_t row = a.rows[b];
    float largest = 0.0f;
    for (int h = 0; h < a.q_heads; ++h) {
      const float size = parts[h * kParts + kPartOMerged];
      largest = size > largest ? size : largest;
    }
    for (int h = 0; h < a.q_heads; ++h, parts += kParts, out += kFeatures) {
      const int64_t head = row * a.q_heads + h;
      const float* anchor = a.anchor + head * kAnchorFeatures;
      for (int i = 0; i < kAnchorFeatures; ++i) out[kAnchorFeature[i]] = anchor[i];
      const T* anchor_q = static_cast<const T*>(a.anchor_q) + head * D;
      const float* mean_k = a.mean_k + (row * a.kv_heads + h / G) * D;
      const QueryProducts dot = products(q + static_cast<int64_t>(h) * D, anchor_q, mean_k, D);
      const double norm = __builtin_sqrt(dot.self), norms = norm * __builtin_sqrt(dot.anchor_self);
      const double score = middle > 0 ? dot.mean_k * a.scale : 0.0;
      // Keys of a normal distribution: ln E exp x = mean + variance / 2.
      const double lse_middle = log_middle + score + 0.5 * dot.self * out[kFeatureZ + 1];
      out[kFeatureLayer] = static_cast<float>(a.layer);
      out[kFeatureHead] = static_cast<float>(a.first_head + h);
      out[kFeatureCpuTokens] = cpu_tokens;
      out[kFeatureGpuTokens] = gpu_tokens;
      out[kFeatureQMeanK] = norm > 0 ? static_cast<float>(score / norm) : 0.0f;
      out[kFeatureLseSink] = finite_lse(parts[kPartLseSink]);
      out[kFeatureLseCpu] = middle > 0 ? static_cast<float>(lse_middle) : kEmptyLse;
      out[kFeatureLseLocal] = finite_lse(parts[kPartLseLocal]);
      out[kFeatureOSink] = parts[kPartOSink];
      out[kFeatureOLocal] = parts[kPartOLocal];
      out[kFeatureQNorm] = static_cast<float>(norm);
      out[kFeatureCosine] = norms > 0 ? static_cast<float>(dot.anchor / norms) : 0.0f;
      out[kFeatureOMax] = largest;
    }
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
