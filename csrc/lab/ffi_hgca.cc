// The C ABI of lab/hgca.h.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "ffi/objects.h"
#include "lab/hgca.h"

namespace fluxion {
namespace {

class HgcaObj : public ffi::Object {
 public:
  explicit HgcaObj(std::unique_ptr<Hgca> h) : hgca(std::move(h)) {}
  std::unique_ptr<Hgca> hgca;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fluxion.Hgca", HgcaObj, ffi::Object);
};
class HgcaRef : public ffi::ObjectRef {
 public:
  explicit HgcaRef(ffi::ObjectPtr<HgcaObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(HgcaRef, ffi::ObjectRef, HgcaObj);
};

HgcaRef hgca_create(Pool pool, int64_t q_heads, int64_t window, int64_t rows, double alpha, double beta) {
  for (int64_t n : {q_heads, window, rows}) {
    if (n < 0 || n > INT32_MAX) Raise("ValueError") << "A size of the state is " << n << ", which cannot be.";
  }
  return guarded([&] {
    const HgcaConfig config{static_cast<int>(q_heads), static_cast<int>(window), static_cast<int>(rows),
                            static_cast<float>(alpha), static_cast<float>(beta)};
    return HgcaRef(ffi::make_object<HgcaObj>(std::make_unique<Hgca>(pool->pool, config)));
  });
}

void hgca_establish(HgcaRef ref, int64_t layer, int64_t row, int64_t length, TensorView q, TensorView pages,
                    double scale) {
  const HostPool& pool = ref->hgca->pool();
  expect(q, "q", kv_type(pool), {-1, ref->hgca->config().q_heads, pool.shape().head_dim}, 2);
  expect(pages, "pages", kInt32, {-1}, 1);
  const HgcaQueries queries{data<char>(q), q.stride(0) * pool.shape().element(), static_cast<int>(q.size(0)),
                            narrow(length)};
  guarded([&] {
    ref->hgca->establish(narrow(layer), narrow(row), queries, data<int32_t>(pages), pages.size(0),
                         static_cast<float>(scale));
  });
}

int64_t hgca_step(HgcaRef ref, int64_t layer, TensorView rows, TensorView seq_lens, TensorView table,
                  TensorView q, TensorView window, double scale) {
  const HgcaConfig& config = ref->hgca->config();
  const HostPool& pool = ref->hgca->pool();
  expect(rows, "rows", kInt32, {-1}, 1);
  const int64_t B = rows.size(0);
  expect(seq_lens, "seq_lens", kInt32, {B}, 1);
  expect(table, "page_table", kInt32, {B, -1}, 1);
  expect(q, "q", kv_type(pool), {B, config.q_heads, pool.shape().head_dim}, 2);
  HgcaStep step{};
  step.layer = narrow(layer);
  step.batch = static_cast<int>(B);
  step.rows = data<int32_t>(rows);
  step.seq_lens = data<int32_t>(seq_lens);
  step.table = data<int32_t>(table);
  step.table_stride = table.stride(0);
  step.columns = table.size(1);
  step.q = data<char>(q);
  step.q_stride = q.stride(0) * pool.shape().element();
  step.scale = static_cast<float>(scale);
  if (window.numel() > 0)
    step.window = window_view(pool, window, pool.shape().sink_pages * kPage, config.window);
  return guarded([&] { return ref->hgca->step(step); });
}

void hgca_lists(HgcaRef ref, TensorView offsets, TensorView pages, TensorView masks) {
  const int group = ref->hgca->config().q_heads / ref->hgca->pool().shape().kv_heads;
  expect(offsets, "offsets", kInt64, {ref->hgca->listed() + 1}, 1);
  expect(pages, "pages", kInt32, {ref->hgca->listed_pages()}, 1);
  expect(masks, "masks", kUInt16, {pages.size(0), group}, 2);
  ref->hgca->lists(data<int64_t>(offsets), data<int32_t>(pages), data<uint16_t>(masks));
}

int64_t hgca_averages(HgcaRef ref, int64_t layer, int64_t row, TensorView out) {
  expect(out, "out", kFloat32, {ref->hgca->config().q_heads, -1}, 2);
  return guarded([&] {
    return static_cast<int64_t>(
        ref->hgca->averages(narrow(layer), narrow(row), data<float>(out), out.size(1)));
  });
}

void hgca_release(HgcaRef ref, int64_t row) { ref->hgca->release(narrow(row)); }

int64_t hgca_bytes(HgcaRef ref) { return ref->hgca->bytes(); }

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(hgca_create, fluxion::hgca_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hgca_establish, fluxion::hgca_establish);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hgca_step, fluxion::hgca_step);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hgca_lists, fluxion::hgca_lists);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hgca_averages, fluxion::hgca_averages);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hgca_release, fluxion::hgca_release);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hgca_bytes, fluxion::hgca_bytes);
