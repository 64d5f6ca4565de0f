// The C ABI of the engine's kinds of tasks that come with a plan.
#include "engine/reach.h"
#include "ffi/plan.h"

namespace fluxion {
namespace {

TaskKindRef reach_create(ffi::Tensor reach, ffi::Tensor gate) {
  expect(reach, "reach", kFloat32, {-1, -1}, 2);
  expect(gate, "gate", kFloat32, {reach.size(0), reach.size(1)}, 2);
  const Reach::Reaches of{data<float>(reach), data<float>(gate), reach.size(0), reach.size(1)};
  return make_kind<Reach>(of, keep({reach, gate}));
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(reach_create, fluxion::reach_create);
