// The C ABI of the lab's kinds of tasks.
#include "ffi/plan.h"
#include "lab/early_stop.h"
#include "lab/single_tokens.h"

namespace fluxion {
namespace {

TaskKindRef single_tokens_create() { return make_kind<SingleTokens>(); }

TaskKindRef early_stop_create(ffi::Tensor stop, ffi::Tensor spread) {
  expect(stop, "stop", kFloat32, {-1, -1}, 2);
  expect(spread, "spread", kFloat32, {stop.size(0), stop.size(1)}, 2);
  const EarlyStop::Shares shares{data<float>(stop), data<float>(spread), stop.size(0), stop.size(1)};
  return make_kind<EarlyStop>(shares, keep({stop, spread}));
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(single_tokens_create, fluxion::single_tokens_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(early_stop_create, fluxion::early_stop_create);
