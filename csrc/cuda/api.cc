// What host code reaches of a device: device/device_api.h.
#include <string>

#include "cuda/kernels.h"

namespace fluxion::device {

namespace {

thread_local std::string sentence;

template <class Body>
int guarded(Body body) {
  try {
    enter_device();
    body();
    return 0;
  } catch (const std::exception& e) {
    sentence = e.what();
    return 1;
  }
}

cudaStream_t of(void* stream) { return static_cast<cudaStream_t>(stream); }

int stream_create(void** stream) {
  return guarded([&] {
    cudaStream_t made = nullptr;
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "looking at the priorities of streams");
    check(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, greatest), "the creation of a stream");
    *stream = made;
  });
}

int stream_destroy(void* stream) {
  return guarded([&] { check(cudaStreamDestroy(of(stream)), "the end of a stream"); });
}

int stream_synchronize(void* stream) {
  return guarded([&] { check(cudaStreamSynchronize(of(stream)), "waiting for a stream"); });
}

int stream_query(void* stream) {
  return guarded([&] {
    const cudaError_t error = cudaStreamQuery(of(stream));
    if (error != cudaErrorNotReady) check(error, "looking at a stream");
  });
}

int device_allocate(int64_t bytes, void** memory) {
  return guarded(
      [&] { check(cudaMalloc(memory, static_cast<size_t>(bytes)), "the allocation of device memory"); });
}

int device_free(void* memory) {
  return guarded([&] { check(cudaFree(memory), "freeing device memory"); });
}

int pinned_allocate(int64_t bytes, void** memory) {
  return guarded([&] {
    check(cudaHostAlloc(memory, static_cast<size_t>(bytes), cudaHostAllocPortable | cudaHostAllocMapped),
          "the allocation of pinned memory");
  });
}

int pinned_free(void* memory) {
  return guarded([&] { check(cudaFreeHost(memory), "freeing pinned memory"); });
}

int pinned_register(void* memory, int64_t bytes) {
  return guarded([&] {
    check(cudaHostRegister(memory, static_cast<size_t>(bytes),
                           cudaHostRegisterPortable | cudaHostRegisterMapped),
          "pinning host memory");
  });
}

int pinned_unregister(void* memory) {
  return guarded([&] { check(cudaHostUnregister(memory), "unpinning host memory"); });
}

int64_t workspace(int32_t tasks, int32_t longest, int32_t group, int32_t head_dim) {
  return workspace_bytes(tasks, longest, group, head_dim);
}

int64_t plan(int32_t tasks, int32_t entries, int32_t group, int32_t head_dim, int32_t element) {
  return plan_bytes(tasks, entries, group, head_dim, element);
}

int attend_batch(void* stream, const DeviceBatch* batch) {
  return guarded([&] { attend(of(stream), *batch); });
}

int copy(void* stream, const DeviceCopy* what) {
  return guarded([&] { copy_tiles(of(stream), *what); });
}

int signal_word(void* stream, uint32_t* word, uint32_t value) {
  return guarded([&] { signal(of(stream), word, value); });
}

const char* error() { return sentence.c_str(); }

}  // namespace

const DeviceApi* device_api() {
  static const DeviceApi api{kDeviceApiVersion,
                             stream_create,
                             stream_destroy,
                             stream_synchronize,
                             stream_query,
                             device_allocate,
                             device_free,
                             pinned_allocate,
                             pinned_free,
                             pinned_register,
                             pinned_unregister,
                             workspace,
                             plan,
                             attend_batch,
                             copy,
                             signal_word,
                             error};
  return &api;
}

}  // namespace fluxion::device
