#include "prefill/prefill.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "prefill/choose.h"

namespace fluxion {
namespace {

// The least number of items for each worker, if there is work for them, so that the last item does not hold
// up all.
constexpr int64_t kItemsPerWorker = 4;
// Tokens of a list that justify an item of their own.
constexpr int64_t kLeastKeys = 1024;

// In a sparse prefill: tokens before a block, and at the end of the chunk, that are always read; and the
// distance between the queries that choose.
constexpr int64_t kNear = 256, kLast = 256;
constexpr int kAskEvery = 8;
// Tokens that the bits of a word can name.
constexpr int kLargestTree = 64;
// The share of its weight that a query needs, if the budget allows.
constexpr float kKeep = 0.98f;

// An item is a block of queries of one KV head and a stretch of what they attend to.
class ChunkWork {
 public:
  ChunkWork(const HostPool& pool, const Chunk& chunk) : pool_(pool), chunk_(chunk) {
    const PoolShape& s = pool.shape();
    group_ = chunk.q_heads / s.kv_heads;
    const int64_t wanted = kItemsPerWorker * pool.workers().size();
    const int64_t most = std::max(kExtendRows / group_, 1);
    // Small blocks lay out more keys in total.
    const int64_t fewest = (chunk.tokens + most - 1) / most;
    block_ = static_cast<int>((chunk.tokens + fewest - 1) / fewest);
    blocks_ = (chunk.tokens + block_ - 1) / block_;
    const int64_t keys = chunk.start + chunk.tokens, items = blocks_ * s.kv_heads;
    windowed_ = chunk.window < keys;
    const bool sparse = chunk.budget < 1 && keys > kNear + kExtendKeys && !windowed_ && !chunk.tree;
    if (!sparse && !windowed_) {
      stretches_ = std::clamp<int64_t>(wanted / items, 1, std::max<int64_t>(keys / kLeastKeys, 1));
    }
    const int64_t tiles = (keys + kExtendKeys - 1) / kExtendKeys;
    stretch_ = (tiles + stretches_ - 1) / stretches_ * kExtendKeys;
    const int64_t rows = int64_t{block_} * group_;
    scratch_bytes_ = round_up(extend_scratch_bytes(static_cast<int>(rows), s.head_dim), 64);
    part_floats_ = rows * (s.head_dim + 1);
    scratch_.reset(new char[scratch_bytes_ * pool.workers().size()]);
    parts_.reset(new float[part_floats_ * (stretches_ == 1 ? pool.workers().size() : items * stretches_)]);
    if (sparse) lists_.resize(pool.workers().size());
    for (List& list : lists_) {
      list.weights.resize((block_ / kAskEvery + 1) * group_ * (keys / kExtendKeys));
      list.rank.resize(keys / kExtendKeys);
      list.pages.resize(keys / kPage + 1);
    }
  }

  double run() {
    const auto attend = [](void* self, int worker) { static_cast<ChunkWork*>(self)->attend(worker); };
    launch(attend);
    if (stretches_ == 1) return static_cast<double>(read_) / static_cast<double>(there_);
    next_ = 0;
    const auto merge = [](void* self, int) { static_cast<ChunkWork*>(self)->merge(); };
    launch(merge);
    return 1;
  }

 private:
  void launch(WorkerPool::Fn fn) {
    WorkerPool& workers = pool_.workers();
    if (workers.size() > 1 && workers.launch(fn, this)) {
      workers.join();
    } else {
      fn(this, 0);
    }
  }

  // A block of queries. The last ones are taken first: they have most to attend to.
  struct Block {
    int head;
    int64_t first, tokens;  // of the chunk
  };
  Block block(int64_t i) const {
    const int64_t b = blocks_ - 1 - i / pool_.shape().kv_heads;
    const int64_t first = b * block_;
    return {static_cast<int>(i % pool_.shape().kv_heads), first,
            std::min<int64_t>(block_, chunk_.tokens - first)};
  }

