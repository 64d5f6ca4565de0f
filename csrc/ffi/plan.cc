// The C ABI of engine/plan.h. Argument checks live here.
#include "ffi/plan.h"

#include <tvm/ffi/container/array.h>

#include "engine/sketched.h"

namespace fluxion {
namespace {

using ffi::Optional;
using ffi::Tensor;

// The caller keeps the plan's tensors alive: a plan may be made for every layer, which leaves no time to
// count references.
PlanRef plan_create(TensorView blk, TensorView budget, TensorView value, Optional<TensorView> owner,
                    Optional<ffi::Array<TaskKindRef>> kinds) {
  expect(blk, "blk", kInt32, {-1, -1}, 2);
  const int64_t B = blk.size(0), H = blk.size(1);
  expect(budget, "budget", kFloat32, {B, -1}, 2);
  expect(value, "value", kFloat32, {B, H}, 2);
  const int64_t Hq = budget.size(1);
  if (H < 1 || Hq % H != 0 || B > INT32_MAX || Hq > INT32_MAX) {
    Raise("ValueError") << "budget has " << Hq << " heads and blk has " << H
                        << "; the first must be a multiple of the second.";
  }
  const auto plan = std::make_shared<LayerPlan>();
  plan->batch = static_cast<int>(B);
  plan->kv_heads = static_cast<int>(H);
  plan->q_heads = static_cast<int>(Hq);
  plan->blk = data<int32_t>(blk);
  plan->budget = data<float>(budget);
  plan->value = data<float>(value);
  if (owner.has_value()) {
    expect(*owner, "owner", kInt32, {B, H}, 2);
    plan->owner = data<int32_t>(*owner);
  }
  if (kinds.has_value()) {
    for (const TaskKindRef& ref : *kinds) plan->kinds.push_back(ref->kind);
  }
  return guarded([&] {
    for (const auto& kind : plan->kinds) kind->check_shape(*plan);
    return PlanRef(ffi::make_object<PlanObj>(plan));
  });
}

TaskKindRef sketched_create(Tensor left) {
  expect(left, "left", kFloat32, {-1, -1}, 2);
  return make_kind<Sketched>(data<float>(left), left.size(0), left.size(1), keep({left}));
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_create, fluxion::plan_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sketched_create, fluxion::sketched_create);
