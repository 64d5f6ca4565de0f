#include "engine/chunks.h"

#include <algorithm>
#include <atomic>

namespace fluxion {

namespace {

// First of `units` in chunk i of `chunks`.
int cut(int units, int chunks, int i) { return static_cast<int>(static_cast<int64_t>(units) * i / chunks); }

int chunks_of(const Layer& layer, int64_t bytes, int units) {
  const int64_t size = layer.config.chunk_bytes, chunks = (bytes + size - 1) / size;
  return static_cast<int>(std::clamp<int64_t>(chunks, 1, std::max(1, std::min(units, kMaxChunks))));
}

// Whole tiles that were read.
void check_tiles(const Layer& layer, int kv_head, const int32_t* pages, int count) {
  if (const Canary* canary = layer.pool.canary())
    canary->read_tiles(layer.pool, layer.in.layer, kv_head, pages, int64_t{count} * kPage);
}

// body(from, to, helper) for every chunk of `count` things in units of `unit`, which are `bytes` together.
template <class Body>
void in_chunks(const Layer& layer, int64_t bytes, int count, int unit, Scratch* s, const Body& body) {
  const int units = (count + unit - 1) / unit, chunks = chunks_of(layer, bytes, units);
  const auto chunk = [&](int i, Scratch* helper) {
    body(cut(units, chunks, i) * unit, std::min(cut(units, chunks, i + 1) * unit, count), helper);
  };
  s->busy_ns -= s->stage.run(chunks, s, chunk);
}

}  // namespace

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
      kernel(q, heads, D, layer.in.scale, layer.pool.tiles(layer.in.layer, kv_head), pages + from,
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
  constexpr int kUnit = 16;  // blocks: what the kernel scores at a time
  std::atomic<int64_t> bytes{0};
  const auto score = [&](int from, int to, Scratch* helper) {
    const Blocks part = at.part(from, to);
    BlockScorer& scorer = helper->scorer;
    const int64_t read = scorer.score(layer.pool, layer.in.layer, task.head, part, layer.pages(task), q,
                                      heads, spread, scores + from, stride);
    scorer.check(layer.pool, layer.in.layer, task.head, part, layer.pages(task));
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

void score_rows(const Layer& layer, const Task& task, int count, Scratch* s) {
  const auto score = [&](int from, int to, Scratch*) {
    layer.kernels.score_rows(layer.query(task), layer.group, layer.shape.head_dim, layer.tiles(task),
                             &s->tokens[from], to - from, &s->scores[from], s->stride(layer.group));
    if (const Canary* canary = layer.pool.canary())
      canary->read_tokens(layer.pool, layer.in.layer, task.head, &s->tokens[from], to - from);
  };
  in_chunks(layer, count * layer.shape.row_bytes(), count, kPage, s, score);
}

}  // namespace fluxion
