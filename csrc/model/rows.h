// Operations between the linear layers of a model, over rows of a pass: few in decode, many in prefill.
#pragma once

#include <cstdint>

#include "kernels/table.h"
#include "runtime/worker_pool.h"

namespace fluxion {

// Rows that begin `stride` bytes apart.
struct Rows {
  char* at;
  int64_t stride;

  char* operator[](int64_t i) const { return at + i * stride; }
};

struct NormRows {
  Rows x, residual, out, sum;  // residual.at nullptr: none, and sum is not written
  const void* weight;
  int size;
  float epsilon;
  bool gemma;
};

struct GateRows {
  Rows gate, up, out;
  int size;
  bool gelu;
};

struct RopeRows {
  Rows q, k, q_out, k_out;
  int q_heads, k_heads, head_dim, rotary;
  bool halves;
  const int64_t* positions;  // [rows]
  Rows cos_sin;              // one a position
};

// Each does `count` rows with the kernels of that name (kernels/table.h), on the calling thread alone if they
// are few or the workers are busy.
void norm_rows(WorkerPool& workers, const KernelTable& kernels, int64_t count, const NormRows& rows);
void gate_rows(WorkerPool& workers, const KernelTable& kernels, int64_t count, const GateRows& rows);
void rope_rows(WorkerPool& workers, const KernelTable& kernels, int64_t count, const RopeRows& rows);

}  // namespace fluxion
