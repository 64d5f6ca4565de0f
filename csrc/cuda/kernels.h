// The launches. All are asynchronous, in the order of their stream, and throw Failure when the device's
// runtime refuses. The caller has checked the arguments.
#pragma once

#include <cstdint>

#include "cuda/port.h"

namespace fluxion::device {

// [N][heads][D] with strides in bytes between tokens; heads and numbers dense.
struct Rows {
  char* data;
  int64_t stride;
};

// Windows of one layer (kv/windows.py).
struct WindowTiles {
  char* data;
  int64_t head_stride;  // bytes
  int rows;
};

// Results of attention to be merged: o of `element` bytes a number, lse in base 2 or natural.
struct Result {
  const char* o;
  const float* lse;
  int element;
  bool base2;
};

void publish(Port& port, cudaStream_t stream, int layer, int rows, Rows q, Rows k, Rows v,
             WindowTiles windows);
void resident(Port& port, cudaStream_t stream, int rows, Rows q, WindowTiles windows, float scale, float* o,
              float* lse, bool want_parts);
void observe(Port& port, cudaStream_t stream, int rows, Result sinks, Result local, float* o, float* lse);
void take(Port& port, cudaStream_t stream, int rows, Result own, char* out);

// The host pool's tiles of one layer: [kv_heads][pages][2][16][D], pinned.
struct HostTiles {
  char* data;
  int pages;
  int kv_heads, head_dim, element;

  constexpr int64_t tile_bytes() const { return int64_t{2} * kPage * head_dim * element; }
};

// [N][heads][D] with strides in bytes; numbers dense.
struct HeadRows {
  char* data;
  int64_t stride, head_stride;

  __host__ __device__ char* at(int64_t token, int64_t head) const {
    return data + token * stride + head * head_stride;
  }
};

struct KeysValues {
  HeadRows k, v;
};

void fill_window(cudaStream_t stream, const HostTiles& tiles, WindowTiles windows, int row, int start,
                 int stop, const int32_t* pages, const KeysValues& fresh, const Placement& placement);
void gather(cudaStream_t stream, const HostTiles& tiles, const int32_t* pages, int count,
            const KeysValues& to);

// One layer of the host pool, pinned.
struct HostLayer {
  HostTiles tiles;
  char* entries;    // [kv_heads][pages][2][D]: metadata of level 0
  double* moments;  // [kv_heads][pages][2 D + 8]
};

// A page that a chunk writes: its tokens [first, stop), from token `token` of the chunk's keys and values.
struct ChunkPage {
  int32_t page, first, stop, token;
};

void write_pages(cudaStream_t stream, const HostLayer& layer, const ChunkPage* chunk, int count,
                 const KeysValues& fresh);
// Both results and lse have one base. o: numbers of o_element bytes; if that is a's element size, o and lse
// may be a's.
void merge(cudaStream_t stream, int64_t heads, int head_dim, Result a, Result b, char* o, int o_element,
           float* lse);

// Copies consecutive bytes, a multiple of 16: the best throughput of the link for a kernel.
void copy_in_order(cudaStream_t stream, const char* from, char* to, int64_t bytes);

}  // namespace fluxion::device
