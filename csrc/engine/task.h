// A task: one request and one group (a KV head and its query heads).
#pragma once

#include <cstdint>

namespace fluxion {

struct Task {
  int32_t request;
  int32_t head;  // KV head
};

// Bytes that a task read of the middle: of blocks the whole tiles; of single tokens the rows of K and V that
// some head attends to (of some that sketches find only V). What the guard adds is read by itself, and counts
// once more where another head of the group has read it. What the tasks of a bundle read together counts for
// each of them.
struct Reads {
  int64_t tile_bytes = 0;
  int64_t metadata_bytes = 0;
};

// What one task reads: scratch.pages[0..count) and, when masked, scratch.masks[count][G].
struct Selection {
  int count = 0;
  bool masked = false;
  bool near = false;    // a cache has most of it
  uint16_t ranked = 0;  // heads whose blocks were chosen by their scores, which are in the scratch
  int64_t tokens = 0;   // summed over heads
  Reads reads;
};

enum Stat {
  kStatLayers,
  kStatTasks,
  kStatTasksCpu,  // these two in the order of Executor
  kStatTasksTorch,
  kStatFailedTasks,
  kStatWidenedTasks,  // that the guard made read more
  kStatMiddleTokens,  // summed over the query heads of every layer, streaming ones included
  kStatTokensRead,    // summed over heads: what they attended to in the middle
  kStatTileBytes,     // see Reads; what a bundle reads together counts once
  kStatMetadataBytes,
  kStatSharedTasks,          // that were done in bundles
  kStatSharedTileBytes,      // that a bundle's tasks had in common: tile_bytes had been so much more without
  kStatSharedMetadataBytes,  // the same of metadata_bytes
  kStatCount
};
extern const char* const kStatNames;  // comma separated, in the order of Stat

}  // namespace fluxion
