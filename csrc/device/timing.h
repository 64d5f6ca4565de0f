// How long a device takes for batches of attention: what device/rates.py fits its rates to.
#pragma once

#include <cstdint>

#include "device/device_api.h"

namespace fluxion {

enum class Where { kInPlace, kHot, kStaged };

struct TimedBatch {
  int tasks, pages;   // tiles of each task
  const char* q;      // [tasks][G][D]
  const char* tiles;  // [available] pinned tiles
  int64_t available;  // at least tasks * pages
  Where where;  // the tiles are read: in host memory, in device memory, or there after they were gathered
  int group, head_dim, element;
  bool flash;  // Batch::allocate
  double timeout_s;
};

// ns[i]: of run i, from its launch until the host sees its signal. Runs read tiles in turn, so that what one
// left in a cache helps the next only once all were read. Throws DeviceFailure.
void time_attend(const DeviceApi& api, const TimedBatch& what, int runs, int64_t* ns);

}  // namespace fluxion
