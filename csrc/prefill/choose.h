// Which earlier tokens a block of queries attends to in a sparse prefill.
#pragma once

#include <cstdint>

namespace fluxion {

// Shares of a weight are told apart by size, eight classes to a power of two, the largest first; the last
// class is for all that are smaller.
inline constexpr int kShareClasses = 256;

// The blocks that some query needs, of which lse[rows][blocks] has the weights. A query needs the heaviest
// ones until they have `keep` of its weight. If that is more than `most` blocks, those that weigh most for
// any query, and of the last class that is taken evenly distributed ones: so what a head spreads over all, it
// spreads over a sample.
//
// Writes rank[b], below kShareClasses for a block that is chosen. All are, if some weight is no number.
void choose_blocks(const float* lse, int rows, int64_t blocks, float keep, int64_t most, uint16_t* rank);

}  // namespace fluxion
