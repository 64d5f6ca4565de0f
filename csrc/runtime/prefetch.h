#pragma once

namespace fluxion {

// Prefetches the line at p, which need not be mapped, into the L1 cache. Not the compiler's builtin: GCC sees
// no effect in it and drops it from loops.
inline void prefetch(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht0 %0" ::"m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p);
#endif
}

}  // namespace fluxion
