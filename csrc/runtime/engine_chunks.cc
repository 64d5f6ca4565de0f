// The stages of a task that are cut into chunks: its scan and its attention.
#include <algorithm>
#include <atomic>

#include "runtime/engine.h"

namespace fluxion {

namespace {

// First of `units` in chunk i of `chunks`.
int cut(int units, int chunks, int i) { return static_cast<int>(static_cast<int64_t>(units) * i / chunks); }

}  // namespace

// Nothing but the sizes of a task may decide where it is cut: see Engine.
int Engine::chunks_of(int64_t bytes, int units) const {
  const int64_t chunks = (bytes + config_.chunk_bytes - 1) / config_.chunk_bytes;
  return static_cast<int>(std::clamp<int64_t>(chunks, 1, std::max(1, std::min(units, kMaxChunks))));
}

// Until no task that is begun can open a stage any more.
void Engine::help(int worker) {
  constexpr int kPauses = 16;  // about a microsecond between two rounds of looks
  const int workers = static_cast<int>(scratch_.size());
  Scratch* own = &scratch_[worker];
  for (Backoff backoff; owners_.load(std::memory_order_acquire) > 0;) {
    int helped = 0;
    const int64_t start = now_ns();
    for (int i = 1; i < workers; ++i) helped += scratch_[(worker + i) % workers].stage.help(own);
    if (helped > 0) {
      own->busy_ns += now_ns() - start;
      own->helped_chunks += helped;
      backoff = {};
    } else {
      backoff.wait(kPauses);
    }
  }
}

// Attention of what the scratch lists.
void Engine::attend(const Task& task, const Selection& selection, Scratch* s, float* o, float* lse) const {
  attend(query(task.request, task.head), group_, task.head, selection, s->pages.data(), s->masks.data(), s, o,
         lse);
}

// Attention of `heads` queries over the selection's pages, with masks if it is masked. The scratch has room
// for the parts. page_lse: as for KernelTable::attend_pages, or nullptr.
void Engine::attend(const char* q, int heads, int kv_head, const Selection& selection, const int32_t* pages,
                    const uint16_t* masks, Scratch* s, float* o, float* lse, float* page_lse) const {
  const int D = shape_.head_dim, count = selection.count;
  constexpr int kUnit = 4;  // tiles: as many as the kernel goes through side by side
  const int units = (count + kUnit - 1) / kUnit;
  const int chunks = chunks_of(selection.reads.tile_bytes, units);
  const auto attend_chunk = [&](int i, Scratch*) {
    const int from = cut(units, chunks, i) * kUnit, to = std::min(cut(units, chunks, i + 1) * kUnit, count);
    const auto call = [&](auto kernel, auto... more) {
      kernel(q, heads, D, args_.scale, pool_->tiles(args_.layer, kv_head), pages + from,
             selection.masked ? masks + static_cast<int64_t>(from) * heads : nullptr, to - from, count - to,
             i == 0 ? o : &s->part_o[(i - 1) * heads * D], i == 0 ? lse : &s->part_lse[(i - 1) * heads],
             more...);
    };
    if (page_lse == nullptr) {
      call(selection.near ? kernels_.attend_near : kernels_.attend);
    } else {
      call(kernels_.attend_pages, page_lse + static_cast<int64_t>(from) * heads);
    }
  };
  s->busy_ns -= s->stage.run(chunks, s, attend_chunk);
  for (int i = 0; i < (chunks - 1) * heads; ++i) {
    const int h = i % heads;
    lse[h] = exact_.merge_state(o + h * D, lse[h], &s->part_o[i * D], s->part_lse[i], D, o + h * D);
  }
}

// Scores of blocks of a task's request for `heads` queries: scores[h * stride + i]; the bytes of metadata
// read.
int64_t Engine::score_blocks(const Task& task, const Blocks& at, const char* q, int heads, float spread,
                             float* scores, int64_t stride, Scratch* s) const {
  constexpr int kUnit = 16;  // blocks: what the kernel scores at a time
  const int units = (at.count + kUnit - 1) / kUnit;
  const int chunks = chunks_of(at.count * shape_.entry_bytes(), units);
  std::atomic<int64_t> bytes{0};
  const auto score_chunk = [&](int i, Scratch* helper) {
    const int from = cut(units, chunks, i) * kUnit;
    const Blocks part = at.part(from, std::min(cut(units, chunks, i + 1) * kUnit, at.count));
    const int64_t read = helper->scorer.score(*pool_, args_.layer, task.head, part, pages_of(task.request), q,
                                              heads, spread, scores + from, stride);
    bytes.fetch_add(read, std::memory_order_relaxed);
  };
  s->busy_ns -= s->stage.run(chunks, s, score_chunk);
  return bytes.load(std::memory_order_relaxed);
}

// Scores of all tokens of `count` physical pages into the scratch.
void Engine::score_tokens(const Task& task, const int32_t* pages, int count, Scratch* s) const {
  const int64_t stride = static_cast<int64_t>(s->scores.size()) / group_;
  const int chunks = chunks_of(count * shape_.tile_bytes() / 2, count);
  const auto score_chunk = [&](int i, Scratch*) {
    const int from = cut(count, chunks, i), to = cut(count, chunks, i + 1);
    kernels_.score_tokens(query(task.request, task.head), group_, shape_.head_dim,
                          pool_->tiles(args_.layer, task.head), pages + from, to - from,
                          &s->scores[from * kPage], stride);
  };
  s->busy_ns -= s->stage.run(chunks, s, score_chunk);
}

// Scores of the scratch's tokens, `count` of them, into the scratch.
void Engine::score_rows(const Task& task, int count, Scratch* s) const {
  const int64_t stride = static_cast<int64_t>(s->scores.size()) / group_;
  const int units = (count + kPage - 1) / kPage;
  const int chunks = chunks_of(count * shape_.token_bytes(), units);
  const auto score_chunk = [&](int i, Scratch*) {
    const int from = cut(units, chunks, i) * kPage;
    const int to = std::min(cut(units, chunks, i + 1) * kPage, count);
    kernels_.score_rows(query(task.request, task.head), group_, shape_.head_dim,
                        pool_->tiles(args_.layer, task.head), &s->tokens[from], to - from, &s->scores[from],
                        stride);
  };
  s->busy_ns -= s->stage.run(chunks, s, score_chunk);
}

}  // namespace fluxion
