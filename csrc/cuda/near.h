// The near middle: a device that ranks blocks by metadata of its own, attends to the tiles it has copies of,
// and leaves the others to the CPU (device/far_lists.h).
//
// Metadata of level 0 of the whole pool is in device memory, and is written wherever a page fills: by
// `near_write` for a prompt's chunk, by `near_keep` for the token of a decode step. So whatever page lies in
// a middle is known. Copies of tiles lie in slots, each KV head's in a part of its own; the second-chance
// algorithm (CLOCK) decides which one makes room. A tile that is written again is written to its copy, too.
//
// The launches of a decode layer belong to the port's stream, in this order, and near_write to passes of
// prefill, which end before the next step begins. So nothing here is read and written at once:
//
//   near_rank    before publish: scores, choice, and the lists of what is near and what is far
//   publish, resident
//   near_attend  attends to what is near and merges it with the residents' result
//   near_keep    what this step filled, and some of what was far, get copies: the CPU reads it meanwhile
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
  bool together;      // what one head of a group chose, all of them read
  float spread;       // KernelTable::score
};

// What a group's heads attend to of what is near: the first `count` entries of its row of near_slots.
struct NearTask {
  const void* q;  // [G][D]
  int32_t count;
};

// Of a step, in device memory.
struct NearStep {
  int32_t batch;  // requests whose blocks the device ranks: all of the port's step, or none
};

// Counts since the start, modulo 2^32, pinned; written by near_keep.
enum NearCount : int { kNearHits, kNearMisses, kNearKept, kNearCounts = 8 };

// What kernels know; passed by value. B: max_requests of the port, H: KV heads, Hq: query heads, G: heads of
// a group.
struct NearView {
  NearShape shape;
  FarShape far;
  char* entries;     // [layers][H][pages][2][D]: metadata of level 0
  int32_t* slot_of;  // [layers][H][pages]: of a tile's copy among its head's; -1: it has none
  char* tiles;       // [H][slots][2][16][D]
  int32_t* owner;    // [H][slots]: layer * pages + page; -1: nobody
  uint32_t* used;    // [H][slots]: not 0: since the hand came by
  uint32_t* hand;    // [H]
  // The step's.
  NearStep* step;
  int32_t* table;   // [B][max_pages]: physical pages
  int32_t* blk;     // [B]: pages of a block
  int32_t* wanted;  // [B]: blocks that each head of the request reads; 0: none
  // The layer's.
  float* scores;        // [B][Hq][stride]
  uint32_t* chosen;     // [B][Hq][stride / 32]: a bit a block
  NearTask* tasks;      // [B * H]
  int32_t* near_slots;  // [B * H][max_pages]: of `tiles`, all heads' slots in one row
  uint16_t* masks;  // [B * H][max_pages][G]: 0xffff: the head reads the tile, 0: it does not; unless together
  int32_t* missed;  // [B * H][max_pages]: physical pages
  int32_t* missed_count;
  uint32_t* counts;  // [kNearCounts]
  float *o, *lse;    // [B][Hq][D], [B][Hq]: of what is near
  char* workspace;   // of near_workspace_bytes
  // Pinned.
  char* lists;  // of far_bytes(far)
  uint32_t* told;

  __host__ __device__ int64_t stride() const { return (int64_t{shape.max_pages} + 31) / 32 * 32; }
  __host__ __device__ int64_t tile(int layer, int head, int page) const {
    return (int64_t{layer} * far.kv_heads + head) * shape.pages + page;
  }
};

// Owns the device's memory of it. Of one port and its stream.
class Near {
 public:
  // lists: pinned, of far_bytes; told: pinned [kNearCounts]. Throws Failure where memory runs out.
  Near(const Port& port, const NearShape& shape, char* lists, uint32_t* told);
  ~Near();
  Near(const Near&) = delete;
  Near& operator=(const Near&) = delete;

  const NearView& view() const { return view_; }
  // Of device memory.
  int64_t bytes() const { return bytes_; }

  // What a step's requests read: blocks of blk[b] tokens, the share budget[b] of them. ranks: false: the CPU
  // chooses. table: [batch][columns]; copied. After Port::step.
  void step(cudaStream_t stream, const Port& port, bool ranks, const int32_t* lengths, int batch,
            const int32_t* table, int64_t table_stride, int columns, const int32_t* blk, const float* budget);
  // No tile has a copy any more.
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

// Device memory for the parts that lists of up to max_pages tiles are cut into.
int64_t near_workspace_bytes(int groups, int max_pages, int group, int head_dim);

void near_rank(const Near& near, const Port& port, cudaStream_t stream, int layer, int rows, Rows q);
// o, lse: [rows][Hq][D], [rows][Hq], natural log: merged into them.
void near_attend(const Near& near, const Port& port, cudaStream_t stream, int rows, float scale, float* o,
                 float* lse);
// layer.entries and layer.moments are not read.
void near_keep(const Near& near, const Port& port, cudaStream_t stream, int layer, WindowTiles windows,
               const HostTiles& host);
// The pages of a chunk that are full now, as the host pool has them: behind write_pages in its stream.
void near_write(const Near& near, const Port& port, cudaStream_t stream, int layer, const HostLayer& host,
                const ChunkPage* chunk, int count);

}  // namespace fluxion::device
