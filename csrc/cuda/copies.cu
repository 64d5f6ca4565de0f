// Copies between the host pool and a device: fill_window, gather, copy_in_order.
#include "cuda/device.cuh"
#include "cuda/kernels.h"

namespace fluxion::device {

namespace {

constexpr int kThreads = 128;

struct FillArgs {
  HostTiles tiles;
  WindowTiles windows;
  KeysValues fresh;
  const int32_t* pages;
  Placement placement;
  int row, start, stop;
  int sinks_used, first_local;  // pages
};

// Grid: resident pages, KV heads.
__global__ void __launch_bounds__(kThreads) fill_kernel(FillArgs a) {
  const int page =
      static_cast<int>(blockIdx.x) < a.sinks_used ? blockIdx.x : a.first_local + blockIdx.x - a.sinks_used;
  const int h = blockIdx.y, vectors = a.tiles.head_dim * a.tiles.element / 16;
  const int64_t slot = int64_t{a.row} * a.placement.slot_pages() + a.placement.slot(page);
  const int64_t bytes = a.tiles.tile_bytes();
  auto* to = reinterpret_cast<uint4*>(a.windows.data + h * a.windows.head_stride + slot * bytes);
  const char* host = nullptr;
  if (page * kPage < a.start) host = a.tiles.data + (int64_t{h} * a.tiles.pages + a.pages[page]) * bytes;
  for (int i = threadIdx.x; i < 2 * kPage * vectors; i += kThreads) {
    const int token = i / vectors % kPage, position = page * kPage + token;
    if (position >= a.stop) continue;
    if (position < a.start) {
      to[i] = __ldcs(reinterpret_cast<const uint4*>(host) + i);
    } else {
      const HeadRows& from = i < kPage * vectors ? a.fresh.k : a.fresh.v;
      to[i] = reinterpret_cast<const uint4*>(from.at(position - a.start, h))[i % vectors];
    }
  }
}

struct GatherArgs {
  HostTiles tiles;
  const int32_t* pages;
  KeysValues to;
};

// Grid: pages, KV heads.
__global__ void __launch_bounds__(kThreads) gather_kernel(GatherArgs a) {
  const int h = blockIdx.y, vectors = a.tiles.head_dim * a.tiles.element / 16;
  const int64_t tile = int64_t{h} * a.tiles.pages + a.pages[blockIdx.x];
  const auto* from = reinterpret_cast<const uint4*>(a.tiles.data + tile * a.tiles.tile_bytes());
  for (int i = threadIdx.x; i < 2 * kPage * vectors; i += kThreads) {
    const HeadRows& rows = i < kPage * vectors ? a.to.k : a.to.v;
    const int64_t token = int64_t{blockIdx.x} * kPage + i / vectors % kPage;
    reinterpret_cast<uint4*>(rows.at(token, h))[i % vectors] = __ldcs(from + i);
  }
}

// Consecutive threads have consecutive 16 bytes.
__global__ void __launch_bounds__(kThreads)
    in_order_kernel(const uint4* __restrict__ from, uint4* __restrict__ to, int64_t vectors) {
  const int64_t all = int64_t{gridDim.x} * kThreads;
#pragma unroll 4
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < vectors; i += all)
    to[i] = __ldcs(from + i);
}

}  // namespace

void fill_window(cudaStream_t stream, const HostTiles& tiles, WindowTiles windows, int row, int start,
                 int stop, const int32_t* pages, const KeysValues& fresh, const Placement& placement) {
  const int all = (stop + kPage - 1) / kPage, sink_pages = placement.sink_pages();
  const int first_local = placement.first_local(stop);
  const int sinks_used = all < sink_pages ? all : sink_pages;
  const int local = all > first_local ? all - first_local : 0;
  if (sinks_used + local == 0) return;
  const FillArgs args{tiles, windows, fresh, pages, placement, row, start, stop, sinks_used, first_local};
  launch("the launch of fill_window", fill_kernel,
         dim3(static_cast<unsigned>(sinks_used + local), static_cast<unsigned>(tiles.kv_heads)),
         dim3(kThreads), 0, stream, args);
}

void gather(cudaStream_t stream, const HostTiles& tiles, const int32_t* pages, int count,
            const KeysValues& to) {
  if (count == 0) return;
  const GatherArgs args{tiles, pages, to};
  launch("the launch of gather", gather_kernel,
         dim3(static_cast<unsigned>(count), static_cast<unsigned>(tiles.kv_heads)), dim3(kThreads), 0, stream,
         args);
}

void copy_in_order(cudaStream_t stream, const char* from, char* to, int64_t bytes) {
  // Enough to fill any device, with several loads of each in flight.
  constexpr int64_t kMostBlocks = 1056;
  const int64_t vectors = bytes / 16, blocks = (vectors + kThreads - 1) / kThreads;
  if (blocks == 0) return;
  launch("the launch of copy_in_order", in_order_kernel,
         dim3(static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks)), dim3(kThreads), 0, stream,
         reinterpret_cast<const uint4*>(from), reinterpret_cast<uint4*>(to), vectors);
}

}  // namespace fluxion::device
