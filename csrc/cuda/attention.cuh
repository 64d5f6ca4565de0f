// Attention of one group's query heads to a list of tiles, by one block of 64 threads.
//
// K and V bypass shared memory: every thread loads 16 bytes at a time and uses them for all heads at once.
// Keys: 8 threads a token, so that a warp's load is 128 consecutive bytes of each of 4 tokens. Values: one
// thread for each 16 bytes of a token. A round of 64 tokens: scores, softmax, values.
//
// The result does not depend on concurrent work: sums have a fixed order, and the parts of a list (Split)
// depend on its length alone.
#pragma once

#include "cuda/device.cuh"

namespace fluxion::device {

inline constexpr int kAttendThreads = 64;
inline constexpr int kRoundTiles = 4, kRoundTokens = kRoundTiles * kPage;
inline constexpr int kMaxParts = 64;

// How a list of `count` tiles is split into parts, one block each.
struct Split {
  int tiles;  // of a part; the last may have fewer
  int parts;

  __host__ __device__ static Split of(int count) {
    const int rounds = (count + kRoundTiles - 1) / kRoundTiles;
    const int tiles = (rounds + kMaxParts - 1) / kMaxParts * kRoundTiles;
    return {tiles, tiles > 0 ? (count + tiles - 1) / tiles : 0};
  }
  // Upper bound of the parts of a list of up to `longest` tiles.
  __host__ __device__ static int most(int longest) {
    const int rounds = (longest + kRoundTiles - 1) / kRoundTiles;
    return rounds < kMaxParts ? rounds : kMaxParts;
  }
};

// What a block keeps in shared memory, for element type T and up to kG heads.
template <class T, int kG>
struct AttendShared {
  union {
    // Queries, times scale and log2(e). [head][i][vector] holds numbers 4 i .. 4 i + 3 of each 16-byte
    // vector, so that neighbouring threads, which have neighbouring vectors, read neighbouring banks.
    float4 q[kG * kMaxHeadDim / 4];
    float sums[kAttendThreads * kWide<T> * kG];  // of threads that share the same numbers of values
  };
  float scores[kG][kRoundTokens];  // then weights
  float top[kG], sum[kG];          // running maximum of the scores, sum of the weights
  float shrink[kG];                // factor of earlier rounds under the present maximum
  const char* at[kRoundTiles];     // the round's tiles
  uint32_t any[kRoundTiles];       // tokens that some head has; 0 past the list's end
  uint16_t masks[kRoundTiles][kMaxGroup];
};

// Sums over kThreads threads, 8 or a warp, which differ in the last bits of their number. Each has kN addends
// x[0..kN). Afterwards the thread whose last bits are `part` has the sums from number part * kN / kThreads on
// in x[0] and following.
template <int kThreads, int kN>
__device__ __forceinline__ void scatter_sums(float (&x)[kN], int part) {
  int n = kN;
#pragma unroll
  for (int offset = kThreads / 2; offset > 0; offset /= 2) {
    if (n > 1) {
      n /= 2;
      const bool upper = (part & offset) != 0;
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) {
        if (i < n) {
          const float given = __shfl_xor_sync(kWholeWarp, upper ? x[i] : x[i + n], offset);
          x[i] = (upper ? x[i + n] : x[i]) + given;
        }
      }
    } else {
      x[0] += __shfl_xor_sync(kWholeWarp, x[0], offset);
    }
  }
}

// Queries [G][D] into shared memory; heads G to kG-1 are zeros. The caller synchronizes.
template <class T, int kG>
__device__ __forceinline__ void load_queries(AttendShared<T, kG>& s, const T* q, int G, int D, float scale) {
  const int vectors = D / kWide<T>;
  for (int i = threadIdx.x; i < kG * vectors; i += kAttendThreads) {
    const int g = i / vectors, v = i % vectors;
    float x[kWide<T>] = {};
    if (g < G) unpack(reinterpret_cast<const uint4*>(q + static_cast<int64_t>(g) * D)[v], x);
#pragma unroll
    for (int j = 0; j < kWide<T> / 4; ++j) {
      const float f = scale * kLog2e;
      s.q[g * (D / 4) + j * vectors + v] =
          make_float4(x[4 * j] * f, x[4 * j + 1] * f, x[4 * j + 2] * f, x[4 * j + 3] * f);
    }
  }
}

