// Measures what a head needs to read of the middle, by reading all of it: the labels that budget predictors
// learn from, and their features of a request's anchor query.
#pragma once

#include <cstdint>

#include "kernels/feature_index.h"
#include "runtime/pool.h"

namespace fluxion {

inline constexpr int kResults = 3;
inline constexpr int kMeasuredBlocks[] = {1, 16, 32, 64, 128};
inline constexpr int kBlockSizes = 5;

// When a selection is good enough. o is the head's exact output, o' its output from the residents and the
// selection.
enum class Criterion : int {
  kLayerError = 0,  // |o' - o| / max over the heads of |o| <= threshold (Fluxion, Eq. 2)
  kHeadError = 1,   // |o' - o| / |o| <= threshold
  kMass = 2,        // share of the attention mass that is read >= threshold
};

// N queries, all of one request. Outputs are contiguous float32, written whole; Hq query heads, Hk KV heads.
struct MeasureArgs {
  int layer;
  const int32_t* pages;  // physical page of every logical page
  int64_t page_count;
  const int32_t* lengths;  // [N]: tokens of the request when the query was the last one, itself included
  int queries;             // N
  const char* q;           // [N][Hq][D] KV dtype, the last two contiguous
  int64_t q_stride;        // bytes
  int q_heads;
  float scale;            // multiplies q.k
  int window;             // tokens, a multiple of 16
  const float* criteria;  // [C][2]: kind, threshold
  int criterion_count;    // C, at least 1
  bool single_tokens;     // false: budgets for blocks of one token are NaN

  float* anchor;  // [N][Hq][28]: see predictor/measure.py
  float* mean_k;  // [N][Hk][D]: of the middle; 0 where it is empty
  float* parts;   // [N][Hq][5]: lse_sink, lse_local, |O_sink|, |O_local|, |O of both|; an empty part: -inf, 0
  float*
      result;  // [N][Hq][3]: |o|, error of the residents alone (kLayerError), the middle's share of the mass
  float* budgets;  // [N][Hq][C][5]: least budget for blocks of 1, 16, 32, 64, 128 tokens
};

// The budget for which units_of_budget() gives exactly `count` of the blocks; 1 only for all of them.
float budget_of_blocks(int count, int tokens, int blk, int blocks);

// Blocks are tried in the order in which the engine selects them without attend_union: none, the best, the
// two best, and so on. The first prefix that meets a criterion gives the budget. All blocks always meet it.
//
// Reads keys and values once; single tokens read the values they need once more. Reads only tokens below each
// length. Runs on the pool's workers, or in the caller alone while they are busy. The layer's pages must not
// be written meanwhile. Throws std::invalid_argument before anything is written.
void measure(const HostPool& pool, const MeasureArgs& args);

}  // namespace fluxion
