// The C ABI of engine/plan.h. Argument checks live here.
#include "ffi/plan.h"

#include <tvm/ffi/container/array.h>

#include "engine/listed.h"

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

PlanRef plan_create(Tensor blk, Tensor budget, Tensor value, Optional<Tensor> owner, Optional<Tensor> given_o,
                    Optional<Tensor> given_lse, ffi::Array<TaskKindRef> kinds) {
  Kept kept;
  LayerPlan plan{};
  plan.blk = kept.add<int32_t>(blk, "blk", kInt32, {-1, -1});
  const int64_t B = blk.size(0), H = blk.size(1);
  plan.budget = kept.add<float>(budget, "budget", kFloat32, {B, -1});
  plan.value = kept.add<float>(value, "value", kFloat32, {B, H});
  const int64_t Hq = budget.size(1);
  if (H < 1 || Hq % H != 0 || B > INT32_MAX || Hq > INT32_MAX) {
    Raise("ValueError") << "budget has " << Hq << " heads and blk has " << H
                        << "; the first must be a multiple of the second.";
  }
  plan.batch = static_cast<int>(B);
  plan.kv_heads = static_cast<int>(H);
  plan.q_heads = static_cast<int>(Hq);
  if (owner.has_value()) plan.owner = kept.add<int32_t>(*owner, "owner", kInt32, {B, H});
  if (given_o.has_value() && given_lse.has_value()) {
    plan.given_lse = kept.add<float>(*given_lse, "given.lse", kFloat32, {B, Hq});
    plan.given_o = kept.add<float>(*given_o, "given.o", kFloat32, {B, Hq, -1});
    plan.head_dim = static_cast<int>((*given_o).size(2));
  }
  for (const TaskKindRef& ref : kinds) plan.kinds.push_back(ref->kind);
  plan.memory = kept.take();
  return guarded([&] {
    for (const auto& kind : plan.kinds) kind->check_shape(plan);
    return PlanRef(ffi::make_object<PlanObj>(std::make_shared<const LayerPlan>(std::move(plan))));
  });
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
  if (chosen.has_value() && scores.has_value()) {
    lists.chosen = kept.add<uint16_t>(*chosen, "record.chosen", kUInt16, {lists.count, lists.group});
    lists.scores = kept.add<float>(*scores, "record.scores", kFloat32, {lists.count, lists.group, kPage});
  }
  return make_kind<ListedTokens>(lists, kept.take());
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_create, fluxion::plan_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(listed_create, fluxion::listed_create);
