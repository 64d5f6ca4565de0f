// How much of a layer a device takes, so that it and the CPU are done at the same time.
#pragma once

#include "engine/engine.h"

namespace fluxion {

// What device/rates.py measures, in bytes/s but for launch_s. A rate of 0: cannot do it.
struct Rates {
  double cpu;       // tiles that the workers attend to, together; they read metadata as fast
  double link;      // tiles in host memory that the device attends to
  double hot;       // tiles in its own memory
  double scan;      // metadata that the dispatcher's one thread ranks blocks by
  double launch_s;  // from a claim to the result, of a batch that reads nothing
  double stage;     // tiles in host memory that are gathered into device memory first
  double stage_s;   // launch_s of such a batch
};

// The share of the load that the device should take, in [0, 1]: the one that minimises
//   max(T_cpu, T_gpu), T_cpu(f) = (cpu_bytes + (1 - f) * (tiles + metadata)) / cpu,
//   T_gpu(f) = launch + min(read, rank) / tasks + f * max(read, rank) for f > 0,
//   read = missed / link + hit / hot, rank = metadata / scan:
// the dispatcher ranks the next tasks while the device attends to the last ones, but for the first and the
// last one (of how many, is left out where `tasks` is 0). hit_share: of the tile bytes, those expected in hot
// slots. Tiles are read in place or staged, whichever leaves the device more.
double device_share(const ForeignLoad& load, const Rates& rates, double hit_share);

// ForeignLoad::bytes() up to which the share is 0, at most 2^62.
int64_t least_bytes(const Rates& rates);

// Bytes of tiles in host memory, in a batch, from which it is done sooner with a stage, at most 2^62: never.
int64_t stage_from(const Rates& rates);

}  // namespace fluxion
