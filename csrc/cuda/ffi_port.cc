// The C ABI: the device side of a mailbox.
#include "cuda/ffi_port.h"

#include <memory>
#include <utility>

namespace fluxion::device {
namespace {

MailboxShape shape_of(int64_t max_requests, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                      int64_t element) {
  MailboxShape s{};
  s.max_requests = narrow(max_requests, 1, 1 << 16, "max_requests");
  s.kv_heads = narrow(kv_heads, 1, 1 << 12, "kv_heads");
  s.q_heads = narrow(q_heads, kv_heads, kMaxGroup * kv_heads, "q_heads");
  s.head_dim = narrow(head_dim, 32, kMaxHeadDim, "head_dim");
  s.element = static_cast<int32_t>(element);
  if (q_heads % kv_heads != 0 || head_dim % 16 != 0 || (element != 2 && element != 4)) {
    Raise("ValueError") << "A mailbox cannot have " << q_heads << " query heads, " << kv_heads
                        << " KV heads, head_dim " << head_dim << " and numbers of " << element << " bytes.";
  }
  return s;
}

PortRef port_create(TensorView arena, int64_t max_requests, int64_t q_heads, int64_t kv_heads,
                    int64_t head_dim, int64_t element, int64_t sinks, int64_t window, int64_t timeout_ns) {
  const MailboxShape shape = shape_of(max_requests, q_heads, kv_heads, head_dim, element);
  const Placement placement = placement_of(sinks, window);
  expect_pinned(arena, "arena", kBytes, {-1}, 1);
  if (arena.numel() < mailbox_bytes(shape) || reinterpret_cast<uintptr_t>(data<char>(arena)) % 256 != 0) {
    Raise("ValueError") << "arena has " << arena.numel() << " bytes and must have " << mailbox_bytes(shape)
                        << ", from a multiple of 256.";
  }
  if (timeout_ns < 1) Raise("ValueError") << "The time-out of a mailbox must be positive.";
  return guard([&] {
    return PortRef(ffi::make_object<PortObj>(
        std::make_unique<Port>(data<char>(arena), shape, placement, static_cast<uint64_t>(timeout_ns))));
  });
}

void port_reset(PortRef port, int64_t stream) {
  guard([&] { port->port->reset(stream_of(stream)); });
}

void port_step(PortRef port_ref, int64_t stream, TensorView rows, TensorView lengths) {
  Port& port = *port_ref->port;
  expect(rows, "rows", kInt32, {-1}, 1);
  const int64_t batch = rows.size(0);
  expect(lengths, "lengths", kInt32, {batch}, 1);
  narrow(batch, 0, port.view().shape.max_requests, "The number of requests");
  const int32_t *r = data<int32_t>(rows), *n = data<int32_t>(lengths);
  for (int64_t b = 0; b < batch; ++b) {
    narrow(r[b], 0, port.bound_rows() - 1, "A row");
    narrow(n[b], 1, INT32_MAX - kPage, "A length");
  }
  guard([&] { port.step(stream_of(stream), r, n, static_cast<int>(batch)); });
}

void publish_layer(PortRef port_ref, int64_t stream, int64_t layer, TensorView q, TensorView k, TensorView v,
                   TensorView windows) {
  Port& port = *port_ref->port;
  const MailboxShape& s = port.view().shape;
  const int rows = rows_in(port, q);
  const Rows queries = rows_of(port, q, "q", rows, s.q_heads), keys = rows_of(port, k, "k", rows, s.kv_heads),
             values = rows_of(port, v, "v", rows, s.kv_heads);
  const WindowTiles tiles = port_windows(port, windows);
  const int number = narrow(layer, 0, INT32_MAX, "layer");
  guard([&] { publish(port, stream_of(stream), number, rows, queries, keys, values, tiles); });
}

void resident_layer(PortRef port_ref, int64_t stream, TensorView q, TensorView windows, double scale,
                    TensorView o, TensorView lse, bool want_parts) {
  Port& port = *port_ref->port;
  const MailboxShape& s = port.view().shape;
  const int rows = rows_in(port, q);
  const Rows queries = rows_of(port, q, "q", rows, s.q_heads);
  expect_device(o, "o", kFloat32, {rows, s.q_heads, s.head_dim}, 3);
  expect_device(lse, "lse", kFloat32, {rows, s.q_heads}, 2);
  const WindowTiles tiles = port_windows(port, windows);
  guard([&] {
    resident(port, stream_of(stream), rows, queries, tiles, static_cast<float>(scale), data<float>(o),
             data<float>(lse), want_parts);
  });
}

Result result_of(const Port& port, const TensorView& o, const char* o_name, const TensorView& lse,
                 const char* lse_name, bool base2, int rows) {
  const MailboxShape& s = port.view().shape;
  const bool narrow_o = same(o.dtype(), kBFloat16) && s.element == 2;
  expect_device(o, o_name, narrow_o ? kBFloat16 : kFloat32, {rows, s.q_heads, s.head_dim}, 3);
  expect_device(lse, lse_name, kFloat32, {rows, s.q_heads}, 2);
  return {data<char>(o), data<float>(lse), narrow_o ? 2 : 4, base2};
}

void observe_layer(PortRef port_ref, int64_t stream, TensorView o_sink, TensorView lse_sink,
                   TensorView o_local, TensorView lse_local, bool base2, TensorView o, TensorView lse) {
  Port& port = *port_ref->port;
  const MailboxShape& s = port.view().shape;
  const int rows = rows_in(port, o);
  const Result sinks = result_of(port, o_sink, "o_sink", lse_sink, "lse_sink", base2, rows);
  const Result local = result_of(port, o_local, "o_local", lse_local, "lse_local", base2, rows);
  if (sinks.element != local.element) Raise("ValueError") << "o_sink and o_local must have one dtype.";
  expect_device(o, "o", kFloat32, {rows, s.q_heads, s.head_dim}, 3);
  expect_device(lse, "lse", kFloat32, {rows, s.q_heads}, 2);
  guard([&] { observe(port, stream_of(stream), rows, sinks, local, data<float>(o), data<float>(lse)); });
}

void take_layer(PortRef port_ref, int64_t stream, TensorView o, TensorView lse, bool base2, TensorView out) {
  Port& port = *port_ref->port;
  const MailboxShape& s = port.view().shape;
  const int rows = rows_in(port, out);
  expect_device(out, "out", kv_type(s.element), {rows, s.q_heads, s.head_dim}, 3);
  const Result own = result_of(port, o, "o", lse, "lse", base2, rows);
  guard([&] { take(port, stream_of(stream), rows, own, data<char>(out)); });
}

}  // namespace
}  // namespace fluxion::device

TVM_FFI_DLL_EXPORT_TYPED_FUNC(port_create, fluxion::device::port_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(port_reset, fluxion::device::port_reset);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(port_step, fluxion::device::port_step);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(publish, fluxion::device::publish_layer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(resident, fluxion::device::resident_layer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(observe, fluxion::device::observe_layer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(take, fluxion::device::take_layer);
