#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/table.h"

namespace fluxion {
namespace scalar {
extern const KernelTable kTables[2];
}
#ifdef FLUXION_X86
namespace avx2 {
extern const KernelTable kTables[2];
}
namespace avx512 {
extern const KernelTable kTables[2];
}
namespace avx512bf16 {
extern const KernelTable kTables[2];
}
#endif

namespace {

struct Isa {
  const KernelTable* tables;
  bool (*supported)();
};

// Worst first. __builtin_cpu_supports also asks XGETBV whether the operating system saves the wide registers.
constexpr Isa kIsas[] = {
    {scalar::kTables, [] { return true; }},
#ifdef FLUXION_X86
    {avx2::kTables, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
    {avx512::kTables,
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
     }},
    {avx512bf16::kTables,
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("avx512bf16");
     }},
#endif
};

bool runs(const Isa& isa) {
#ifdef FLUXION_X86
  __builtin_cpu_init();
#endif
  return isa.supported();
}

}  // namespace

const KernelTable* kernel_table(const char* isa, DType dtype) {
  for (const Isa& candidate : kIsas) {
    if (std::strcmp(candidate.tables[0].isa, isa) == 0) {
      return runs(candidate) ? &candidate.tables[static_cast<int>(dtype)] : nullptr;
    }
  }
  return nullptr;
}

int available_isas(const char** names, int max) {
  int n = 0;
  for (const Isa& isa : kIsas) {
    if (!runs(isa)) continue;
    if (n < max) names[n] = isa.tables[0].isa;
    ++n;
  }
  return n;
}

const KernelTable* best_kernel_table(DType dtype) {
  if (const char* name = std::getenv("FLUXION_ISA"); name && *name) {
    if (const KernelTable* table = kernel_table(name, dtype)) return table;
    std::string legal;
    for (const Isa& isa : kIsas) {
      if (runs(isa)) legal += (legal.empty() ? "" : ", ") + std::string(isa.tables[0].isa);
    }
    throw std::runtime_error("FLUXION_ISA=" + std::string(name) +
                             " is not an instruction set that this CPU can run; unset it or use one of " +
                             legal + ".");
  }
  const KernelTable* best = nullptr;
  for (const Isa& isa : kIsas) {
    if (runs(isa)) best = &isa.tables[static_cast<int>(dtype)];
  }
  return best;
}

int64_t select_scratch_bytes(int n) {
  // The scores and some of them again, see select.h; each up to two vectors longer.
  return (2 * static_cast<int64_t>(n) + 64) * 4;
}

}  // namespace fluxion
