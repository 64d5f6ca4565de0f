// The C ABI of prefill.
#include <algorithm>

#include "ffi/objects.h"
#include "prefill/prefill.h"

namespace fluxion {
namespace {

double pool_attend_chunk(Pool pool_ref, int64_t layer, TensorView pages, int64_t start, TensorView q,
                         double scale, double cap, double budget, int64_t window,
                         ffi::Optional<TensorView> sinks, ffi::Optional<TensorView> tree, TensorView out) {
  const HostPool& pool = *pool_ref->pool;
  const PoolShape& s = pool.shape();
  expect(pages, "pages", kInt32, {-1}, 1);
  expect(q, "q", kv_type(pool), {-1, -1, s.head_dim}, 2);
  expect(out, "out", kv_type(pool), {q.size(0), q.size(1), s.head_dim}, 3);
  const float* logits = sinks_of(sinks, q.size(1));
  if (tree.has_value()) expect(*tree, "tree", kInt64, {q.size(0)}, 1);
  return guarded([&] {
    Chunk chunk;
    chunk.layer = narrow(layer);
    chunk.pages = data<int32_t>(pages);
    chunk.n_pages = pages.size(0);
    chunk.start = start;
    chunk.tokens = q.size(0);
    chunk.q_heads = static_cast<int>(q.size(1));
    chunk.q = data<char>(q);
    chunk.q_stride = q.stride(0) * s.element();
    chunk.scale = scale_of(scale, cap);
    chunk.out = data<char>(out);
    chunk.budget = static_cast<float>(budget);
    chunk.window = static_cast<int>(std::clamp<int64_t>(window, -1, kNoWindow));
    chunk.sinks = logits;
    if (tree.has_value()) chunk.tree = reinterpret_cast<const uint64_t*>(data<int64_t>(*tree));
    return attend_chunk(pool, chunk);
  });
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(pool_attend_chunk, fluxion::pool_attend_chunk);
