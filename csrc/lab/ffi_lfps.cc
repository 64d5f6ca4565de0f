// The C ABI of lab/lfps.h. Argument checks live here.
#include <cstdint>
#include <memory>
#include <utility>

#include "ffi/objects.h"
#include "lab/lfps.h"

namespace fluxion {
namespace {

class LfpsObj : public ffi::Object {
 public:
  explicit LfpsObj(std::unique_ptr<Lfps> p) : lfps(std::move(p)) {}
  std::unique_ptr<Lfps> lfps;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fluxion.Lfps", LfpsObj, ffi::Object);
};
class LfpsRef : public ffi::ObjectRef {
 public:
  explicit LfpsRef(ffi::ObjectPtr<LfpsObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(LfpsRef, ffi::ObjectRef, LfpsObj);
};

LfpsRef lfps_create(Pool pool, int64_t q_heads, int64_t rows, int64_t window, double decay,
                    double alpha_vertical, double alpha_slash, double bypass, bool expand,
                    int64_t renormalise) {
  for (int64_t n : {q_heads, rows, window, renormalise}) {
    if (n < 0 || n > INT32_MAX) Raise("ValueError") << "A size of LFPS is " << n << ", which cannot be.";
  }
  return guarded([&] {
    const LfpsConfig config{static_cast<int>(q_heads),
                            static_cast<int>(rows),
                            static_cast<int>(window),
                            decay,
                            alpha_vertical,
                            alpha_slash,
                            bypass,
                            expand,
                            static_cast<int>(renormalise)};
    return LfpsRef(ffi::make_object<LfpsObj>(std::make_unique<Lfps>(pool->pool, config)));
  });
}

void lfps_begin(LfpsRef ref, int64_t layer, int64_t row, int64_t length, TensorView pages, TensorView queries,
                double scale) {
  Lfps& lfps = *ref->lfps;
  const HostPool& pool = lfps.pool();
  expect(pages, "pages", kInt32, {-1}, 1);
  expect(queries, "queries", kv_type(pool), {-1, lfps.config().q_heads, pool.shape().head_dim}, 3);
  guarded([&] {
    lfps.begin(narrow(layer), narrow(row), narrow(length), data<int32_t>(pages), pages.size(0),
               data<char>(queries), static_cast<int>(queries.size(0)), static_cast<float>(scale));
  });
}

LfpsStep step_of(int64_t layer, const TensorView& rows, const TensorView& seq_lens) {
  expect(rows, "rows", kInt32, {-1}, 1);
  expect(seq_lens, "seq_lens", kInt32, {rows.size(0)}, 1);
  return {narrow(layer), static_cast<int>(rows.size(0)), data<int32_t>(rows), data<int32_t>(seq_lens)};
}

int64_t lfps_plan(LfpsRef ref, int64_t layer, TensorView rows, TensorView seq_lens, TensorView table,
                  TensorView q, double scale, double k, TensorView blk, TensorView budget, TensorView value,
                  TensorView offsets, TensorView pages, TensorView masks, TensorView given_o,
                  TensorView given_lse) {
  Lfps& lfps = *ref->lfps;
  const HostPool& pool = lfps.pool();
  const PoolShape& s = pool.shape();
  const LfpsStep step = step_of(layer, rows, seq_lens);
  const int64_t B = step.batch, Hq = lfps.config().q_heads;
  expect(table, "page_table", kInt32, {B, -1}, 1);
  expect(q, "q", kv_type(pool), {B, Hq, s.head_dim}, 2);
  expect(blk, "blk", kInt32, {B, s.kv_heads}, 2);
  expect(budget, "budget", kFloat32, {B, Hq}, 2);
  expect(value, "value", kFloat32, {B, s.kv_heads}, 2);
  expect(offsets, "offsets", kInt64, {B * s.kv_heads + 1}, 1);
  expect(pages, "pages", kInt32, {-1}, 1);
  expect(masks, "masks", kUInt16, {pages.size(0), lfps.group()}, 2);
  expect(given_o, "given_o", kFloat32, {B, Hq, s.head_dim}, 3);
  expect(given_lse, "given_lse", kFloat32, {B, Hq}, 2);
  LfpsPlan plan{};
  plan.q = data<char>(q);
  plan.q_stride = q.stride(0) * s.element();
  plan.table = data<int32_t>(table);
  plan.table_stride = table.stride(0);
  plan.columns = table.size(1);
  plan.scale = static_cast<float>(scale);
  plan.k = k;
  plan.capacity = pages.size(0);
  plan.blk = data<int32_t>(blk);
  plan.budget = data<float>(budget);
  plan.value = data<float>(value);
  plan.offsets = data<int64_t>(offsets);
  plan.pages = data<int32_t>(pages);
  plan.masks = data<uint16_t>(masks);
  plan.given_o = data<float>(given_o);
  plan.given_lse = data<float>(given_lse);
  return guarded([&] { return lfps.plan(step, plan); });
}

void lfps_update(LfpsRef ref, int64_t layer, TensorView rows, TensorView seq_lens, TensorView offsets,
                 TensorView pages, TensorView chosen, TensorView scores, TensorView given_lse,
                 TensorView local_lse, double scale) {
  Lfps& lfps = *ref->lfps;
  const PoolShape& s = lfps.pool().shape();
  const LfpsStep step = step_of(layer, rows, seq_lens);
  const int64_t B = step.batch, Hq = lfps.config().q_heads, groups = B * s.kv_heads;
  expect(offsets, "offsets", kInt64, {groups + 1}, 1);
  expect(pages, "pages", kInt32, {-1}, 1);
  const int64_t n = pages.size(0);
  expect(chosen, "chosen", kUInt16, {n, lfps.group()}, 2);
  expect(scores, "scores", kFloat32, {n, lfps.group(), kPage}, 3);
  expect(given_lse, "given_lse", kFloat32, {B, Hq}, 2);
  expect(local_lse, "local_lse", kFloat32, {B, Hq}, 2);
  const int64_t* at = data<int64_t>(offsets);
  bool fits = at[0] == 0 && at[groups] == n;
  for (int64_t i = 0; i < groups; ++i) {
    fits = fits && at[i] <= at[i + 1] && at[i + 1] <= n;
    const int end = window_start_page(step.seq_lens[i / s.kv_heads], s.sink_pages, lfps.config().window);
    for (int64_t j = at[i]; fits && j < at[i + 1]; ++j)
      fits = data<int32_t>(pages)[j] >= s.sink_pages && data<int32_t>(pages)[j] < end;
  }
  if (!fits) Raise("ValueError") << "The lists are not those of a plan of this step; pass the plan's.";
  guarded([&] {
    lfps.update(step, {at, data<int32_t>(pages), data<uint16_t>(chosen), data<float>(scores),
                       data<float>(given_lse), data<float>(local_lse), static_cast<float>(scale)});
  });
}

void lfps_release(LfpsRef ref, int64_t row) {
  guarded([&] { ref->lfps->release(narrow(row)); });
}

void lfps_tables(LfpsRef ref, int64_t layer, int64_t row, int64_t head, TensorView vertical,
                 TensorView slash) {
  expect(vertical, "vertical", kFloat32, {-1}, 1);
  expect(slash, "slash", kFloat32, {vertical.size(0)}, 1);
  guarded([&] {
    ref->lfps->tables(narrow(layer), narrow(row), narrow(head), data<float>(vertical), data<float>(slash),
                      static_cast<int>(vertical.size(0)));
  });
}

// Bytes of state; then heads planned, heads passed by, and candidates, cumulative.
void lfps_counts(LfpsRef ref, TensorView out) {
  expect(out, "out", kInt64, {4}, 1);
  int64_t* to = data<int64_t>(out);
  *to++ = ref->lfps->bytes();
  for (const int64_t count : ref->lfps->counts()) *to++ = count;
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(lfps_create, fluxion::lfps_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lfps_begin, fluxion::lfps_begin);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lfps_plan, fluxion::lfps_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lfps_update, fluxion::lfps_update);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lfps_release, fluxion::lfps_release);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lfps_tables, fluxion::lfps_tables);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lfps_counts, fluxion::lfps_counts);
