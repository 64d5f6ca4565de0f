// Merges attention to two sets of tokens: merge.
#include "cuda/device.cuh"
#include "cuda/kernels.h"

namespace fluxion::device {

namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

struct MergeArgs {
  Result a, b;
  int64_t heads;
  int head_dim;
  char* o;
  float* lse;
};

// A warp a head. A side with an LSE of -inf is not read.
template <class A, class B, class O>
__global__ void __launch_bounds__(kThreads) merge_kernel(MergeArgs m) {
  const int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (i >= m.heads) return;
  const int lane = threadIdx.x % 32, D = m.head_dim;
  const A* a = reinterpret_cast<const A*>(m.a.o) + i * D;
  const B* b = reinterpret_cast<const B*>(m.b.o) + i * D;
  O* o = reinterpret_cast<O*>(m.o) + i * D;
  const float to_base2 = m.a.base2 ? 1.0f : kLog2e, from_base2 = m.a.base2 ? 1.0f : kLn2;
  float weight_a, weight_b;
  const float lse = merge_weights(m.a.lse[i] * to_base2, m.b.lse[i] * to_base2, &weight_a, &weight_b);
  for (int v = lane; v < D / 4; v += 32) {
    const float4 x =
        weigh(weight_a, [&] { return load_four(a + 4 * v); }, weight_b, [&] { return load_four(b + 4 * v); });
    store_four(x, o + 4 * v);
  }
  __syncwarp();  // lse may be that of a
  if (lane == 0) m.lse[i] = lse * from_base2;
}

}  // namespace

void merge(cudaStream_t stream, int64_t heads, int head_dim, Result a, Result b, char* o, int o_element,
           float* lse) {
  if (heads == 0) return;
  const MergeArgs args{a, b, heads, head_dim, o, lse};
  const dim3 grid(static_cast<unsigned>((heads + kWarps - 1) / kWarps));
  const auto kernel =
      b.element == 4   ? merge_kernel<float, float, float>
      : a.element == 4 ? o_element == 4 ? merge_kernel<float, BF16, float> : merge_kernel<float, BF16, BF16>
      : o_element == 4 ? merge_kernel<BF16, BF16, float>
                       : merge_kernel<BF16, BF16, BF16>;
  launch("the launch of merge", kernel, grid, dim3(kThreads), 0, stream, args);
}

}  // namespace fluxion::device
