#include "runtime/pool.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace fluxion {
namespace {

// Calls visit(layer, kind, offset) for every section of the mapping in order; kinds: 0 tiles, 1..4 meta of
// level kind - 1, 5..7 tags of level kind - 4, 8 moments, 9 sketches. Returns the total.
template <typename Visit>
int64_t lay_out(const PoolShape& s, Visit visit) {
  int64_t offset = 0;
  const auto section = [&](int layer, int kind, int64_t bytes) {
    visit(layer, kind, offset);
    offset += round_up(bytes, kSmallPage);
  };
  for (int l = 0; l < s.layers; ++l) {
    section(l, 0, s.head_pages() * s.tile_bytes());
    for (int j = 0; j < kLevels; ++j) section(l, 1 + j, s.kv_heads * s.entries(j) * s.entry_bytes());
    for (int j = 1; j < kLevels; ++j) section(l, 4 + j, s.entries(j) * sizeof(int32_t));
    section(l, 8, s.head_pages() * s.moments_len() * sizeof(double));
    if (s.sketched) section(l, 9, s.head_pages() * s.sketch_bytes());
  }
  return round_up(offset, kHugePage);
}

[[noreturn]] void refuse(const std::string& sentence) { throw std::invalid_argument(sentence); }

constexpr int kAdoptPages = 64;  // enough to amortise the hand-out
constexpr int64_t kMaxPages = std::numeric_limits<int32_t>::max() / kPage;

void check_shape(const PoolShape& s) {
  if (s.layers < 1 || s.layers > 4096)
    refuse("The pool has " + std::to_string(s.layers) + " layers; it needs 1 to 4096.");
  if (s.kv_heads < 1 || s.kv_heads > 1024) {
    refuse("The pool has " + std::to_string(s.kv_heads) + " KV heads; it needs 1 to 1024.");
  }
  // Page 0 is padding; token numbers are int32.
  if (s.pages < 2 || s.pages > kMaxPages) {
    refuse("The pool has " + std::to_string(s.pages) + " pages; it needs 2 to " + std::to_string(kMaxPages) +
           ".");
  }
  if (s.head_dim < kMinHeadDim || s.head_dim > kMaxHeadDim || s.head_dim % 16 != 0) {
    refuse("head_dim is " + std::to_string(s.head_dim) +
           "; the kernels serve multiples of 16 from 32 to 256.");
  }
  if (s.dtype != DType::kF32 && s.dtype != DType::kBF16 && s.dtype != DType::kInt8) {
    refuse("What is stored must be 0 (float32), 1 (bfloat16) or 2 (int8), not " +
           std::to_string(static_cast<int>(s.dtype)) + ".");
  }
  // Tiles are more than half of the pool. In floating point, because the product may overflow an int64_t.
  if (2.0 * s.layers * s.kv_heads * s.pages * static_cast<double>(s.tile_bytes()) > 1e18)
    refuse("The pool would have more bytes than a machine has addresses for; take fewer pages.");
  if (s.sink_pages < 0) refuse("sink_pages is " + std::to_string(s.sink_pages) + "; it cannot be negative.");
}

const KernelTable* pick_kernels(const std::string& isa, DType dtype) {
  if (isa.empty()) return best_kernel_table(dtype);
  if (const KernelTable* table = kernel_table(isa.c_str(), dtype)) return table;
  const char* names[16];
  const int count = available_isas(names, 16);
  std::string legal;
  for (int i = 0; i < count; ++i) legal += (i ? ", " : "") + std::string(names[i]);
  refuse("This CPU cannot run the instruction set \"" + isa + "\"; choose one of " + legal + ".");
}

}  // namespace

int64_t pool_bytes(const PoolShape& shape) {
  check_shape(shape);
  return lay_out(shape, [](int, int, int64_t) {});
}

