// The host pool: every tile of every layer, with metadata and moments.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/api.h"
#include "kernels/table.h"
#include "runtime/canary.h"
#include "runtime/host_memory.h"
#include "runtime/pool_shape.h"
#include "runtime/worker_pool.h"

namespace fluxion {

// Bytes a HostPool of this shape maps. Throws std::invalid_argument for a shape the kernels cannot serve.
int64_t pool_bytes(const PoolShape& shape);

// Keys or values of some tokens: element [token][head][0..D) at data + token * token_stride + head *
// head_stride (strides in bytes), D contiguous.
struct TokenView {
  const char* data;
  int64_t token_stride;
  int64_t head_stride;

  const char* at(int64_t token, int64_t head) const {
    return data + token * token_stride + head * head_stride;
  }
};

// Device windows of one layer, KV dtype: [kv_heads][rows * slot_pages][2][16][D]. They hold tokens as the
// pool stores them, which with 8-bit elements are not exactly what was appended. Row r owns slot_pages pages
// from r * slot_pages: the sinks, then a ring of window + 16 tokens.
struct WindowView {
  char* data = nullptr;
  int64_t head_stride = 0;  // bytes
  int rows = 0;
  int sink_pages = 0;
  int ring_pages = 0;

  // The ring has one page more than the window has tokens, because a window begins with a whole page.
  static int ring_of(int window) { return window / kPage + 1; }
  int slot_pages() const { return sink_pages + ring_pages; }
  int window() const { return (ring_pages - 1) * kPage; }
  // Page of the window, within one head, that holds logical page `page` of row `row`.
  int64_t slot(int row, int page) const {
    const int in_row = page < sink_pages ? page : sink_pages + (page - sink_pages) % ring_pages;
    return static_cast<int64_t>(row) * slot_pages() + in_row;
  }
};

// First logical page of the window of a request of n tokens: everything from sink_pages up to it is the
// middle.
inline int window_start_page(int n, int sink_pages, int window) {
  const int pages = n > window ? (n - window) / kPage : 0;
  return pages > sink_pages ? pages : sink_pages;
}

// Layout: see PoolShape and layer_.
//
// A page is full when its 16 tokens are written. Then its metadata and moments are computed, its sketch if
// the shape has sketches, and the coarse entry of level j if it is the last page of its block. A coarse entry
// lives at [last page >> j] and is tagged with that page. After a collision the later writer has the entry,
// and the other block is scored from its pages, bit-identically. One exception: after two requests prefill
// the same prefix at once, SGLang rebinds one to the other's pages. That request's earlier entries and
// moments describe its own copies of the tokens, which rounding may set apart. A stale tag is harmless: a
// block is looked up by its last page, which is full and on the request's path, and that page rewrote the
// entry when it became full.
//
// With a canary, every writer and every reader of tiles, entries and sketches reports to it. Not checked are
// reads by policies that inspect keys, by measurements for predictors, and by devices.
//
// append and adopt must not run together with readers of the same layer. The engine, which appends and reads
// in one step, uses the four parts of an append below.
class HostPool {
 public:
  // spread: how blocks are scored (KernelTable::score). isa: a name of available_isas(), or "" for the best
  // one. Throws std::invalid_argument or std::runtime_error.
  HostPool(std::shared_ptr<WorkerPool> workers, const PoolShape& shape, float spread, const std::string& isa);

  const PoolShape& shape() const { return shape_; }
  float spread() const { return spread_; }
  const KernelTable& kernels() const { return *kernels_; }
  // Kernels of the same ISA for tiles of the KV dtype, which windows have.
  const KernelTable& window_kernels() const { return *window_kernels_; }
  WorkerPool& workers() const { return *workers_; }

  char* tiles(int layer, int head) const {
    return layer_[layer].tiles + static_cast<int64_t>(head) * shape_.pages * shape_.tile_bytes();
  }
  char* tile(int layer, int head, int page) const { return tiles(layer, head) + page * shape_.tile_bytes(); }
  char* entries(int layer, int head, int level) const {
    return layer_[layer].meta[level] + head * shape_.entries(level) * shape_.entry_bytes();
  }
  char* entry(int layer, int head, int level, int page) const {
    return entries(layer, head, level) + (page >> level) * shape_.entry_bytes();
  }
  int32_t* tags(int layer, int level) const { return layer_[layer].tags[level]; }  // level 1..3
  double* moments(int layer, int head, int page) const {
    return layer_[layer].moments + (static_cast<int64_t>(head) * shape_.pages + page) * shape_.moments_len();
  }
  // The sketches of a head's pages, by page; only if the shape has sketches.
  char* sketches(int layer, int head) const {
    return layer_[layer].sketches + int64_t{head} * shape_.pages * shape_.sketch_bytes();
  }
  char* tiles_base(int layer) const { return layer_[layer].tiles; }
  char* meta_base(int layer, int level) const { return layer_[layer].meta[level]; }
  double* moments_base(int layer) const { return layer_[layer].moments; }
  // Everything above, for all layers: a device must pin it to read it.
  const HostMemory& memory() const { return memory_; }