// Finds which of a round's tokens each head has, and where their tiles are. The caller synchronizes.
template <class T, int kG, class Tiles>
__device__ __forceinline__ void find_round(AttendShared<T, kG>& s, int G, const Tiles& tiles, int first,
                                           int count) {
  static_assert(kRoundTiles * kMaxGroup == kAttendThreads);
  const int i = threadIdx.x / kMaxGroup, g = threadIdx.x % kMaxGroup;
  const uint32_t mask = first + i < count && g < G ? tiles.mask(first + i, g) : 0;
  uint32_t any = mask;
#pragma unroll
  for (int offset = kMaxGroup / 2; offset > 0; offset /= 2) any |= __shfl_xor_sync(kWholeWarp, any, offset);
  s.masks[i][g] = static_cast<uint16_t>(mask);
  if (g == 0) s.any[i] = any, s.at[i] = any != 0 ? tiles.tile(first + i) : nullptr;
}

// Computes the scores of a round's tokens.
template <class T, int kG>
__device__ __forceinline__ void score_round(AttendShared<T, kG>& s, int D) {
  constexpr int kW = kWide<T>;
  // Tiles whose keys are loaded before any of their sums, as registers allow.
  constexpr int kAhead = kG <= 4 ? 4 : kG == 8 ? 2 : 1;
  const int thread = threadIdx.x, vectors = D / kW, part = thread % 8, token = thread / 8;
  for (int ahead = 0; ahead < kRoundTiles; ahead += kAhead) {
    float dots[kAhead][2 * kG] = {};  // of tokens `token` and `token` + 8
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const uint32_t any = s.any[ahead + a];
      if (any == 0) continue;
      const uint4* keys = reinterpret_cast<const uint4*>(s.at[ahead + a]) + token * vectors;
      const bool low = any >> token & 1, high = any >> (token + 8) & 1;
      for (int v = part; v < vectors; v += 8) {
        float x[kW] = {}, y[kW] = {};
        if (low) unpack(__ldcs(keys + v), x);
        if (high) unpack(__ldcs(keys + 8 * vectors + v), y);
#pragma unroll
        for (int g = 0; g < kG; ++g) {
#pragma unroll
          for (int j = 0; j < kW / 4; ++j) {
            const float4 f = s.q[g * (D / 4) + j * vectors + v];
            float& dx = dots[a][g];
            float& dy = dots[a][kG + g];
            dx = fmaf(f.x, x[4 * j], dx), dy = fmaf(f.x, y[4 * j], dy);
            dx = fmaf(f.y, x[4 * j + 1], dx), dy = fmaf(f.y, y[4 * j + 1], dy);
            dx = fmaf(f.z, x[4 * j + 2], dx), dy = fmaf(f.z, y[4 * j + 2], dy);
            dx = fmaf(f.w, x[4 * j + 3], dx), dy = fmaf(f.w, y[4 * j + 3], dy);
          }
        }
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      scatter_sums<8>(dots[a], part);
      constexpr int kOwn = kG >= 4 ? kG / 4 : 1, kSame = kG >= 4 ? 1 : 4 / kG;
      if (part % kSame != 0) continue;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int number = part * 2 * kG / 8 + i, g = number % kG, t = token + number / kG * 8;
        const bool has = (s.masks[ahead + a][g] >> t & 1) != 0;
        // Larger products become the largest number. NaN stays NaN: the maximum ignores it, so it reaches the
        // output. fminf would turn it into the largest number.
        const float dot = dots[a][i], bounded = dot > 3.402823466e+38f ? 3.402823466e+38f : dot;
        s.scores[g][(ahead + a) * kPage + t] = has ? bounded : minus_infinity();
      }
    }
  }
}

// Turns scores into weights under the maximum of this and earlier rounds, a head a warp at a time.
template <class T, int kG>
__device__ __forceinline__ void weigh_round(AttendShared<T, kG>& s) {
  const int lane = threadIdx.x % 32;
  for (int g = threadIdx.x / 32; g < kG; g += 2) {
    const float x = s.scores[g][lane], y = s.scores[g][lane + 32];
    const float before = s.top[g], top = fmaxf(before, warp_max(fmaxf(x, y)));
    const float base = reference(top), wx = exp2f(x - base), wy = exp2f(y - base);
    const float sum = warp_sum(wx + wy), shrink = exp2f(before - base);
    s.scores[g][lane] = wx;
    s.scores[g][lane + 32] = wy;
    const float total = fmaf(s.sum[g], shrink, sum);
    __syncwarp();  // every lane has read what lane 0 now writes
    if (lane == 0) s.top[g] = top, s.sum[g] = total, s.shrink[g] = shrink;
  }
}

