// Merges the CPU's part of a layer: take.
#include "cuda/device.cuh"
#include "cuda/kernels.h"
#include "cuda/words.cuh"

namespace fluxion::device {

namespace {

struct TakeArgs {
  PortView port;
  Result own;
  int rows;
  char* out;
};

constexpr int kThreads = 128, kWarps = kThreads / 32;
// All of them are on the device at the same time, because the others wait for the first.
constexpr int kMostBlocks = 48;

struct TakeShared {
  bool taken;
};

// Only this thread's polls cross the link. Returns whether the answer is there; false: gave up.
__device__ bool wait_for_host(const PortView& port, uint32_t sequence) {
  PollingWords words{{port}};
  const MailboxSlot slot = mailbox_slot(port.shape, sequence);
  auto* taken_at = reinterpret_cast<uint64_t*>(port.arena + slot.taken_at);
  // If the device has given up, the slots are the CPU's.
  const bool stamps = !gave_up(words);
  const uint64_t start = nanoseconds();
  if (stamps) taken_at[0] = start;
  Take look;
  while ((look = look_for_answer(words, sequence, nanoseconds() - start > port.timeout_ns)) == Take::kWait) {
    pause();
  }
  words.fence();  // the following reads see what the host wrote before its answer
  const bool taken = look == Take::kTaken;
  const uint64_t end = nanoseconds();
  store_release(&port.state->looked, look_of(sequence, taken));
  if (stamps && taken) taken_at[1] = end;  // after the release, which would wait for this to cross the link
  return taken;
}

// The other blocks wait for the result of the first.
__device__ bool wait_for_first(const PortView& port, uint32_t sequence) {
  uint32_t found;
  while (!is_look_of(found = load_acquire(&port.state->looked), sequence)) pause();
  return found_answer(found);
}

// A warp a head. O: type of this device's own result; T: KV dtype.
template <class O, class T>
__global__ void __launch_bounds__(kThreads) take_kernel(TakeArgs a) {
  auto& s = shared<TakeShared>();
  const PortView& port = a.port;
  const uint32_t sequence = port.state->sequence;
  if (threadIdx.x == 0)
    s.taken = blockIdx.x == 0 ? wait_for_host(port, sequence) : wait_for_first(port, sequence);
  __syncthreads();
  const bool taken = s.taken;
  const int D = port.shape.head_dim, lane = threadIdx.x % 32;
  const int64_t heads = int64_t{a.rows} * port.shape.q_heads;
  const int64_t real = int64_t{port.state->batch} * port.shape.q_heads;
  const MailboxSlot slot = mailbox_slot(port.shape, sequence);
  const auto* given = reinterpret_cast<const float*>(port.arena + slot.o);
  const auto* given_lse = reinterpret_cast<const float*>(port.arena + slot.lse);
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < heads;
       i += int64_t{gridDim.x} * kWarps) {
    const O* own = reinterpret_cast<const O*>(a.own.o) + i * D;
    T* out = reinterpret_cast<T*>(a.out) + i * D;
    float w_own = 1.0f, w_given = 0.0f;
    if (taken && i < real) {
      const float own_lse = a.own.base2 ? a.own.lse[i] : a.own.lse[i] * kLog2e;
      merge_weights(own_lse, load_fresh(given_lse + i) * kLog2e, &w_own, &w_given);
    }
    for (int v = lane; v < D / 4; v += 32) {
      const float4 x = weigh(
          w_own, [&] { return load_four(own + 4 * v); }, w_given,
          [&] { return load_fresh(reinterpret_cast<const float4*>(given + i * D) + v); });
      store_four(x, out + 4 * v);
    }
  }
}

}  // namespace

void take(Port& port, cudaStream_t stream, int rows, Result own, char* out) {
  const TakeArgs args{port.view(), own, rows, out};
  const int64_t blocks = (int64_t{rows} * args.port.shape.q_heads + kWarps - 1) / kWarps;
  // A step of no requests waits, too: the slot is the CPU's until it answers.
  const dim3 grid(static_cast<unsigned>(blocks < 1 ? 1 : blocks < kMostBlocks ? blocks : kMostBlocks));
  const bool wide = args.port.shape.element == 4;
  const auto kernel = own.element == 4 ? wide ? take_kernel<float, float> : take_kernel<float, BF16>
                                       : take_kernel<BF16, BF16>;
  launch("the launch of take", kernel, grid, dim3(kThreads), sizeof(TakeShared), stream, args);
}

}  // namespace fluxion::device
