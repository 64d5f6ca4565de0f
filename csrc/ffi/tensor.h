// Tensors and errors of a C ABI through apache-tvm-ffi.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/failure.h"

namespace fluxion {

namespace ffi = tvm::ffi;
using ffi::TensorView;

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
  } catch (const CorruptMemory& e) {
    Raise("CorruptMemory") << e.what();
  } catch (...) {
    Raise("RuntimeError") << sentence_of(std::current_exception());
  }
  TVM_FFI_UNREACHABLE();
}

inline constexpr DLDataType kInt32{kDLInt, 32, 1}, kInt64{kDLInt, 64, 1}, kInt8{kDLInt, 8, 1},
    kFloat32{kDLFloat, 32, 1}, kFloat64{kDLFloat, 64, 1}, kBFloat16{kDLBfloat, 16, 1}, kUInt8{kDLUInt, 8, 1},
    kUInt16{kDLUInt, 16, 1}, kBool{kDLBool, 8, 1};

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

// For error sentences. DLDataTypeToString throws for types without a name, and Raise cannot be interrupted.
inline std::string dtype_text(DLDataType dtype) {
  try {
    return ffi::DLDataTypeToString(dtype);
  } catch (const ffi::Error&) {
    return "of another kind";
  }
}

// Checks dtype, shape (-1: any), and that the last `dense` dimensions are contiguous.
inline void expect_form(const TensorView& t, const char* name, DLDataType dtype,
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
    Raise("ValueError") << name << " has the dtype " << dtype_text(t.dtype()) << " and must have "
                        << dtype_text(dtype) << ".";
  }
  int64_t stride = 1;
  for (int i = t.ndim() - 1; i >= t.ndim() - dense && t.numel() > 0; --i) {
    if (t.size(i) != 1 && t.stride(i) != stride) {
      Raise("ValueError") << name << " must be contiguous in its last " << dense << " dimensions.";
    }
    stride *= t.size(i);
  }
}

// The same for a tensor in host memory.
inline void expect(const TensorView& t, const char* name, DLDataType dtype,
                   std::initializer_list<int64_t> want, int dense) {
  expect_form(t, name, dtype, want, dense);
  const int device = t.device().device_type;
  if (device != kDLCPU && device != kDLCUDAHost) {
    Raise("ValueError") << name << " is on a device; pass a tensor in host memory.";
  }
}

// A number from Python as an int. A number out of range becomes one that is refused: cut to 32 bits, it could
// be another layer or row.
inline int narrow(int64_t number) { return static_cast<int>(std::clamp<int64_t>(number, -1, INT32_MAX)); }

// Two arguments that come together or not at all.
template <typename A, typename B>
bool both(const A& a, const char* a_name, const B& b, const char* b_name) {
  if (a.has_value() == b.has_value()) return a.has_value();
  const bool has_a = a.has_value();
  Raise("ValueError") << (has_a ? a_name : b_name) << " was given without " << (has_a ? b_name : a_name)
                      << "; give both or neither.";
  TVM_FFI_UNREACHABLE();
}

template <typename T>
T* data(const TensorView& t) {
  return reinterpret_cast<T*>(static_cast<char*>(t.data_ptr()) + t.byte_offset());
}

}  // namespace fluxion
