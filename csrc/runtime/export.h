// What a library of another package links to, such as that of the lab: CMake's fluxion_companion() makes one.
#pragma once

#include <cstdint>

// Of a function, or of a class that others derive from. Everything else of this library is hidden.
#define FLUXION_API __attribute__((visibility("default")))

namespace fluxion {

// Changes with each change of what Python calls, or of the layout of what another library sees.
inline constexpr int64_t kAbiVersion = 40;

}  // namespace fluxion
