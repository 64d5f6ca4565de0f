// Measures memory throughput and the kernels' use of it: reads lists of pieces, and runs kernels over the
// very same lists, on the workers of a pool. The clock is read only around each run of all tasks.
#pragma once

#include <cstdint>

#include "kernels/table.h"
#include "runtime/worker_pool.h"

namespace fluxion {

// Task i reads the pieces (tiles, entries, scores) [first[i], first[i + 1]) of a list. Workers take one task
// after another, as in a layer.
struct ProbeTasks {
  const int64_t* first;  // [count + 1]
  int count;

  int64_t size(int i) const { return first[i + 1] - first[i]; }
};

// Where the times of the runs go, in nanoseconds.
struct ProbeRuns {
  int64_t* ns;  // [count]
  int count;
};

struct ReadProbe {
  const char* base;
  const int32_t* pieces;  // nullptr: piece i of the list lies at i
  int64_t piece_bytes;
  int streams;    // KernelTable::read
  int64_t ahead;  // KernelTable::read
};

struct AttendProbe {
  const char* q;  // [tasks][G][D] KV dtype
  int G, D;
  float scale;
  const char* tiles;
  const int32_t* pages;
  const uint16_t* masks;  // [pages][G] or nullptr
  float* o;               // [tasks][G][D]
  float* lse;             // [tasks][G]
};

struct ScoreProbe {
  const char* q;  // as above
  int G, D;
  const char* entries;
  const int32_t* index;
  float spread;
  // Task i writes [G][n] from G * first[i] on, n its size. nullptr: every worker writes to the same memory
  // again and again, like the engine, whose scores stay in a cache.
  float* out;
};

struct SelectProbe {
  int G;
  const float* scores;  // as ScoreProbe::out
  const int32_t* k;     // [tasks], 1 to the task's size: how many blocks every head takes
  uint16_t* heads;      // [blocks], written
};

// Each throws std::runtime_error when the workers are busy with a layer.

// Returns the sum of all words read in the last run, modulo 2^32.
uint32_t probe(WorkerPool& workers, const KernelTable& kernels, const ProbeTasks& tasks,
               const ReadProbe& what, const ProbeRuns& runs);
void probe(WorkerPool& workers, const KernelTable& kernels, int64_t element, const ProbeTasks& tasks,
           const AttendProbe& what, const ProbeRuns& runs);
void probe(WorkerPool& workers, const KernelTable& kernels, int64_t element, const ProbeTasks& tasks,
           const ScoreProbe& what, const ProbeRuns& runs);
void probe(WorkerPool& workers, const KernelTable& kernels, const ProbeTasks& tasks, const SelectProbe& what,
           const ProbeRuns& runs);

}  // namespace fluxion
