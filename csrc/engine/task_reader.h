// Somebody who reads what a task has chosen, in the place of the worker that chose it.
#pragma once

#include <cstdint>

#include "engine/layer.h"
#include "engine/task.h"

namespace fluxion {

// What the open layer has that such a reader may take, by the sizes of the plan: what the tasks will read,
// about.
struct ReadableLoad {
  int layer = 0;
  int own = 0;                                 // tasks for such a reader alone
  int tasks = 0;                               // tasks that it may take
  int64_t tile_bytes = 0, metadata_bytes = 0;  // of these
  int64_t cpu_bytes = 0;  // tiles and metadata of the CPU's own tasks, metadata of the reader's

  int64_t bytes() const { return tile_bytes + metadata_bytes + cpu_bytes; }
};

// A task whose blocks are chosen. What it points to lives for the call.
struct ChosenTask {
  int64_t claim;
  const Layer& layer;
  const Task& task;
  const Selection& chosen;
  const int32_t* pages;   // [chosen.count]
  const uint16_t* masks;  // [chosen.count][G], if chosen.masked
  int64_t guess;          // bytes of tiles, by the plan
  bool alone;             // the plan wants the reader to have it
};

class TaskReader {
 public:
  virtual ~TaskReader() = default;

  // A layer opens: no worker has a task of it yet. Whether the reader wants to be asked about its tasks.
  virtual bool open(const ReadableLoad& load) noexcept = 0;
  // Any worker. True: the claim is the reader's, which delivers or fails it; false: it is still the worker's.
  virtual bool take(const ChosenTask& task) noexcept = 0;
  // The workers have done what was theirs of a layer for which open() said yes. Not of one that was
  // abandoned.
  virtual void close() noexcept = 0;
};

}  // namespace fluxion
