// Attention to sinks and window, and what the CPU's policies see of it.
#include "cuda/attention.cuh"
#include "cuda/kernels.h"
#include "cuda/words.cuh"
#include "kernels/feature_index.h"

namespace fluxion::device {

namespace {

struct ResidentArgs {
  PortView port;
  Rows q;
  WindowTiles windows;
  int rows;
  float scale;
  float* o;
  float* lse;
  bool want_parts;
};

template <class T, int kG>
struct ResidentShared {
  AttendShared<T, kG> attend;
  uint32_t last;
};

// Consecutive logical pages of a request, in its row of the windows.
struct ResidentTiles {
  const char* row;  // the row's first tile
  int64_t tile_bytes;
  int page, length;
  Placement placement;

  __device__ const char* tile(int i) const { return row + placement.slot(page + i) * tile_bytes; }
  __device__ uint32_t mask(int i, int) const {
    const int tokens = length - (page + i) * kPage;
    return tokens >= kPage ? 0xffffu : (1u << tokens) - 1;
  }
};

// Merges `n` results in `o` [n][stride] and `lse` [n][G] (base 2) of one head, by a warp.
struct Merged {
  const float* o;
  const float* lse;
  int n, G;
  int64_t stride;
  float top, total;

  __device__ Merged(const float* o, const float* lse, int n, int G, int64_t stride)
      : o(o), lse(lse), n(n), G(G), stride(stride), top(minus_infinity()), total(0.0f) {
    for (int i = 0; i < n; ++i) top = fmaxf(top, __ldcg(lse + i * G));
    for (int i = 0; i < n; ++i) total += exp2f(__ldcg(lse + i * G) - reference(top));
  }
  __device__ float whole() const { return lse_of(top, total); }
  // Numbers 4 v to 4 v + 3 of the output.
  __device__ float4 four(int v) const {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = 0; i < n; ++i) {
      const float part = __ldcg(lse + i * G);
      if (part == minus_infinity()) continue;
      const float weight = exp2f(part - reference(top)) / total;
      const float4 x = __ldcg(reinterpret_cast<const float4*>(o + i * stride) + v);
      sum.x = fmaf(weight, x.x, sum.x), sum.y = fmaf(weight, x.y, sum.y);
      sum.z = fmaf(weight, x.z, sum.z), sum.w = fmaf(weight, x.w, sum.w);
    }
    return sum;
  }
};

__device__ float squares(float4 x) { return fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, x.w * x.w))); }

// Merges one head's sinks and window, by a warp: o [D], lse (natural), and parts if not nullptr.
template <class Sinks, class Local>
__device__ void join(const Sinks& sinks, const Local& local, int D, float* o, float* lse, float* parts) {
  const int lane = threadIdx.x % 32;
  float w_sink, w_local;
  const float lse_sink = sinks.whole(), lse_local = local.whole();
  const float whole = merge_weights(lse_sink, lse_local, &w_sink, &w_local);
  float sink_square = 0.0f, local_square = 0.0f, square = 0.0f;
  for (int v = lane; v < D / 4; v += 32) {
    // A side without tokens has weight 0, whatever its memory holds.
    const float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float4 a = lse_sink == minus_infinity() ? none : sinks.four(v);
    const float4 b = lse_local == minus_infinity() ? none : local.four(v);
    const float4 x = make_float4(fmaf(w_sink, a.x, w_local * b.x), fmaf(w_sink, a.y, w_local * b.y),
                                 fmaf(w_sink, a.z, w_local * b.z), fmaf(w_sink, a.w, w_local * b.w));
    reinterpret_cast<float4*>(o)[v] = x;
    sink_square += squares(a);
    local_square += squares(b);
    square += squares(x);
  }
  if (lane == 0) *lse = whole * kLn2;
  if (parts == nullptr) return;
  sink_square = warp_sum(sink_square);
  local_square = warp_sum(local_square);
  square = warp_sum(square);
  if (lane == 0) {
    parts[kPartLseSink] = lse_sink * kLn2;
    parts[kPartLseLocal] = lse_local * kLn2;
    parts[kPartOSink] = sqrtf(sink_square);
    parts[kPartOLocal] = sqrtf(local_square);
    parts[kPartOMerged] = sqrtf(square);
  }
}

// Called once by every block that has written parts; the last of `blocks` announces them.
__device__ void observed(const PortView& port, uint32_t blocks) {
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(&port.state->observed, 1) == blocks - 1) {
    port.state->observed = 0;
    __threadfence_system();
    DeviceWords words{port};
    announce(words, kObserved, port.state->sequence);
  }
}

__device__ float* parts_of(const PortView& port, int64_t head) {
  const MailboxSlot slot = mailbox_slot(port.shape, port.state->sequence);
  return reinterpret_cast<float*>(port.arena + slot.parts) + head * kMailboxParts;
}

