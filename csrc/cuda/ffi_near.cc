// The C ABI: the near middle.
#include "cuda/ffi_port.h"
#include "cuda/near.h"

namespace fluxion::device {
namespace {

class NearObj : public ffi::Object {
 public:
  explicit NearObj(std::unique_ptr<Near> n) : near(std::move(n)) {}
  std::unique_ptr<Near> near;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fluxion.Near", NearObj, ffi::Object);
};
class NearRef : public ffi::ObjectRef {
 public:
  explicit NearRef(ffi::ObjectPtr<NearObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(NearRef, ffi::ObjectRef, NearObj);
};

NearRef near_create(PortRef port, TensorView lists, TensorView told, int64_t layers, int64_t pages,
                    int64_t max_pages, int64_t slots, bool together, double spread) {
  const MailboxShape& s = port->port->view().shape;
  NearShape shape{};
  shape.layers = narrow(layers, 1, 1 << 16, "layers");
  shape.pages = narrow(pages, 1, INT32_MAX / shape.layers, "pages");
  shape.max_pages = narrow(max_pages, 1, INT32_MAX / s.max_requests / s.kv_heads, "max_pages");
  shape.slots = narrow(slots, 1, INT32_MAX / s.kv_heads - 1, "slots");
  shape.together = together;
  shape.spread = static_cast<float>(spread);
  expect_pinned(lists, "lists", kBytes, {far_bytes({s.max_requests, s.kv_heads, shape.max_pages})}, 1);
  expect_pinned(told, "told", kInt32, {kNearCounts}, 1);
  return guard([&] {
    return NearRef(ffi::make_object<NearObj>(std::make_unique<Near>(
        *port->port, shape, data<char>(lists), reinterpret_cast<uint32_t*>(data<int32_t>(told)))));
  });
}

int64_t near_bytes(NearRef near) { return near->near->bytes(); }

void near_step(NearRef near, PortRef port, int64_t stream, bool ranks, TensorView lengths, TensorView table,
               TensorView blk, TensorView budget) {
  const int64_t batch = port->port->batch(), most = near->near->view().shape.max_pages;
  expect(lengths, "lengths", kInt32, {batch}, 1);
  expect(table, "table", kInt32, {batch, -1}, 1);
  expect(blk, "blk", kInt32, {batch}, 1);
  expect(budget, "budget", kFloat32, {batch}, 1);
  // Only the columns that requests use are needed.
  const int32_t* n = data<int32_t>(lengths);
  int64_t columns = 0;
  for (int64_t b = 0; b < batch; ++b)
    columns = std::max<int64_t>(columns, (int64_t{n[b]} + kPage - 1) / kPage);
  narrow(columns, 0, std::min<int64_t>(most, table.size(1)), "The pages of a request");
  const int32_t* ids = data<int32_t>(table);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t used = (int64_t{n[b]} + kPage - 1) / kPage;
    for (int64_t i = 0; i < used; ++i)
      narrow(ids[b * table.stride(0) + i], 0, near->near->view().shape.pages - 1, "A page");
  }
  guard([&] {
    near->near->step(stream_of(stream), *port->port, ranks, n, static_cast<int>(batch), ids,
                     batch > 0 ? table.stride(0) : 0, static_cast<int>(columns), data<int32_t>(blk),
                     data<float>(budget));
  });
}

void near_rank_layer(NearRef near, PortRef port_ref, int64_t stream, int64_t layer, TensorView q) {
  const Port& port = *port_ref->port;
  const int rows = rows_in(port, q), at = narrow(layer, 0, near->near->view().shape.layers - 1, "layer");
  const Rows queries = rows_of(port, q, "q", rows, port.view().shape.q_heads);
  guard([&] { near_rank(*near->near, port, stream_of(stream), at, rows, queries); });
}

void near_attend_layer(NearRef near, PortRef port_ref, int64_t stream, double scale, TensorView o,
                       TensorView lse) {
  const Port& port = *port_ref->port;
  const MailboxShape& s = port.view().shape;
  const int rows = rows_in(port, o);
  expect_device(o, "o", kFloat32, {rows, s.q_heads, s.head_dim}, 3);
  expect_device(lse, "lse", kFloat32, {rows, s.q_heads}, 2);
  guard([&] {
    near_attend(*near->near, port, stream_of(stream), rows, static_cast<float>(scale), data<float>(o),
                data<float>(lse));
  });
}

// The pool that the near middle belongs to.
HostTiles pool_tiles(const NearRef& near, const PortRef& port, const TensorView& t) {
  const HostTiles tiles = host_tiles_of(t);
  const MailboxShape& s = port->port->view().shape;
  if (tiles.kv_heads != s.kv_heads || tiles.head_dim != s.head_dim || tiles.element != s.element ||
      tiles.pages != near->near->view().shape.pages) {
    Raise("ValueError") << "tiles is of another pool than the near middle.";
  }
  return tiles;
}

void near_keep_layer(NearRef near, PortRef port, int64_t stream, int64_t layer, TensorView windows,
                     TensorView tiles) {
  const int at = narrow(layer, 0, near->near->view().shape.layers - 1, "layer");
  const HostTiles host = pool_tiles(near, port, tiles);
  const WindowTiles from = port_windows(*port->port, windows);
  guard([&] { near_keep(*near->near, *port->port, stream_of(stream), at, from, host); });
}

HostLayer host_layer(const NearRef& near, const PortRef& port, const TensorView& tiles,
                     const TensorView& entries) {
  HostLayer layer{pool_tiles(near, port, tiles), nullptr, nullptr};
  expect_pinned(entries, "entries", kv_type(layer.tiles.element),
                {layer.tiles.kv_heads, layer.tiles.pages, 2, layer.tiles.head_dim}, 4);
  layer.entries = data<char>(entries);
  return layer;
}

void near_write_chunk(NearRef near, PortRef port, int64_t stream, int64_t layer, TensorView tiles,
                      TensorView entries, TensorView chunk) {
  const int at = narrow(layer, 0, near->near->view().shape.layers - 1, "layer");
  const HostLayer host = host_layer(near, port, tiles, entries);
  expect_reachable(chunk, "chunk", kInt32, {-1, 4}, 2);
  const int count = narrow(chunk.size(0), 0, INT32_MAX, "The number of pages");
  guard([&] {
    near_write(*near->near, *port->port, stream_of(stream), at, host,
               reinterpret_cast<const ChunkPage*>(data<int32_t>(chunk)), count);
  });
}

// Copies a layer's metadata from the host pool, which is not written meanwhile. Layer 0 drops all copies.
void near_renew(NearRef near, PortRef port, int64_t stream, int64_t layer, TensorView tiles,
                TensorView entries) {
  const NearView& v = near->near->view();
  const int at = narrow(layer, 0, v.shape.layers - 1, "layer");
  const HostLayer host = host_layer(near, port, tiles, entries);
  const int64_t bytes =
      int64_t{2} * host.tiles.kv_heads * host.tiles.pages * host.tiles.head_dim * host.tiles.element;
  guard([&] {
    copy_in_order(stream_of(stream), host.entries, v.entries + at * bytes, bytes);
    if (at == 0) near->near->forget(stream_of(stream));
  });
}

}  // namespace
}  // namespace fluxion::device

TVM_FFI_DLL_EXPORT_TYPED_FUNC(near_create, fluxion::device::near_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(near_bytes, fluxion::device::near_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(near_step, fluxion::device::near_step);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(near_rank, fluxion::device::near_rank_layer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(near_attend, fluxion::device::near_attend_layer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(near_keep, fluxion::device::near_keep_layer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(near_write, fluxion::device::near_write_chunk);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(near_renew, fluxion::device::near_renew);