// Adds the values of the team's tokens to `mine`, this thread's part of the sums.
template <class T, int kG>
__device__ __forceinline__ void add_values(const AttendShared<T, kG>& s, int vectors, int team, int teams,
                                           int vector, float (&mine)[kG][kWide<T>]) {
  constexpr int kW = kWide<T>;
#pragma unroll
  for (int g = 0; g < kG; ++g) {
    const float shrink = s.shrink[g];
#pragma unroll
    for (int j = 0; j < kW; ++j) mine[g][j] *= shrink;
  }
  if (team >= teams) return;
#pragma unroll 4
  for (int t = team; t < kRoundTokens; t += teams) {
    if ((s.any[t / kPage] >> t % kPage & 1) == 0) continue;
    const uint4* values = reinterpret_cast<const uint4*>(s.at[t / kPage]) + (kPage + t % kPage) * vectors;
    float x[kW];
    unpack(__ldcs(values + vector), x);
#pragma unroll
    for (int g = 0; g < kG; ++g) {
      const float weight = s.scores[g][t];
      // A token that a head does not have adds nothing to it, not even NaN.
      if (weight != 0.0f) {
#pragma unroll
        for (int j = 0; j < kW; ++j) mine[g][j] = fmaf(weight, x[j], mine[g][j]);
      }
    }
  }
}

// Tiles: const char* tile(int i) is the memory of the list's tile i, uint32_t mask(int i, int g) its tokens
// that head g has. For i < count, g < G; each is called once.
//
// q [G][D] in any memory. All threads together write o [G][D] (float32) and lse [G] (base 2); 0 and -inf for
// an empty list.
template <class T, int kG, class Tiles>
__device__ void attend_list(AttendShared<T, kG>& s, const T* q, int G, int D, float scale, const Tiles& tiles,
                            int count, float* o, float* lse) {
  constexpr int kW = kWide<T>;
  const int thread = threadIdx.x, vectors = D / kW;
  const int lanes = vectors < kAttendThreads ? vectors : kAttendThreads;  // threads a token, for values
  const int teams = kAttendThreads / lanes, team = thread / lanes, vector = thread % lanes;

  load_queries<T, kG>(s, q, G, D, scale);
  if (thread < kG) s.top[thread] = minus_infinity(), s.sum[thread] = 0.0f;
  float mine[kG][kW] = {};
  __syncthreads();
  for (int first = 0; first < count; first += kRoundTiles) {
    find_round(s, G, tiles, first, count);
    __syncthreads();
    score_round(s, D);
    __syncthreads();
    weigh_round(s);
    __syncthreads();
    add_values(s, vectors, team, teams, vector, mine);
    __syncthreads();
  }

  // Adds the teams' sums in the order of the teams; the queries' memory is free by now.
  if (team < teams) {
#pragma unroll
    for (int g = 0; g < kG; ++g) {
#pragma unroll
      for (int j = 0; j < kW; ++j) s.sums[(team * kG + g) * D + vector * kW + j] = mine[g][j];
    }
  }
  __syncthreads();
  for (int i = thread; i < G * D; i += kAttendThreads) {
    float sum = 0.0f;
    for (int t = 0; t < teams; ++t) sum += s.sums[t * kG * D + i];
    const float weights = s.sum[i / D];
    o[i] = weights == 0.0f ? 0.0f : sum / weights;
  }
  if (thread < G) lse[thread] = lse_of(s.top[thread], s.sum[thread]);
}

// Calls f with the number of heads to compile for, as a type: the next power of two. For float32, which is
// for exact tests, 4 or 16.
template <class T, class F>
void with_group(int G, F f) {
  if constexpr (sizeof(T) == 4) {
    if (G <= 4) return f(std::integral_constant<int, 4>());
  } else {
    if (G == 1) return f(std::integral_constant<int, 1>());
    if (G == 2) return f(std::integral_constant<int, 2>());
    if (G <= 4) return f(std::integral_constant<int, 4>());
    if (G <= 8) return f(std::integral_constant<int, 8>());
  }
  return f(std::integral_constant<int, 16>());
}

}  // namespace fluxion::device
