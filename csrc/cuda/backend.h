// CUDA's runtime, or its replacement in the simulated device of the tests (test/native/emulate).
#pragma once

#if defined(FLUXION_SIMULATED)
#include "emulate/runtime.h"
#else
#include <cuda_runtime_api.h>
#endif

namespace fluxion::device {

#if defined(FLUXION_SIMULATED)
inline constexpr bool kSimulated = true;
#else
inline constexpr bool kSimulated = false;
#endif

}  // namespace fluxion::device
