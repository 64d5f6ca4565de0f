// A task: one request and one group (a KV head and its query heads).
#pragma once

#include <cstdint>

namespace fluxion {

struct Task {
  int32_t request;
  int32_t head;  // KV head
};

// Bytes of the middle that a task read. Blocks count whole tiles. Single tokens count the K and V rows that
// some head attends to (V alone for some tokens that sketches find). What a bundle reads together counts for
// each of its tasks.
struct Reads {
  int64_t tile_bytes = 0;
  int64_t metadata_bytes = 0;
};

// What one task reads: scratch.pages[0..count) and, when masked, scratch.masks[count][G].
struct Selection {
  int count = 0;
  bool masked = false;
  bool near = false;   // most of it is in a cache
  int64_t tokens = 0;  // summed over heads
  Reads reads;
};

enum Stat {
  kStatLayers,
  kStatTasks,
  kStatTasksCpu,  // these two in the order of Executor
  kStatTasksTorch,
  kStatFailedTasks,
  kStatMiddleTokens,  // summed over the query heads of every layer, streaming ones included
  kStatTokensRead,    // summed over heads: what they attended to in the middle
  kStatTileBytes,     // see Reads; what a bundle reads together counts once
  kStatMetadataBytes,
  kStatSharedTasks,          // done in bundles
  kStatSharedTileBytes,      // had in common by a bundle's tasks: tile_bytes would be larger by this
  kStatSharedMetadataBytes,  // the same for metadata_bytes
  kStatCount
};
extern const char* const kStatNames;  // comma separated, in the order of Stat

}  // namespace fluxion
