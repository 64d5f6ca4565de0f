#include "cuda/failure.h"

#include <atomic>

namespace fluxion::device {

namespace {

std::atomic<int> selected{-1};
thread_local int entered = -1;

}  // namespace

void select_device(int device) {
  check(cudaSetDevice(device), "selecting a device");
  entered = device;
  selected = device;
}

void enter_device() {
  const int device = selected.load(std::memory_order_relaxed);
  if (device == entered) return;
  check(cudaSetDevice(device), "selecting a device");
  entered = device;
}

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, if possible, so that the next call reports its own
  const char* where = kSimulated ? "the simulated device" : "CUDA";
  std::string remedy;
  if (error == cudaErrorMemoryAllocation) {
    remedy = "; leave more memory free, on the device and of what may be pinned";
  } else if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) {
    remedy =
        "; this machine has no NVIDIA GPU that is visible, or no driver for it as new as this library's CUDA";
  } else if (error == cudaErrorLaunchFailure) {
    remedy = "; the device is lost to this process, which must be started again";
  }
  throw Failure(std::string(where) + " failed at " + what + ": " + cudaGetErrorString(error) + " (" +
                cudaGetErrorName(error) + ")" + remedy + ".");
}

}  // namespace fluxion::device
