// Attention of a prefill chunk over the host pool.
#pragma once

#include <cstdint>

#include "runtime/pool.h"

namespace fluxion {

// Tokens start .. start + tokens - 1 of a request whose logical page i is pages[i]. The pool has them and all
// before them.
struct Chunk {
  int layer;
  const int32_t* pages;
  int64_t n_pages;
  int64_t start, tokens;
  int q_heads;
  const char* q;     // those of token t are [q_heads][D], KV dtype, at q + t * q_stride
  int64_t q_stride;  // bytes
  float scale;       // multiplies q.k
  char* out;         // [tokens][q_heads][D], KV dtype
};

// Every token attends to itself and to all before it. Keys and values are read where they lie, by all
// workers; long lists of few queries are divided among them, too. Throws std::invalid_argument before
// anything is written.
void attend_chunk(const HostPool& pool, const Chunk& chunk);

}  // namespace fluxion
