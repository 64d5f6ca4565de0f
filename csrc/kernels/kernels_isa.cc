// Compiled once for each ISA, with FLUXION_ISA, FLUXION_ISA_HEADER and that ISA's flags, like attend_*.cc.
// The tables, and the attention functions in those files, are the only symbols with external linkage.
// clang-format off
#include FLUXION_ISA_HEADER
#include "simd/dot.h"
#include "simd/mix.h"
#include "simd/words.h"
// clang-format on
#include "kernels/attend_entry.h"
#include "kernels/block_mass.h"
#include "kernels/delta_rule.h"
#include "kernels/extend.h"
#include "kernels/features.h"
#include "kernels/layers.h"
#include "kernels/linear.h"
#include "kernels/linear_quantised.h"
#include "kernels/metadata.h"
#include "kernels/mlp.h"
#include "kernels/panels.h"
#include "kernels/patterns.h"
#include "kernels/probe.h"
#include "kernels/score.h"
#include "kernels/select.h"
#include "kernels/sketch.h"
#include "kernels/table.h"
#include "kernels/tile.h"
#include "kernels/walk.h"
#include "kernels/weights.h"

#define FLUXION_STRING_OF(x) #x
#define FLUXION_STRING(x) FLUXION_STRING_OF(x)

namespace fluxion::FLUXION_ISA {
namespace {

template <class T>
constexpr int matrix_depth() {
#ifdef FLUXION_MATRIX_UNIT
  if (sizeof(Model<T>) == sizeof(BF16)) return kMatrixDepth;
#endif
  return 0;
}

// Where no weights are packed, no kernel for them is compiled.
template <class T>
constexpr LinearPanels linear_panels_of() {
  if constexpr (kPacks<T>)
    return {kPanel, sizeof(typename Dot<T>::Query), pack_panel<T>, unpack_panel<T>, linear_panels<T>};
  else
    return {};
}

template <class T, DType kStored>
constexpr KernelTable make_table() {
  using M = Model<T>;
  return {{score<M>, score_tokens<T>, score_rows<T>, select, block_mass, add_weights, compare_codes},
          {write_sketch<T>, score_sketches<M>, skim_sketches<M>, weigh, light_bounds, mark_heavy,
           sizeof(T) == sizeof(Int8) ? nullptr : add_values<M>},
          {attend<kStored>, attend_near<kStored>, attend_pages<kStored>, extend<T>, extend_blocks<T>},
          {write_token<T>, read_tile<T>, read_token<T>, page_minmax<T>, merge_minmax<M>, page_moments<T>,
           merge_state<M>},
          {features<M>, page_values<T>, add_rows, add_value<T>, dense},
          {pack_linear<M>, linear<M>, linear_panels_of<T>(), pack_quantised<M>, linear_quantised<M>,
           widen_panel<M>, rms_norm<M>, silu_mul<M>, gelu_mul<M>, rope<M>, unit_vector<M>, delta_rule<M>,
           convolve<M>},
          FLUXION_STRING(FLUXION_ISA),
          matrix_depth<T>(),
          read};
}

}  // namespace

// Indexed by DType.
extern const KernelTable kTables[3];
const KernelTable kTables[3] = {make_table<float, DType::kF32>(), make_table<BF16, DType::kBF16>(),
                                make_table<Int8, DType::kInt8>()};

}  // namespace fluxion::FLUXION_ISA
