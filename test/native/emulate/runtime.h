// Replaces cuda_runtime.h where there is no GPU: the part of CUDA that csrc/cuda uses, so that kernels and
// launches run on a CPU as they are written.
//
// A stream is a thread that runs its work in order; the default stream runs it in the calling thread. The
// blocks of a kernel run one after another. A block's threads are fibers: one runs until it waits for others
// (__syncthreads, a warp's shuffle). Every second round goes from the last to the first, so that results
// differ if a barrier is missing. ThreadSanitizer sees fibers as threads that only these waits order. Device
// memory is host memory, filled with NaN; so is shared memory before every block.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorLaunchOutOfResources = 701,
  cudaErrorHostMemoryAlreadyRegistered = 712,
  cudaErrorHostMemoryNotRegistered = 713,
  cudaErrorLaunchFailure = 719,
  cudaErrorStreamCaptureUnsupported = 900,
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
constexpr float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace fluxion::emulate {

struct Stream;
struct Event;
struct Graph;

struct Thread {
  dim3 thread, block, grid;
};
extern constinit thread_local Thread* current;  // of the fiber that runs

void wait_block();
void wait_warp();
// Where the lanes of this thread's warp put their values for a shuffle: two arrays, used in turn.
uint32_t* exchange();
int lane();
void* shared_memory();
uint64_t nanoseconds();
// Called between two polls of a thread that waits for the host: yields the core.
void pause();

cudaError_t launch(dim3 grid, dim3 block, size_t shared_bytes, Stream* stream, std::function<void()> thread);
// DeviceLibrary.inject (device/library.py); false: no such kind.
bool inject(const char* kind, int64_t after);

}  // namespace fluxion::emulate

using cudaStream_t = fluxion::emulate::Stream*;
using cudaEvent_t = fluxion::emulate::Event*;
using cudaGraph_t = fluxion::emulate::Graph*;
using cudaGraphExec_t = fluxion::emulate::Graph*;

enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice };
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void* devicePointer;
  void* hostPointer;
};
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };
struct cudaDeviceProp {
  char name[256];
  int major, minor, multiProcessorCount;
  size_t totalGlobalMem;
};
inline constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaHostAllocPortable = 1,
                          cudaHostAllocMapped = 2, cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2;

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaMemGetInfo(size_t* free, size_t* total);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaMalloc(void** memory, size_t bytes);
cudaError_t cudaFree(void* memory);
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void* memory);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory);
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);

#define threadIdx (::fluxion::emulate::current->thread)
#define blockIdx (::fluxion::emulate::current->block)
#define gridDim (::fluxion::emulate::current->grid)

inline void __syncthreads() { fluxion::emulate::wait_block(); }
inline void __syncwarp() { fluxion::emulate::wait_warp(); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  static_assert(sizeof(T) == 4 && std::is_trivially_copyable_v<T>);
  uint32_t* slots = fluxion::emulate::exchange();
  const int lane = fluxion::emulate::lane();
  std::memcpy(slots + lane, &value, 4);
  fluxion::emulate::wait_warp();
  std::memcpy(&value, slots + (lane ^ mask), 4);
  return value;
}

// Bit i: lane i's predicate. Every lane of the warp calls it.
inline uint32_t __ballot_sync(unsigned, int predicate) {
  uint32_t* slots = fluxion::emulate::exchange();
  slots[fluxion::emulate::lane()] = predicate != 0;
  fluxion::emulate::wait_warp();
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= slots[lane] << lane;
  return bits;
}
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }

inline uint32_t atomicAdd(uint32_t* at, uint32_t value) {
  return __atomic_fetch_add(at, value, __ATOMIC_ACQ_REL);
}
// The atomics before or after these order memory.
inline void __threadfence() {}
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
// Without -ffp-contract=off a compiler might contract these, too.
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsqrt_rn(double x) { return std::sqrt(x); }
template <class T>
T __ldcg(const T* at) {
  return *at;
}
template <class T>
T __ldcs(const T* at) {
  return *at;
}
