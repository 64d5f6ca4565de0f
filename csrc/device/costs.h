// Who reads the tiles of a task: the CPU or the device, so that both are done with a layer at the same time.
#pragma once

#include <cstdint>

#include "engine/task_reader.h"

namespace fluxion {

// What device/rates.py measures, in bytes/s but for launch_s. A rate of 0: cannot do it.
struct Rates {
  double cpu;       // tiles that the workers attend to, together; they read metadata as fast
  double link;      // tiles in host memory that the device attends to
  double hot;       // tiles in its own memory
  double launch_s;  // from a launch to the result, of a batch that reads nothing
  double stage;     // tiles in host memory that are gathered into device memory first
  double stage_s;   // launch_s of such a batch
};

// The share of the tiles that the device should read, in [0, 1]: the one that minimises
//   max(T_cpu, T_gpu), T_cpu(f) = (cpu_bytes + metadata + (1 - f) * tiles) / cpu,
//   T_gpu(f) = launch + f * (missed / link + hit / hot) for f > 0:
// the CPU ranks blocks for both. hit_share: of the tile bytes, those expected in device memory. Tiles are
// read in place or staged, whichever leaves the device more.
double device_share(const ReadableLoad& load, const Rates& rates, double hit_share);

// ReadableLoad::bytes() up to which the share is 0, at most 2^62.
int64_t least_bytes(const Rates& rates);

// Bytes of tiles in host memory, in a batch, from which it is done sooner with a stage, at most 2^62: never.
int64_t stage_from(const Rates& rates);

// Divides a layer task by task, as workers bring them: the device gets a task where it will be done with it
// no later than the CPU with all that it has then. Rates are where this begins; how fast the CPU was in the
// last layers, and how much tasks read for what their plan had said, it learns. Times are now_ns(). For one
// thread.
class Division {
 public:
  Division(const Rates& rates, double missed_rate) : rates_(rates), missed_(missed_rate), cpu_(rates.cpu) {}

  void open(int64_t now, const ReadableLoad& load);
  // Of the open layer. bytes: of the task's tiles; guess: what the plan said.
  bool device_is_sooner(int64_t now, int64_t bytes) const;
  void chosen(int64_t bytes, int64_t guess);
  // alone: the plan gave the task to the device.
  void given(int64_t now, int64_t bytes, bool alone = false);
  void taken_back(int64_t now, int64_t bytes, bool alone);
  // The device has read so much of what it was given.
  void returned(int64_t now, int64_t bytes);
  // The share of tiles that the device finds in its memory, of late.
  void expect(double hit_share);
  // The CPU is done with the layer.
  void close(int64_t now);

 private:
  double device_seconds(int64_t bytes) const;
  // When the device, after what it has, would be done with so many bytes more; now_ns().
  double device_end(int64_t now, int64_t bytes) const;

  Rates rates_;
  double missed_;  // bytes/s
  double cpu_;     // bytes/s, of late
  double hit_share_ = 0;
  double actual_ = 1;  // bytes that tasks read for each one guessed, of late
  ReadableLoad load_;
  int64_t opened_ns_ = 0;
  double busy_until_ns_ = 0;
  int64_t owed_ = 0;                              // bytes that the device has not returned
  int64_t given_ = 0, chosen_ = 0, guessed_ = 0;  // bytes, in this layer
};

}  // namespace fluxion