HostPool::HostPool(std::shared_ptr<WorkerPool> workers, const PoolShape& shape, float spread,
                   const std::string& isa)
    : workers_(std::move(workers)), shape_(shape), spread_(spread) {
  if (!(spread > 0 && spread <= 1))
    refuse("spread is " + std::to_string(spread) + "; it must be above 0 and at most 1.");
  const int64_t bytes = pool_bytes(shape_);
  kernels_ = pick_kernels(isa, shape_.dtype);
  window_kernels_ = kernel_table(kernels_->isa, kv_dtype(shape_.dtype));
  memory_ = HostMemory(bytes);
  layer_.resize(shape_.layers);
  lay_out(shape_, [this](int layer, int kind, int64_t offset) {
    char* at = memory_.data() + offset;
    Layer& l = layer_[layer];
    if (kind == 0) {
      l.tiles = at;
    } else if (kind <= 4) {
      l.meta[kind - 1] = at;
    } else if (kind <= 7) {
      l.tags[kind - 4] = reinterpret_cast<int32_t*>(at);
    } else if (kind == 8) {
      l.moments = reinterpret_cast<double*>(at);
    } else {
      l.sketches = at;
    }
  });
  // Threads that are not pinned may all be on one node.
  const int touching = workers_->pinned() ? std::min(workers_->size(), shape_.kv_heads) : 0;
  const std::vector<NumaNode> nodes = nodes_to_interleave(read_topology(), workers_->cores(), touching);
  if (!nodes.empty()) touch_in_turn(memory_, nodes);
  const auto body = [](void* self, int worker) { static_cast<HostPool*>(self)->first_touch(worker); };
  if (!workers_->each(body, this)) {
    throw std::runtime_error(
        "A pool cannot be created while the workers run a layer; finish the layer first.");
  }
}

void HostPool::first_touch(int worker) const {
  const auto region = [](char* base, int64_t bytes) { touch(base, base + bytes); };
  for (int l = 0; l < shape_.layers; ++l) {
    for (int h = worker; h < shape_.kv_heads; h += workers_->size()) {
      region(tiles(l, h), shape_.pages * shape_.tile_bytes());
      for (int j = 0; j < kLevels; ++j) region(entries(l, h, j), shape_.entries(j) * shape_.entry_bytes());
      region(reinterpret_cast<char*>(moments(l, h, 0)), shape_.pages * shape_.moments_len() * sizeof(double));
      if (shape_.sketched) region(sketches(l, h), shape_.pages * shape_.sketch_bytes());
    }
    if (worker != 0) continue;
    for (int j = 1; j < kLevels; ++j) std::fill_n(tags(l, j), shape_.entries(j), -1);
  }
}

void HostPool::count_writes() {
  if (writes_ != nullptr) return;
  write_counts_ = HostMemory(shape_.layers * shape_.head_pages() * static_cast<int64_t>(sizeof(uint32_t)));
  writes_ = reinterpret_cast<uint32_t*>(write_counts_.data());
}

std::string HostPool::check_pages(const int32_t* pages, int64_t count) const {
  // One comparison covers both ends, so there is no branch: ids below 1 wrap to huge numbers.
  const uint32_t limit = static_cast<uint32_t>(shape_.pages) - 1;
  bool good = true;
  for (int64_t i = 0; i < count; ++i) good &= static_cast<uint32_t>(pages[i]) - 1u < limit;
  if (good) return "";
  int64_t at = 0;
  while (static_cast<uint32_t>(pages[at]) - 1u < limit) ++at;
  return "its logical page " + std::to_string(at) + " has the page id " + std::to_string(pages[at]) +
         ", and ids must be between 1 and " + std::to_string(limit);
}

void HostPool::check_layer(int layer) const {
  if (layer < 0 || layer >= shape_.layers) {
    refuse("The pool has no layer " + std::to_string(layer) + "; its layers are 0 to " +
           std::to_string(shape_.layers - 1) + ".");
  }
}

void HostPool::check_tokens(const int32_t* pages, int64_t n_pages, int64_t start, int64_t count) const {
  // Not by start + count, which may overflow.
  if (start < 0 || count < 0 || start > n_pages * kPage - count) {
    refuse(std::to_string(count) + " tokens were to be appended at position " + std::to_string(start) +
           ", but the " + std::to_string(n_pages) + " pages given hold positions 0 to " +
           std::to_string(n_pages * kPage) + "; pass every page of the request.");
  }
  const std::string wrong = check_pages(pages, (start + count + kPage - 1) / kPage);
  if (!wrong.empty()) refuse("The request cannot be appended to: " + wrong + ".");
}