  void attend(int worker) {
    const PoolShape& s = pool_.shape();
    const int64_t items = blocks_ * s.kv_heads * stretches_;
    for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items;) {
      const Block at = block(item / stretches_);
      const int64_t from = windowed_ ? window_page(at) * kPage : item % stretches_ * stretch_;
      const int64_t before = chunk_.start + at.first - from;
      ExtendArgs args;
      args.q = chunk_.q + at.first * chunk_.q_stride + int64_t{at.head} * group_ * s.token_bytes();
      args.q_stride = chunk_.q_stride;
      args.tokens = static_cast<int>(at.tokens);
      args.G = group_;
      args.D = s.head_dim;
      args.scale = chunk_.scale;
      args.tiles = pool_.tiles(chunk_.layer, at.head);
      args.pages = chunk_.pages + from / kPage;
      args.keys = static_cast<int>(std::clamp<int64_t>(before + at.tokens, 0, stretch_));
      args.first = static_cast<int>(before);
      args.window = chunk_.window;
      if (chunk_.tree != nullptr) {
        args.tree = chunk_.tree + at.first;
        args.root = static_cast<int>(chunk_.start - from);
      }
      if (!lists_.empty()) choose(at, &args, &lists_[worker]);
      read_.fetch_add(args.keys, std::memory_order_relaxed);
      there_.fetch_add(before + at.tokens, std::memory_order_relaxed);
      float* o = part(stretches_ == 1 ? worker : item);
      float* lse = o + at.tokens * group_ * s.head_dim;
      pool_.kernels().extend(args, scratch(worker), o, lse);
      if (const Canary* canary = pool_.canary()) {
        const int64_t filled = std::min<int64_t>(args.keys, std::max<int64_t>(args.first + args.tokens, 0));
        canary->read_tiles(pool_, chunk_.layer, at.head, args.pages, filled);
      }
      if (stretches_ == 1) write(at, o, lse);
    }
  }

  // The page in which the window of a block's first token begins.
  int64_t window_page(const Block& at) const {
    const int64_t first = chunk_.tree == nullptr ? at.first : 0;
    return std::max<int64_t>(chunk_.start + first + 1 - chunk_.window, 0) / kPage;
  }

  // The list of one worker, and its scratch.
  struct List {
    std::vector<float> weights;  // [rows][blocks]
    std::vector<uint16_t> rank;  // [blocks]
    std::vector<int32_t> pages;
  };

  // Reduces the list of a block to what it needs.
  void choose(const Block& at, ExtendArgs* args, List* list) {
    if (at.first + at.tokens > chunk_.tokens - kLast) return;
    const int before = args->first, blocks = before / kExtendKeys;
    const int near = std::max<int>(before - static_cast<int>(kNear), 0) / kExtendKeys;
    if (near < 2) return;
    ExtendArgs asked = *args;
    asked.tokens = std::max(args->tokens / kAskEvery, 1);
    const int stride = args->tokens / asked.tokens;
    asked.q = static_cast<const char*>(args->q) + (stride - 1) * args->q_stride;
    asked.q_stride = stride * args->q_stride;
    asked.keys = blocks * kExtendKeys;
    const int worker = static_cast<int>(list - lists_.data());
    pool_.kernels().extend_blocks(asked, scratch(worker), list->weights.data());
    const auto most = static_cast<int64_t>(std::ceil(chunk_.budget * static_cast<float>(blocks)));
    choose_blocks(list->weights.data(), asked.tokens * group_, blocks, kKeep, most, list->rank.data());
    list->rank[0] = 0;
    constexpr int kPages = kExtendKeys / kPage;
    int32_t* to = list->pages.data();
    for (int b = 0; b < near; ++b) {
      if (list->rank[b] < kShareClasses) to = std::copy_n(args->pages + b * kPages, kPages, to);
    }
    const int dropped = near * kPages - static_cast<int>(to - list->pages.data());
    std::copy(args->pages + near * kPages, args->pages + (args->keys + kPage - 1) / kPage, to);
    args->pages = list->pages.data();
    args->keys -= dropped * kPage;
    args->first -= dropped * kPage;
  }

