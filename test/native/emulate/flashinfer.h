// Stands for FlashInfer's headers in the simulated device: what csrc/cuda/flashinfer.cu uses, under the same
// names and with the same meaning of every argument. nvcc compiles that file with the real headers, so names
// and types are checked there, and what is done with them here. A thread a head computes in double; what
// FlashInfer would not take ends the process.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <tuple>
#include <vector>

#include "cuda/device.cuh"

using nv_bfloat16 = fluxion::device::BF16;

namespace flashinfer {

inline void must(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "FlashInfer's stand-in: %s\n", what);
  std::abort();
}

enum class PosEncodingMode { kNone };
enum class QKVLayout { kNHD, kHND };

template <bool, bool, bool, bool>
struct DefaultAttention {};

template <class T, class Id>
struct paged_kv_t {
  uint32_t heads = 0, page_size = 0, head_dim = 0, batch_size = 0;
  int64_t stride_page = 0, stride_n = 0;
  T *k_data = nullptr, *v_data = nullptr;
  Id *indices = nullptr, *indptr = nullptr, *last_page_len = nullptr;

  paged_kv_t(uint32_t num_heads, uint32_t page_size, uint32_t head_dim, uint32_t batch_size, QKVLayout layout,
             T* k_data, T* v_data, const int64_t* strides, Id* indices, Id* indptr, Id* last_page_len,
             Id* rope = nullptr)
      : heads(num_heads),
        page_size(page_size),
        head_dim(head_dim),
        batch_size(batch_size),
        stride_page(strides[0]),
        stride_n(layout == QKVLayout::kHND ? strides[2] : strides[1]),
        k_data(k_data),
        v_data(v_data),
        indices(indices),
        indptr(indptr),
        last_page_len(last_page_len) {
    must(rope == nullptr && num_heads == 1, "one KV head, and no rotation");
  }

  int32_t length(uint32_t request) const {
    const Id pages = indptr[request + 1] - indptr[request];
    return pages == 0 ? 0 : (pages - 1) * static_cast<Id>(page_size) + last_page_len[request];
  }
  int64_t offset(uint32_t request, int32_t token) const {
    const auto size = static_cast<int32_t>(page_size);
    return indices[indptr[request] + token / size] * stride_page + token % size * stride_n;
  }
};

template <class Q, class KV, class O, class Id>
struct BatchDecodeParams {
  Q* q;
  paged_kv_t<KV, Id> paged_kv;
  O* o;
  float* lse;
  uint32_t padded_batch_size = 0, num_qo_heads;
  Id q_stride_n, q_stride_h;
  float sm_scale;
  Id *request_indices = nullptr, *kv_tile_indices = nullptr, *o_indptr = nullptr,
     *kv_chunk_size_ptr = nullptr;
  bool partition_kv = false;

  BatchDecodeParams(Q* q, Id* q_rope_offset, paged_kv_t<KV, Id> paged_kv, O* o, float* lse, float* alibi,
                    uint32_t num_qo_heads, Id q_stride_n, Id q_stride_h, int32_t window_left,
                    float logits_soft_cap, float sm_scale, float rope_scale, float rope_theta)
      : q(q),
        paged_kv(paged_kv),
        o(o),
        lse(lse),
        num_qo_heads(num_qo_heads),
        q_stride_n(q_stride_n),
        q_stride_h(q_stride_h),
        sm_scale(sm_scale) {
    must(q_rope_offset == nullptr && alibi == nullptr && window_left < 0 && logits_soft_cap == 0 &&
             rope_scale == 1 && rope_theta == 1,
         "plain attention");
  }
};

template <class Id>
auto PartitionPagedKVCacheBinarySearchMinNumPagePerBatch(uint32_t max_grid_size, uint32_t gdy,
                                                         const std::vector<Id>& num_pages, uint32_t least) {
  uint32_t pages = least;
  // An empty list has no part in the search, and one in the end.
  const auto parts = [&](Id fewest) {
    uint32_t sum = 0;
    for (const Id n : num_pages) sum += (static_cast<uint32_t>(std::max(n, fewest)) + pages - 1) / pages;
    return sum;
  };
  const auto longest = static_cast<uint32_t>(*std::max_element(num_pages.begin(), num_pages.end()));
  while (pages < longest && parts(0) * gdy > max_grid_size) ++pages;
  return std::make_tuple(pages, parts(1));
}

template <PosEncodingMode, uint32_t kStages, uint32_t kTile, uint32_t kVector, uint32_t kX, uint32_t kY,
          uint32_t kZ, class, class Params>
void BatchDecodeWithPagedKVCacheKernel(const Params p) {
  // As BatchDecodeWithPagedKVCacheDispatched chooses them.
  static_assert(kStages == 2 && kTile == (kY == 1 ? 4 : 1) && kX <= 32 && kVector >= 8);
  static_assert(kX * kY * kZ <= 128 || kZ == 1);
  static_assert(kX * kY * (kZ + 1) > 128);
  if (threadIdx.x != 0 || threadIdx.z != 0) return;
  constexpr int kD = kVector * kX;
  const uint32_t part = blockIdx.x, head = threadIdx.y,
                 request = static_cast<uint32_t>(p.request_indices[part]);
  must(p.num_qo_heads == kY && p.paged_kv.head_dim == kD && p.partition_kv && part < p.padded_batch_size,
       "the group's shape");
  must(static_cast<uint32_t>(p.o_indptr[request] + p.kv_tile_indices[part]) == part,
       "parts in the order of requests");
  const int32_t chunk = *p.kv_chunk_size_ptr, from = p.kv_tile_indices[part] * chunk;
  const int32_t to = std::min(from + chunk, p.paged_kv.length(request));
  must(from < to, "a part has tokens");
  const auto* q =
      p.q + static_cast<int64_t>(request) * p.q_stride_n + static_cast<int64_t>(head) * p.q_stride_h;
  std::vector<double> scores(static_cast<size_t>(to - from)), o(kD);
  double top = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int32_t t = from; t < to; ++t) {
    const auto* k = p.paged_kv.k_data + p.paged_kv.offset(request, t);
    double score = 0;
    for (int d = 0; d < kD; ++d)
      score += static_cast<double>(fluxion::device::to_float(q[d])) * fluxion::device::to_float(k[d]);
    scores[static_cast<size_t>(t - from)] = score *= p.sm_scale;
    top = std::max(top, score);
  }
  for (int32_t t = from; t < to; ++t) {
    const double weight = std::exp(scores[static_cast<size_t>(t - from)] - top);
    const auto* v = p.paged_kv.v_data + p.paged_kv.offset(request, t);
    for (int d = 0; d < kD; ++d) o[static_cast<size_t>(d)] += weight * fluxion::device::to_float(v[d]);
    sum += weight;
  }
  const int64_t at = static_cast<int64_t>(part) * kY + head;
  for (int d = 0; d < kD; ++d) p.o[at * kD + d] = static_cast<float>(o[static_cast<size_t>(d)] / sum);
  p.lse[at] = static_cast<float>(top * M_LOG2E + std::log2(sum));
}

}  // namespace flashinfer
