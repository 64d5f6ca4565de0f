// Failures of the device's runtime, as sentences.
#pragma once

#include <stdexcept>
#include <string>

#include "cuda/backend.h"

namespace fluxion::device {

class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws Failure unless `error` is success. what names the action: "the launch of publish".
void check(cudaError_t error, const char* what);

// The number of the device that this process uses; threads that CUDA does not know begin with number 0.
void select_device(int device);
// Makes the calling thread use it. Every call from outside begins with this.
void enter_device();

}  // namespace fluxion::device
