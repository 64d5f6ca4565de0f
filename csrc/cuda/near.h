// The near middle: a device ranks blocks by its own metadata, attends to the tiles it has copies of, and
// leaves the others to the CPU (device/far_lists.h).
//
// Metadata of level 0 of the whole pool is in device memory. It is written when a page fills: by `near_write`
// for a prompt's chunk, by `near_keep` for the token of a decode step. So every page of a middle has
// metadata. Copies of tiles lie in slots, in a separate part for each KV head; the second-chance algorithm
// (CLOCK) decides which one makes room. When a tile is written again, so is its copy.
//
// The launches of a decode layer belong to the port's stream, in this order. near_write belongs to passes of
// prefill, which end before the next step begins. So nothing here is read and written at once:
//
//   near_rank    before publish: scores, choice, and the lists of what is near and what is far
//   publish, resident
//   near_attend  attends to what is near and merges it with the residents' result
//   near_keep    copies what this step filled and some of what was far, while the CPU reads it
//   take
#pragma once

#include <cstdint>

#include "cuda/kernels.h"
#include "device/far_lists.h"

namespace fluxion::device {

struct NearShape {
  int32_t layers;
  int32_t pages;      // of the pool
  int32_t max_pages;  // of a request
  int32_t slots;      // of a KV head; a copy of one tile each
  bool together;      // all heads of a group read what one of them chose
  float spread;       // KernelTable::score
};

// The near tiles that a group's heads attend to: the first `count` entries of its row of near_slots.
struct NearTask {
  const void* q;  // [G][D]
  int32_t count;
};

// The step, in device memory.
struct NearStep {
  int32_t batch;  // requests whose blocks the device ranks: all of the port's step, or none
};

// Counts since the start, modulo 2^32, pinned; written by near_keep.
enum NearCount : int { kNearHits, kNearMisses, kNearKept, kNearCounts = 8 };

// The parameters of kernels; passed by value. B: max_requests of the port, H: KV heads, Hq: query heads, G:
// heads of a group.
struct NearView {
  NearShape shape;
  FarShape far;
  char* entries;     // [layers][H][pages][2][D]: metadata of level 0
  int32_t* slot_of;  // [layers][H][pages]: slot of a tile's copy in its head's part; -1: none
  char* tiles;       // [H][slots][2][16][D]
  int32_t* owner;    // [H][slots]: layer * pages + page; -1: free
  uint32_t* used;    // [H][slots]: not 0: used since the hand came by
  uint32_t* hand;    // [H]
  // The step's data.
  NearStep* step;
  int32_t* table;   // [B][max_pages]: physical pages
  int32_t* blk;     // [B]: pages of a block
  int32_t* wanted;  // [B]: blocks that each head of the request reads; 0: none
  // The layer's data.
  float* scores;        // [B][Hq][stride]
  uint32_t* chosen;     // [B][Hq][stride / 32]: a bit a block
  NearTask* tasks;      // [B * H]
  int32_t* near_slots;  // [B * H][max_pages]: of `tiles`, all heads' slots in one row
  uint16_t* masks;  // [B * H][max_pages][G]: 0xffff: the head reads the tile, 0: it does not; unless together
  int32_t* missed;  // [B * H][max_pages]: physical pages
  int32_t* missed_count;
  uint32_t* counts;  // [kNearCounts]
  float *o, *lse;    // [B][Hq][D], [B][Hq]: for near tiles
  char* workspace;   // near_workspace_bytes
  // Pinned.
  char* lists;  // far_bytes(far)
  uint32_t* told;

  __host__ __device__ int64_t stride() const { return (int64_t{shape.max_pages} + 31) / 32 * 32; }
  __host__ __device__ int64_t tile(int layer, int head, int page) const {
    return (int64_t{layer} * far.kv_heads + head) * shape.pages + page;
  }
};

// Owns the device memory of the near middle, for one port and its stream.
class Near {
 public:
  // lists: pinned, far_bytes; told: pinned [kNearCounts]. Throws Failure if memory runs out.
  Near(const Port& port, const NearShape& shape, char* lists, uint32_t* told);
  ~Near();
  Near(const Near&) = delete;
  Near& operator=(const Near&) = delete;

  const NearView& view() const { return view_; }
  // Bytes of device memory.
  int64_t bytes() const { return bytes_; }

  // Sets what a step's requests read: the share budget[b] of their blocks of blk[b] tokens. ranks: false: the
  // CPU chooses. table: [batch][columns]; copied. Call after Port::step.
  void step(cudaStream_t stream, const Port& port, bool ranks, const int32_t* lengths, int batch,
            const int32_t* table, int64_t table_stride, int columns, const int32_t* blk, const float* budget);
  // Drops all copies.
  void forget(cudaStream_t stream);

 private:
  static constexpr int kRing = 4;

  NearView view_{};
  char* memory_ = nullptr;
  int32_t* staged_ = nullptr;
  int64_t staged_ints_ = 0, bytes_ = 0;
  cudaEvent_t copied_[kRing] = {};
  bool used_[kRing] = {};
  int turn_ = 0;

  void release();
};

// Bytes of device memory for the parts of lists of up to max_pages tiles.
int64_t near_workspace_bytes(int groups, int max_pages, int group, int head_dim);

void near_rank(const Near& near, const Port& port, cudaStream_t stream, int layer, int rows, Rows q);
// Merges its result into o, lse: [rows][Hq][D], [rows][Hq], natural log.
void near_attend(const Near& near, const Port& port, cudaStream_t stream, int rows, float scale, float* o,
                 float* lse);
// layer.entries and layer.moments are not read.
void near_keep(const Near& near, const Port& port, cudaStream_t stream, int layer, WindowTiles windows,
               const HostTiles& host);
// Takes the pages that a chunk has filled from the host pool: after write_pages in its stream.
void near_write(const Near& near, const Port& port, cudaStream_t stream, int layer, const HostLayer& host,
                const ChunkPage* chunk, int count);

}  // namespace fluxion::device
