// Failures of the device's runtime, as sentences.
#pragma once

#include <stdexcept>
#include <string>

#if defined(FLUXION_SIMULATED)
#include "cuda/emulate/runtime.h"
#else
#include <cuda_runtime_api.h>
#endif

namespace fluxion::device {

class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws Failure unless `error` is success. what: what was done: "the launch of publish".
void check(cudaError_t error, const char* what);

}  // namespace fluxion::device
