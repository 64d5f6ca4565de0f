// Which blocks each head reads, and which of their tiles are near: near_rank.
#include "cuda/attention.cuh"
#include "cuda/device.cuh"
#include "cuda/near.h"

namespace fluxion::device {

namespace {

struct RankArgs {
  PortView port;
  NearView near;
  Rows q;
  int32_t layer;
  int32_t rows;
};

// The middle of a request, in blocks: engine/block_scores.h.
struct Middle {
  int first_page, end_page;  // logical pages
  int level, first, count;   // blocks

  __device__ Middle(const RankArgs& a, int b) {
    first_page = a.port.placement.sink_pages();
    end_page = a.port.placement.first_local(a.port.lengths[b]);
    level = 0;
    while (1 << level < a.near.blk[b]) ++level;
    first = first_page >> level;
    count = end_page > first_page ? ((end_page - 1) >> level) - first + 1 : 0;
  }
  __device__ int from(int i) const {
    return (first + i) << level > first_page ? (first + i) << level : first_page;
  }
  __device__ int to(int i) const {
    const int end = (first + i + 1) << level;
    return end < end_page ? end : end_page;
  }
};

// Whether request b is to be ranked now.
__device__ bool ranked(const RankArgs& a, int b) {
  return a.port.state->late == 0 && b < a.near.step->batch && b < a.port.state->batch;
}

__device__ __forceinline__ float rounded(float x, const float*) { return x; }
__device__ __forceinline__ float rounded(float x, const BF16*) {
  BF16 y;
  round_to(x, &y);
  return to_float(y);
}

constexpr int kScoreThreads = 128, kScoreWarps = kScoreThreads / 32;

// An entry {minima, maxima} is one row of 2 D numbers. Vector v of it, 16 bytes, is lane v % 32's; a row of
// more than 32 vectors is read in several passes.
template <class T>
inline constexpr int kPasses = 2 * kMaxHeadDim / kWide<T> / 32;
// Blocks in flight for each warp, as registers allow; no more sums than lanes.
template <int kG>
inline constexpr int kBlocksAhead = kG <= 4 ? 4 : 16 / kG;

template <class T, int kG>
struct ScoreShared {
  // {(q - spread |q|) / 2, (q + spread |q|) / 2}, [head][4 numbers of a vector][vector].
  float4 weights[kG][kWide<T> / 4][2 * kMaxHeadDim / kWide<T>];
};

// Grid: parts, KV heads, requests. The weights are those of kernels/score.h; the order of sums differs.
template <class T, int kG>
__global__ void __launch_bounds__(kScoreThreads) score_kernel(RankArgs a) {
  const int h = blockIdx.y, b = blockIdx.z;
  if (!ranked(a, b)) return;
  const Middle middle(a, b);
  const int wanted = a.near.wanted[b];
  if (wanted == 0 || wanted >= middle.count) return;
  auto& s = shared<ScoreShared<T, kG>>();
  constexpr int kW = kWide<T>, kA = kBlocksAhead<kG>;
  const int G = a.port.group(), D = a.port.shape.head_dim, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int vectors = 2 * D / kW;
  const T* q = reinterpret_cast<const T*>(a.q.data + b * a.q.stride) + int64_t{h} * G * D;
  for (int i = threadIdx.x; i < kG * 2 * D; i += kScoreThreads) {
    const int g = i / (2 * D), e = i % (2 * D);
    const float half = g < G ? 0.5f * to_float(q[g * D + e % D]) : 0.0f,
                wide = fabsf(half) * a.near.shape.spread;
    reinterpret_cast<float*>(&s.weights[g][e % kW / 4][e / kW])[e % 4] =
        rounded(e < D ? half - wide : half + wide, q);
  }
  __syncthreads();

  const auto* entries = reinterpret_cast<const uint4*>(reinterpret_cast<const T*>(a.near.entries) +
                                                       a.near.tile(a.layer, h, 0) * 2 * D);
  const int32_t* table = a.near.table + int64_t{b} * a.near.shape.max_pages;
  float* scores = a.near.scores + (int64_t{b} * a.port.shape.q_heads + h * G) * a.near.stride();
  const int64_t stride = a.near.stride();
  for (int first = (blockIdx.x * kScoreWarps + warp) * kA; first < middle.count;
       first += gridDim.x * kScoreWarps * kA) {
    float dots[kA * kG] = {};  // [block][head]
#pragma unroll
    for (int pass = 0; pass < kPasses<T>; ++pass) {
      const int v = lane + 32 * pass;
      if (32 * pass >= vectors) break;
      const bool there = v < vectors, is_low = v * kW < D;
      uint4 raw[kA];
#pragma unroll
      for (int i = 0; i < kA; ++i) {
        if (there && first + i < middle.count)
          raw[i] = entries[int64_t{table[middle.from(first + i)]} * vectors + v];
      }
#pragma unroll
      for (int i = 0; i < kA; ++i) {
        if (!there || first + i >= middle.count) continue;
        float x[kW];
        unpack(raw[i], x);
        for (int p = middle.from(first + i) + 1; p < middle.to(first + i); ++p) {
          float y[kW];
          unpack(entries[int64_t{table[p]} * vectors + v], y);
#pragma unroll
          for (int j = 0; j < kW; ++j) x[j] = is_low ? fminf(x[j], y[j]) : fmaxf(x[j], y[j]);
        }
#pragma unroll
        for (int g = 0; g < kG; ++g) {
#pragma unroll
          for (int j = 0; j < kW / 4; ++j) {
            const float4 w = s.weights[g][j][v];
            float& dot = dots[i * kG + g];
            dot = fmaf(w.x, x[4 * j], dot), dot = fmaf(w.y, x[4 * j + 1], dot);
            dot = fmaf(w.z, x[4 * j + 2], dot), dot = fmaf(w.w, x[4 * j + 3], dot);
          }
        }
      }
    }
    scatter_sums<32>(dots, lane);
    constexpr int kSame = 32 / (kA * kG);  // lanes that have one number
    const int number = lane / kSame, i = first + number / kG, g = number % kG;
    // NaN counts as -inf, -0 as 0: from here on scores compare as numbers.
    if (lane % kSame == 0 && g < G && i < middle.count)
      scores[g * stride + i] = dots[0] > minus_infinity() ? dots[0] + 0.0f : minus_infinity();
  }
}

// Numbers that order as the floats do.
__device__ __forceinline__ uint32_t order_key(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float float_of_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The chosen of n scores: every one >= limit, and the first `ties` of those that equal `tied`
// (kernels/select.h).
struct Threshold {
  float limit, tied;
  int ties;
};

__device__ int count_at_least(const float* scores, int n, float limit) {
  int count = 0;
  for (int i = threadIdx.x % 32; i < n; i += 32) count += scores[i] >= limit;
  for (int offset = 16; offset > 0; offset /= 2) count += __shfl_xor_sync(kWholeWarp, count, offset);
  return count;
}

// By a warp; 1 <= k < n.
__device__ Threshold find_threshold(const float* scores, int n, int k) {
  float low = __uint_as_float(0x7f800000u), high = minus_infinity();
  for (int i = threadIdx.x % 32; i < n; i += 32) {
    low = fminf(low, scores[i]);
    high = fmaxf(high, scores[i]);
  }
  uint32_t from = order_key(-warp_max(-low)), to = order_key(warp_max(high));
  int above = 0;
  while (from < to) {
    const uint32_t middle = to - (to - from) / 2;
    const int count = count_at_least(scores, n, float_of_key(middle));
    if (count == k) return {float_of_key(middle), 0.0f, 0};
    if (count > k) {
      from = middle;
    } else {
      to = middle - 1;
      above = count;
    }
  }
  const float tied = float_of_key(from) + 0.0f;
  return {float_of_key(order_key(tied) + 1), tied, k - above};
}

// By a warp: bits[i / 32] of the blocks that a head reads.
__device__ void choose(const float* scores, int n, int wanted, bool everything, uint32_t* bits) {
  const int lane = threadIdx.x % 32;
  Threshold t{minus_infinity(), 0.0f, 0};
  if (!everything && wanted > 0) t = find_threshold(scores, n, wanted);
  int ties = 0;  // that were taken
  for (int base = 0; base < n; base += 32) {
    const int i = base + lane;
    bool pick = i < n && wanted > 0;
    if (pick && !everything) {
      const float x = scores[i];
      pick = x >= t.limit;
    }
    if (!everything && wanted > 0 && ties < t.ties) {  // the same for the whole warp
      const bool equal = i < n && !pick && scores[i] == t.tied;
      const uint32_t those = __ballot_sync(kWholeWarp, equal);
      pick = pick || (equal && ties + __popc(those & ((1u << lane) - 1)) < t.ties);
      ties += __popc(those);
    }
    const uint32_t word = __ballot_sync(kWholeWarp, pick);
    if (lane == 0) bits[base / 32] = word;
  }
}

constexpr int kListThreads = 512, kListWarps = kListThreads / 32;

struct ListShared {
  int near[kListWarps], far[kListWarps];
};

// Grid: KV heads, rows. Every head chooses, a warp each; then the group's pages are listed in order.
template <class T>
__global__ void __launch_bounds__(kListThreads) list_kernel(RankArgs a) {
  auto& s = shared<ListShared>();
  const int h = blockIdx.x, b = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const NearView& near = a.near;
  const int G = a.port.group(), D = a.port.shape.head_dim, H = a.port.shape.kv_heads;
  const int group = b * H + h;
  const T* q = reinterpret_cast<const T*>(a.q.data + b * a.q.stride) + int64_t{h} * G * D;
  int near_count = 0, far_count = 0;
  const bool ranks = ranked(a, b);
  if (ranks) {
    const Middle middle(a, b);
    const int wanted = near.wanted[b];
    const int64_t head = int64_t{b} * a.port.shape.q_heads + h * G;
    uint32_t* chosen = near.chosen + head * (near.stride() / 32);
    if (warp < G) {
      choose(near.scores + (head + warp) * near.stride(), middle.count, wanted, wanted >= middle.count,
             chosen + warp * (near.stride() / 32));
    }
    __syncthreads();

    const int32_t* table = near.table + int64_t{b} * near.shape.max_pages;
    const int32_t* slot_of = near.slot_of + near.tile(a.layer, h, 0);
    const int64_t place = int64_t{group} * near.shape.max_pages;
    // For the layer that is published next.
    char* far = near.lists;
    const FarLists lists = far_slot(near.far, a.port.state->sequence + 1);
    auto* far_pages = reinterpret_cast<int32_t*>(far + lists.pages) + place;
    auto* far_heads = reinterpret_cast<uint16_t*>(far + lists.heads) + place;
    const uint32_t everyone = (1u << G) - 1, below = (1u << lane) - 1;
    const int pages = middle.end_page - middle.first_page;
    for (int base = 0; base < pages; base += kListThreads) {
      const int p = middle.first_page + base + static_cast<int>(threadIdx.x);
      uint32_t heads = 0;
      int page = 0, slot = -1;
      if (p < middle.end_page) {
        const int i = (p >> middle.level) - middle.first;
        for (int g = 0; g < G; ++g) heads |= (chosen[g * (near.stride() / 32) + i / 32] >> i % 32 & 1u) << g;
        if (heads != 0 && near.shape.together) heads = everyone;
        page = table[p];
        if (heads != 0) slot = slot_of[page];
      }
      const bool is_near = heads != 0 && slot >= 0, is_far = heads != 0 && slot < 0;
      const uint32_t nears = __ballot_sync(kWholeWarp, is_near), fars = __ballot_sync(kWholeWarp, is_far);
      if (lane == 0) s.near[warp] = __popc(nears), s.far[warp] = __popc(fars);
      __syncthreads();
      int near_at = near_count + __popc(nears & below), far_at = far_count + __popc(fars & below);
      for (int w = 0; w < kListWarps; ++w) {
        if (w < warp) near_at += s.near[w], far_at += s.far[w];
        near_count += s.near[w];
        far_count += s.far[w];
      }
      if (is_near) {
        near.near_slots[place + near_at] = h * near.shape.slots + slot;
        near.used[h * near.shape.slots + slot] = 1;
        if (!near.shape.together) {
          for (int g = 0; g < G; ++g) near.masks[(place + near_at) * G + g] = heads >> g & 1 ? 0xffff : 0;
        }
      }
      if (is_far) {
        near.missed[place + far_at] = page;
        far_pages[far_at] = page;
        far_heads[far_at] = static_cast<uint16_t>(heads);
      }
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      reinterpret_cast<int32_t*>(far + lists.counts)[group] = far_count;
      atomicAdd(&near.counts[kNearHits], static_cast<uint32_t>(near_count));
      atomicAdd(&near.counts[kNearMisses], static_cast<uint32_t>(far_count));
    }
  }
  if (threadIdx.x == 0) {
    near.tasks[group] = {q, near_count};
    near.missed_count[group] = far_count;
  }
}

constexpr unsigned kMostScoreParts = 16;

template <class T>
void rank_of(cudaStream_t stream, const RankArgs& args) {
  const MailboxShape& s = args.port.shape;
  const unsigned heads = static_cast<unsigned>(s.kv_heads), rows = static_cast<unsigned>(args.rows);
  // At least eight blocks of the longest request for each warp.
  constexpr unsigned kEach = 8 * kScoreWarps;
  const unsigned most = (static_cast<unsigned>(args.near.shape.max_pages) + kEach - 1) / kEach;
  const dim3 grid(most < kMostScoreParts ? most : kMostScoreParts, heads, rows);
  with_group<T>(args.port.group(), [&](auto group) {
    constexpr int kG = group.value;
    launch("the launch of near scores", score_kernel<T, kG>, grid, dim3(kScoreThreads),
           sizeof(ScoreShared<T, kG>), stream, args);
  });
  launch("the launch of near lists", list_kernel<T>, dim3(heads, rows), dim3(kListThreads),
         sizeof(ListShared), stream, args);
}

}  // namespace

void near_rank(const Near& near, const Port& port, cudaStream_t stream, int layer, int rows, Rows q) {
  if (rows == 0) return;
  const RankArgs args{port.view(), near.view(), q, layer, rows};
  if (port.view().shape.element == 2) {
    rank_of<BF16>(stream, args);
  } else {
    rank_of<float>(stream, args);
  }
}

}  // namespace fluxion::device
