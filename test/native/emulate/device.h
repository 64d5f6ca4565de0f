// The simulated device's version of what csrc/cuda/device.cuh has for GPUs in PTX and nvcc's terms: launches,
// and memory order between the device and its host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>

#include "cuda/failure.h"
#include "emulate/runtime.h"

namespace fluxion::device {

template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, const A&... arguments) {
  std::tuple<P...> values(arguments...);
  check(emulate::launch(grid, block, shared_bytes, stream, [=] { std::apply(kernel, values); }), name);
}

template <class T>
T& shared() {
  return *static_cast<T*>(emulate::shared_memory());
}

inline uint32_t load_acquire(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
// Acquires, because ThreadSanitizer does not know the fence after it.
inline uint32_t load_relaxed(const uint32_t* word) { return load_acquire(word); }
inline void store_release(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
template <class T>
T load_fresh(const T* at) {
  return *at;
}
inline uint64_t nanoseconds() { return emulate::nanoseconds(); }
inline void pause() { emulate::pause(); }

}  // namespace fluxion::device
