// Linear layers of the model, for the few rows of a decode step, over all workers.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/table.h"
#include "runtime/worker_pool.h"

namespace fluxion {

// x [rows][in], weights [outputs][in], bias [outputs] or nullptr, out [rows][outputs], all of one dtype. Rows
// may be apart by any stride, in elements.
// order: nullptr, or whether the weights are packed (kPackedOrder) when the layer is computed. Weights that
// may be packed are contiguous, of a dtype with panels, and have a multiple of kLinearPad inputs.
//
// format: if bits is not 0, the weights are contiguous panels of this format (kernels/table.h), and stride
// and order are not used.
struct LinearLayer {
  const void* x;
  int64_t x_stride;
  int rows, in, outputs;
  const void* weights;
  int64_t stride;
  const int32_t* order;
  QuantisedFormat format;
  const void* bias;
  void* out;
  int64_t out_stride;
};

// The value of `LinearLayer::order` for packed weights; any other value: rows.
inline constexpr int32_t kPackedOrder = 1;

// Bytes of x that a core's L1 cache holds while weights pass through it (LinearArgs::near_bytes).
int64_t near_bytes();

// Scratch memory of running layers. It grows to the largest layer so far.
class LinearScratch {
 public:
  // Returns this many bytes, 64-byte aligned, valid until the next call.
  void* reserve(int64_t bytes);

 private:
  std::unique_ptr<char[]> memory_;
  int64_t size_ = 0;
};

// out = x weights^T + bias. On the calling thread alone if the workers are busy or not worth waking.
void linear(WorkerPool& workers, const KernelTable& kernels, DType dtype, const LinearLayer& layer,
            LinearScratch* scratch);

// Quantised weights in the kernels' dtype, [outputs][in], each rounded once.
void widen(WorkerPool& workers, const KernelTable& kernels, const void* panels, QuantisedFormat format,
           int64_t outputs, int in, DType dtype, void* out);

// Whether weights with this many inputs are read faster if they are packed: eight rows of x do not fit in the
// L1 cache.
bool gains_from_packing(const KernelTable& kernels, int64_t in);

// Packs all whole panels of `outputs` rows of weights, [in] each, and leaves the remaining rows as they are;
// unpack: the other way. to: as many bytes, which may be those of `from`. If it throws, nothing is done.
void repack(WorkerPool& workers, const LinearPanels& panels, DType dtype, const void* from, int64_t outputs,
            int in, bool unpack, void* to);

}  // namespace fluxion
