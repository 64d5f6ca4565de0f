// The near middle's memory and its steps.
#include <algorithm>

#include "cuda/device.cuh"
#include "cuda/near.h"
#include "kernels/units.h"

namespace fluxion::device {

namespace {

constexpr int kHeader = 2, kStepThreads = 128;

// Grid: requests, at least one. staged, by the host: [batch, columns][blk][wanted][table rows].
__global__ void __launch_bounds__(kStepThreads)
    step_kernel(NearView near, const int32_t* staged, int requests, int max_requests) {
  const int b = blockIdx.x, columns = staged[1];
  if (b == 0 && threadIdx.x == 0) near.step->batch = staged[0];
  if (b >= requests) return;
  const int32_t* row = staged + kHeader + 2 * max_requests + int64_t{b} * columns;
  if (threadIdx.x == 0) {
    near.blk[b] = staged[kHeader + b];
    near.wanted[b] = staged[kHeader + max_requests + b];
  }
  for (int i = threadIdx.x; i < columns; i += kStepThreads)
    near.table[int64_t{b} * near.shape.max_pages + i] = row[i];
}

}  // namespace

Near::Near(const Port& port, const NearShape& shape, char* lists, uint32_t* told) {
  const MailboxShape& s = port.view().shape;
  view_.shape = shape;
  view_.far = {s.max_requests, s.kv_heads, shape.max_pages};
  view_.lists = lists;
  view_.told = told;
  const int64_t B = s.max_requests, H = s.kv_heads, Hq = s.q_heads, D = s.head_dim, G = Hq / H,
                groups = B * H;
  const int64_t tiles = int64_t{shape.layers} * H * shape.pages, slots = H * shape.slots, P = shape.max_pages;
  const int64_t stride = view_.stride();
  int64_t at = 0;
  const auto place = [&](int64_t bytes) {
    const int64_t here = at;
    at += mailbox_round(bytes);
    return here;
  };
  const int64_t entries = place(tiles * 2 * D * s.element), slot_of = place(tiles * 4),
                copies = place(slots * 2 * kPage * D * s.element), owner = place(slots * 4),
                used = place(slots * 4), hand = place(H * 4), step = place(sizeof(NearStep)),
                table = place(B * P * 4), blk = place(B * 4), wanted = place(B * 4),
                scores = place(B * Hq * stride * 4), chosen = place(B * Hq * stride / 8),
                tasks = place(groups * static_cast<int64_t>(sizeof(NearTask))),
                near_slots = place(groups * P * 4), masks = place(shape.together ? 0 : groups * P * G * 2),
                missed = place(groups * P * 4), missed_count = place(groups * 4),
                counts = place(kNearCounts * 4), o = place(B * Hq * D * 4), lse = place(B * Hq * 4),
                workspace = place(near_workspace_bytes(static_cast<int>(groups), shape.max_pages,
                                                       static_cast<int>(G), static_cast<int>(D)));
  bytes_ = at;
  staged_ints_ = kHeader + 2 * B + B * P;
  try {
    check(cudaMalloc(reinterpret_cast<void**>(&memory_), static_cast<size_t>(bytes_)),
          "the allocation of device memory for metadata and copies of tiles");
    check(cudaHostAlloc(reinterpret_cast<void**>(&staged_), static_cast<size_t>(kRing * staged_ints_ * 4),
                        cudaHostAllocPortable),
          "the allocation of pinned memory for a step's pages");
    for (cudaEvent_t& event : copied_)
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "the creation of an event");
    view_.entries = memory_ + entries;
    view_.slot_of = reinterpret_cast<int32_t*>(memory_ + slot_of);
    view_.tiles = memory_ + copies;
    view_.owner = reinterpret_cast<int32_t*>(memory_ + owner);
    view_.used = reinterpret_cast<uint32_t*>(memory_ + used);
    view_.hand = reinterpret_cast<uint32_t*>(memory_ + hand);
    view_.step = reinterpret_cast<NearStep*>(memory_ + step);
    view_.table = reinterpret_cast<int32_t*>(memory_ + table);
    view_.blk = reinterpret_cast<int32_t*>(memory_ + blk);
    view_.wanted = reinterpret_cast<int32_t*>(memory_ + wanted);
    view_.scores = reinterpret_cast<float*>(memory_ + scores);
    view_.chosen = reinterpret_cast<uint32_t*>(memory_ + chosen);
    view_.tasks = reinterpret_cast<NearTask*>(memory_ + tasks);
    view_.near_slots = reinterpret_cast<int32_t*>(memory_ + near_slots);
    view_.masks = reinterpret_cast<uint16_t*>(memory_ + masks);
    view_.missed = reinterpret_cast<int32_t*>(memory_ + missed);
    view_.missed_count = reinterpret_cast<int32_t*>(memory_ + missed_count);
    view_.counts = reinterpret_cast<uint32_t*>(memory_ + counts);
    view_.o = reinterpret_cast<float*>(memory_ + o);
    view_.lse = reinterpret_cast<float*>(memory_ + lse);
    view_.workspace = memory_ + workspace;
    check(cudaMemsetAsync(view_.counts, 0, kNearCounts * 4, nullptr), "clearing counts");
    check(cudaMemsetAsync(view_.step, 0, sizeof(NearStep), nullptr), "clearing a step");
    forget(nullptr);
    check(cudaStreamSynchronize(nullptr), "clearing device memory");
  } catch (...) {
    release();
    throw;
  }
}

