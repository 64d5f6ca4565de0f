// The C ABI of workers and pool. Arguments are checked here: the classes below receive the right shapes and
// dtypes.
#include "runtime/pool.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/objects.h"
#include "kernels/api.h"
#include "runtime/worker_pool.h"

namespace fluxion {
namespace {

PoolShape pool_shape(int64_t layers, int64_t kv_heads, int64_t pages, int64_t head_dim, int64_t dtype,
                     int64_t sink_pages, bool sketched) {
  for (int64_t v : {layers, kv_heads, pages, head_dim, dtype, sink_pages}) {
    if (v < 0 || v > INT32_MAX) Raise("ValueError") << "A size of the pool is " << v << ", which cannot be.";
  }
  return {static_cast<int>(layers),
          static_cast<int>(kv_heads),
          static_cast<int>(pages),
          static_cast<int>(head_dim),
          static_cast<DType>(dtype),
          static_cast<int>(sink_pages),
          sketched};
}

int64_t abi_version() { return kAbiVersion; }

// spin_us: how long idle workers wait for work before they sleep; below 0: kIdleSpinNs.
Workers workers_create(int64_t n, TensorView cores, int64_t spin_us, bool pinned) {
  expect(cores, "cores", kInt32, {-1}, 1);
  return guarded([&] {
    const int32_t* c = data<int32_t>(cores);
    const int threads = static_cast<int>(std::clamp<int64_t>(n, -1, 1 << 20));
    const int64_t spin_ns = spin_us < 0 ? kIdleSpinNs : std::min<int64_t>(spin_us, 1'000'000) * 1000;
    return Workers(ffi::make_object<WorkersObj>(
        std::make_shared<WorkerPool>(threads, std::vector<int>(c, c + cores.numel()), spin_ns, pinned)));
  });
}

ffi::String workers_cores(Workers workers) {
  std::string out;
  for (int c : workers->pool->cores()) out += (out.empty() ? "" : ",") + std::to_string(c);
  return out;
}

int64_t pool_bytes_of(int64_t layers, int64_t kv_heads, int64_t pages, int64_t head_dim, int64_t dtype,
                      bool sketched) {
  return guarded(
      [&] { return pool_bytes(pool_shape(layers, kv_heads, pages, head_dim, dtype, 0, sketched)); });
}

Pool pool_create(Workers workers, int64_t layers, int64_t kv_heads, int64_t pages, int64_t head_dim,
                 int64_t dtype, int64_t sink_pages, bool sketched, double spread, ffi::String isa,
                 double canary) {
  if (!(canary >= 0 && canary <= 1)) {
    Raise("ValueError") << "canary is " << canary << "; it is a share of reads, 0 to 1.";
  }
  return guarded([&] {
    const PoolShape shape = pool_shape(layers, kv_heads, pages, head_dim, dtype, sink_pages, sketched);
    const auto pool =
        std::make_shared<HostPool>(workers->pool, shape, static_cast<float>(spread), std::string(isa));
    if (canary > 0) pool->guard(canary);
    return Pool(ffi::make_object<PoolObj>(pool));
  });
}

// out: [2]: checked reads, and mismatches.
void pool_canary_counts(Pool pool, TensorView out) {
  expect(out, "out", kInt64, {2}, 1);
  const Canary* canary = pool->pool->canary();
  data<int64_t>(out)[0] = canary == nullptr ? 0 : canary->checks();
  data<int64_t>(out)[1] = canary == nullptr ? 0 : canary->mismatches();
}

// Returns a line for each of the first `most` mismatches. checked: [1], how much was checked.
ffi::String pool_sweep(Pool pool, int64_t most, TensorView checked) {
  expect(checked, "checked", kInt64, {1}, 1);
  const Canary* canary = pool->pool->canary();
  if (canary == nullptr) {
    Raise("ValueError") << "This pool has no canary to compare with; create it with one.";
  }
  return guarded([&] {
    std::string out;
    for (const std::string& sentence : canary->sweep(*pool->pool, most, data<int64_t>(checked)))
      out += sentence + "\n";
    return ffi::String(out);
  });
}

ffi::String pool_isa(Pool pool) { return ffi::String(pool->pool->kernels().isa); }

// A tensor over the pool's memory, which it keeps alive.
struct PoolMemory {
  std::shared_ptr<HostPool> pool;
  void* at;
  void AllocData(DLTensor* t) { t->data = at; }
  void FreeData(DLTensor*) {}
};

ffi::Tensor pool_tensor(Pool pool_ref, ffi::String name_ref, int64_t layer) {
  const std::string name(name_ref);
  const HostPool& pool = *pool_ref->pool;
  const PoolShape& s = pool.shape();
  const int l = narrow(layer);
  guarded([&] { pool.check_layer(l); });
  const auto view = [&](void* at, std::initializer_list<int64_t> shape, DLDataType dtype) {
    return ffi::Tensor::FromNDAlloc(PoolMemory{pool_ref->pool, at},
                                    ffi::ShapeView(shape.begin(), shape.size()), dtype, DLDevice{kDLCPU, 0});
  };
  if (name == "memory") {  // whole small pages: bytes after the last belong to the mapping
    const HostMemory& memory = pool.memory();
    return view(memory.data(), {round_up(memory.bytes(), kSmallPage)}, DLDataType{kDLUInt, 8, 1});
  }
  if (name == "tiles" && s.dtype == DType::kInt8)
    return view(pool.tiles_base(l), {s.kv_heads, s.pages, s.tile_bytes()}, DLDataType{kDLUInt, 8, 1});
  if (name == "tiles")
    return view(pool.tiles_base(l), {s.kv_heads, s.pages, 2, kPage, s.head_dim}, kv_type(pool));
  if (name == "moments") return view(pool.moments_base(l), {s.kv_heads, s.pages, s.moments_len()}, kFloat64);
  if (name == "sketches" && s.sketched)
    return view(pool.sketches(l, 0), {s.kv_heads, s.pages, s.sketch_bytes()}, DLDataType{kDLUInt, 8, 1});
  for (int j = 0; j < kLevels; ++j) {
    const std::string level = std::to_string(j);
    if (name == "meta" + level)
      return view(pool.meta_base(l, j), {s.kv_heads, s.entries(j), 2, s.head_dim}, kv_type(pool));
    if (j > 0 && name == "tag" + level) return view(pool.tags(l, j), {s.entries(j)}, kInt32);
  }
  Raise("ValueError")
      << "The pool has no tensor \"" << name
      << "\"; choose tiles, meta0 to meta3, tag1 to tag3, moments, memory, or sketches of a pool "
      << "that has some.";
  TVM_FFI_UNREACHABLE();
}

void pool_append(Pool pool_ref, int64_t layer, TensorView pages, int64_t start, TensorView k, TensorView v) {
  HostPool& pool = *pool_ref->pool;
  expect(pages, "pages", kInt32, {-1}, 1);
  const TokenView keys = token_view(pool, k, "k", -1), values = token_view(pool, v, "v", k.size(0));
  guarded([&] {
    pool.append(narrow(layer), data<int32_t>(pages), pages.size(0), start, k.size(0), keys, values);
  });
}

void pool_check(Pool pool, TensorView pages, int64_t start, int64_t count) {
  expect(pages, "pages", kInt32, {-1}, 1);
  guarded([&] { pool->pool->check_tokens(data<int32_t>(pages), pages.size(0), start, count); });
}

void pool_forget_sums(Pool pool, TensorView pages) {
  expect(pages, "pages", kInt32, {-1}, 1);
  guarded([&] { pool->pool->forget_sums(data<int32_t>(pages), pages.size(0)); });
}

void pool_adopt(Pool pool, int64_t layer, TensorView pages, int64_t start, int64_t count, bool described) {
  expect(pages, "pages", kInt32, {-1}, 1);
  guarded([&] {
    pool->pool->adopt(narrow(layer), data<int32_t>(pages), pages.size(0), start, count, described);
  });
}

void pool_fill_window(Pool pool_ref, int64_t layer, TensorView window, int64_t row, int64_t n,
                      TensorView pages, int64_t sinks, int64_t window_tokens) {
  HostPool& pool = *pool_ref->pool;
  expect(pages, "pages", kInt32, {-1}, 1);
  const WindowView view = window_view(pool, window, sinks, window_tokens);
  guarded([&] {
    pool.fill_window(narrow(layer), view, narrow(row), narrow(n), data<int32_t>(pages), pages.size(0));
  });
}

void pool_gather(Pool pool_ref, int64_t layer, TensorView pages, TensorView k, TensorView v) {
  HostPool& pool = *pool_ref->pool;
  const PoolShape& s = pool.shape();
  expect(pages, "pages", kInt32, {-1}, 1);
  for (auto [t, name] : {std::pair{&k, "out_k"}, std::pair{&v, "out_v"}}) {
    expect(*t, name, kv_type(pool), {s.kv_heads, pages.size(0) * kPage, s.head_dim}, 2);
  }
  guarded([&] {
    pool.gather(narrow(layer), data<int32_t>(pages), pages.size(0), data<char>(k), k.stride(0) * s.element(),
                data<char>(v), v.stride(0) * s.element());
  });
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(abi_version, fluxion::abi_version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workers_create, fluxion::workers_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workers_cores, fluxion::workers_cores);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_bytes, fluxion::pool_bytes_of);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_create, fluxion::pool_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_canary_counts, fluxion::pool_canary_counts);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_sweep, fluxion::pool_sweep);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_isa, fluxion::pool_isa);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_tensor, fluxion::pool_tensor);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_append, fluxion::pool_append);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_check, fluxion::pool_check);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_forget_sums, fluxion::pool_forget_sums);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_adopt, fluxion::pool_adopt);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_fill_window, fluxion::pool_fill_window);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_gather, fluxion::pool_gather);
