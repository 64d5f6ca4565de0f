// The C ABI of csrc/device/mailbox.h.
#include <algorithm>
#include <cstdint>
#include <memory>

#include "device/far_tiles.h"
#include "device/mailbox.h"
#include "device/steady_step.h"
#include "ffi/engine.h"
#include "ffi/plan.h"

namespace fluxion {
namespace {

class MailboxObj : public ffi::Object {
 public:
  explicit MailboxObj(std::shared_ptr<Mailbox> m) : mailbox(std::move(m)) {}
  std::shared_ptr<Mailbox> mailbox;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fluxion.Mailbox", MailboxObj, ffi::Object);
};
class MailboxRef : public ffi::ObjectRef {
 public:
  explicit MailboxRef(ffi::ObjectPtr<MailboxObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(MailboxRef, ffi::ObjectRef, MailboxObj);
};

// The arena, which a tensor over it keeps alive.
struct ArenaOwner {
  std::shared_ptr<Mailbox> mailbox;
  void AllocData(DLTensor* t) { t->data = mailbox->arena(); }
  void FreeData(DLTensor*) {}
};

MailboxRef mailbox_create(int64_t max_requests, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                          int64_t element) {
  const auto size = [](int64_t n) { return static_cast<int32_t>(std::clamp<int64_t>(n, -1, 1 << 24)); };
  const MailboxShape shape{size(max_requests), size(q_heads), size(kv_heads), size(head_dim), size(element)};
  return guarded([&] { return MailboxRef(ffi::make_object<MailboxObj>(std::make_shared<Mailbox>(shape))); });
}

ffi::Tensor mailbox_arena(MailboxRef ref) {
  const int64_t bytes = ref->mailbox->bytes();
  return ffi::Tensor::FromNDAlloc(ArenaOwner{ref->mailbox}, ffi::ShapeView(&bytes, 1),
                                  DLDataType{kDLUInt, 8, 1}, DLDevice{kDLCPU, 0});
}

// q, k, v, parts, o, lse, layer, published_at, taken_at
void mailbox_offsets(MailboxRef ref, int64_t sequence, TensorView out) {
  expect(out, "out", kInt64, {9}, 1);
  const MailboxSlot at = mailbox_slot(ref->mailbox->shape(), static_cast<uint32_t>(sequence));
  const int64_t offsets[] = {at.q,       at.k, at.v, at.parts, at.o, at.lse, at.layer, at.published_at,
                             at.taken_at};
  std::copy_n(offsets, 9, data<int64_t>(out));
}

MailboxWord word_of(int64_t word) {
  if (word < 0 || word >= kMailboxWords) Raise("ValueError") << "A mailbox has no word " << word << ".";
  return static_cast<MailboxWord>(word);
}

int64_t mailbox_wait(MailboxRef ref, int64_t word, int64_t sequence, int64_t timeout_ns) {
  return static_cast<int64_t>(ref->mailbox->wait(word_of(word), static_cast<uint32_t>(sequence), timeout_ns));
}

bool mailbox_answer(MailboxRef ref, int64_t sequence) {
  return ref->mailbox->answer(static_cast<uint32_t>(sequence));
}

bool mailbox_fail(MailboxRef ref, int64_t sequence) {
  return ref->mailbox->fail(static_cast<uint32_t>(sequence));
}

bool mailbox_finish(MailboxRef ref, EngineRef engine, int64_t sequence, int64_t planned_ns) {
  guarded([&] { engine->engine->finish(); });
  return ref->mailbox->answer(static_cast<uint32_t>(sequence), planned_ns);
}

// out: [n, 8], LayerTimes. Returns how many there are.
int64_t mailbox_times(MailboxRef ref, TensorView out) {
  static_assert(sizeof(LayerTimes) == 8 * sizeof(int64_t));
  expect(out, "out", kInt64, {-1, 8}, 2);
  return ref->mailbox->take_times(reinterpret_cast<LayerTimes*>(data<int64_t>(out)), out.size(0));
}

void mailbox_settled(MailboxRef ref) { ref->mailbox->settled(); }

void mailbox_cancel(MailboxRef ref) { ref->mailbox->cancel(); }

void mailbox_reset(MailboxRef ref) { ref->mailbox->reset(); }

int64_t mailbox_load(MailboxRef ref, int64_t word) { return ref->mailbox->load(word_of(word)); }

void mailbox_store(MailboxRef ref, int64_t word, int64_t value) {
  ref->mailbox->store(word_of(word), static_cast<uint32_t>(value));
}

int64_t far_lists_bytes(int64_t max_requests, int64_t kv_heads, int64_t max_pages) {
  return far_bytes(
      {static_cast<int32_t>(max_requests), static_cast<int32_t>(kv_heads), static_cast<int32_t>(max_pages)});
}

TaskKindRef far_tiles_create(ffi::Tensor lists, int64_t max_requests, int64_t kv_heads, int64_t max_pages,
                             int64_t parity) {
  const FarShape shape{static_cast<int32_t>(max_requests), static_cast<int32_t>(kv_heads),
                       static_cast<int32_t>(max_pages)};
  expect(lists, "lists", DLDataType{kDLUInt, 8, 1}, {far_bytes(shape)}, 1);
  return make_kind<FarTiles>(data<char>(lists), shape, static_cast<int>(parity % 2), keep({lists}));
}

// out: [3], Served.
void mailbox_serve(MailboxRef ref, EngineRef engine, PlanRef even, PlanRef odd, int64_t sequence,
                   int64_t layers, double scale, int64_t timeout_ns, TensorView out) {
  expect(out, "out", kInt64, {3}, 1);
  const MailboxShape& s = ref->mailbox->shape();
  const PoolShape& pool = engine->engine->pool().shape();
  for (const PlanRef& plan : {even, odd}) check_plan(*engine->engine, *plan->plan);
  if (s.q_heads != engine->engine->config().q_heads || s.kv_heads != pool.kv_heads ||
      s.head_dim != pool.head_dim || s.element != pool.element() ||
      engine->engine->batch() > s.max_requests || layers < 0 || layers > pool.layers) {
    Raise("ValueError") << "The mailbox is for other layers than the engine's.";
  }
  const SteadyStep step{{even->plan, odd->plan},
                        static_cast<uint32_t>(sequence),
                        static_cast<int>(layers),
                        static_cast<float>(scale),
                        timeout_ns};
  const Served served = guarded([&] { return serve(*ref->mailbox, *engine->engine, step); });
  int64_t* to = data<int64_t>(out);
  to[0] = served.layers, to[1] = static_cast<int64_t>(served.wait), to[2] = served.taken;
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(mailbox_create, fluxion::mailbox_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mailbox_arena, fluxion::mailbox_arena);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mailbox_offsets, fluxion::mailbox_offsets);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mailbox_wait, fluxion::mailbox_wait);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mailbox_answer, fluxion::mailbox_answer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mailbox_fail, fluxion::mailbox_fail);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mailbox_finish, fluxion::mailbox_finish);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mailbox_times, fluxion::mailbox_times);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mailbox_settled, fluxion::mailbox_settled);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mailbox_cancel, fluxion::mailbox_cancel);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mailbox_reset, fluxion::mailbox_reset);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mailbox_load, fluxion::mailbox_load);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mailbox_store, fluxion::mailbox_store);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(far_lists_bytes, fluxion::far_lists_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(far_tiles_create, fluxion::far_tiles_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mailbox_serve, fluxion::mailbox_serve);
