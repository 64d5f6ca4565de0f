#ifdef FLUXION_X86
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/table.h"

namespace fluxion {
namespace scalar {
extern const KernelTable kTables[3];
}
#ifdef FLUXION_X86
namespace avx2 {
extern const KernelTable kTables[3];
}
namespace avx512 {
extern const KernelTable kTables[3];
}
namespace avx512bf16 {
extern const KernelTable kTables[3];
}
namespace amx {
extern const KernelTable kTables[3];
}
#endif

namespace {

#ifdef FLUXION_X86
// Whether this process may use the matrix unit: a process has to ask, for all of its threads.
bool matrix_unit() {
#if defined(FLUXION_EMULATED_UNIT)  // a test's
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

// What this CPU can run, indexed by DType, worst first.
struct Isas {
  const KernelTable* tables[5];
  int count = 0;

  Isas() {
    add(scalar::kTables);
#ifdef FLUXION_X86
    // __builtin_cpu_supports also asks XGETBV whether the operating system saves the wide registers.
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return;
    add(avx2::kTables);
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
      return;
    add(avx512::kTables);
    if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
      add(avx512bf16::kTables);
      // Intel's cores take four times as long for a product of bf16 vectors as for one of float32 vectors, of
      // half as many elements (measured on Emerald Rapids): to widen the keys is the faster way.
      if (__builtin_cpu_is("intel")) std::swap(tables[count - 1], tables[count - 2]);
    }
    if (matrix_unit()) add(amx::kTables);
#endif
  }

 private:
  void add(const KernelTable* isa) { tables[count++] = isa; }
};

const Isas& isas() {
  static const Isas found;
  return found;
}

}  // namespace

const KernelTable* kernel_table(const char* isa, DType dtype) {
  for (int i = 0; i < isas().count; ++i) {
    const KernelTable* tables = isas().tables[i];
    if (std::strcmp(tables[0].isa, isa) == 0) return &tables[static_cast<int>(dtype)];
  }
  return nullptr;
}

int available_isas(const char** names, int max) {
  for (int i = 0; i < isas().count && i < max; ++i) names[i] = isas().tables[i][0].isa;
  return isas().count;
}

const KernelTable* best_kernel_table(DType dtype) {
  if (const char* name = std::getenv("FLUXION_ISA"); name && *name) {
    if (const KernelTable* table = kernel_table(name, dtype)) return table;
    std::string legal;
    for (int i = 0; i < isas().count; ++i)
      legal += (legal.empty() ? "" : ", ") + std::string(isas().tables[i][0].isa);
    throw std::runtime_error("FLUXION_ISA=" + std::string(name) +
                             " is not an instruction set that this CPU can run; unset it or use one of " +
                             legal + ".");
  }
  return &isas().tables[isas().count - 1][static_cast<int>(dtype)];
}

int64_t select_scratch_bytes(int n) {
  // The scores and some of them again, see select.h; each up to two vectors longer.
  return (2 * static_cast<int64_t>(n) + 64) * 4;
}

int64_t extend_scratch_bytes(int rows, int D) {
  // See the constructor in extend.h, with the largest of every ISA: strips of 32 rows, words of one element,
  // rows filled up to 32 elements, 16 lanes.
  const int64_t padded = rows + 31, depth = D + 31;
  const int64_t floats =
      2 * depth * kExtendKeys + 2 * 32 * kExtendKeys + kPage * D + padded * (depth + D + 16 + 1);
  return floats * 4 + 16 * 64;
}

int64_t linear_pack_bytes(int rows, int in) {
  // Groups of eight rows, the last padded; floats where bf16 cannot be multiplied.
  const int64_t padded = (static_cast<int64_t>(in) + kLinearPad - 1) / kLinearPad * kLinearPad;
  return (static_cast<int64_t>(rows) + 7) / 8 * 8 * padded * 4;
}

}  // namespace fluxion
