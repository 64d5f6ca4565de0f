// The C ABI of a device library (device/library.py says what each function does). Argument checks live here.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "cuda/api.h"
#include "cuda/kernels.h"
#include "cuda/limits.h"
#include "ffi/tensor.h"

namespace fluxion::device {
namespace {

// Raised by one whenever a function's signature changes; library.py compares it.
constexpr int64_t kAbiVersion = 2;

constexpr int kDeviceType = kSimulated ? kDLCPU : kDLCUDA;

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

class GraphObj : public ffi::Object {
 public:
  explicit GraphObj(cudaGraphExec_t e) : exec(e) {}
  ~GraphObj() { cudaGraphExecDestroy(exec); }
  cudaGraphExec_t exec;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fluxion.Graph", GraphObj, ffi::Object);
};
class GraphRef : public ffi::ObjectRef {
 public:
  explicit GraphRef(ffi::ObjectPtr<GraphObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(GraphRef, ffi::ObjectRef, GraphObj);
};

template <typename Body>
auto guard(Body body) -> decltype(body()) {
  try {
    enter_device();
    return body();
  } catch (const Failure& e) {
    Raise("DeviceError") << e.what();
  }
  TVM_FFI_UNREACHABLE();
}

cudaStream_t stream_of(int64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

// Kernels load 16 bytes at a time.
void expect_aligned(const TensorView& t, const char* name, int64_t element, int strided) {
  bool fits = reinterpret_cast<uintptr_t>(data<char>(t)) % 16 == 0;
  for (int i = 0; i < strided && t.numel() > 0; ++i) fits = fits && t.stride(i) * element % 16 == 0;
  if (!fits) Raise("ValueError") << name << " does not start, with every token, at a multiple of 16 bytes.";
}

// On the device, and read or written a number at a time.
void expect_numbers(const TensorView& t, const char* name, DLDataType dtype,
                    std::initializer_list<int64_t> want, int dense) {
  expect_form(t, name, dtype, want, dense);
  if (t.device().device_type != kDeviceType) {
    Raise("ValueError") << name << " is not on the device; move it there.";
  }
}

void expect_device(const TensorView& t, const char* name, DLDataType dtype,
                   std::initializer_list<int64_t> want, int dense) {
  expect_numbers(t, name, dtype, want, dense);
  expect_aligned(t, name, dtype.bits / 8, t.ndim() - dense);
}

// Host memory that the device may read: pinned for all its length.
void expect_pinned(const TensorView& t, const char* name, DLDataType dtype,
                   std::initializer_list<int64_t> want, int dense) {
  expect(t, name, dtype, want, dense);
  if (t.numel() == 0) return;
  const char* first = data<char>(t);
  int64_t last = dtype.bits / 8 - 1;
  for (int i = 0; i < t.ndim(); ++i) last += (t.size(i) - 1) * t.stride(i) * (dtype.bits / 8);
  for (const char* at : {first, first + last}) {
    cudaPointerAttributes attributes{};
    guard([&] { check(cudaPointerGetAttributes(&attributes, at), "looking at host memory"); });
    if (attributes.type != cudaMemoryTypeHost) {
      Raise("ValueError") << name << " is host memory that is not pinned; register it with host_register.";
    }
  }
}

// Pinned, or on the device.
void expect_reachable(const TensorView& t, const char* name, DLDataType dtype,
                      std::initializer_list<int64_t> want, int dense) {
  if (t.device().device_type == kDeviceType) {
    expect_device(t, name, dtype, want, dense);
  } else {
    expect_pinned(t, name, dtype, want, dense);
  }
}

DLDataType kv_type(int element) { return element == 2 ? kBFloat16 : kFloat32; }

int narrow(int64_t value, int64_t least, int64_t most, const char* name) {
  if (value < least || value > most) {
    Raise("ValueError") << name << " is " << value << " and must be from " << least << " to " << most << ".";
  }
  return static_cast<int>(value);
}

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

void check_placement(int64_t sinks, int64_t window) {
  if (sinks < 0 || sinks % kPage != 0 || window < kPage || window % kPage != 0 || sinks > 1 << 24 ||
      window > 1 << 24) {
    Raise("ValueError") << "sinks is " << sinks << " and window is " << window
                        << "; both must be multiples of 16, and window at least 16.";
  }
}

WindowTiles windows_of(const TensorView& t, int kv_heads, int head_dim, int element, int64_t slot_pages) {
  expect_device(t, "windows", kv_type(element), {kv_heads, -1, 2, kPage, head_dim}, 4);
  if (t.size(1) % slot_pages != 0) {
    Raise("ValueError") << "windows has " << t.size(1) << " pages a head, which is no multiple of the "
                        << slot_pages << " pages of a row (sinks, window and one page).";
  }
  return {data<char>(t), t.stride(0) * element, static_cast<int>(t.size(1) / slot_pages)};
}

// ---- the library and its device

int64_t device_abi() { return kAbiVersion; }
int64_t api_address() { return reinterpret_cast<int64_t>(device_api()); }

ffi::String device_info() {
  return guard([] {
    int device = 0, driver = 0, runtime = 0;
    cudaDeviceProp about{};
    size_t free = 0, total = 0;
    check(cudaGetDevice(&device), "looking for a device");
    check(cudaGetDeviceProperties(&about, device), "looking at the device");
    check(cudaMemGetInfo(&free, &total), "looking at the device's memory");
    check(cudaDriverGetVersion(&driver), "looking at the driver");
    check(cudaRuntimeGetVersion(&runtime), "looking at the runtime");
    std::string name;
    for (const char* c = about.name; *c != '\0'; ++c) {
      if (*c != '"' && *c != '\\') name += *c;
    }
    std::ostringstream out;
    out << "{\"backend\": \"" << (kSimulated ? "simulated" : "cuda") << "\", \"device\": " << device
        << ", \"name\": \"" << name << "\", \"multiprocessors\": " << about.multiProcessorCount
        << ", \"capability\": \"" << about.major << "." << about.minor << "\", \"memory_bytes\": " << total
        << ", \"free_bytes\": " << free << ", \"driver\": " << driver << ", \"runtime\": " << runtime << "}";
    return ffi::String(out.str());
  });
}

void device_select(int64_t device) {
  const int number = narrow(device, 0, 1 << 16, "device");
  guard([&] { select_device(number); });
}

// ---- host memory

void host_register(TensorView memory) {
  expect(memory, "memory", DLDataType{kDLUInt, 8, 1}, {-1}, 1);
  char* at = data<char>(memory);
  if (memory.numel() == 0 || reinterpret_cast<uintptr_t>(at) % 4096 != 0 || memory.numel() % 4096 != 0) {
    Raise("ValueError") << "memory starts at " << static_cast<void*>(at) << " and has " << memory.numel()
                        << " bytes; both must be multiples of 4096.";
  }
  guard([&] {
    check(cudaHostRegister(at, static_cast<size_t>(memory.numel()),
                           cudaHostRegisterPortable | cudaHostRegisterMapped),
          "pinning host memory");
  });
}

void host_unregister(TensorView memory) {
  guard([&] { check(cudaHostUnregister(data<char>(memory)), "unpinning host memory"); });
}

struct PinnedMemory {
  void AllocData(DLTensor* t) {
    guard([&] {
      check(cudaHostAlloc(&t->data, static_cast<size_t>(t->shape[0]),
                          cudaHostAllocPortable | cudaHostAllocMapped),
            "the allocation of pinned memory");
    });
  }
  void FreeData(DLTensor* t) {
    cudaFreeHost(t->data);
    cudaGetLastError();
  }
};

ffi::Tensor pinned_empty(int64_t bytes) {
  if (bytes < 1) Raise("ValueError") << "Pinned memory of " << bytes << " bytes cannot be.";
  return ffi::Tensor::FromNDAlloc(PinnedMemory{}, ffi::ShapeView(&bytes, 1), DLDataType{kDLUInt, 8, 1},
                                  DLDevice{kDLCPU, 0});
}

// ---- the mailbox

ffi::String mailbox_layout(int64_t sequence, int64_t max_requests, int64_t q_heads, int64_t kv_heads,
                           int64_t head_dim, int64_t element) {
  const MailboxShape shape = shape_of(max_requests, q_heads, kv_heads, head_dim, element);
  const MailboxSlot slot = mailbox_slot(shape, static_cast<uint32_t>(sequence));
  std::ostringstream out;
  out << "{\"bytes\": " << mailbox_bytes(shape) << ", \"q\": " << slot.q << ", \"k\": " << slot.k
      << ", \"v\": " << slot.v << ", \"parts\": " << slot.parts << ", \"o\": " << slot.o
      << ", \"lse\": " << slot.lse << ", \"layer\": " << slot.layer
      << ", \"published_at\": " << slot.published_at << ", \"taken_at\": " << slot.taken_at << "}";
  return ffi::String(out.str());
}

uint32_t* word_of(const TensorView& arena, int64_t word) {
  expect(arena, "arena", DLDataType{kDLUInt, 8, 1}, {-1}, 1);
  narrow(word, 0, kMailboxWords - 1, "word");
  narrow(arena.numel(), kMailboxWords * kWordBytes, INT32_MAX, "The size of arena");
  return reinterpret_cast<uint32_t*>(data<char>(arena) + word * kWordBytes);
}

int64_t word_load(TensorView arena, int64_t word) {
  return __atomic_load_n(word_of(arena, word), __ATOMIC_ACQUIRE);
}

void word_store(TensorView arena, int64_t word, int64_t value) {
  __atomic_store_n(word_of(arena, word), static_cast<uint32_t>(value), __ATOMIC_RELEASE);
}

PortRef port_create(TensorView arena, int64_t max_requests, int64_t q_heads, int64_t kv_heads,
                    int64_t head_dim, int64_t element, int64_t sinks, int64_t window, int64_t timeout_ns) {
  const MailboxShape shape = shape_of(max_requests, q_heads, kv_heads, head_dim, element);
  check_placement(sinks, window);
  expect_pinned(arena, "arena", DLDataType{kDLUInt, 8, 1}, {-1}, 1);
  if (arena.numel() < mailbox_bytes(shape) || reinterpret_cast<uintptr_t>(data<char>(arena)) % 256 != 0) {
    Raise("ValueError") << "arena has " << arena.numel() << " bytes and must have " << mailbox_bytes(shape)
                        << ", from a multiple of 256.";
  }
  if (timeout_ns < 1) Raise("ValueError") << "The time-out of a mailbox must be positive.";
  return guard([&] {
    return PortRef(ffi::make_object<PortObj>(
        std::make_unique<Port>(data<char>(arena), shape, static_cast<int>(sinks), static_cast<int>(window),
                               static_cast<uint64_t>(timeout_ns))));
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

// [N][heads][D] on the device with N at least the step's requests; returns where.
Rows rows_of(const Port& port, const TensorView& t, const char* name, int64_t rows, int64_t heads) {
  const MailboxShape& s = port.view().shape;
  expect_device(t, name, kv_type(s.element), {rows, heads, s.head_dim}, 2);
  return {data<char>(t), t.size(0) > 0 ? t.stride(0) * s.element : 0};
}

// The rows of a layer's tensors: as many as the port may have requests, and no fewer than the step has.
int rows_in(const Port& port, const TensorView& q) {
  const int64_t rows = q.ndim() > 0 ? q.size(0) : 0;
  return narrow(rows, port.batch(), port.view().shape.max_requests, "The number of rows");
}

WindowTiles port_windows(Port& port, const TensorView& windows) {
  const PortView& v = port.view();
  const WindowTiles tiles =
      windows_of(windows, v.shape.kv_heads, v.shape.head_dim, v.shape.element, v.slot_pages());
  port.bind_rows(tiles.rows);
  return tiles;
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

// ---- prefill

HostTiles tiles_of(const TensorView& t) {
  const bool wide = same(t.dtype(), kFloat32);
  expect_pinned(t, "tiles", wide ? kFloat32 : kBFloat16, {-1, -1, 2, kPage, -1}, 5);
  HostTiles tiles{};
  tiles.data = data<char>(t);
  tiles.kv_heads = narrow(t.size(0), 1, 1 << 12, "The number of KV heads");
  tiles.pages = narrow(t.size(1), 1, INT32_MAX, "The number of pages");
  tiles.head_dim = narrow(t.size(4), 32, kMaxHeadDim, "head_dim");
  tiles.element = wide ? 4 : 2;
  if (tiles.head_dim % 16 != 0)
    Raise("ValueError") << "head_dim is " << tiles.head_dim << ", no multiple of 16.";
  return tiles;
}

KeysValues tokens_of(const HostTiles& tiles, const TensorView& k, const TensorView& v, int64_t tokens) {
  const auto rows = [&](const TensorView& t, const char* name) {
    expect_device(t, name, kv_type(tiles.element), {tokens, tiles.kv_heads, tiles.head_dim}, 1);
    return Rows{data<char>(t), t.stride(0) * tiles.element};
  };
  KeysValues both{};
  both.k = rows(k, "k");
  both.v = rows(v, "v");
  both.k_head_stride = k.stride(1) * tiles.element;
  both.v_head_stride = v.stride(1) * tiles.element;
  return both;
}

void fill(int64_t stream, TensorView tiles_t, TensorView windows, int64_t row, int64_t start, int64_t stop,
          TensorView pages, TensorView k, TensorView v, int64_t sinks, int64_t window) {
  check_placement(sinks, window);
  const HostTiles tiles = tiles_of(tiles_t);
  const WindowTiles to =
      windows_of(windows, tiles.kv_heads, tiles.head_dim, tiles.element, (sinks + window) / kPage + 1);
  narrow(row, 0, to.rows - 1, "row");
  narrow(stop, 0, INT32_MAX - kPage, "stop");
  narrow(start, 0, stop, "start");
  expect_reachable(pages, "pages", kInt32, {-1}, 1);
  narrow(pages.size(0), (start + kPage - 1) / kPage, INT32_MAX, "The number of pages");
  const KeysValues fresh = tokens_of(tiles, k, v, stop - start);
  guard([&] {
    fill_window(stream_of(stream), tiles, to, static_cast<int>(row), static_cast<int>(start),
                static_cast<int>(stop), data<int32_t>(pages), fresh, static_cast<int>(sinks),
                static_cast<int>(window));
  });
}

void gather_pages(int64_t stream, TensorView tiles_t, TensorView pages, TensorView k, TensorView v) {
  const HostTiles tiles = tiles_of(tiles_t);
  expect_reachable(pages, "pages", kInt32, {-1}, 1);
  const int count = narrow(pages.size(0), 0, INT32_MAX / kPage, "The number of pages");
  const KeysValues to = tokens_of(tiles, k, v, int64_t{count} * kPage);
  guard([&] { gather(stream_of(stream), tiles, data<int32_t>(pages), count, to); });
}

void write_chunk(int64_t stream, TensorView tiles, TensorView entries, TensorView moments, TensorView chunk,
                 TensorView k, TensorView v) {
  HostLayer layer{tiles_of(tiles), nullptr, nullptr};
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
  const auto element = [](const TensorView& t) { return same(t.dtype(), kBFloat16) ? 2 : 4; };
  const auto check_form = [&](const TensorView& t, const char* name) {
    expect_device(t, name, kv_type(element(t)), {o.size(0), o.size(1), o.size(2)}, 3);
  };
  expect_device(o, "o", kv_type(element(o)), {-1, -1, -1}, 3);  // has three dimensions, from here on
  check_form(o_a, "o_a");
  check_form(o_b, "o_b");
  for (const auto& [t, name] : {std::pair{&lse_a, "lse_a"}, {&lse_b, "lse_b"}, {&lse, "lse"}})
    expect_numbers(*t, name, kFloat32, {o.size(0), o.size(1)}, 2);
  if (element(o_b) == 4 && (element(o_a) == 2 || element(o) == 2)) {
    Raise("ValueError") << "o_b is float32, so o_a and o must be, too.";
  }
  const int head_dim = narrow(o.size(2), 32, kMaxHeadDim, "head_dim");
  if (head_dim % 16 != 0) Raise("ValueError") << "head_dim is " << head_dim << ", no multiple of 16.";
  const int64_t heads = o.size(0) * o.size(1);
  narrow(heads, 0, INT32_MAX, "The number of heads");
  guard([&] {
    merge(stream_of(stream), heads, head_dim, {data<char>(o_a), data<float>(lse_a), element(o_a), base2},
          {data<char>(o_b), data<float>(lse_b), element(o_b), base2}, data<char>(o), element(o),
          data<float>(lse));
  });
}

// ---- what host code reaches through device_api

int64_t workspace(int64_t tasks, int64_t longest, int64_t group, int64_t head_dim) {
  return workspace_bytes(narrow(tasks, 0, INT32_MAX, "tasks"), narrow(longest, 0, INT32_MAX, "longest"),
                         narrow(group, 1, kMaxGroup, "group"), narrow(head_dim, 32, kMaxHeadDim, "head_dim"));
}

void attend_tasks(int64_t stream, TensorView tasks, int64_t longest, TensorView entries, TensorView masks,
                  TensorView hot, int64_t group, int64_t head_dim, int64_t element, double scale,
                  TensorView o, TensorView lse, TensorView workspace_t) {
  static_assert(sizeof(DeviceTask) == 24);
  DeviceBatch batch{};
  expect_pinned(tasks, "tasks", DLDataType{kDLUInt, 8, 1}, {-1, 24}, 2);
  batch.tasks = reinterpret_cast<const DeviceTask*>(data<char>(tasks));
  batch.tasks_count = narrow(tasks.size(0), 0, INT32_MAX, "The number of tasks");
  batch.longest = narrow(longest, 0, INT32_MAX, "longest");
  batch.group = narrow(group, 1, kMaxGroup, "group");
  batch.head_dim = narrow(head_dim, 32, kMaxHeadDim, "head_dim");
  batch.element = narrow(element, 2, 4, "element");
  expect_pinned(entries, "entries", kInt32, {-1}, 1);
  batch.tiles = data<int32_t>(entries);
  if (masks.numel() > 0) {
    expect_pinned(masks, "masks", kUInt16, {entries.size(0), group}, 2);
    batch.masks = data<uint16_t>(masks);
  }
  if (hot.numel() > 0) batch.hot = data<char>(hot);
  batch.scale = static_cast<float>(scale);
  expect_reachable(o, "o", kFloat32, {batch.tasks_count, group, head_dim}, 3);
  expect_reachable(lse, "lse", kFloat32, {batch.tasks_count, group}, 2);
  batch.o = data<float>(o);
  batch.lse = data<float>(lse);
  expect_device(workspace_t, "workspace", DLDataType{kDLUInt, 8, 1}, {-1}, 1);
  narrow(workspace_t.numel(), workspace_bytes(batch.tasks_count, batch.longest, batch.group, batch.head_dim),
         INT64_MAX, "The size of workspace");
  batch.workspace = data<char>(workspace_t);
  guard([&] { attend(stream_of(stream), batch); });
}

void copy_tiles_of(int64_t stream, TensorView source, TensorView slots, int64_t tile_bytes, TensorView hot) {
  expect_pinned(source, "source", kInt64, {-1}, 1);
  expect_pinned(slots, "slots", kInt32, {source.size(0)}, 1);
  DeviceCopy copy{};
  copy.from = reinterpret_cast<const char* const*>(data<int64_t>(source));
  copy.to = data<int32_t>(slots);
  copy.count = narrow(source.size(0), 0, INT32_MAX, "The number of tiles");
  copy.tile_bytes = tile_bytes;
  copy.hot = data<char>(hot);
  guard([&] { copy_tiles(stream_of(stream), copy); });
}

void copy_in_order_of(int64_t stream, TensorView source, TensorView to) {
  expect_pinned(source, "source", DLDataType{kDLUInt, 8, 1}, {-1}, 1);
  expect_device(to, "to", DLDataType{kDLUInt, 8, 1}, {source.size(0)}, 1);
  expect_aligned(source, "source", 1, 0);
  expect_aligned(to, "to", 1, 0);
  if (source.size(0) % 16 != 0) Raise("ValueError") << "source has no multiple of 16 bytes.";
  guard([&] { copy_in_order(stream_of(stream), data<char>(source), data<char>(to), source.size(0)); });
}

void signal_of(int64_t stream, TensorView word, int64_t value) {
  expect_pinned(word, "word", kInt32, {-1}, 1);
  narrow(word.numel(), 1, INT32_MAX, "The size of word");
  guard([&] {
    signal(stream_of(stream), reinterpret_cast<uint32_t*>(data<int32_t>(word)), static_cast<uint32_t>(value));
  });
}

// ---- streams and graphs

int64_t stream_create() {
  return guard([] {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "the creation of a stream");
    return reinterpret_cast<int64_t>(stream);
  });
}

void stream_destroy(int64_t stream) {
  guard([&] {
    const cudaError_t waited = cudaStreamSynchronize(stream_of(stream));
    check(cudaStreamDestroy(stream_of(stream)), "the end of a stream");
    check(waited, "the end of a stream");
  });
}

void stream_synchronize(int64_t stream) {
  guard([&] { check(cudaStreamSynchronize(stream_of(stream)), "waiting for a stream"); });
}

void graph_begin(int64_t stream) {
  guard([&] {
    check(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal), "recording a graph");
  });
}

GraphRef graph_end(int64_t stream) {
  return guard([&] {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    check(cudaStreamEndCapture(stream_of(stream), &graph), "recording a graph");
    const cudaError_t error = cudaGraphInstantiate(&exec, graph, 0);
    cudaGraphDestroy(graph);
    check(error, "the instantiation of a graph");
    return GraphRef(ffi::make_object<GraphObj>(exec));
  });
}

void graph_launch(GraphRef graph, int64_t stream) {
  guard([&] { check(cudaGraphLaunch(graph->exec, stream_of(stream)), "the launch of a graph"); });
}

}  // namespace
}  // namespace fluxion::device

TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_abi, fluxion::device::device_abi);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_api, fluxion::device::api_address);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_info, fluxion::device::device_info);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_select, fluxion::device::device_select);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(host_register, fluxion::device::host_register);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(host_unregister, fluxion::device::host_unregister);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pinned_empty, fluxion::device::pinned_empty);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mailbox_layout, fluxion::device::mailbox_layout);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(word_load, fluxion::device::word_load);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(word_store, fluxion::device::word_store);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(port_create, fluxion::device::port_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(port_reset, fluxion::device::port_reset);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(port_step, fluxion::device::port_step);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(publish, fluxion::device::publish_layer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(resident, fluxion::device::resident_layer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(observe, fluxion::device::observe_layer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(take, fluxion::device::take_layer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fill_window, fluxion::device::fill);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather, fluxion::device::gather_pages);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_pages, fluxion::device::write_chunk);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge, fluxion::device::merge_results);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_bytes, fluxion::device::workspace);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend, fluxion::device::attend_tasks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_tiles, fluxion::device::copy_tiles_of);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_in_order, fluxion::device::copy_in_order_of);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(signal, fluxion::device::signal_of);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(stream_create, fluxion::device::stream_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(stream_destroy, fluxion::device::stream_destroy);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(stream_synchronize, fluxion::device::stream_synchronize);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(graph_begin, fluxion::device::graph_begin);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(graph_end, fluxion::device::graph_end);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(graph_launch, fluxion::device::graph_launch);