  void merge() {
    const PoolShape& s = pool_.shape();
    const int64_t blocks = blocks_ * s.kv_heads;
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < blocks;) {
      const Block at = block(i);
      const int64_t rows = at.tokens * group_, values = rows * s.head_dim;
      float* o = part(i * stretches_);
      for (int64_t r = 0; r < rows; ++r) {
        const auto lse = [&](int64_t stretch) -> float& {
          return part(i * stretches_ + stretch)[values + r];
        };
        float top = lse(0), sum = 0;
        for (int64_t p = 1; p < stretches_; ++p) top = std::max(top, lse(p));
        if (top == -std::numeric_limits<float>::infinity()) continue;
        for (int64_t p = 0; p < stretches_; ++p) sum += std::exp(lse(p) - top);
        float* to = o + r * s.head_dim;
        for (int64_t p = 0; p < stretches_; ++p) {
          const float weight = std::exp(lse(p) - top) / sum;
          const float* from = part(i * stretches_ + p) + r * s.head_dim;
          for (int d = 0; d < s.head_dim; ++d) to[d] = (p ? to[d] : 0.0f) + weight * from[d];
        }
        lse(0) = top + std::log(sum);
      }
      write(at, o, o + values);
    }
  }

  void write(const Block& at, const float* o, const float* lse) const {
    const PoolShape& s = pool_.shape();
    constexpr float kNothing = -std::numeric_limits<float>::infinity();
    for (int64_t r = 0; r < at.tokens * group_; ++r) {
      const int64_t token = at.first + r / group_, head = int64_t{at.head} * group_ + r % group_;
      char* to = chunk_.out + (token * chunk_.q_heads + head) * s.token_bytes();
      const float sink = chunk_.sinks == nullptr ? kNothing : chunk_.sinks[head];
      pool_.kernels().merge_state(o + r * s.head_dim, lse[r], nullptr, sink, s.head_dim, to);
    }
  }

  char* scratch(int worker) const { return scratch_.get() + worker * scratch_bytes_; }
  float* part(int64_t i) const { return parts_.get() + i * part_floats_; }

  const HostPool& pool_;
  const Chunk& chunk_;
  int group_, block_;                // heads of a group, tokens of a block
  bool windowed_;                    // some token is outside the window of a query
  int64_t blocks_;                   // of each KV head
  int64_t stretches_ = 1, stretch_;  // of each block; tokens of one
  int64_t scratch_bytes_, part_floats_;
  std::unique_ptr<char[]> scratch_;  // of every worker
  // Per worker, or per item if there are stretches: o [tokens][G][D], lse [tokens][G].
  std::unique_ptr<float[]> parts_;
  std::vector<List> lists_;  // of every worker, in a sparse prefill
  std::atomic<int64_t> next_{0}, read_{0}, there_{0};
};

}  // namespace

double attend_chunk(const HostPool& pool, const Chunk& chunk) {
  const PoolShape& s = pool.shape();
  pool.check_layer(chunk.layer);
  pool.check_tokens(chunk.pages, chunk.n_pages, chunk.start, chunk.tokens);
  if (chunk.q_heads < s.kv_heads || chunk.q_heads % s.kv_heads != 0 ||
      chunk.q_heads / s.kv_heads > kExtendRows) {
    throw std::invalid_argument("q has " + std::to_string(chunk.q_heads) + " heads for the pool's " +
                                std::to_string(s.kv_heads) + " KV heads; it needs 1 to " +
                                std::to_string(kExtendRows) + " for each.");
  }
  if (!(chunk.budget > 0 && chunk.budget <= 1)) {
    throw std::invalid_argument("The budget of a prefill is " + std::to_string(chunk.budget) +
                                "; it must be above 0 and at most 1.");
  }
  if (chunk.window < 1) {
    throw std::invalid_argument("The window of a layer is " + std::to_string(chunk.window) +
                                " tokens; a token attends at least to itself.");
  }
  if (chunk.tree != nullptr) {
    if (chunk.tokens > kLargestTree || chunk.tokens > chunk.window) {
      throw std::invalid_argument("A tree has " + std::to_string(chunk.tokens) + " tokens; it may have " +
                                  std::to_string(std::min(kLargestTree, chunk.window)) + ".");
    }
    for (int64_t t = 0; t < chunk.tokens; ++t) {
      if (chunk.tree[t] >> t != 1) {
        throw std::invalid_argument("Token " + std::to_string(t) +
                                    " of a tree must attend to itself and to no later one.");
      }
    }
  }
  if (chunk.tokens == 0) return 1;
  return ChunkWork(pool, chunk).run();
}

}  // namespace fluxion