void HostPool::count_write(int layer, int head, int page) const {
  if (writes_ == nullptr) return;
  // A tile has one writer at a time. The fence orders the count before the write that it announces.
  const std::atomic_ref count(writes_[tile_number(layer, head, page)]);
  count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
}

void HostPool::write_token(int layer, int head, int page, int offset, const char* k, const char* v) const {
  count_write(layer, head, page);
  kernels_->write_token(k, v, shape_.head_dim, offset, tile(layer, head, page));
  if (canary_ == nullptr) return;
  // The canary gets the token as it should be stored, not as memory holds it.
  alignas(64) char apart[kMaxTileBytes];
  kernels_->write_token(k, v, shape_.head_dim, offset, apart);
  canary_->wrote_token(layer, head, page, offset, apart);
}

void HostPool::read_token(int layer, int head, int page, int offset, char* to) const {
  kernels_->read_token(tile(layer, head, page), shape_.head_dim, offset, to);
}

void HostPool::describe_page(int layer, int head, int page) const {
  const char* full = tile(layer, head, page);
  kernels_->page_minmax(full, shape_.head_dim, entry(layer, head, 0, page));
  kernels_->page_moments(full, shape_.head_dim, moments(layer, head, page));
  sketch_page(layer, head, page);
  if (canary_ != nullptr) canary_->wrote_entry(layer, head, 0, page, entry(layer, head, 0, page));
}

void HostPool::sketch_page(int layer, int head, int page) const {
  if (!shape_.sketched) return;
  char* to = sketches(layer, head) + page * shape_.sketch_bytes();
  kernels_->write_sketch(tile(layer, head, page), shape_.head_dim, to);
  if (canary_ != nullptr) canary_->wrote_sketch(layer, head, page, to);
}

void HostPool::chain_page(int layer, int head, const int32_t* pages, int logical) const {
  double* sums = moments(layer, head, pages[logical]);
  if (logical < shape_.sink_pages) {
    std::fill_n(sums, shape_.moments_len(), 0.0);
    return;
  }
  if (logical == 0) return;
  const double* before = moments(layer, head, pages[logical - 1]);
  for (int64_t i = 0; i < shape_.moments_len(); ++i) sums[i] += before[i];
}

void HostPool::seal_blocks(int layer, int head, const int32_t* pages, int logical) const {
  int first = logical + 1;
  for (int j = 1; j < kLevels && (logical + 1) % (1 << j) == 0; ++j) {
    if (logical < shape_.sink_pages) return;  // a block of sinks only is never looked up
    first = std::max(logical + 1 - (1 << j), shape_.sink_pages);
    char* to = entry(layer, head, j, pages[logical]);
    std::memcpy(to, entry(layer, head, 0, pages[first]), shape_.entry_bytes());
    for (int i = first + 1; i <= logical; ++i) {
      kernels_->merge_minmax(to, entry(layer, head, 0, pages[i]), shape_.head_dim);
    }
    if (canary_ != nullptr) canary_->wrote_entry(layer, head, j, pages[logical], to);
  }
  // The largest block includes the pages of the others.
  if (canary_ != nullptr) canary_->read_entries(*this, layer, head, 0, pages + first, 1, logical + 1 - first);
}

void HostPool::tag_blocks(int layer, const int32_t* pages, int logical) const {
  if (logical < shape_.sink_pages) return;
  for (int j = 1; j < kLevels && (logical + 1) % (1 << j) == 0; ++j) {
    tags(layer, j)[pages[logical] >> j] = pages[logical];
  }
}

