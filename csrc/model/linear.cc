#include "model/linear.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace fluxion {
namespace {

// Bytes of weights that a worker takes at a time.
constexpr int64_t kChunkBytes = 384 << 10;
constexpr int kChunksOfWorker = 8;
constexpr int64_t kLeastBytes = 32 << 10;
constexpr int kLeastOutputs = 4;  // of a chunk, which has a multiple of them: rows go two by two

struct Job {
  const KernelTable& kernels;
  const LinearLayer& layer;
  const LinearArgs& args;
  int64_t element;
  int packed;  // outputs whose weights are in panels, the first ones
  int chunk, count;
  alignas(64) std::atomic<int> next{0};

  void run() {
    for (int i = next.fetch_add(1, std::memory_order_relaxed); i < count;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      const int64_t first = static_cast<int64_t>(i) * chunk;
      const auto end = std::min<int64_t>(first + chunk, layer.outputs);
      if (layer.format.bits > 0) {
        kernels.linear_quantised(args, first, static_cast<int>(end - first), out(first));
        continue;
      }
      const auto rows = std::clamp<int64_t>(packed, first, end);  // where they begin
      if (first < rows) kernels.panels.linear(args, first, static_cast<int>(rows - first), out(first));
      if (rows < end) kernels.linear(args, rows, static_cast<int>(end - rows), out(rows));
    }
  }

  void* out(int64_t output) const { return static_cast<char*>(layer.out) + output * element; }
};

}  // namespace

// Two thirds of a core's L1 cache, which has at least 32 KiB.
int64_t near_bytes() {
#ifdef _SC_LEVEL1_DCACHE_SIZE
  static const int64_t nearest = sysconf(_SC_LEVEL1_DCACHE_SIZE);
#else
  constexpr int64_t nearest = 0;
#endif
  return std::max(nearest, int64_t{32} << 10) * 2 / 3;
}

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
  const int64_t element = element_bytes(dtype);
  const bool quantised = layer.format.bits > 0;
  const int64_t row = std::max<int64_t>(
                    quantised ? panel_bytes(layer.format, layer.in) / kQuantisedPanel : layer.in * element,
                    1),
                all = row * layer.outputs;
  const int64_t share = all / (static_cast<int64_t>(workers.size()) * kChunksOfWorker);
  const int64_t bytes = std::clamp(share, kLeastBytes, kChunkBytes);
  const bool panels = !quantised && layer.order != nullptr && *layer.order == kPackedOrder;
  const int least = quantised ? kQuantisedPanel : panels ? kernels.panels.outputs : kLeastOutputs;
  const int64_t outputs = std::max<int64_t>(bytes / row, least);
  const int chunk = static_cast<int>(std::min<int64_t>(outputs / least * least, layer.outputs));
  void* packed = scratch->reserve(linear_pack_bytes(layer.rows, layer.in));
  const auto pack = quantised ? kernels.pack_quantised : kernels.pack_linear;
  pack(layer.x, layer.x_stride, layer.rows, layer.in, packed);
  const LinearArgs args{packed,     layer.rows,       layer.in,     layer.weights, layer.stride,
                        layer.bias, layer.out_stride, near_bytes(), layer.format};
  Job job{kernels,
          layer,
          args,
          element,
          panels ? layer.outputs / least * least : 0,
          chunk,
          (layer.outputs + chunk - 1) / chunk};
  const auto body = [](void* ctx, int) { static_cast<Job*>(ctx)->run(); };
  if (job.count > 1 && workers.size() > 1 && workers.launch(body, &job)) return workers.join();
  job.run();
}

void widen(WorkerPool& workers, const KernelTable& kernels, const void* panels, QuantisedFormat format,
           int64_t outputs, int in, DType dtype, void* out) {
  struct Job {
    const KernelTable& kernels;
    const char* panels;
    char* out;
    QuantisedFormat format;
    int64_t outputs, element;
    int in;
  } job{kernels,
        static_cast<const char*>(panels),
        static_cast<char*>(out),
        format,
        outputs,
        element_bytes(dtype),
        in};
  const auto part = [](void* ctx, int i) {
    const Job& j = *static_cast<const Job*>(ctx);
    const int64_t first = int64_t{i} * kQuantisedPanel;
    const int count = static_cast<int>(std::min<int64_t>(j.outputs - first, kQuantisedPanel));
    j.kernels.widen_panel(j.panels + i * panel_bytes(j.format, j.in), j.format, j.in, count,
                          j.out + first * j.in * j.element);
  };
  workers.parallel_for(static_cast<int>((outputs + kQuantisedPanel - 1) / kQuantisedPanel), part, &job);
}

bool gains_from_packing(const KernelTable& kernels, int64_t in) {
  constexpr int kRows = 8;
  const LinearPanels& panels = kernels.panels;
  return panels.outputs > 0 && in % kLinearPad == 0 && in * panels.x_bytes * kRows > near_bytes();
}

void repack(WorkerPool& workers, const LinearPanels& panels, DType dtype, const void* from, int64_t outputs,
            int in, bool unpack, void* to) {
  const int64_t bytes = int64_t{panels.outputs} * in * element_bytes(dtype), count = outputs / panels.outputs;
  // Allocates first: a failure half-way would lose partly packed weights.
  const std::unique_ptr<char[]> copies(from == to ? new char[workers.size() * bytes] : nullptr);
  const auto move = unpack ? panels.unpack : panels.pack;
  std::atomic<int64_t> next{0};
  const auto work = [&](int worker) {
    for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < count;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      const char* panel = static_cast<const char*>(from) + i * bytes;
      if (copies != nullptr)
        panel = static_cast<const char*>(std::memcpy(copies.get() + worker * bytes, panel, bytes));
      move(panel, in, static_cast<char*>(to) + i * bytes);
    }
  };
  const auto body = [](void* ctx, int worker) { (*static_cast<decltype(&work)>(ctx))(worker); };
  if (workers.size() > 1 && workers.launch(body, const_cast<void*>(static_cast<const void*>(&work))))
    workers.join();
  else
    work(0);
  const int64_t done = count * bytes, all = outputs * in * element_bytes(dtype);
  if (from != to)
    std::memcpy(static_cast<char*>(to) + done, static_cast<const char*>(from) + done, all - done);
}

}  // namespace fluxion
