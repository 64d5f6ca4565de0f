// The C ABI of predictor/measure.h.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <cstdint>

#include "ffi/objects.h"
#include "predictor/measure.h"

namespace fluxion {
namespace {

void measure_of(Pool pool_ref, int64_t layer, TensorView pages, TensorView lengths, TensorView q,
                double scale, int64_t window, TensorView criteria, bool single_tokens, TensorView anchor,
                TensorView mean_k, TensorView parts, TensorView result, TensorView budgets) {
  const HostPool& pool = *pool_ref->pool;
  const PoolShape& s = pool.shape();
  expect(pages, "pages", kInt32, {-1}, 1);
  expect(lengths, "lengths", kInt32, {-1}, 1);
  const int64_t N = lengths.size(0);
  expect(q, "q", kv_type(pool), {N, -1, s.head_dim}, 2);
  expect(criteria, "criteria", kFloat32, {-1, 2}, 2);
  const int64_t Hq = q.size(1), C = criteria.size(0);
  if (N * Hq > INT32_MAX || window < 0 || window > INT32_MAX || C > INT32_MAX || layer < 0 ||
      layer > INT32_MAX) {
    Raise("ValueError") << "A size of the measurement cannot be: " << N << " queries of " << Hq
                        << " heads, window " << window << ", layer " << layer << ".";
  }
  expect(anchor, "anchor", kFloat32, {N, Hq, kAnchorFeatures}, 3);
  expect(mean_k, "mean_k", kFloat32, {N, s.kv_heads, s.head_dim}, 3);
  expect(parts, "parts", kFloat32, {N, Hq, kParts}, 3);
  expect(result, "result", kFloat32, {N, Hq, kResults}, 3);
  expect(budgets, "budgets", kFloat32, {N, Hq, C, kBlockSizes}, 4);
  MeasureArgs args{};
  args.layer = static_cast<int>(layer);
  args.pages = data<int32_t>(pages);
  args.page_count = pages.size(0);
  args.lengths = data<int32_t>(lengths);
  args.queries = static_cast<int>(N);
  args.q = data<char>(q);
  args.q_stride = q.stride(0) * s.element();
  args.q_heads = static_cast<int>(Hq);
  args.scale = static_cast<float>(scale);
  args.window = static_cast<int>(window);
  args.criteria = data<float>(criteria);
  args.criterion_count = static_cast<int>(C);
  args.single_tokens = single_tokens;
  args.anchor = data<float>(anchor);
  args.mean_k = data<float>(mean_k);
  args.parts = data<float>(parts);
  args.result = data<float>(result);
  args.budgets = data<float>(budgets);
  guarded([&] { measure(pool, args); });
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(measure, fluxion::measure_of);
