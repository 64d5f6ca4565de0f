// Shared by the files of a device library's C ABI (device/library.py documents each function): failures of
// the device's runtime as Python exceptions, and checks of arguments. Kernels do not check theirs.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "cuda/kernels.h"
#include "ffi/tensor.h"

namespace fluxion::device {

inline constexpr int kDeviceType = kSimulated ? kDLCPU : kDLCUDA;
inline constexpr DLDataType kBytes{kDLUInt, 8, 1};

template <typename Body>
auto guard(Body body) -> decltype(body()) {
  try {
    enter_device();
    return body();
  } catch (const Failure& e) {
    Raise("DeviceError") << e.what();
  }
  TVM_FFI_UNREACHABLE();
}

inline cudaStream_t stream_of(int64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }
inline DLDataType kv_type(int element) { return element == 2 ? kBFloat16 : kFloat32; }
inline int element_of(const TensorView& t) { return same(t.dtype(), kBFloat16) ? 2 : 4; }

int narrow(int64_t value, int64_t least, int64_t most, const char* name);
int narrow_head_dim(int64_t head_dim);
Placement placement_of(int64_t sinks, int64_t window);

// ---- tensors, as expect_form in ffi/tensor.h checks them

// Kernels load 16 bytes at a time: the start, and the strides of the first dimensions.
void expect_aligned(const TensorView& t, const char* name, int64_t element, int strided);
// On the device, and read or written a number at a time.
void expect_numbers(const TensorView& t, const char* name, DLDataType dtype,
                    std::initializer_list<int64_t> want, int dense);
// On the device, and aligned.
void expect_device(const TensorView& t, const char* name, DLDataType dtype,
                   std::initializer_list<int64_t> want, int dense);
// Host memory that the device may read: pinned for all its length.
void expect_pinned(const TensorView& t, const char* name, DLDataType dtype,
                   std::initializer_list<int64_t> want, int dense);
// Pinned, or on the device.
void expect_reachable(const TensorView& t, const char* name, DLDataType dtype,
                      std::initializer_list<int64_t> want, int dense);
// A layer's windows, of rows of the placement's size.
WindowTiles windows_of(const TensorView& t, int kv_heads, int head_dim, int element,
                       const Placement& placement);

}  // namespace fluxion::device