// Grid: chunks of 4 pages (those of the sinks first), groups, requests.
template <class T, int kG>
__global__ void __launch_bounds__(kAttendThreads) resident_kernel(ResidentArgs a) {
  auto& s = shared<ResidentShared<T, kG>>();
  const PortView& port = a.port;
  const int chunk = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
  const int G = port.group(), D = port.shape.head_dim, chunks = gridDim.x;
  const bool want_parts = a.want_parts && port.state->late == 0;
  const int64_t group = int64_t{b} * gridDim.y + h;
  if (b >= port.state->batch) {
    if (chunk > 0) return;
    if (b < a.rows) {
      for (int i = threadIdx.x; i < G * D; i += kAttendThreads) a.o[group * G * D + i] = 0.0f;
      if (threadIdx.x < static_cast<unsigned>(G)) a.lse[group * G + threadIdx.x] = minus_infinity();
    }
    if (want_parts) observed(port, gridDim.y * gridDim.z);
    return;
  }
  const int n = port.lengths[b], row = port.rows[b], sink_pages = port.placement.sink_pages();
  const int pages = (n + kPage - 1) / kPage, sink_chunks = port.sink_chunks();
  const int start = port.placement.first_local(n);
  const bool of_sinks = chunk < sink_chunks;
  const int first = of_sinks ? chunk * kRoundTiles : start + (chunk - sink_chunks) * kRoundTiles;
  const int end = of_sinks && sink_pages < pages ? sink_pages : pages;
  const int left = row < a.windows.rows ? end - first : 0;
  const int64_t tile_bytes = int64_t{2} * kPage * D * sizeof(T);
  const int64_t row_bytes = port.placement.slot_pages() * tile_bytes;
  const ResidentTiles tiles{a.windows.data + h * a.windows.head_stride + row * row_bytes, tile_bytes, first,
                            n, port.placement};
  const T* q = reinterpret_cast<const T*>(a.q.data + b * a.q.stride) + int64_t{h} * G * D;
  float* o = port.partial + group * chunks * G * D;
  float* lse = port.partial_lse + group * chunks * G;
  attend_list<T, kG>(s.attend, q, G, D, a.scale, tiles,
                     left < 0             ? 0
                     : left < kRoundTiles ? left
                                          : kRoundTiles,
                     o + int64_t{chunk} * G * D, lse + chunk * G);

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) s.last = atomicAdd(port.arrived + group, 1) == static_cast<uint32_t>(chunks) - 1;
  __syncthreads();
  if (s.last == 0) return;
  __threadfence();
  if (threadIdx.x == 0) port.arrived[group] = 0;
  for (int g = threadIdx.x / 32; g < G; g += kAttendThreads / 32) {
    const int64_t stride = int64_t{G} * D, head = group * G + g;
    const Merged sinks(o + g * D, lse + g, sink_chunks, G, stride);
    const Merged local(o + sink_chunks * stride + g * D, lse + sink_chunks * G + g, chunks - sink_chunks, G,
                       stride);
    join(sinks, local, D, a.o + head * D, a.lse + head, want_parts ? parts_of(port, head) : nullptr);
  }
  if (want_parts) observed(port, gridDim.y * gridDim.z);
}

// A result of another kernel, in the form that `join` reads.
template <class T>
struct Given {
  const T* o;
  float lse;

  __device__ float whole() const { return lse; }
  __device__ float4 four(int v) const { return load_four(o + 4 * v); }
};

// The base-2 LSE of a given result. FlashInfer gives -inf for no tokens; before version 0.7, about -50,000.
__device__ __forceinline__ float given_lse(float lse, bool base2) {
  if (!base2) return lse * kLog2e;
  return lse < -49000.0f ? minus_infinity() : lse;
}

struct ObserveArgs {
  PortView port;
  Result sinks, local;
  int rows;
  float* o;
  float* lse;
};

constexpr int kObserveThreads = 128;

// A warp a head.
template <class T>
__global__ void __launch_bounds__(kObserveThreads) observe_kernel(ObserveArgs a) {
  const PortView& port = a.port;
  const int D = port.shape.head_dim, warps = kObserveThreads / 32;
  const int64_t heads = int64_t{a.rows} * port.shape.q_heads;
  const int64_t real = int64_t{port.state->batch} * port.shape.q_heads;
  const bool late = port.state->late != 0;
  for (int64_t i = int64_t{blockIdx.x} * warps + threadIdx.x / 32; i < heads;
       i += int64_t{gridDim.x} * warps) {
    const Given<T> sinks{reinterpret_cast<const T*>(a.sinks.o) + i * D,
                         given_lse(a.sinks.lse[i], a.sinks.base2)};
    const Given<T> local{reinterpret_cast<const T*>(a.local.o) + i * D,
                         given_lse(a.local.lse[i], a.local.base2)};
    join(sinks, local, D, a.o + i * D, a.lse + i, late || i >= real ? nullptr : parts_of(port, i));
  }
  if (!late) observed(port, gridDim.x);
}

template <class T>
void resident_of(cudaStream_t stream, const ResidentArgs& args) {
  const PortView& port = args.port;
  const dim3 grid(static_cast<unsigned>(port.chunks()), static_cast<unsigned>(port.shape.kv_heads),
                  static_cast<unsigned>(args.rows > 0 ? args.rows : 1));
  with_group<T>(port.group(), [&](auto group) {
    constexpr int kG = group.value;
    launch("the launch of resident attention", resident_kernel<T, kG>, grid, dim3(kAttendThreads),
           sizeof(ResidentShared<T, kG>), stream, args);
  });
}

}  // namespace

void resident(Port& port, cudaStream_t stream, int rows, Rows q, WindowTiles windows, float scale, float* o,
              float* lse, bool want_parts) {
  const ResidentArgs args{port.view(), q, windows, rows, scale, o, lse, want_parts};
  if (port.view().shape.element == 2) {
    resident_of<BF16>(stream, args);
  } else {
    resident_of<float>(stream, args);
  }
}

void observe(Port& port, cudaStream_t stream, int rows, Result sinks, Result local, float* o, float* lse) {
  const ObserveArgs args{port.view(), sinks, local, rows, o, lse};
  const int64_t heads = int64_t{rows} * port.view().shape.q_heads, warps = kObserveThreads / 32;
  const int64_t blocks = (heads + warps - 1) / warps;
  const dim3 grid(static_cast<unsigned>(blocks < 1 ? 1 : blocks));
  const auto kernel = sinks.element == 2 ? observe_kernel<BF16> : observe_kernel<float>;
  launch("the launch of observe", kernel, grid, dim3(kObserveThreads), 0, stream, args);
}

}  // namespace fluxion::device
