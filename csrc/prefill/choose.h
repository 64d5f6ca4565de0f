// Which earlier tokens a block of queries attends to in a sparse prefill.
#pragma once

#include <cstdint>

namespace fluxion {

// Classes of shares of a weight by size: eight to a power of two, the largest first; the last class is for
// all smaller shares.
inline constexpr int kShareClasses = 256;

// Chooses the blocks that some query needs; lse[rows][blocks] has their weights. A query needs the heaviest
// blocks until they have `keep` of its weight. If that is more than `most` blocks, takes those that weigh
// most for any query. The last class that is taken is sampled evenly, so that a head with spread attention
// reads a sample.
//
// Writes rank[b], below kShareClasses for a chosen block. All are chosen if some weight is NaN.
void choose_blocks(const float* lse, int rows, int64_t blocks, float keep, int64_t most, uint16_t* rank);

}  // namespace fluxion
