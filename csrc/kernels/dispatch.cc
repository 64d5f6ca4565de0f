#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/cpu.h"
#include "kernels/isas.h"  // written by the build: FLUXION_EACH_ISA(X) is X(isa) of every instruction set in it
#include "kernels/table.h"

namespace fluxion {

#define FLUXION_DECLARE(isa)           \
  namespace isa {                      \
  extern const KernelTable kTables[3]; \
  }
FLUXION_EACH_ISA(FLUXION_DECLARE)
#undef FLUXION_DECLARE

namespace {

// The instruction sets that this CPU can run and the library has, worst first. Each table is indexed by
// DType.
struct Isas {
  const KernelTable* tables[Supported::kMost];
  int count = 0;

  Isas() {
    const Supported cpu = supported();
    for (int i = 0; i < cpu.count; ++i) {
      if (const KernelTable* found = built(cpu.names[i])) tables[count++] = found;
    }
  }

 private:
  static const KernelTable* built(const char* name) {
#define FLUXION_FIND(isa) \
  if (std::strcmp(name, #isa) == 0) return isa::kTables;
    FLUXION_EACH_ISA(FLUXION_FIND)
#undef FLUXION_FIND
    return nullptr;
  }
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

const char* best_isa_of_cpu() { return supported().best(); }

const KernelTable* best_kernel_table(DType dtype) {
  if (const char* name = std::getenv("FLUXION_ISA"); name && *name) {
    if (const KernelTable* table = kernel_table(name, dtype)) return table;
    std::string legal;
    for (int i = 0; i < isas().count; ++i)
      legal += (legal.empty() ? "" : ", ") + std::string(isas().tables[i][0].isa);
    throw std::runtime_error(
        "FLUXION_ISA=" + std::string(name) +
        " is not an instruction set that this CPU can run and this library has; unset it "
        "or use one of " +
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
