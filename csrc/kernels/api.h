// What libraries beside this one (csrc/lab, csrc/probe) may call.
#pragma once

#include <cstdint>

// Marks it; everything else is hidden.
#define FLUXION_API __attribute__((visibility("default")))

namespace fluxion {

// One more with every change of what is marked, of a class that it takes, or of what Python calls. A library
// that was built for another number does not fit.
inline constexpr int64_t kAbiVersion = 45;

}  // namespace fluxion
