// Hands a layer to the CPU: publish.
#include "cuda/device.cuh"
#include "cuda/kernels.h"
#include "cuda/words.cuh"

namespace fluxion::device {

namespace {

struct PublishArgs {
  PortView port;
  Rows q, k, v;
  WindowTiles windows;
  int32_t layer;
};

constexpr int kThreads = 128;

// One block a request.
__global__ void __launch_bounds__(kThreads) publish_kernel(PublishArgs a) {
  const PortView& port = a.port;
  PortState& state = *port.state;
  if (state.late != 0) return;
  const MailboxShape& shape = port.shape;
  const uint32_t sequence = state.sequence + 1;
  const MailboxSlot slot = mailbox_slot(shape, sequence);
  const int b = blockIdx.x;
  if (b < state.batch) {
    const int vectors = shape.head_dim * shape.element / 16;
    const auto* q = reinterpret_cast<const uint4*>(a.q.data + b * a.q.stride);
    auto* q_slot = reinterpret_cast<uint4*>(port.arena + slot.q) + int64_t{b} * shape.q_heads * vectors;
    for (int i = threadIdx.x; i < shape.q_heads * vectors; i += kThreads) q_slot[i] = q[i];

    const int row = port.rows[b], position = port.lengths[b] - 1, page = position / kPage;
    const Placement& placement = port.placement;
    const int64_t tile = (int64_t{row} * placement.slot_pages() + placement.slot(page)) * 2 * kPage * vectors;
    for (int i = threadIdx.x; i < 2 * shape.kv_heads * vectors; i += kThreads) {
      const int half = i / (shape.kv_heads * vectors), rest = i % (shape.kv_heads * vectors);
      const Rows& from = half == 0 ? a.k : a.v;
      const uint4 x = reinterpret_cast<const uint4*>(from.data + b * from.stride)[rest];
      auto* to = reinterpret_cast<uint4*>(port.arena + (half == 0 ? slot.k : slot.v));
      to[int64_t{b} * shape.kv_heads * vectors + rest] = x;
      if (row < 0 || row >= a.windows.rows || position < 0) continue;
      auto* window = reinterpret_cast<uint4*>(a.windows.data + rest / vectors * a.windows.head_stride);
      window[tile + (half * kPage + position % kPage) * vectors + rest % vectors] = x;
    }
  }
  if (b == 0 && threadIdx.x == 0) *reinterpret_cast<int32_t*>(port.arena + slot.layer) = a.layer;
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(&state.published, 1) == gridDim.x - 1) {
    state.published = 0;
    state.sequence = sequence;
    auto* taken_at = reinterpret_cast<uint64_t*>(port.arena + slot.taken_at);
    taken_at[0] = taken_at[1] = 0;
    *reinterpret_cast<uint64_t*>(port.arena + slot.published_at) = nanoseconds();
    __threadfence_system();
    DeviceWords words{port};
    announce(words, kPublished, sequence);
  }
}

}  // namespace

void publish(Port& port, cudaStream_t stream, int layer, int rows, Rows q, Rows k, Rows v,
             WindowTiles windows) {
  const PublishArgs args{port.view(), q, k, v, windows, layer};
  // A step without requests is published, too: the CPU counts layers.
  launch("the launch of publish", publish_kernel, dim3(static_cast<unsigned>(rows > 0 ? rows : 1)),
         dim3(kThreads), 0, stream, args);
}

}  // namespace fluxion::device