void HostPool::append(int layer, const int32_t* pages, int64_t n_pages, int64_t start, int64_t count,
                      TokenView k, TokenView v) {
  check_layer(layer);
  check_tokens(pages, n_pages, start, count);
  struct Job {
    const HostPool* pool;
    int layer;
    const int32_t* pages;
    int64_t start, count;
    TokenView k, v;
    FirstFailure* failure;  // first of any head; the other heads are still written
  };
  FirstFailure failure;
  Job job{this, layer, pages, start, count, k, v, &failure};
  const auto head_body = [](void* arg, int h) {
    const Job& j = *static_cast<Job*>(arg);
    for (int64_t t = 0; t < j.count; ++t) {
      const int64_t position = j.start + t;
      const int logical = static_cast<int>(position / kPage), offset = static_cast<int>(position % kPage);
      j.pool->write_token(j.layer, h, j.pages[logical], offset, j.k.at(t, h), j.v.at(t, h));
      if (offset != kPage - 1) continue;
      j.failure->guard([&] { j.pool->seal_page(j.layer, h, j.pages, logical); });
      j.failure->guard([&] { j.pool->seal_blocks(j.layer, h, j.pages, logical); });
    }
  };
  failure.guard([&] { workers_->parallel_for(shape_.kv_heads, head_body, &job); });
  // Every head sealed its blocks in this order, so after a collision tag and entries have the same last
  // writer. Tags are written even after a failure: an entry with a new owner must not keep the old tag.
  for (int64_t p = start / kPage; p < (start + count) / kPage; ++p)
    tag_blocks(layer, pages, static_cast<int>(p));
  failure.rethrow();
}

// Has the canary take the present contents as valid, because another writer wrote them.
void HostPool::vouch(int layer, int head, const int32_t* pages, int64_t start, int64_t count) const {
  for (int64_t at = start; at < start + count; ++at) {
    const int page = pages[at / kPage], offset = static_cast<int>(at % kPage);
    canary_->wrote_token(layer, head, page, offset, tile(layer, head, page));
    if (offset == kPage - 1) canary_->wrote_entry(layer, head, 0, page, entry(layer, head, 0, page));
  }
}

void HostPool::forget_sums(const int32_t* pages, int64_t count) {
  const std::string wrong = check_pages(pages, count);
  if (!wrong.empty()) refuse("Sums of the pages cannot be forgotten: " + wrong + ".");
  if (canary_ == nullptr) return;
  for (int l = 0; l < shape_.layers; ++l) {
    for (int h = 0; h < shape_.kv_heads; ++h) {
      for (int64_t i = 0; i < count; ++i) canary_->forget_tokens(l, h, pages[i]);
    }
  }
}

void HostPool::adopt(int layer, const int32_t* pages, int64_t n_pages, int64_t start, int64_t count,
                     bool described) {
  check_layer(layer);
  check_tokens(pages, n_pages, start, count);
  struct Job {
    const HostPool* pool;
    int layer;
    const int32_t* pages;
    int64_t start, count;
    int first, full, stop;  // logical pages: first written; end of the filled; end of the written
    bool described;
    FirstFailure* failure;  // as in append()
  };
  FirstFailure failure;
  Job job{this,
          layer,
          pages,
          start,
          count,
          static_cast<int>(start / kPage),
          static_cast<int>((start + count) / kPage),
          static_cast<int>((start + count + kPage - 1) / kPage),
          described,
          &failure};
  // What depends on a page alone is split by pages, because there may be more workers than heads.
  const auto pages_body = [](void* arg, int item) {
    const Job& j = *static_cast<Job*>(arg);
    const int heads = j.pool->shape().kv_heads, begin = j.first + item / heads * kAdoptPages;
    for (int p = begin; p < std::min(begin + kAdoptPages, j.full); ++p) {
      // A device describes pages, and makes no sketches.
      if (j.described) {
        j.pool->sketch_page(j.layer, item % heads, j.pages[p]);
      } else {
        j.pool->describe_page(j.layer, item % heads, j.pages[p]);
      }
    }
  };
  const auto head_body = [](void* arg, int h) {
    const Job& j = *static_cast<Job*>(arg);
    for (int p = j.first; p < j.stop; ++p) j.pool->count_write(j.layer, h, j.pages[p]);
    if (j.pool->canary_ != nullptr) j.pool->vouch(j.layer, h, j.pages, j.start, j.count);
    for (int p = j.first; p < j.full; ++p) {
      j.pool->chain_page(j.layer, h, j.pages, p);
      j.failure->guard([&] { j.pool->seal_blocks(j.layer, h, j.pages, p); });
    }
  };
  if (const int full = job.full - job.first; (!described || shape_.sketched) && full > 0) {
    const int items = (full + kAdoptPages - 1) / kAdoptPages * shape_.kv_heads;
    failure.guard([&] { workers_->parallel_for(items, pages_body, &job); });
  }
  failure.guard([&] { workers_->parallel_for(shape_.kv_heads, head_body, &job); });
  for (int p = job.first; p < job.full; ++p) tag_blocks(layer, pages, p);
  failure.rethrow();
}

