// Indices of the numbers that describe a head to the predictor (Fluxion, appendix A). predictor/features.py
// has their formulas; a test compares the two lists.
#pragma once

namespace fluxion {

enum Feature : int {
  kFeatureLayer,
  kFeatureHead,
  kFeatureCpuTokens,
  kFeatureGpuTokens,
  kFeatureSinkKNorm,
  kFeatureSinkVNorm,
  kFeatureMeanKNorm,
  kFeatureMeanVNorm,
  kFeatureKNorm,                      // mean, variance, skewness, kurtosis
  kFeatureVNorm = kFeatureKNorm + 4,  // the same four
  kFeatureQMeanK = kFeatureVNorm + 4,
  kFeatureZ,  // the same four
  kFeatureLseSink = kFeatureZ + 4,
  kFeatureLseCpu,
  kFeatureLseLocal,
  kFeatureAnchorLseSink,
  kFeatureAnchorLseCpu,
  kFeatureAnchorLseLocal,
  kFeatureOSink,
  kFeatureOLocal,
  kFeatureAnchorOSink,
  kFeatureAnchorOCpu,
  kFeatureAnchorOLocal,
  kFeatureQNorm,
  kFeatureAnchorQNorm,
  kFeatureCosine,
  kFeatureBudgets,  // of blocks of 16, 32, 64, 128
  kFeatureOMax = kFeatureBudgets + 4,
  kFeatureAnchorOMax,
  kFeatures
};
static_assert(kFeatures == 41);

// The features of the anchor query, in the order of its compact array. Not inline: an ISA object must define
// no symbol that the linker could keep for the others.
inline constexpr int kAnchorFeatures = 28;
constexpr int kAnchorFeature[kAnchorFeatures] = {4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 17, 18,
                                                 19, 20, 24, 25, 26, 29, 30, 31, 33, 35, 36, 37, 38, 40};

// Stands for the LSE of no tokens, -inf, among the features.
inline constexpr float kEmptyLse = -30.0f;

// Parts of the resident attention of one query head: the LSE of the sinks and of the window, the norms of
// their outputs, the norm of both merged.
enum Part : int { kPartLseSink, kPartLseLocal, kPartOSink, kPartOLocal, kPartOMerged, kParts };

}  // namespace fluxion
