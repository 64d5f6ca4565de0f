// Sizes of the host pool.
#pragma once

#include <cstdint>

#include "kernels/table.h"

namespace fluxion {

inline constexpr int kLevels = 4;  // blocks of 16, 32, 64 and 128 tokens: level j joins 1 << j pages

struct PoolShape {
  int layers;
  int kv_heads;
  int pages;  // page 0 included: the padding page, never read or written
  int head_dim;
  DType dtype;            // of what is stored
  int sink_pages;         // logical pages below this are in no coarse entry and no moments
  bool sketched = false;  // every full page has a sketch of its keys

  // Pages of all heads: the first factor of every size, and an int64_t so that no product overflows.
  int64_t head_pages() const { return int64_t{kv_heads} * pages; }
  // Sizes in the KV dtype, which queries, outputs, metadata and windows have: a key, and a tile of a window.
  int64_t element() const { return element_bytes(dtype); }
  int64_t token_bytes() const { return head_dim * element(); }
  int64_t window_tile_bytes() const { return 2 * kPage * token_bytes(); }
  int64_t entry_bytes() const { return 2 * token_bytes(); }
  // Sizes as stored: a key or a value, and a tile.
  int64_t row_bytes() const { return stored_bytes(dtype, head_dim); }
  int64_t tile_bytes() const { return 2 * kPage * row_bytes(); }
  int64_t sketch_bytes() const { return fluxion::sketch_bytes(head_dim); }
  int64_t skimmed_bytes() const { return fluxion::skimmed_bytes(head_dim); }
  int64_t moments_len() const { return 2 * head_dim + 8; }
  int64_t entries(int level) const { return (pages + (int64_t{1} << level) - 1) >> level; }
};

}  // namespace fluxion
