// Writes a chunk to the host pool: write_pages. For pages that it fills, metadata and own moments are bit for
// bit those of HostPool::describe_page: the expressions and the order of additions are those of
// kernels/metadata.h. The host makes the sketches.
#include "cuda/device.cuh"
#include "cuda/kernels.h"

namespace fluxion::device {

namespace {

constexpr int kThreads = 128;
constexpr int kRows = 2 * kPage;  // of a tile: keys, then values
constexpr int kLanes = 16;        // sums that the squares of a row are divided into

struct WriteArgs {
  HostLayer layer;
  const ChunkPage* chunk;
  KeysValues fresh;
};

struct WriteShared {
  double squares[kRows][kLanes];
  double norms[kRows];
  uint4 tile[1];  // goes on
};

// Writes the chunk's tokens to the tile. A page that they fill is also copied to shared memory, with the
// tokens that the host had.
__device__ __forceinline__ void write_tile(const WriteArgs& a, const ChunkPage& at, char* tile, uint4* copy) {
  const int vectors = a.layer.tiles.head_dim * a.layer.tiles.element / 16;
  auto* to = reinterpret_cast<uint4*>(tile);
  for (int i = threadIdx.x; i < kRows * vectors; i += kThreads) {
    const int token = i / vectors % kPage;
    if (token >= at.stop || (token < at.first && at.stop < kPage)) continue;
    uint4 x;
    if (token < at.first) {
      x = __ldcs(to + i);
    } else {
      const HeadRows& from = i < kPage * vectors ? a.fresh.k : a.fresh.v;
      x = reinterpret_cast<const uint4*>(from.at(at.token + token - at.first, blockIdx.y))[i % vectors];
      to[i] = x;
    }
    copy[i] = x;
  }
}

// Grid: pages, KV heads.
template <class T>
__global__ void __launch_bounds__(kThreads) write_kernel(WriteArgs a) {
  auto& s = shared<WriteShared>();
  const ChunkPage at = a.chunk[blockIdx.x];
  const int D = a.layer.tiles.head_dim;
  const int64_t page = int64_t{blockIdx.y} * a.layer.tiles.pages + at.page;
  write_tile(a, at, a.layer.tiles.data + page * a.layer.tiles.tile_bytes(), s.tile);
  if (at.stop < kPage) return;
  __syncthreads();

  const T* rows = reinterpret_cast<const T*>(s.tile);
  T* entry = reinterpret_cast<T*>(a.layer.entries) + page * 2 * D;
  double* sums = a.layer.moments + page * (2 * D + 8);
  for (int i = threadIdx.x; i < 2 * D; i += kThreads) {
    const T* column = rows + i / D * kPage * D + i % D;
    float low = to_float(column[0]), high = low;
    double sum = 0.0;
    for (int t = 0; t < kPage; ++t) {
      const float x = to_float(column[t * D]);
      low = low < x ? low : x;
      high = high > x ? high : x;
      sum = __dadd_rn(sum, x);
    }
    sums[i] = sum;
    if (i >= D) continue;
    round_to(low, entry + i);
    round_to(high, entry + D + i);
  }
  for (int i = threadIdx.x; i < kRows * kLanes; i += kThreads) {
    double square = 0.0;
    for (int d = i % kLanes; d < D; d += kLanes) {
      const double x = to_float(rows[i / kLanes * D + d]);
      square = __dadd_rn(square, x * x);
    }
    s.squares[i / kLanes][i % kLanes] = square;
  }
  __syncthreads();
  if (threadIdx.x < kRows) {
    double* squares = s.squares[threadIdx.x];
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) squares[i] = __dadd_rn(squares[i], squares[i + width]);
    }
    s.norms[threadIdx.x] = __dsqrt_rn(squares[0]);
  }
  __syncthreads();
  if (threadIdx.x < 8) {  // the powers 1 to 4 of keys, then of values
    const int power = threadIdx.x % 4 + 1, first = threadIdx.x / 4 * kPage;
    double sum = 0.0;
    for (int row = first; row < first + kPage; ++row) {
      const double norm = s.norms[row], square = s.squares[row][0];
      sum = __dadd_rn(sum, power == 1   ? norm
                           : power == 2 ? square
                           : power == 3 ? square * norm
                                        : square * square);
    }
    sums[2 * D + threadIdx.x] = sum;
  }
}

}  // namespace

void write_pages(cudaStream_t stream, const HostLayer& layer, const ChunkPage* chunk, int count,
                 const KeysValues& fresh) {
  if (count == 0) return;
  const WriteArgs args{layer, chunk, fresh};
  const size_t shared_bytes = sizeof(WriteShared) + static_cast<size_t>(layer.tiles.tile_bytes());
  const auto kernel = layer.tiles.element == 2 ? write_kernel<BF16> : write_kernel<float>;
  launch("the launch of write_pages", kernel,
         dim3(static_cast<unsigned>(count), static_cast<unsigned>(layer.tiles.kv_heads)), dim3(kThreads),
         shared_bytes, stream, args);
}

}  // namespace fluxion::device
