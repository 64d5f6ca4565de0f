// The instruction sets that this CPU and its operating system can run. The library picks the best of those
// that it was built with, and the build asks for the best.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include <utility>

namespace fluxion {

struct Supported {
  static constexpr int kMost = 5;
  const char* names[kMost] = {"scalar"};  // worst first
  int count = 1;

  const char* best() const { return names[count - 1]; }
};

#if defined(__x86_64__)
// Whether this process may use the matrix unit. A process has to request it for all of its threads.
inline bool matrix_unit() {
#if defined(FLUXION_EMULATED_UNIT)  // of a test
  return true;
#elif defined(__linux__) && defined(SYS_arch_prctl)
  unsigned a, b, c, d = 0;
  constexpr unsigned kBF16 = 1u << 22, kTile = 1u << 24;  // of leaf 7, EDX
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBF16) == 0 || (d & kTile) == 0) return false;
  if (!__builtin_cpu_supports("avx512vnni")) return false;
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#endif

inline Supported supported() {
  Supported isas;
#if defined(__x86_64__)
  const auto add = [&](const char* name) { isas.names[isas.count++] = name; };
  // __builtin_cpu_supports also asks XGETBV whether the operating system saves the wide registers.
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
    return isas;
  add("avx2");
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return isas;
  add("avx512");
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
    add("avx512bf16");
    // Intel's cores take four times as long for a product of bf16 vectors as for one of float32 vectors with
    // half as many elements (measured on Emerald Rapids): widening the keys is faster.
    if (__builtin_cpu_is("intel")) std::swap(isas.names[isas.count - 1], isas.names[isas.count - 2]);
  }
  if (matrix_unit()) add("amx");
#endif
  return isas;
}

}  // namespace fluxion
