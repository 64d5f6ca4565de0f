// Arguments of the probes: checks of tensors, with an error sentence for those that do not fit.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>

#include <initializer_list>
#include <sstream>
#include <string>

#include "kernels/table.h"

namespace fluxion::probe {

using tvm::ffi::String;
using tvm::ffi::TensorView;

inline constexpr DLDataType kFloat32{kDLFloat, 32, 1};
inline constexpr DLDataType kFloat64{kDLFloat, 64, 1};
inline constexpr DLDataType kBFloat16{kDLBfloat, 16, 1};
inline constexpr DLDataType kInt32{kDLInt, 32, 1};
inline constexpr DLDataType kInt64{kDLInt, 64, 1};
inline constexpr DLDataType kUInt8{kDLUInt, 8, 1};
inline constexpr DLDataType kUInt16{kDLUInt, 16, 1};

inline bool same(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

// A tensor argument with its name, for the sentence of an error.
struct Argument {
  const char* name;
  const TensorView& tensor;

  // Whether all axes but the first are contiguous.
  bool rows_contiguous() const {
    int64_t stride = 1;
    for (int32_t i = tensor.ndim() - 1; i > 0; --i) {
      if (tensor.size(i) != 1 && tensor.stride(i) != stride) return false;
      stride *= tensor.size(i);
    }
    return true;
  }

  // Sizes below 0 are free. any_rows: the first axis may have any stride.
  const Argument& require(DLDataType dtype, std::initializer_list<int64_t> shape,
                          bool any_rows = false) const {
    const bool contiguous =
        tensor.numel() == 0 || (any_rows ? rows_contiguous() : static_cast<bool>(tensor.IsContiguous()));
    bool ok = contiguous && tensor.device().device_type == kDLCPU && same(tensor.dtype(), dtype) &&
              tensor.ndim() == static_cast<int32_t>(shape.size());
    int64_t axis = 0;
    for (int64_t size : shape) {
      ok = ok && (size < 0 || tensor.size(axis) == size);
      ++axis;
    }
    if (ok) return *this;
    std::ostringstream wanted, given;
    axis = 0;
    for (int64_t size : shape) {
      wanted << (axis++ ? ", " : "") << (size < 0 ? "any" : std::to_string(size));
    }
    for (int32_t i = 0; i < tensor.ndim(); ++i) given << (i ? ", " : "") << tensor.size(i);
    TVM_FFI_THROW(ValueError) << name << " is a " << tvm::ffi::DLDataTypeToString(tensor.dtype())
                              << " tensor of shape [" << given.str()
                              << (contiguous ? "]; pass a" : "], not contiguous; pass a")
                              << " contiguous CPU tensor of " << tvm::ffi::DLDataTypeToString(dtype)
                              << " and shape [" << wanted.str() << "].";
    return *this;
  }

  DType kv_dtype() const {
    if (same(tensor.dtype(), kFloat32)) return DType::kF32;
    if (same(tensor.dtype(), kBFloat16)) return DType::kBF16;
    TVM_FFI_THROW(ValueError) << name << " is a " << tvm::ffi::DLDataTypeToString(tensor.dtype())
                              << " tensor, which no kernel takes; convert it to bfloat16 or float32.";
    return DType::kF32;
  }

  // The size of the last axis.
  int head_dim() const {
    const int64_t D = tensor.ndim() > 0 ? tensor.size(-1) : 0;
    if (D < kMinHeadDim || D > kMaxHeadDim || D % 16 != 0) {
      TVM_FFI_THROW(ValueError) << name << " has head_dim " << D << "; pass a multiple of 16 from "
                                << kMinHeadDim << " to " << kMaxHeadDim << ".";
    }
    return static_cast<int>(D);
  }

  int group(int most = kMaxGroup) const {
    const int64_t G = tensor.ndim() > 0 ? tensor.size(0) : 0;
    if (G < 1 || G > most) {
      TVM_FFI_THROW(ValueError) << name << " has " << G << " heads; pass 1 to " << most
                                << " heads, those that share one KV head.";
    }
    return static_cast<int>(G);
  }

  // int32 ids below `limit`.
  int ids(int64_t limit) const {
    require(kInt32, {-1});
    const int32_t* id = data<int32_t>();
    for (int64_t i = 0; i < tensor.size(0); ++i) {
      if (id[i] < 0 || id[i] >= limit) {
        TVM_FFI_THROW(ValueError) << name << " holds " << id[i] << " at index " << i
                                  << "; pass ids from 0 to " << limit - 1 << ".";
      }
    }
    return count();
  }

  int count() const {
    if (tensor.size(0) > INT32_MAX) {
      TVM_FFI_THROW(ValueError) << name << " has " << tensor.size(0) << " elements; pass at most "
                                << INT32_MAX << ".";
    }
    return static_cast<int>(tensor.size(0));
  }

  template <class T = void>
  T* data() const {
    return static_cast<T*>(tensor.data_ptr());
  }
};

inline DLDataType dl_dtype(DType dtype) { return dtype == DType::kF32 ? kFloat32 : kBFloat16; }

// Storage of tiles: plain ones are [P, 2, 16, D] of q's dtype, 8-bit ones [P, bytes] uint8.
struct Tiles {
  DType stored;
  int64_t count;

  Tiles(const TensorView& tiles, DType dtype, int D) : stored(dtype) {
    const Argument argument{"tiles", tiles};
    if (dtype == DType::kBF16 && same(tiles.dtype(), kUInt8)) {
      stored = DType::kInt8;
      argument.require(kUInt8, {-1, 2 * kPage * stored_bytes(stored, D)});
    } else {
      argument.require(dl_dtype(dtype), {-1, 2, kPage, D});
    }
    count = tiles.size(0);
  }
};

// One tile. The shape of an 8-bit tile does not tell D.
inline DType one_tile(const TensorView& tile, int D) {
  const Argument from{"tile", tile};
  if (same(tile.dtype(), kUInt8)) {
    from.require(kUInt8, {2 * kPage * stored_bytes(DType::kInt8, D)});
    return DType::kInt8;
  }
  from.require(dl_dtype(from.kv_dtype()), {2, kPage, D});
  return from.kv_dtype();
}

inline std::string isas() {
  const char* names[8];
  const int n = available_isas(names, 8);
  std::string joined;
  for (int i = 0; i < n; ++i) joined += (i ? "," : "") + std::string(names[i]);
  return joined;
}

inline const KernelTable& table_of(const String& isa, DType dtype) {
  const KernelTable* table = kernel_table(isa.c_str(), dtype);
  if (table == nullptr) {
    TVM_FFI_THROW(ValueError) << "isa " << isa.c_str() << " cannot be run by this CPU; use one of " << isas()
                              << ".";
  }
  return *table;
}

}  // namespace fluxion::probe