void HostPool::fill_window(int layer, const WindowView& window, int row, int n, const int32_t* pages,
                           int64_t n_pages) {
  check_layer(layer);
  if (row < 0 || row >= window.rows) {
    refuse("The windows have no row " + std::to_string(row) + "; there are " + std::to_string(window.rows) +
           ".");
  }
  if (n < 0 || n > n_pages * kPage) {
    refuse("A row was to be filled with " + std::to_string(n) + " tokens, but the " +
           std::to_string(n_pages) + " pages given hold " + std::to_string(n_pages * kPage) +
           "; pass every page of the request.");
  }
  const std::string wrong = check_pages(pages, (n + kPage - 1) / kPage);
  if (!wrong.empty()) refuse("The row cannot be filled: " + wrong + ".");
  struct Job {
    const HostPool* pool;
    int layer;
    const WindowView* window;
    int row, n;
    const int32_t* pages;
  } job{this, layer, &window, row, n, pages};
  const auto head_body = [](void* arg, int h) {
    const Job& j = *static_cast<Job*>(arg);
    const PoolShape& shape = j.pool->shape();
    const WindowView& w = *j.window;
    const int last = (j.n + kPage - 1) / kPage;
    const int start = window_start_page(j.n, w.sink_pages, w.window());
    const Canary* canary = j.pool->canary();
    const auto copy = [&](int p) {
      const int tokens = std::min(kPage, j.n - p * kPage);
      j.pool->kernels().read_tile(j.pool->tile(j.layer, h, j.pages[p]), shape.head_dim, tokens,
                                  w.data + h * w.head_stride + w.slot(j.row, p) * shape.window_tile_bytes());
      if (canary != nullptr) canary->read_tiles(*j.pool, j.layer, h, &j.pages[p], tokens);
    };
    for (int p = 0; p < std::min(w.sink_pages, last); ++p) copy(p);
    for (int p = start; p < last; ++p) copy(p);
  };
  workers_->parallel_for(shape_.kv_heads, head_body, &job);
}

void HostPool::gather(int layer, const int32_t* pages, int64_t count, char* k, int64_t k_head_stride, char* v,
                      int64_t v_head_stride) {
  check_layer(layer);
  const std::string wrong = check_pages(pages, count);
  if (!wrong.empty()) refuse("The pages cannot be gathered: " + wrong + ".");
  constexpr int kChunk = 64;  // pages an item: enough to amortise the hand-out, few enough to balance a head
  struct Job {
    const HostPool* pool;
    int layer;
    const int32_t* pages;
    int64_t count, chunks;
    char *k, *v;
    int64_t k_stride, v_stride;
  } job{this, layer, pages, count, (count + kChunk - 1) / kChunk, k, v, k_head_stride, v_head_stride};
  const auto chunk_body = [](void* arg, int item) {
    const Job& j = *static_cast<Job*>(arg);
    const int64_t h = item / j.chunks, first = item % j.chunks * kChunk;
    const PoolShape& shape = j.pool->shape();
    const int64_t half = shape.window_tile_bytes() / 2;
    alignas(64) char read[kMaxTileBytes];
    for (int64_t i = first; i < std::min(first + kChunk, j.count); ++i) {
      const char* from = j.pool->tile(j.layer, static_cast<int>(h), j.pages[i]);
      j.pool->kernels().read_tile(from, shape.head_dim, kPage, read);
      std::memcpy(j.k + h * j.k_stride + i * half, read, half);
      std::memcpy(j.v + h * j.v_stride + i * half, read + half, half);
    }
  };
  workers_->parallel_for(static_cast<int>(shape_.kv_heads * job.chunks), chunk_body, &job);
}

}  // namespace fluxion
