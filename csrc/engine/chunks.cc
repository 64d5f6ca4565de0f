#include "engine/chunks.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "runtime/prefetch.h"

namespace fluxion {

namespace {

// First unit of chunk i of `chunks`.
int cut(int units, int chunks, int i) { return static_cast<int>(static_cast<int64_t>(units) * i / chunks); }

int chunks_of(const Layer& layer, int64_t bytes, int units) {
  const int64_t size = layer.config.chunk_bytes, chunks = (bytes + size - 1) / size;
  return static_cast<int>(std::clamp<int64_t>(chunks, 1, std::max(1, std::min(units, kMaxChunks))));
}

// Checks whole tiles that were read.
void check_tiles(const Layer& layer, int kv_head, const int32_t* pages, int count) {
  if (const Canary* canary = layer.pool.canary())
    canary->read_tiles(layer.pool, layer.at.index, kv_head, pages, int64_t{count} * kPage);
}

// Calls body(from, to, helper) for every chunk of `count` items in units of `unit`. bytes: of all items.
template <class Body>
void in_chunks(const Layer& layer, int64_t bytes, int count, int unit, Scratch* s, const Body& body) {
  const int units = (count + unit - 1) / unit, chunks = chunks_of(layer, bytes, units);
  const auto chunk = [&](int i, Scratch* helper) {
    body(cut(units, chunks, i) * unit, std::min(cut(units, chunks, i + 1) * unit, count), helper);
  };
  s->busy_ns -= s->stage.run(chunks, s, chunk);
}

// Tiles that rows of the pool are copied to, as many as fit in the L2 cache. Not for 8-bit tiles.
class Gathered : public OwnScratch {
 public:
  static constexpr int kBytes = 128 << 10;

  // Makes room, and masks that name every token.
  void reserve(const PoolShape& shape, int heads) {
    count_ = static_cast<int>(std::max<int64_t>(1, kBytes / shape.tile_bytes()));
    lines_.resize(count_ * shape.tile_bytes() / sizeof(Line));
    masks_.assign(static_cast<size_t>(count_) * heads, 0xffff);
    pages_.resize(count_);
    std::iota(pages_.begin(), pages_.end(), 0);
  }
  int tokens() const { return count_ * kPage; }
  char* tiles() { return lines_[0].bytes; }
  const int32_t* pages() const { return pages_.data(); }
  // Masks of n tokens; nullptr if they fill tiles. The last tile stays cut until the next reserve().
  const uint16_t* masks(int n, int heads) {
    if (n % kPage == 0) return nullptr;
    std::fill_n(&masks_[n / kPage * heads], heads, static_cast<uint16_t>((1u << n % kPage) - 1));
    return masks_.data();
  }
  // Copies token number `token` of the pool to place `at`.
  void take(const Layer& layer, const Task& task, int32_t token, int at) {
    const int64_t row = layer.shape.row_bytes(), half = kPage * row;
    const char* from = layer.tiles(task) + token / kPage * layer.shape.tile_bytes() + token % kPage * row;
    char* to = tiles() + at / kPage * 2 * half + at % kPage * row;
    copy(from, row, to);
    copy(from + half, row, to + half);
  }
  // Prefetches a token for take().
  static void fetch(const Layer& layer, const Task& task, int32_t token) {
    const int64_t row = layer.shape.row_bytes();
    const char* at = layer.tiles(task) + token / kPage * layer.shape.tile_bytes() + token % kPage * row;
    for (int64_t b = 0; b < row; b += sizeof(Line)) {
      prefetch(at + b);
      prefetch(at + kPage * row + b);
    }
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };

  static void copy(const char* from, int64_t bytes, char* to) {
    constexpr int kPiece = 32;  // divides every row
    for (int64_t b = 0; b < bytes; b += kPiece) std::memcpy(to + b, from + b, kPiece);
  }

