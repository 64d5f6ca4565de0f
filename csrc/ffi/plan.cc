// The C ABI of engine/plan.h. Argument checks live here.
#include "ffi/plan.h"

#include <tvm/ffi/container/array.h>

#include "engine/listed.h"
#include "engine/sketched.h"

namespace fluxion {
namespace {

using ffi::Optional;
using ffi::Tensor;

// Tensors of one object: checked, and kept as long as it lives.
class Kept {
 public:
  template <class T>
  T* add(const Tensor& t, const char* name, DLDataType dtype, std::initializer_list<int64_t> shape) {
    expect(t, name, dtype, shape, static_cast<int>(shape.size()));
    all_.push_back(t);
    return data<T>(t);
  }
  std::shared_ptr<const void> take() { return keep(std::move(all_)); }

 private:
  std::vector<Tensor> all_;
};

// Whoever made the plan keeps its tensors alive: one that is made for every layer has no time to count
// references.
PlanRef plan_create(TensorView blk, TensorView budget, TensorView value, Optional<TensorView> owner,
                    Optional<TensorView> given_o, Optional<TensorView> given_lse,
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
  if (both(given_o, "given.o", given_lse, "given.lse")) {
    expect(*given_lse, "given.lse", kFloat32, {B, Hq}, 2);
    expect(*given_o, "given.o", kFloat32, {B, Hq, -1}, 3);
    plan->given_lse = data<float>(*given_lse);
    plan->given_o = data<float>(*given_o);
    plan->head_dim = static_cast<int>((*given_o).size(2));
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

TaskKindRef listed_create(Tensor offsets, Tensor pages, Tensor masks, Optional<Tensor> chosen,
                          Optional<Tensor> scores) {
  Kept kept;
  ListedTokens::Lists lists{};
  lists.offsets = kept.add<int64_t>(offsets, "listed.offsets", kInt64, {-1});
  lists.groups = offsets.size(0) - 1;
  lists.pages = kept.add<int32_t>(pages, "listed.pages", kInt32, {-1});
  lists.count = pages.size(0);
  lists.masks = kept.add<uint16_t>(masks, "listed.masks", kUInt16, {lists.count, -1});
  lists.group = static_cast<int>(masks.size(1));
  if (both(chosen, "record.chosen", scores, "record.scores")) {
    lists.chosen = kept.add<uint16_t>(*chosen, "record.chosen", kUInt16, {lists.count, lists.group});
    lists.scores = kept.add<float>(*scores, "record.scores", kFloat32, {lists.count, lists.group, kPage});
  }
  return make_kind<ListedTokens>(lists, kept.take());
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_create, fluxion::plan_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(listed_create, fluxion::listed_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sketched_create, fluxion::sketched_create);
