// Basics of every kernel: launches, memory order between a device and its host, wide loads, sums of a warp.
// Compiled by nvcc for GPUs, and by the host's compiler for the simulated device.
//
// The CPU writes some host memory while a kernel runs (the words and slots of a mailbox). It is read with
// loads of system scope (load_fresh), because others may return stale data of a cache. Before that comes an
// acquire load of the word that announces it, or a relaxed one and a fence. What the host is to read is
// followed by a system-wide fence before its word. Host memory that is constant while a kernel runs (tiles,
// lists) needs neither.
#pragma once

#include <cstdint>
#include <tuple>
#include <utility>

#include "cuda/failure.h"
#include "cuda/limits.h"
#if defined(FLUXION_SIMULATED)
#include "emulate/device.h"
#endif

namespace fluxion::device {

inline constexpr unsigned kWholeWarp = 0xffffffffu;
inline constexpr float kLog2e = 1.44269504088896340736f, kLn2 = 0.69314718055994530942f;

struct BF16 {
  uint16_t bits;
};

#if !defined(FLUXION_SIMULATED)

// ---- launches

// shared_bytes: of the kernel's shared<T>(), at most 48 KiB.
template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, const A&... arguments) {
  std::tuple<P...> values(arguments...);
  const cudaError_t error = std::apply(
      [&](P&... each) {
        void* pointers[] = {&each...};
        return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, pointers, shared_bytes,
                                stream);
      },
      values);
  check(error, name);
}

template <class T>
__device__ __forceinline__ T& shared() {
  extern __shared__ uint4 fluxion_shared[];
  return *reinterpret_cast<T*>(fluxion_shared);
}

// ---- order of memory

// With system scope: the other side may be the host.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ float load_fresh(const float* at) {
  float x;
  asm volatile("ld.relaxed.sys.global.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
  return x;
}
__device__ __forceinline__ float4 load_fresh(const float4* at) {
  float4 x;
  asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(at)
               : "memory");
  return x;
}
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
__device__ __forceinline__ void pause() { __nanosleep(64); }

#endif

// ---- numbers

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(BF16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

// Rounds to the nearest, ties to even, like the CPU's kernels (simd/types.h).
__device__ __forceinline__ void round_to(float x, float* out) { *out = x; }
__device__ __forceinline__ void round_to(float x, BF16* out) {
  const uint32_t bits = __float_as_uint(x);
  const uint32_t rounded = x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
  out->bits = static_cast<uint16_t>(rounded >> 16);
}

// 16 bytes of numbers.
template <class T>
inline constexpr int kWide = 16 / static_cast<int>(sizeof(T));

__device__ __forceinline__ void unpack(const uint4& raw, float (&x)[4]) {
  x[0] = __uint_as_float(raw.x);
  x[1] = __uint_as_float(raw.y);
  x[2] = __uint_as_float(raw.z);
  x[3] = __uint_as_float(raw.w);
}
__device__ __forceinline__ void unpack(const uint4& raw, float (&x)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

// Four consecutive numbers as floats, from memory the device wrote earlier.
__device__ __forceinline__ float4 load_four(const float* at) { return *reinterpret_cast<const float4*>(at); }
__device__ __forceinline__ float4 load_four(const BF16* at) {
  struct alignas(8) Four {
    BF16 x[4];
  };
  const Four raw = *reinterpret_cast<const Four*>(at);
  return make_float4(to_float(raw.x[0]), to_float(raw.x[1]), to_float(raw.x[2]), to_float(raw.x[3]));
}
template <class T>
__device__ __forceinline__ void store_four(float4 from, T* at) {
  struct alignas(4 * sizeof(T)) Four {
    T x[4];
  } raw;
  round_to(from.x, &raw.x[0]);
  round_to(from.y, &raw.x[1]);
  round_to(from.z, &raw.x[2]);
  round_to(from.w, &raw.x[3]);
  *reinterpret_cast<Four*>(at) = raw;
}

// Sums and maxima over a warp: every lane gets them, in an order of additions that never changes.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kWholeWarp, x, offset);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, offset));
  return x;
}

// Exponents are relative to this. If all scores are -inf, weights become 0; NaN stays NaN.
__device__ __forceinline__ float reference(float top) { return top == minus_infinity() ? 0.0f : top; }
// The base-2 LSE of weights with this sum.
__device__ __forceinline__ float lse_of(float top, float sum) {
  return sum == 0.0f ? minus_infinity() : top + log2f(sum);
}

// weight_a * a() + weight_b * b(). A side with weight 0 has no tokens and is not read.
template <class A, class B>
__device__ __forceinline__ float4 weigh(float weight_a, A a, float weight_b, B b) {
  float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (weight_a != 0.0f) {
    const float4 y = a();
    x = make_float4(weight_a * y.x, weight_a * y.y, weight_a * y.z, weight_a * y.w);
  }
  if (weight_b != 0.0f) {
    const float4 y = b();
    x = make_float4(fmaf(weight_b, y.x, x.x), fmaf(weight_b, y.y, x.y), fmaf(weight_b, y.z, x.z),
                    fmaf(weight_b, y.w, x.w));
  }
  return x;
}

// Merges two results of attention: returns the merged LSE. LSEs are base 2; -inf: no tokens. weight_a,
// weight_b: of the outputs, together 1 (0 and 0 if neither has tokens).
__device__ __forceinline__ float merge_weights(float a, float b, float* weight_a, float* weight_b) {
  const float top = fmaxf(a, b);  // of a NaN and a number, the number
  if (a == minus_infinity() && b == minus_infinity()) {
    *weight_a = *weight_b = 0.0f;
    return top;
  }
  const float x = exp2f(a - top), y = exp2f(b - top), sum = x + y;
  *weight_a = x / sum;
  *weight_b = y / sum;
  return top + log2f(sum);
}

}  // namespace fluxion::device
