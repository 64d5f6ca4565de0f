// What the files of the runtime's C ABI share: its objects, its errors and the checks of tensors.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "runtime/pool.h"
#include "runtime/worker_pool.h"

namespace fluxion {

namespace ffi = tvm::ffi;
using ffi::TensorView;

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

// Raise("ValueError") << "...": throws at the end of the statement. TVM_FFI_THROW would read the debug
// information of every loaded library for a C++ backtrace, which takes seconds and tells the user nothing.
class Raise {
 public:
  explicit Raise(const char* kind) : kind_(kind) {}
  [[noreturn]] ~Raise() noexcept(false) { throw ffi::Error(kind_, text_.str(), ""); }
  template <typename T>
  Raise& operator<<(const T& part) {
    text_ << part;
    return *this;
  }

 private:
  const char* kind_;
  std::ostringstream text_;
};

// C++ exceptions become the Python exceptions of the same meaning.
template <typename Body>
auto guarded(Body body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::invalid_argument& e) {
    Raise("ValueError") << e.what();
  } catch (const ffi::Error&) {
    throw;
  } catch (const std::exception& e) {
    Raise("RuntimeError") << e.what();
  }
  TVM_FFI_UNREACHABLE();
}

inline constexpr DLDataType kInt32{kDLInt, 32, 1}, kInt64{kDLInt, 64, 1}, kInt8{kDLInt, 8, 1},
    kFloat32{kDLFloat, 32, 1}, kFloat64{kDLFloat, 64, 1}, kBFloat16{kDLBfloat, 16, 1},
    kUInt16{kDLUInt, 16, 1};

inline DLDataType kv_type(const HostPool& pool) {
  return pool.shape().dtype == DType::kBF16 ? kBFloat16 : kFloat32;
}

inline bool same(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

inline std::string shape_text(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    out += (i ? ", " : "") + (shape[i] < 0 ? std::string("any") : std::to_string(shape[i]));
  }
  return out + "]";
}

// Checks a host tensor: dtype, shape (-1: any), and that its last `dense` dimensions are contiguous.
inline void expect(const TensorView& t, const char* name, DLDataType dtype,
                   std::initializer_list<int64_t> want, int dense) {
  const std::vector<int64_t> shape(want);
  const std::vector<int64_t> got(t.shape().begin(), t.shape().end());
  bool fits = got.size() == shape.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = shape[i] < 0 || shape[i] == got[i];
  if (!fits) {
    Raise("ValueError") << name << " has the shape " << shape_text(got) << " and must have "
                        << shape_text(shape) << ".";
  }
  if (!same(t.dtype(), dtype)) {
    Raise("ValueError") << name << " has the dtype " << ffi::DLDataTypeToString(t.dtype())
                        << " and must have " << ffi::DLDataTypeToString(dtype) << ".";
  }
  const int device = t.device().device_type;
  if (device != kDLCPU && device != kDLCUDAHost) {
    Raise("ValueError") << name << " is on a device; pass a tensor in host memory.";
  }
  int64_t stride = 1;
  for (int i = t.ndim() - 1; i >= t.ndim() - dense && t.numel() > 0; --i) {
    if (t.size(i) != 1 && t.stride(i) != stride) {
      Raise("ValueError") << name << " must be contiguous in its last " << dense << " dimensions.";
    }
    stride *= t.size(i);
  }
}

template <typename T>
T* data(const TensorView& t) {
  return reinterpret_cast<T*>(static_cast<char*>(t.data_ptr()) + t.byte_offset());
}

// Windows of one layer as the engine has them: [kv_heads, rows * slot pages, 2, 16, D].
inline WindowView window_view(const HostPool& pool, const TensorView& t, int64_t sinks, int64_t window) {
  const PoolShape& s = pool.shape();
  expect(t, "window", kv_type(pool), {s.kv_heads, -1, 2, kPage, s.head_dim}, 4);
  if (sinks < 0 || sinks % kPage != 0 || window < kPage || window % kPage != 0) {
    Raise("ValueError") << "sinks is " << sinks << " and window is " << window
                        << "; both must be multiples of 16, and window at least 16.";
  }
  WindowView w;
  w.data = data<char>(t);
  w.head_stride = t.size(1) * s.tile_bytes();
  if (s.kv_heads > 1) w.head_stride = t.stride(0) * s.element();
  w.sink_pages = static_cast<int>(sinks / kPage);
  w.ring_pages = static_cast<int>(window / kPage) + 1;
  if (t.size(1) % w.slot_pages() != 0) {
    Raise("ValueError") << "window has " << t.size(1) << " pages a head, which is no multiple of the "
                        << w.slot_pages() << " pages of a row (sinks, window and one page).";
  }
  w.rows = static_cast<int>(t.size(1) / w.slot_pages());
  return w;
}

}  // namespace fluxion
