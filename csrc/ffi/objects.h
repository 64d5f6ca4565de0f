// Shared by the files of the C ABI: its objects, and checks of tensors that belong to a pool.
#pragma once

#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "ffi/tensor.h"
#include "runtime/pool.h"
#include "runtime/worker_pool.h"

namespace fluxion {

class WorkersObj : public ffi::Object {
 public:
  explicit WorkersObj(std::shared_ptr<WorkerPool> p) : pool(std::move(p)) {}
  std::shared_ptr<WorkerPool> pool;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fluxion.Workers", WorkersObj, ffi::Object);
};
class Workers : public ffi::ObjectRef {
 public:
  explicit Workers(ffi::ObjectPtr<WorkersObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(Workers, ffi::ObjectRef, WorkersObj);
};

class PoolObj : public ffi::Object {
 public:
  explicit PoolObj(std::shared_ptr<HostPool> p) : pool(std::move(p)) {}
  std::shared_ptr<HostPool> pool;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fluxion.HostPool", PoolObj, ffi::Object);
};
class Pool : public ffi::ObjectRef {
 public:
  explicit Pool(ffi::ObjectPtr<PoolObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(Pool, ffi::ObjectRef, PoolObj);
};

inline DLDataType kv_type(const HostPool& pool) {
  return kv_dtype(pool.shape().dtype) == DType::kBF16 ? kBFloat16 : kFloat32;
}

// Keys or values [tokens, heads, D], D contiguous.
inline TokenView token_view(const HostPool& pool, const TensorView& t, const char* name, int64_t tokens) {
  const PoolShape& s = pool.shape();
  expect(t, name, kv_type(pool), {tokens, s.kv_heads, s.head_dim}, 1);
  return {data<char>(t), t.stride(0) * s.element(), t.stride(1) * s.element()};
}

inline constexpr double kMostCap = 1e9;  // a larger cap would have no effect

// A logit for each query head, or nullptr.
inline const float* sinks_of(const ffi::Optional<TensorView>& sinks, int64_t q_heads) {
  if (!sinks.has_value()) return nullptr;
  expect(*sinks, "sinks", kFloat32, {q_heads}, 1);
  return data<float>(*sinks);
}

// cap: of logits, 0 for none.
inline Scale scale_of(double factor, double cap) {
  if (!(cap >= 0) || cap > kMostCap) {
    Raise("ValueError") << "cap is " << cap << "; a cap of logits is above 0 and at most " << kMostCap
                        << ", 0 is none.";
  }
  return {static_cast<float>(factor), static_cast<float>(cap)};
}

inline constexpr int64_t kMostResidents = 1 << 30;  // tokens; more do not fit slot counts

// Windows of one layer as the engine has them: [kv_heads, rows * slot pages, 2, 16, D].
inline WindowView window_view(const HostPool& pool, const TensorView& t, int64_t sinks, int64_t window) {
  const PoolShape& s = pool.shape();
  expect(t, "window", kv_type(pool), {s.kv_heads, -1, 2, kPage, s.head_dim}, 4);
  if (sinks < 0 || sinks % kPage != 0 || window < kPage || window % kPage != 0 ||
      std::max(sinks, window) > kMostResidents) {
    Raise("ValueError") << "sinks is " << sinks << " and window is " << window
                        << "; both must be multiples of 16, and window at least 16.";
  }
  WindowView w;
  w.data = data<char>(t);
  w.head_stride = t.size(1) * s.window_tile_bytes();
  if (s.kv_heads > 1) w.head_stride = t.stride(0) * s.element();
  w.sink_pages = static_cast<int>(sinks / kPage);
  w.ring_pages = WindowView::ring_of(static_cast<int>(window));
  if (t.size(1) < 1) Raise("ValueError") << "window has no pages; it needs those of one row at least.";
  if (t.size(1) % w.slot_pages() != 0) {
    Raise("ValueError") << "window has " << t.size(1) << " pages a head, which is no multiple of the "
                        << w.slot_pages() << " pages of a row (sinks, window and one page).";
  }
  w.rows = static_cast<int>(t.size(1) / w.slot_pages());
  return w;
}

}  // namespace fluxion
