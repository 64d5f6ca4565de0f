// Linear layers of the model, for the few rows of a decode step, over all workers.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/table.h"
#include "runtime/worker_pool.h"

namespace fluxion {

// x [rows][in], weights [outputs][in], bias [outputs] or nullptr, out [rows][outputs], all of one dtype. Rows
// may be apart by any stride, in elements.
struct LinearLayer {
  const void* x;
  int64_t x_stride;
  int rows, in, outputs;
  const void* weights;
  int64_t stride;
  const void* bias;
  void* out;
  int64_t out_stride;
};

// Memory for what every layer needs while it runs. It grows to the largest layer that has come.
class LinearScratch {
 public:
  // So many bytes, 64-byte aligned, until the next call.
  void* reserve(int64_t bytes);

 private:
  std::unique_ptr<char[]> memory_;
  int64_t size_ = 0;
};

// out = x weights^T + bias. On the calling thread alone where the workers are busy or not worth waking.
void linear(WorkerPool& workers, const KernelTable& kernels, DType dtype, const LinearLayer& layer,
            LinearScratch* scratch);

}  // namespace fluxion
