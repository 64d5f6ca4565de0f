// Which tiles have copies: near_keep, near_write.
#include "cuda/device.cuh"
#include "cuda/near.h"

namespace fluxion::device {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
// Maximum tiles of a head that a layer of a step copies over the link: these cross it in about the time that
// the CPU takes for the far tiles.
constexpr int kMostKept = 32;
// Maximum slots that are inspected for one batch of pages.
constexpr int kMostLooked = 1024;

struct KeepArgs {
  PortView port;
  NearView near;
  WindowTiles windows;
  HostLayer host;
  const ChunkPage* chunk;
  int32_t chunk_pages;
  int32_t layer;
};

struct KeepShared {
  int32_t free[32];
  // The present batch: physical page, slot or -1, and the request whose window has it.
  int32_t page[32], slot[32], from[32];
  int32_t count, kept;
};

// Finds different slots of one head for the pages of a warp's lanes (-1: no page); -1 if none is free among
// the next kMostLooked. Inspects every slot at most once. read: the pages are being read, so they count as
// recently used.
__device__ int find_slot(const KeepArgs& a, int h, int page, bool read, KeepShared& s) {
  const NearView& near = a.near;
  const int lane = threadIdx.x % 32, slots = near.shape.slots;
  const uint32_t below = (1u << lane) - 1;
  int32_t* owner = near.owner + int64_t{h} * slots;
  uint32_t* used = near.used + int64_t{h} * slots;
  int slot = page >= 0 ? near.slot_of[near.tile(a.layer, h, page)] : -1;
  bool needs = page >= 0 && slot < 0;
  int hand = static_cast<int>(near.hand[h]);
  // An existing copy must not make room for another lane's.
  if (slot >= 0) used[slot] = 1;
  __syncwarp();
  const int most = slots < kMostLooked ? slots : kMostLooked;
  for (int looked = 0; looked < most;) {
    const uint32_t wanting = __ballot_sync(kWholeWarp, needs);
    if (wanting == 0) break;
    const int width = most - looked < 32 ? most - looked : 32;
    const int at = (hand + lane) % slots;
    const bool free = lane < width && used[at] == 0;
    const uint32_t frees = __ballot_sync(kWholeWarp, free);
    const int rank = __popc(frees & below), want = __popc(wanting), found = __popc(frees);
    if (free) s.free[rank] = at;
    // The hand stops after the last slot that is taken.
    const uint32_t last = __ballot_sync(kWholeWarp, free && rank == want - 1);
    const int passed = last != 0 ? __popc(last - 1) + 1 : width;
    if (lane < passed && !free) used[at] = 0;
    __syncwarp();
    if (needs && __popc(wanting & below) < found) {
      needs = false;
      slot = s.free[__popc(wanting & below)];
      const int before = owner[slot];
      if (before >= 0) near.slot_of[near.tile(before / near.shape.pages, h, before % near.shape.pages)] = -1;
      owner[slot] = a.layer * near.shape.pages + page;
      used[slot] = read ? 1 : 0;
      near.slot_of[near.tile(a.layer, h, page)] = slot;
    }
    __syncwarp();
    hand = (hand + passed) % slots;
    looked += passed;
  }
  if (lane == 0) near.hand[h] = static_cast<uint32_t>(hand);
  return slot;
}

__device__ const char* window_tile(const KeepArgs& a, int b, int h) {
  const Placement& placement = a.port.placement;
  const int64_t tile_bytes = a.host.tiles.tile_bytes();
  const int page = a.port.lengths[b] / kPage - 1;
  return a.windows.data + h * a.windows.head_stride +
         (int64_t{a.port.rows[b]} * placement.slot_pages() + placement.slot(page)) * tile_bytes;
}

// Minimum and maximum of the keys of a tile, by a warp.
template <class T>
__device__ void describe(const char* tile, int D, T* entry) {
  for (int d = threadIdx.x % 32; d < D; d += 32) {
    const T* key = reinterpret_cast<const T*>(tile) + d;
    float low = to_float(*key), high = low;
    for (int t = 1; t < kPage; ++t) {
      const float x = to_float(key[t * D]);
      low = low < x ? low : x;
      high = high > x ? high : x;
    }
    round_to(low, entry + d);
    round_to(high, entry + D + d);
  }
}

// The block has the pages of a batch and the source of each: a window, or the host pool. Writes metadata of
// all, if it is new, and copies of those that find a slot. Page -1 means none.
template <class T>
__device__ void keep_batch(const KeepArgs& a, int h, KeepShared& s, bool described, bool read) {
  const NearView& near = a.near;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, D = a.port.shape.head_dim;
  const int64_t tile_bytes = a.host.tiles.tile_bytes(), vectors = tile_bytes / 16;
  __syncthreads();
  if (warp == 0) s.slot[lane] = find_slot(a, h, lane < s.count ? s.page[lane] : -1, read, s);
  __syncthreads();
  for (int i = warp; i < s.count; i += kWarps) {
    const int page = s.page[i], slot = s.slot[i];
    if (page < 0) continue;
    const int64_t in_pool = int64_t{h} * near.shape.pages + page;
    const char* from =
        s.from[i] >= 0 ? window_tile(a, s.from[i], h) : a.host.tiles.data + in_pool * tile_bytes;
    T* entry = reinterpret_cast<T*>(near.entries) + near.tile(a.layer, h, page) * 2 * D;
    if (s.from[i] >= 0) {
      describe(from, D, entry);
    } else if (!described) {
      const T* known = reinterpret_cast<const T*>(a.host.entries) + in_pool * 2 * D;
      for (int d = lane; d < 2 * D; d += 32) entry[d] = known[d];
    }
    if (slot < 0) continue;
    const uint4* source = reinterpret_cast<const uint4*>(from);
    uint4* to = reinterpret_cast<uint4*>(near.tiles + (int64_t{h} * near.shape.slots + slot) * tile_bytes);
    constexpr int kAhead = 8;
    for (int first = lane; first < vectors; first += 32 * kAhead) {
      uint4 x[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (first + 32 * j < vectors) x[j] = source[first + 32 * j];
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (first + 32 * j < vectors) to[first + 32 * j] = x[j];
      }
    }
  }
  __syncthreads();
}

// Grid: KV heads.
template <class T>
__global__ void __launch_bounds__(kThreads) keep_kernel(KeepArgs a) {
  auto& s = shared<KeepShared>();
  const NearView& near = a.near;
  const PortState& state = *a.port.state;
  if (state.late != 0) return;
  const int h = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, H = a.port.shape.kv_heads;
  // Pages that this step's tokens fill.
  for (int first = 0; first < state.batch; first += 32) {
    if (warp == 0) {
      const int b = first + lane;
      const int n = b < state.batch ? a.port.lengths[b] : 1;
      const bool fills = n % kPage == 0;
      const uint32_t those = __ballot_sync(kWholeWarp, fills);
      const int at = __popc(those & ((1u << lane) - 1));
      if (fills) s.page[at] = near.table[int64_t{b} * near.shape.max_pages + n / kPage - 1], s.from[at] = b;
      if (lane == 0) s.count = __popc(those);
    }
    __syncthreads();
    if (s.count > 0) keep_batch<T>(a, h, s, true, false);
    __syncthreads();
  }
  // Copies some far tiles, of one request after another, from a different request and place in every layer.
  const int batch = near.step->batch < state.batch ? near.step->batch : state.batch;
  if (threadIdx.x == 0) s.kept = 0;
  __syncthreads();
  for (int turn = 0; turn < batch && s.kept < kMostKept; ++turn) {
    const int b =
        static_cast<int>((state.sequence + static_cast<uint32_t>(turn)) % static_cast<uint32_t>(batch));
    const int group = b * H + h, missed = near.missed_count[group];
    if (missed == 0) continue;
    const int share = (kMostKept - s.kept) / (batch - turn), most = share > 0 ? share : 1;
    const int count = missed < most ? missed : most;
    if (threadIdx.x < 32) {
      const int first = static_cast<int>(state.sequence * 7u % static_cast<uint32_t>(missed));
      int page = -1;
      if (lane < count) page = near.missed[int64_t{group} * near.shape.max_pages + (first + lane) % missed];
      // Another request may have had it copied just now.
      if (page >= 0 && near.slot_of[near.tile(a.layer, h, page)] >= 0) page = -1;
      s.page[lane] = page;
      s.from[lane] = -1;
      const uint32_t those = __ballot_sync(kWholeWarp, page >= 0);
      if (lane == 0) s.count = count;
      if (lane == 0) atomicAdd(&near.counts[kNearKept], static_cast<uint32_t>(__popc(those)));
    }
    keep_batch<T>(a, h, s, true, true);
    if (threadIdx.x == 0) s.kept += count;
    __syncthreads();
  }
  if (h == 0 && threadIdx.x < kNearCounts) near.told[threadIdx.x] = near.counts[threadIdx.x];
}

// Grid: KV heads.
template <class T>
__global__ void __launch_bounds__(kThreads) chunk_kernel(KeepArgs a) {
  auto& s = shared<KeepShared>();
  const int h = blockIdx.x, lane = threadIdx.x % 32;
  for (int first = 0; first < a.chunk_pages; first += 32) {
    if (threadIdx.x < 32) {
      const int i = first + lane;
      const bool full = i < a.chunk_pages && a.chunk[i].stop == kPage;
      const uint32_t those = __ballot_sync(kWholeWarp, full);
      const int at = __popc(those & ((1u << lane) - 1));
      if (full) s.page[at] = a.chunk[i].page, s.from[at] = -1;
      if (lane == 0) s.count = __popc(those);
    }
    __syncthreads();
    if (s.count > 0) keep_batch<T>(a, h, s, false, false);
    __syncthreads();
  }
}

}  // namespace

void near_keep(const Near& near, const Port& port, cudaStream_t stream, int layer, WindowTiles windows,
               const HostTiles& host) {
  const KeepArgs args{port.view(), near.view(), windows, {host, nullptr, nullptr}, nullptr, 0, layer};
  const auto kernel = host.element == 2 ? keep_kernel<BF16> : keep_kernel<float>;
  launch("the launch of near_keep", kernel, dim3(static_cast<unsigned>(host.kv_heads)), dim3(kThreads),
         sizeof(KeepShared), stream, args);
}

void near_write(const Near& near, const Port& port, cudaStream_t stream, int layer, const HostLayer& host,
                const ChunkPage* chunk, int count) {
  if (count == 0) return;
  const KeepArgs args{port.view(), near.view(), {}, host, chunk, count, layer};
  const auto kernel = host.tiles.element == 2 ? chunk_kernel<BF16> : chunk_kernel<float>;
  launch("the launch of near_write", kernel, dim3(static_cast<unsigned>(host.tiles.kv_heads)), dim3(kThreads),
         sizeof(KeepShared), stream, args);
}

}  // namespace fluxion::device
