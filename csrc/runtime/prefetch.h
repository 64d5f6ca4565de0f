#pragma once

namespace fluxion {

// Fetches the line at p, which need not be mapped, into the nearest cache. Not the compiler's builtin: that
// has no effect it knows of, and GCC drops it from loops.
inline void prefetch(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht0 %0" ::"m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p);
#endif
}

}  // namespace fluxion
