// Attention of a prefill chunk over the host pool.
#pragma once

#include <cstdint>

#include "kernels/table.h"
#include "runtime/pool.h"

namespace fluxion {

// Tokens start .. start + tokens - 1 of a request whose logical page i is pages[i]. The pool has these and
// all tokens before them.
struct Chunk {
  int layer;
  const int32_t* pages;
  int64_t n_pages;
  int64_t start, tokens;
  int q_heads;
  const char* q;     // those of token t are [q_heads][D], KV dtype, at q + t * q_stride
  int64_t q_stride;  // bytes
  Scale scale;
  char* out;               // [tokens][q_heads][D], KV dtype
  float budget;            // the largest share of earlier tokens that is read, in (0, 1]; 1: an exact prefill
  int window = kNoWindow;  // newest tokens that each token attends to, itself included
  const float* sinks = nullptr;  // [q_heads]: a logit a head without a value; nullptr: none
  // [tokens]: the tokens are nodes of a tree, at most 64, parents first. Token t attends to token i only if
  // bit i of tree[t] is 1: its ancestors and itself. nullptr: each one attends to all before it.
  const uint64_t* tree = nullptr;
};

// Every token attends to itself and to all before it that are in its window. A prefill with a window is
// exact. All workers read keys and values in place, and also divide long lists of few queries. Throws
// std::invalid_argument before anything is written.
//
// With a budget below 1, a block of queries and the heads of a group read the sinks, nearby tokens, and the
// blocks of kExtendKeys other tokens that matter most to some of these queries (choose_blocks). Every eighth
// query is asked, exactly. The last tokens of a chunk, which may be the question, read everything.
//
// A tree is attended to exactly, and is no deeper than a window. A token's position is its depth.
//
// Returns which share of the tokens to attend to was read.
double attend_chunk(const HostPool& pool, const Chunk& chunk);

}  // namespace fluxion