  // Has this share of the reads of tiles, metadata and sketches checked. Called before anything is written.
  // Throws as Canary does.
  void guard(double share) { canary_ = std::make_unique<Canary>(shape_, share); }
  // nullptr: nothing is checked.
  const Canary* canary() const { return canary_.get(); }

  // Writes tokens start..start+count-1 of the request whose logical page i is pages[i], n_pages of them.
  // Positions before start are only read. Throws std::invalid_argument before anything is written.
  void append(int layer, const int32_t* pages, int64_t n_pages, int64_t start, int64_t count, TokenView k,
              TokenView v);
  // append() for tokens that another writer has put into their tiles. described: the writer, a device, has
  // also written the metadata and the own moments of every page that they fill; sketches are made here all
  // the same. Call it once for every such write, before the tokens are read. Same errors.
  void adopt(int layer, const int32_t* pages, int64_t n_pages, int64_t start, int64_t count, bool described);
  // Throws std::invalid_argument where append() would, for any layer.
  void check_tokens(const int32_t* pages, int64_t n_pages, int64_t start, int64_t count) const;
  // Copies the resident tiles (sinks and window) of a request of n tokens into a row of the windows.
  void fill_window(int layer, const WindowView& window, int row, int n, const int32_t* pages,
                   int64_t n_pages);
  // out[head][i * 16 .. i * 16 + 15][D] = keys, values of pages[i], KV dtype. Strides in bytes.
  void gather(int layer, const int32_t* pages, int64_t count, char* k, int64_t k_head_stride, char* v,
              int64_t v_head_stride);

  // The canary forgets all tokens of these pages.
  void forget_sums(const int32_t* pages, int64_t count);

  // The four parts of an append, for one layer. Both seals read what was written before, and throw
  // CorruptMemory only when all is done. The request that appended then ends; no other request has the page.
  void write_token(int layer, int head, int page, int offset, const char* k, const char* v) const;
  // Copies token `offset` of a tile, as it is stored, to the same place of a KV-dtype tile `to`.
  void read_token(int layer, int head, int page, int offset, char* to) const;
  // Writes metadata of level 0, moments and sketch of logical page `logical`, which is full. Writes nothing
  // that belongs to another page, so other pages and coarse entries may be read meanwhile.
  void seal_page(int layer, int head, const int32_t* pages, int logical) const {
    describe_page(layer, head, pages[logical]);
    chain_page(layer, head, pages, logical);
    if (canary_ != nullptr) canary_->read_tiles(*this, layer, head, pages + logical, kPage);
  }
  // Writes the coarse entries whose last page is `logical`, for one head. May overwrite an entry in use.
  void seal_blocks(int layer, int head, const int32_t* pages, int logical) const;
  // Writes their tags; once a layer.
  void tag_blocks(int layer, const int32_t* pages, int logical) const;

  // Counts writes to tiles from now on. Called while nothing appends.
  void count_writes();
  // A number that changes before every write to the tile (for a device: in adopt, before the tokens are
  // read). If it is the same before and after a copy of the tile, the copy is of one state. The tile's writer
  // may go on meanwhile. Needs count_writes().
  uint32_t writes(int layer, int head, int page) const {
    return std::atomic_ref(writes_[tile_number(layer, head, page)]).load(std::memory_order_acquire);
  }
  // Prefetches for writes().
  void expect_writes(int layer, int head, int page) const {
    __builtin_prefetch(&writes_[tile_number(layer, head, page)]);
  }
  int64_t tile_number(int layer, int head, int page) const {
    return (int64_t{layer} * shape_.kv_heads + head) * shape_.pages + page;
  }

  // "" or what is wrong with the ids pages[0..count).
  FLUXION_API std::string check_pages(const int32_t* pages, int64_t count) const;
  FLUXION_API void check_layer(int layer) const;

 private:
  struct Layer {
    char* tiles;
    char* meta[kLevels];
    int32_t* tags[kLevels];  // [0] is unused
    double* moments;
    char* sketches;  // [kv_heads][pages], if the shape has sketches
  };

  // The two parts of seal_page. The first depends on the page alone, on any path: metadata, and the page's
  // own moments in the place of the sums. The second turns these into running sums, once.
  void describe_page(int layer, int head, int page) const;
  void sketch_page(int layer, int head, int page) const;
  void chain_page(int layer, int head, const int32_t* pages, int logical) const;
  void count_write(int layer, int head, int page) const;
  void vouch(int layer, int head, const int32_t* pages, int64_t start, int64_t count) const;
  void first_touch(int worker) const;

  std::shared_ptr<WorkerPool> workers_;
  PoolShape shape_;
  float spread_;
  const KernelTable *kernels_, *window_kernels_;
  HostMemory memory_;
  std::vector<Layer> layer_;
  HostMemory write_counts_;
  std::unique_ptr<Canary> canary_;
  uint32_t* writes_ = nullptr;  // [layers][kv_heads][pages]; nullptr: not counted
};

}  // namespace fluxion