  int count_ = 0;
  std::vector<Line> lines_;
  std::vector<uint16_t> masks_;
  std::vector<int32_t> pages_;
};

void attend_gathered(const Layer& layer, const Task& task, const int32_t* tokens, int count, Scratch* helper,
                     float* o, float* lse) {
  constexpr int kAhead = 16;
  const int G = layer.group, D = layer.shape.head_dim;
  Gathered& room = helper->own<Gathered>();
  room.reserve(layer.shape, G);
  alignas(64) float more_o[kMaxGroup * kMaxHeadDim];
  float more_lse[kMaxGroup];
  for (int first = 0; first < count; first += room.tokens()) {
    const int n = std::min(room.tokens(), count - first);
    for (int i = first; i < first + n; ++i) {
      if (i + kAhead < count) Gathered::fetch(layer, task, tokens[i + kAhead]);
      room.take(layer, task, tokens[i], i - first);
    }
    layer.kernels.attend_near(layer.query(task), G, D, layer.at.scale, room.tiles(), room.pages(),
                              room.masks(n, G), (n + kPage - 1) / kPage, 0, first == 0 ? o : more_o,
                              first == 0 ? lse : more_lse);
    if (first > 0) layer.merge(G, o, lse, more_o, more_lse);
  }
  if (const Canary* canary = layer.pool.canary())
    canary->read_tokens(layer.pool, layer.at.index, task.head, tokens, count);
}

}  // namespace

void attend_tokens(const Layer& layer, const Task& task, int count, Scratch* s, float* o, float* lse) {
  const int G = layer.group, D = layer.shape.head_dim, units = (count + kPage - 1) / kPage;
  const int chunks = chunks_of(layer, 2 * count * layer.shape.row_bytes(), units);
  const auto attend_chunk = [&](int i, Scratch* helper) {
    const int from = cut(units, chunks, i) * kPage, to = std::min(cut(units, chunks, i + 1) * kPage, count);
    attend_gathered(layer, task, &s->tokens[from], to - from, helper,
                    i == 0 ? o : &s->part_o[(i - 1) * G * D], i == 0 ? lse : &s->part_lse[(i - 1) * G]);
  };
  s->busy_ns -= s->stage.run(chunks, s, attend_chunk);
  for (int i = 1; i < chunks; ++i)
    layer.merge(G, o, lse, &s->part_o[(i - 1) * G * D], &s->part_lse[(i - 1) * G]);
}

void attend_weighed(const Layer& layer, const Task& task, const Weighed& of, Scratch* s, float* o,
                    float* lse) {
  const int G = layer.group, D = layer.shape.head_dim;
  const int chunks = chunks_of(layer, of.tokens * layer.shape.row_bytes(), of.count);
  const auto attend_chunk = [&](int i, Scratch*) {
    const int from = cut(of.count, chunks, i), n = cut(of.count, chunks, i + 1) - from;
    float* sum = i == 0 ? o : &s->part_o[(i - 1) * G * D];
    float* log_sum = i == 0 ? lse : &s->part_lse[(i - 1) * G];
    layer.kernels.add_values(of.weights, of.stride, of.at + from, G, D, layer.tiles(task), of.pages + from,
                             of.masks + from, n, sum, log_sum);
    for (int g = 0; g < G; ++g) {
      const float total = log_sum[g], inverse = total > 0 ? 1 / total : 0.0f;
      for (int d = 0; d < D; ++d) sum[g * D + d] *= inverse;
      log_sum[g] = total > 0 ? of.unit[g] + std::log(total) : -std::numeric_limits<float>::infinity();
    }
  };
  s->busy_ns -= s->stage.run(chunks, s, attend_chunk);
  for (int i = 1; i < chunks; ++i)
    layer.merge(G, o, lse, &s->part_o[(i - 1) * G * D], &s->part_lse[(i - 1) * G]);
  if (const Canary* canary = layer.pool.canary()) {
    int count = 0;
    for (int i = 0; i < of.count; ++i) {
      for (unsigned bits = of.masks[i]; bits != 0; bits &= bits - 1)
        s->tokens[count++] = of.pages[i] * kPage + std::countr_zero(bits);
    }
    canary->read_tokens(layer.pool, layer.at.index, task.head, s->tokens.data(), count);
  }
}

void attend(const Layer& layer, const Task& task, const Selection& selection, Scratch* s, float* o,
            float* lse) {
  attend(layer, layer.query(task), layer.group, task.head, selection, s->pages.data(), s->masks.data(), s, o,
         lse);
}

void attend(const Layer& layer, const char* q, int heads, int kv_head, const Selection& selection,
            const int32_t* pages, const uint16_t* masks, Scratch* s, float* o, float* lse, float* page_lse) {
  const int D = layer.shape.head_dim, count = selection.count;
  constexpr int kUnit = 4;  // tiles: as many as the kernel goes through side by side
  const int units = (count + kUnit - 1) / kUnit;
  const int chunks = chunks_of(layer, selection.reads.tile_bytes, units);
  const auto attend_chunk = [&](int i, Scratch*) {
    const int from = cut(units, chunks, i) * kUnit, to = std::min(cut(units, chunks, i + 1) * kUnit, count);
    const auto call = [&](auto kernel, auto... more) {
      kernel(q, heads, D, layer.at.scale, layer.pool.tiles(layer.at.index, kv_head), pages + from,
             selection.masked ? masks + static_cast<int64_t>(from) * heads : nullptr, to - from, count - to,
             i == 0 ? o : &s->part_o[(i - 1) * heads * D], i == 0 ? lse : &s->part_lse[(i - 1) * heads],
             more...);
    };
    if (page_lse == nullptr) {
      call(selection.near ? layer.kernels.attend_near : layer.kernels.attend);
    } else {
      call(layer.kernels.attend_pages, page_lse + static_cast<int64_t>(from) * heads);
    }
    check_tiles(layer, kv_head, pages + from, to - from);
  };
  s->busy_ns -= s->stage.run(chunks, s, attend_chunk);
  for (int i = 1; i < chunks; ++i)
    layer.merge(heads, o, lse, &s->part_o[(i - 1) * heads * D], &s->part_lse[(i - 1) * heads]);
}

int64_t score_blocks(const Layer& layer, const Task& task, const Blocks& at, const char* q, int heads,
                     float spread, float* scores, int64_t stride, Scratch* s) {
  constexpr int kUnit = 16;  // blocks that the kernel scores at a time
  std::atomic<int64_t> bytes{0};
  const auto score = [&](int from, int to, Scratch* helper) {
    const Blocks part = at.part(from, to);
    BlockScorer& scorer = helper->scorer;
    const int64_t read = scorer.score(layer.pool, layer.at.index, task.head, part, layer.pages(task), q,
                                      heads, spread, scores + from, stride);
    scorer.check(layer.pool, layer.at.index, task.head, part, layer.pages(task));
    bytes.fetch_add(read, std::memory_order_relaxed);
  };
  in_chunks(layer, at.count * layer.shape.entry_bytes(), at.count, kUnit, s, score);
  return bytes.load(std::memory_order_relaxed);
}

void score_tokens(const Layer& layer, const Task& task, const int32_t* pages, int count, Scratch* s) {
  const auto score = [&](int from, int to, Scratch*) {
    layer.kernels.score_tokens(layer.query(task), layer.group, layer.shape.head_dim, layer.tiles(task),
                               pages + from, to - from, &s->scores[from * kPage], s->stride(layer.group));
    check_tiles(layer, task.head, pages + from, to - from);
  };
  in_chunks(layer, count * layer.shape.tile_bytes() / 2, count, 1, s, score);
}

void score_sketches(const Layer& layer, const Task& task, const int32_t* pages, int count, Scratch* s) {
  const auto score = [&](int from, int to, Scratch*) {
    layer.kernels.score_sketches(layer.query(task), layer.group, layer.shape.head_dim,
                                 layer.pool.sketches(layer.at.index, task.head), pages + from, to - from,
                                 &s->scores[from * kPage], s->stride(layer.group));
  };
  in_chunks(layer, count * layer.shape.sketch_bytes(), count, 1, s, score);
}

void skim_sketches(const Layer& layer, const Task& task, const int32_t* pages, int count, float* about,
                   float* most, int64_t stride, Scratch* s) {
  const auto skim = [&](int from, int to, Scratch*) {
    layer.kernels.skim_sketches(layer.query(task), layer.group, layer.shape.head_dim,
                                layer.pool.sketches(layer.at.index, task.head), pages + from, to - from,
                                about + from, most + from, stride);
    if (const Canary* canary = layer.pool.canary())
      canary->read_sketches(layer.pool, layer.at.index, task.head, pages + from, to - from);
  };
  in_chunks(layer, count * layer.shape.skimmed_bytes(), count, kPage, s, skim);
}

void for_each_head(const Layer& layer, int64_t bytes, Scratch* s,
                   const std::function<void(int, Scratch*)>& body) {
  in_chunks(layer, layer.group * bytes, layer.group, 1, s, [&](int from, int to, Scratch* helper) {
    for (int g = from; g < to; ++g) body(g, helper);
  });
}

void score_rows(const Layer& layer, const Task& task, int count, Scratch* s) {
  const auto score = [&](int from, int to, Scratch*) {
    layer.kernels.score_rows(layer.query(task), layer.group, layer.shape.head_dim, layer.tiles(task),
                             &s->tokens[from], to - from, &s->scores[from], s->stride(layer.group));
    if (const Canary* canary = layer.pool.canary())
      canary->read_tokens(layer.pool, layer.at.index, task.head, &s->tokens[from], to - from);
  };
  in_chunks(layer, count * layer.shape.row_bytes(), count, kPage, s, score);
}

}  // namespace fluxion
