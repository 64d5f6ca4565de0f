#include <algorithm>

#include "cuda/device.cuh"
#include "cuda/port.h"
#include "device/protocol.h"

namespace fluxion::device {

namespace {

// Takes the step's requests from where the host left them. One block.
__global__ void __launch_bounds__(128) step_kernel(PortView port, const int32_t* staged) {
  const int max = port.shape.max_requests, batch = staged[0];
  for (int i = threadIdx.x; i < batch; i += 128) {
    port.rows[i] = staged[1 + i];
    port.lengths[i] = staged[1 + max + i];
  }
  if (threadIdx.x == 0) {
    port.state->batch = batch;
    store_release(port.word(kBatch), static_cast<uint32_t>(batch));
  }
}

// One block of a warp.
__global__ void __launch_bounds__(32) reset_kernel(PortView port) {
  if (threadIdx.x == 0) *port.state = PortState{};
  const int groups = port.shape.max_requests * port.shape.kv_heads;
  for (int i = threadIdx.x; i < groups; i += 32) port.arrived[i] = 0;
  for (int w = threadIdx.x; w < kMailboxWords; w += 32) {
    store_release(port.word(static_cast<MailboxWord>(w)), 0);
  }
}

}  // namespace

Port::Port(char* arena, const MailboxShape& shape, const Placement& placement, uint64_t timeout_ns) {
  view_.arena = arena;
  view_.shape = shape;
  view_.placement = placement;
  view_.timeout_ns = timeout_ns;
  const int64_t requests = shape.max_requests, groups = requests * shape.kv_heads;
  const int64_t heads = groups * view_.chunks() * view_.group();
  const int64_t sizes[] = {mailbox_round(sizeof(PortState)),
                           mailbox_round(requests * 4),
                           mailbox_round(requests * 4),
                           mailbox_round(groups * 4),
                           mailbox_round(heads * shape.head_dim * 4),
                           mailbox_round(heads * 4)};
  int64_t bytes = 0;
  for (const int64_t size : sizes) bytes += size;
  try {
    check(cudaMalloc(reinterpret_cast<void**>(&memory_), static_cast<size_t>(bytes)),
          "the allocation of a mailbox's device memory");
    check(cudaHostAlloc(reinterpret_cast<void**>(&staged_),
                        static_cast<size_t>(kRing * (1 + 2 * requests) * 4), cudaHostAllocPortable),
          "the allocation of pinned memory for a step's requests");
    for (cudaEvent_t& event : copied_) {
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "the creation of an event");
    }
  } catch (...) {
    release();
    throw;
  }
  char* at = memory_;
  auto next = [&, i = 0]() mutable {
    char* here = at;
    at += sizes[i++];
    return here;
  };
  view_.state = reinterpret_cast<PortState*>(next());
  view_.rows = reinterpret_cast<int32_t*>(next());
  view_.lengths = reinterpret_cast<int32_t*>(next());
  view_.arrived = reinterpret_cast<uint32_t*>(next());
  view_.partial = reinterpret_cast<float*>(next());
  view_.partial_lse = reinterpret_cast<float*>(next());
  try {
    // In the default stream, and finished: the port's own stream is not known yet.
    check(cudaMemsetAsync(memory_, 0, static_cast<size_t>(mailbox_round(sizeof(PortState))), nullptr),
          "clearing a mailbox");
    check(cudaMemsetAsync(view_.arrived, 0, static_cast<size_t>(groups * 4), nullptr), "clearing a mailbox");
    check(cudaStreamSynchronize(nullptr), "clearing a mailbox");
  } catch (...) {
    release();
    throw;
  }
}

Port::~Port() { release(); }

void Port::release() {
  for (int i = 0; i < kRing; ++i) {
    if (used_[i]) cudaEventSynchronize(copied_[i]);
    if (copied_[i] != nullptr) cudaEventDestroy(copied_[i]);
  }
  if (staged_ != nullptr) cudaFreeHost(staged_);
  if (memory_ != nullptr) cudaFree(memory_);
  cudaGetLastError();
}

void Port::step(cudaStream_t stream, const int32_t* rows, const int32_t* lengths, int batch) {
  const int64_t max = view_.shape.max_requests;
  int32_t* staged = staged_ + turn_ * (1 + 2 * max);
  if (used_[turn_]) check(cudaEventSynchronize(copied_[turn_]), "waiting for an earlier step");
  staged[0] = batch;
  std::copy_n(rows, batch, staged + 1);
  std::copy_n(lengths, batch, staged + 1 + max);
  launch("the launch of a step", step_kernel, dim3(1), dim3(128), 0, stream, view_, staged);
  check(cudaEventRecord(copied_[turn_], stream), "recording an event");
  used_[turn_] = true;
  batch_ = batch;
  turn_ = (turn_ + 1) % kRing;
}

void Port::reset(cudaStream_t stream) {
  batch_ = 0;
  launch("the launch of a reset", reset_kernel, dim3(1), dim3(32), 0, stream, view_);
}

}  // namespace fluxion::device
