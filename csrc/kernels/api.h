// What other libraries (csrc/lab, csrc/probe) may call.
#pragma once

#include <cstdint>

// Exports a symbol; everything else is hidden.
#define FLUXION_API __attribute__((visibility("default")))

namespace fluxion {

// Incremented with every change of an exported symbol, of a class in its signature, or of what Python calls.
// A library built for another number does not fit.
inline constexpr int64_t kAbiVersion = 45;

}  // namespace fluxion