Near::~Near() { release(); }

void Near::release() {
  for (int i = 0; i < kRing; ++i) {
    if (used_[i]) cudaEventSynchronize(copied_[i]);
    if (copied_[i] != nullptr) cudaEventDestroy(copied_[i]);
  }
  if (staged_ != nullptr) cudaFreeHost(staged_);
  if (memory_ != nullptr) cudaFree(memory_);
  cudaGetLastError();
}

void Near::forget(cudaStream_t stream) {
  const size_t heads = static_cast<size_t>(view_.far.kv_heads), slots = heads * view_.shape.slots * 4;
  const size_t tiles = heads * view_.shape.layers * view_.shape.pages * 4;
  check(cudaMemsetAsync(view_.slot_of, 0xff, tiles, stream), "clearing what has copies");
  check(cudaMemsetAsync(view_.owner, 0xff, slots, stream), "clearing what has copies");
  check(cudaMemsetAsync(view_.used, 0, slots, stream), "clearing what has copies");
  check(cudaMemsetAsync(view_.hand, 0, heads * 4, stream), "clearing what has copies");
}

void Near::step(cudaStream_t stream, const Port& port, bool ranks, const int32_t* lengths, int batch,
                const int32_t* table, int64_t table_stride, int columns, const int32_t* blk,
                const float* budget) {
  const Placement& placement = port.view().placement;
  const int max = port.view().shape.max_requests;
  int32_t* staged = staged_ + turn_ * staged_ints_;
  if (used_[turn_]) check(cudaEventSynchronize(copied_[turn_]), "waiting for an earlier step");
  staged[0] = ranks ? batch : 0;
  staged[1] = columns;
  for (int b = 0; b < batch; ++b) {
    std::copy_n(table + b * table_stride, columns, staged + kHeader + 2 * max + int64_t{b} * columns);
    const int pages = ranks ? blk[b] / kPage : 1, first = placement.sink_pages() / std::max(pages, 1);
    const int end = placement.first_local(lengths[b]), tokens = (end - placement.sink_pages()) * kPage;
    const bool reads = ranks && pages > 0 && budget[b] > 0 && tokens > 0;
    const int units = reads ? (end - 1) / pages - first + 1 : 0;
    staged[kHeader + b] = std::max(pages, 1);
    staged[kHeader + max + b] = !reads           ? 0
                                : budget[b] >= 1 ? units
                                                 : units_of_budget(budget[b], tokens, blk[b], units);
  }
  launch("the launch of a step", step_kernel, dim3(static_cast<unsigned>(std::max(batch, 1))),
         dim3(kStepThreads), 0, stream, view_, static_cast<const int32_t*>(staged), batch, max);
  check(cudaEventRecord(copied_[turn_], stream), "recording an event");
  used_[turn_] = true;
  turn_ = (turn_ + 1) % kRing;
}

}  // namespace fluxion::device
