#include "model/linear.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>

namespace fluxion {
namespace {

// Weights that a worker takes at a time.
constexpr int64_t kChunkBytes = 384 << 10;
constexpr int kChunksOfWorker = 8;
constexpr int64_t kLeastBytes = 32 << 10;
constexpr int kLeastOutputs = 4;  // of a chunk, which has a multiple of them: rows go two by two

struct Job {
  const KernelTable& kernels;
  const LinearLayer& layer;
  const LinearArgs& args;
  int64_t element;
  int chunk, count;
  alignas(64) std::atomic<int> next{0};

  void run() {
    for (int i = next.fetch_add(1, std::memory_order_relaxed); i < count;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      const int64_t first = static_cast<int64_t>(i) * chunk;
      const auto outputs = static_cast<int>(std::min<int64_t>(chunk, layer.outputs - first));
      kernels.linear(args, first, outputs, static_cast<char*>(layer.out) + first * element);
    }
  }
};

// Two thirds of a core's nearest cache. Such caches have 32 KiB at least.
int64_t near_bytes() {
#ifdef _SC_LEVEL1_DCACHE_SIZE
  static const int64_t nearest = sysconf(_SC_LEVEL1_DCACHE_SIZE);
#else
  constexpr int64_t nearest = 0;
#endif
  return std::max(nearest, int64_t{32} << 10) * 2 / 3;
}

}  // namespace

void* LinearScratch::reserve(int64_t bytes) {
  constexpr int64_t kAlign = 64;
  if (size_ < bytes) {
    memory_.reset(new char[bytes + kAlign]);
    size_ = bytes;
  }
  const auto at = reinterpret_cast<uintptr_t>(memory_.get());
  return reinterpret_cast<void*>((at + kAlign - 1) / kAlign * kAlign);
}

void linear(WorkerPool& workers, const KernelTable& kernels, DType dtype, const LinearLayer& layer,
            LinearScratch* scratch) {
  if (layer.rows == 0 || layer.outputs == 0) return;
  const int64_t element = dtype == DType::kBF16 ? 2 : 4;
  void* packed = scratch->reserve(linear_pack_bytes(layer.rows, layer.in));
  kernels.pack_linear(layer.x, layer.x_stride, layer.rows, layer.in, packed);
  const LinearArgs args{packed,       layer.rows, layer.in,         layer.weights,
                        layer.stride, layer.bias, layer.out_stride, near_bytes()};
  const int64_t row = std::max<int64_t>(layer.in * element, 1), all = row * layer.outputs;
  const int64_t share = all / (static_cast<int64_t>(workers.size()) * kChunksOfWorker);
  const int64_t bytes = std::clamp(share, kLeastBytes, kChunkBytes);
  const int64_t outputs = std::max<int64_t>(bytes / row, kLeastOutputs);
  const int chunk =
      static_cast<int>(std::min<int64_t>(outputs / kLeastOutputs * kLeastOutputs, layer.outputs));
  Job job{kernels, layer, args, element, chunk, (layer.outputs + chunk - 1) / chunk};
  const auto body = [](void* ctx, int) { static_cast<Job*>(ctx)->run(); };
  if (job.count > 1 && workers.size() > 1 && workers.launch(body, &job)) return workers.join();
  job.run();
}

}  // namespace fluxion
