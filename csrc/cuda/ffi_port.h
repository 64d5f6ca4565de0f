// Ports as objects of the C ABI, and the checks of a layer's tensors against one.
#pragma once

#include <memory>
#include <utility>

#include "cuda/ffi_checks.h"

namespace fluxion::device {

class PortObj : public ffi::Object {
 public:
  explicit PortObj(std::unique_ptr<Port> p) : port(std::move(p)) {}
  std::unique_ptr<Port> port;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fluxion.Port", PortObj, ffi::Object);
};
class PortRef : public ffi::ObjectRef {
 public:
  explicit PortRef(ffi::ObjectPtr<PortObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(PortRef, ffi::ObjectRef, PortObj);
};

// [N][heads][D] on the device, with N at least the step's requests. Returns its address and stride.
inline Rows rows_of(const Port& port, const TensorView& t, const char* name, int64_t rows, int64_t heads) {
  const MailboxShape& s = port.view().shape;
  expect_device(t, name, kv_type(s.element), {rows, heads, s.head_dim}, 2);
  return {data<char>(t), t.size(0) > 0 ? t.stride(0) * s.element : 0};
}

// The number of rows of a layer's tensors: at least the step's requests, at most the port's maximum.
inline int rows_in(const Port& port, const TensorView& q) {
  const int64_t rows = q.ndim() > 0 ? q.size(0) : 0;
  return narrow(rows, port.batch(), port.view().shape.max_requests, "The number of rows");
}

inline WindowTiles port_windows(Port& port, const TensorView& windows) {
  const PortView& v = port.view();
  const WindowTiles tiles =
      windows_of(windows, v.shape.kv_heads, v.shape.head_dim, v.shape.element, v.placement);
  port.bind_rows(tiles.rows);
  return tiles;
}

// A layer of the host pool.
HostTiles host_tiles_of(const TensorView& tiles);

}  // namespace fluxion::device
