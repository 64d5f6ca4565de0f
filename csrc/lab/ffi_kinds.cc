// The C ABI of the lab's kinds of tasks.
#include "ffi/plan.h"
#include "kernels/api.h"
#include "lab/early_stop.h"
#include "lab/listed.h"
#include "lab/single_tokens.h"

namespace fluxion {
namespace {

using ffi::Optional;
using ffi::Tensor;

// The ABI that the library was built for: objects of both libraries must have one layout.
int64_t companion_abi_version() { return kAbiVersion; }

TaskKindRef single_tokens_create() { return make_kind<SingleTokens>(); }

TaskKindRef early_stop_create(Tensor stop, Tensor spread) {
  expect(stop, "stop", kFloat32, {-1, -1}, 2);
  expect(spread, "spread", kFloat32, {stop.size(0), stop.size(1)}, 2);
  const EarlyStop::Shares shares{data<float>(stop), data<float>(spread), stop.size(0), stop.size(1)};
  return make_kind<EarlyStop>(shares, keep({stop, spread}));
}

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

TaskKindRef listed_create(Tensor offsets, Tensor pages, Tensor masks, Optional<Tensor> chosen,
                          Optional<Tensor> scores, Optional<Tensor> given_o, Optional<Tensor> given_lse) {
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
  if (both(given_o, "given.o", given_lse, "given.lse")) {
    lists.given_lse = kept.add<float>(*given_lse, "given.lse", kFloat32, {-1, -1});
    lists.q_heads = (*given_lse).size(1);
    lists.given_o = kept.add<float>(*given_o, "given.o", kFloat32, {(*given_lse).size(0), lists.q_heads, -1});
    lists.head_dim = (*given_o).size(2);
  }
  return make_kind<ListedTokens>(lists, kept.take());
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(companion_abi_version, fluxion::companion_abi_version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(single_tokens_create, fluxion::single_tokens_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(early_stop_create, fluxion::early_stop_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(listed_create, fluxion::listed_create);
