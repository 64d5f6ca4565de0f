// The C ABI: prefill, between the host pool and the device; and merge.
#include <utility>

#include "cuda/ffi_port.h"

namespace fluxion::device {

HostTiles host_tiles_of(const TensorView& t) {
  const int element = same(t.dtype(), kFloat32) ? 4 : 2;
  expect_pinned(t, "tiles", kv_type(element), {-1, -1, 2, kPage, -1}, 5);
  HostTiles tiles{};
  tiles.data = data<char>(t);
  tiles.kv_heads = narrow(t.size(0), 1, 1 << 12, "The number of KV heads");
  tiles.pages = narrow(t.size(1), 1, INT32_MAX, "The number of pages");
  tiles.head_dim = narrow_head_dim(t.size(4));
  tiles.element = element;
  return tiles;
}

namespace {

KeysValues tokens_of(const HostTiles& tiles, const TensorView& k, const TensorView& v, int64_t tokens) {
  const auto rows = [&](const TensorView& t, const char* name) {
    expect_device(t, name, kv_type(tiles.element), {tokens, tiles.kv_heads, tiles.head_dim}, 1);
    return HeadRows{data<char>(t), t.stride(0) * tiles.element, t.stride(1) * tiles.element};
  };
  return {rows(k, "k"), rows(v, "v")};
}

void fill(int64_t stream, TensorView tiles_t, TensorView windows, int64_t row, int64_t start, int64_t stop,
          TensorView pages, TensorView k, TensorView v, int64_t sinks, int64_t window) {
  const Placement placement = placement_of(sinks, window);
  const HostTiles tiles = host_tiles_of(tiles_t);
  const WindowTiles to = windows_of(windows, tiles.kv_heads, tiles.head_dim, tiles.element, placement);
  narrow(row, 0, to.rows - 1, "row");
  narrow(stop, 0, INT32_MAX - kPage, "stop");
  narrow(start, 0, stop, "start");
  expect_reachable(pages, "pages", kInt32, {-1}, 1);
  narrow(pages.size(0), (start + kPage - 1) / kPage, INT32_MAX, "The number of pages");
  const KeysValues fresh = tokens_of(tiles, k, v, stop - start);
  guard([&] {
    fill_window(stream_of(stream), tiles, to, static_cast<int>(row), static_cast<int>(start),
                static_cast<int>(stop), data<int32_t>(pages), fresh, placement);
  });
}

void gather_pages(int64_t stream, TensorView tiles_t, TensorView pages, TensorView k, TensorView v) {
  const HostTiles tiles = host_tiles_of(tiles_t);
  expect_reachable(pages, "pages", kInt32, {-1}, 1);
  const int count = narrow(pages.size(0), 0, INT32_MAX / kPage, "The number of pages");
  const KeysValues to = tokens_of(tiles, k, v, int64_t{count} * kPage);
  guard([&] { gather(stream_of(stream), tiles, data<int32_t>(pages), count, to); });
}

void write_chunk(int64_t stream, TensorView tiles, TensorView entries, TensorView moments, TensorView chunk,
                 TensorView k, TensorView v) {
  HostLayer layer{host_tiles_of(tiles), nullptr, nullptr};
  const int64_t heads = layer.tiles.kv_heads, pages = layer.tiles.pages, dim = layer.tiles.head_dim;
  expect_pinned(entries, "entries", kv_type(layer.tiles.element), {heads, pages, 2, dim}, 4);
  expect_pinned(moments, "moments", kFloat64, {heads, pages, 2 * dim + 8}, 3);
  layer.entries = data<char>(entries);
  layer.moments = data<double>(moments);
  expect_reachable(chunk, "chunk", kInt32, {-1, 4}, 2);
  static_assert(sizeof(ChunkPage) == 4 * sizeof(int32_t));
  const int count = narrow(chunk.size(0), 0, INT32_MAX, "The number of pages");
  const KeysValues fresh = tokens_of(layer.tiles, k, v, k.ndim() > 0 ? k.size(0) : 0);
  guard([&] {
    write_pages(stream_of(stream), layer, reinterpret_cast<const ChunkPage*>(data<int32_t>(chunk)), count,
                fresh);
  });
}

void merge_results(int64_t stream, TensorView o_a, TensorView lse_a, TensorView o_b, TensorView lse_b,
                   bool base2, TensorView o, TensorView lse) {
  const auto check_form = [&](const TensorView& t, const char* name) {
    expect_device(t, name, kv_type(element_of(t)), {o.size(0), o.size(1), o.size(2)}, 3);
  };
  expect_device(o, "o", kv_type(element_of(o)), {-1, -1, -1}, 3);  // has three dimensions, from here on
  check_form(o_a, "o_a");
  check_form(o_b, "o_b");
  for (const auto& [t, name] : {std::pair{&lse_a, "lse_a"}, {&lse_b, "lse_b"}, {&lse, "lse"}})
    expect_numbers(*t, name, kFloat32, {o.size(0), o.size(1)}, 2);
  if (element_of(o_b) == 4 && (element_of(o_a) == 2 || element_of(o) == 2)) {
    Raise("ValueError") << "o_b is float32, so o_a and o must be, too.";
  }
  const int head_dim = narrow_head_dim(o.size(2));
  const int64_t heads = o.size(0) * o.size(1);
  narrow(heads, 0, INT32_MAX, "The number of heads");
  guard([&] {
    merge(stream_of(stream), heads, head_dim, {data<char>(o_a), data<float>(lse_a), element_of(o_a), base2},
          {data<char>(o_b), data<float>(lse_b), element_of(o_b), base2}, data<char>(o), element_of(o),
          data<float>(lse));
  });
}

// Measures the link.
void copy_in_order_of(int64_t stream, TensorView source, TensorView to) {
  expect_pinned(source, "source", kBytes, {-1}, 1);
  expect_device(to, "to", kBytes, {source.size(0)}, 1);
  expect_aligned(source, "source", 1, 0);
  expect_aligned(to, "to", 1, 0);
  if (source.size(0) % 16 != 0) Raise("ValueError") << "source has no multiple of 16 bytes.";
  guard([&] { copy_in_order(stream_of(stream), data<char>(source), data<char>(to), source.size(0)); });
}

}  // namespace
}  // namespace fluxion::device

TVM_FFI_DLL_EXPORT_TYPED_FUNC(fill_window, fluxion::device::fill);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather, fluxion::device::gather_pages);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_pages, fluxion::device::write_chunk);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge, fluxion::device::merge_results);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_in_order, fluxion::device::copy_in_order_of);
