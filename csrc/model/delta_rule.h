// Layers that keep one state per request in place of keys and values, over the rows of a pass.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/table.h"
#include "model/rows.h"
#include "runtime/host_memory.h"
#include "runtime/worker_pool.h"

namespace fluxion {

// Requests whose tokens follow one another in the rows of a pass, and the states they have.
struct StatefulRows {
  int64_t requests;
  const int32_t* starts;  // [requests + 1], first rows; nullptr: one row each
  const int32_t* slots;   // [requests] of the states; negative: padding rows

  int64_t first(int64_t request) const { return starts != nullptr ? starts[request] : request; }
  int64_t rows() const { return first(requests); }
};

// The kernel `convolve`.
struct ConvolutionLayer {
  StatefulRows at;
  const bool* goes_on;  // [requests], whether the state is valid; if not, it begins with zeros. nullptr: all
  Rows x, out;
  int channels, taps;
  const void *weights, *bias;  // bias nullptr: none
  Rows states;                 // one a slot
};

// The gated delta rule of the kernel `delta_rule`, for unit vectors of query and key; the query's is divided
// by the root of `keys`. With a_log, decay = exp(-exp(a_log) softplus(a + dt_bias)) and strength =
// sigmoid(b); without it, decay = exp(a), strength = b.
struct DeltaRuleLayer {
  StatefulRows at;
  Rows q, k, v, out;  // heads side by side
  int key_heads, heads, keys, values;
  const float *a, *b;            // [rows][heads], with a stride of `heads`
  const float *a_log, *dt_bias;  // [heads], or nullptr
  float* states;                 // [values][keys] of every head of a slot
  int64_t slot_stride;           // floats
  const int32_t* snapshot_at;    // [requests]: token before which the state is copied; -1: never
  float* snapshots;              // [requests][heads][values][keys], or nullptr
};

struct DeltaRuleScratch {
  HostMemory memory;
  std::vector<DeltaToken> tokens;
};

void convolve(WorkerPool& workers, const KernelTable& kernels, DType dtype, const ConvolutionLayer& layer);
void delta_rule(WorkerPool& workers, const KernelTable& kernels, DType dtype, const DeltaRuleLayer& layer,
                DeltaRuleScratch* scratch);

}  // namespace fluxion
