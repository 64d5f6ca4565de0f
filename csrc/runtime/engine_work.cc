// What the workers do in a layer: resident items, then tasks from the queue.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "runtime/engine.h"

namespace fluxion {

int blocks_of_budget(float budget, int tokens, int blk, int blocks) {
  const double wanted = std::ceil(static_cast<double>(budget) * tokens / blk * (1 - 1e-6));
  return static_cast<int>(std::clamp(wanted, 1.0, static_cast<double>(blocks)));
}

const char* Engine::query(int request, int head) const {
  return args_.q + request * args_.q_stride + static_cast<int64_t>(head) * group_ * shape_.token_bytes();
}

int64_t Engine::state_at(int request, int head) const {
  return static_cast<int64_t>(request) * config_.q_heads + static_cast<int64_t>(head) * group_;
}

void Engine::worker_main(void* self, int worker) { static_cast<Engine*>(self)->work(worker); }

void Engine::work(int worker) {
  Scratch* scratch = &scratch_[worker];
  for (int i; (i = next_item_.fetch_add(1, std::memory_order_relaxed)) < items_;) resident_item(i, scratch);
  for (int64_t claim; (claim = queue_.pop(Executor::kCpu)) >= 0;) {
    run_task(TaskQueue::task_of(claim), scratch);
    queue_.finish(claim);
  }
}

// Appends this step's token of one request and KV head, then attends to the sinks and the window.
void Engine::resident_item(int item, Scratch* scratch) {
  const int b = item / shape_.kv_heads, h = item % shape_.kv_heads;
  if (skip_[b]) return;
  const Request& r = requests_[b];
  const int position = r.length - 1, logical = position / kPage, offset = position % kPage;
  const WindowView& w = args_.window;
  char* window = w.data == nullptr ? nullptr : w.data + h * w.head_stride;
  if (args_.k.data != nullptr) {
    const char *k = args_.k.at(b, h), *v = args_.v.at(b, h);
    pool_->write_token(args_.layer, h, pages_of(b)[logical], offset, k, v);
    if (offset == kPage - 1) pool_->seal_page(args_.layer, h, pages_of(b), logical);
    if (window != nullptr) {
      const int64_t bytes = shape_.token_bytes();
      char* to = window + w.slot(r.row, logical) * shape_.tile_bytes() + offset * bytes;
      std::memcpy(to, k, bytes);
      std::memcpy(to + kPage * bytes, v, bytes);
    }
  }
  if (window == nullptr) return;
  int count = 0;
  int32_t* pages = scratch->pages.data();
  for (int p = 0; p <= logical && p < w.sink_pages; ++p)
    pages[count++] = static_cast<int32_t>(w.slot(r.row, p));
  for (int p = r.window_page; p <= logical; ++p) pages[count++] = static_cast<int32_t>(w.slot(r.row, p));
  const uint16_t* masks = nullptr;
  if (offset != kPage - 1) {
    std::fill_n(scratch->masks.data(), (count - 1) * group_, uint16_t{0xffff});
    std::fill_n(scratch->masks.data() + (count - 1) * group_, group_,
                static_cast<uint16_t>((2u << offset) - 1));
    masks = scratch->masks.data();
  }
  const int64_t at = state_at(b, h);
  kernels_.attend(query(b, h), group_, shape_.head_dim, args_.scale, window, pages, masks, count,
                  &res_o_[at * shape_.head_dim], &res_lse_[at]);
  part_done(b, h);
}

void Engine::run_task(int i, Scratch* scratch) {
  const Task& task = tasks_[i];
  const Selection chosen = select(task, scratch);
  const int64_t at = state_at(task.request, task.head);
  kernels_.attend(query(task.request, task.head), group_, shape_.head_dim, args_.scale,
                  pool_->tiles(args_.layer, task.head), scratch->pages.data(),
                  chosen.masked ? scratch->masks.data() : nullptr, chosen.count,
                  &mid_o_[at * shape_.head_dim], &mid_lse_[at]);
  scratch->stats[kStatTasksCpu] += 1;
  scratch->stats[kStatTokensRead] += chosen.tokens;
  scratch->stats[kStatTileBytes] += chosen.count * shape_.tile_bytes();
  scratch->stats[kStatMetadataBytes] += chosen.metadata_bytes;
  if (args_.window.data != nullptr) part_done(task.request, task.head);
}

// The later of a group's resident item and task merges the two.
void Engine::part_done(int request, int head) {
  std::atomic<uint8_t>& parts = parts_[request * shape_.kv_heads + head];
  if (parts.fetch_sub(1, std::memory_order_acq_rel) == 1) merge(request, head);
}

void Engine::merge(int request, int head) {
  const int64_t at = state_at(request, head), D = shape_.head_dim;
  char* out =
      args_.out + request * args_.out_stride + static_cast<int64_t>(head) * group_ * shape_.token_bytes();
  for (int g = 0; g < group_; ++g) {
    kernels_.merge_state(&res_o_[(at + g) * D], res_lse_[at + g], &mid_o_[(at + g) * D], mid_lse_[at + g],
                         shape_.head_dim, out + g * shape_.token_bytes());
  }
}

// Upper bounds of every block of the middle for every head of the group: scratch->scores[g * stride + i].
void Engine::score_blocks(const Task& task, int level, int first_block, int blocks, Scratch* s,
                          Selection* out) const {
  const int D = shape_.head_dim, end = requests_[task.request].window_page;
  const int32_t* pages = pages_of(task.request);
  const int32_t* tags = level == 0 ? nullptr : pool_->tags(args_.layer, level);
  const char* q = query(task.request, task.head);
  int merged = 0;
  const int64_t stride = static_cast<int64_t>(s->scores.size()) / group_;
  // Blocks without an entry of their own get one here, and their scores in batches.
  constexpr int32_t kIota[kMergeBatch] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                          16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
  const auto score_merged = [&] {
    kernels_.score(q, group_, D, s->merged.data(), kIota, merged, s->merged_score.data(), kMergeBatch);
    for (int g = 0; g < group_; ++g) {
      for (int m = 0; m < merged; ++m)
        s->scores[g * stride + s->merged_block[m]] = s->merged_score[g * kMergeBatch + m];
    }
    merged = 0;
  };
  const auto has_entry = [&](int i) {
    const int last = ((first_block + i + 1) << level) - 1;
    if (last >= end) return false;
    return level == 0 || tags[pages[last] >> level] == pages[last];
  };
  for (int i = 0; i < blocks; ++i) {
    s->index[i] = has_entry(i) ? pages[((first_block + i + 1) << level) - 1] >> level : -1;
  }
  const int entries = static_cast<int>(
      std::count_if(s->index.begin(), s->index.begin() + blocks, [](int e) { return e >= 0; }));
  out->metadata_bytes += entries * shape_.entry_bytes();
  if (entries == blocks) {
    kernels_.score(q, group_, D, pool_->entries(args_.layer, task.head, level), s->index.data(), blocks,
                   s->scores.data(), stride);
    return;
  }
  // Runs of blocks that have an entry, and the others merged in between.
  for (int i = 0; i < blocks;) {
    if (s->index[i] >= 0) {
      int run = i;
      while (run < blocks && s->index[run] >= 0) ++run;
      kernels_.score(q, group_, D, pool_->entries(args_.layer, task.head, level), &s->index[i], run - i,
                     s->scores.data() + i, stride);
      i = run;
      continue;
    }
    const int first = std::max((first_block + i) << level, sink_pages());
    const int last = std::min((first_block + i + 1) << level, end);
    char* entry = s->merged.data() + merged * shape_.entry_bytes();
    std::memcpy(entry, pool_->entry(args_.layer, task.head, 0, pages[first]), shape_.entry_bytes());
    for (int p = first + 1; p < last; ++p) {
      kernels_.merge_minmax(entry, pool_->entry(args_.layer, task.head, 0, pages[p]), D);
    }
    out->metadata_bytes += (last - first) * shape_.entry_bytes();
    s->merged_block[merged++] = i++;
    if (merged == kMergeBatch) score_merged();
  }
  if (merged > 0) score_merged();
}

Selection Engine::select(const Task& task, Scratch* s) const {
  Selection out;
  const Request& r = requests_[task.request];
  const int first = sink_pages(), end = r.window_page;
  const int tokens = (end - first) * kPage;
  const int blk = blk_[task.request * shape_.kv_heads + task.head];
  const int level = std::countr_zero(static_cast<unsigned>(blk / kPage));
  const int first_block = first >> level, blocks = ((end - 1) >> level) - first_block + 1;
  const float* budget = &budget_[state_at(task.request, task.head)];
  const int32_t* pages = pages_of(task.request);

  const uint16_t everyone = static_cast<uint16_t>((1u << group_) - 1);
  uint16_t active = 0, whole = 0;  // heads that read something, that read everything
  int wanted[kMaxGroup];
  for (int g = 0; g < group_; ++g) {
    if (!(budget[g] > 0)) continue;
    active |= 1u << g;
    wanted[g] = budget[g] >= 1 ? blocks : blocks_of_budget(budget[g], tokens, blk, blocks);
    if (wanted[g] == blocks) whole |= 1u << g;
  }
  // With the union, one head that reads everything decides for all: no scan.
  if (config_.attend_union && whole != 0) whole = active;
  std::fill_n(s->chosen.data(), blocks, whole);
  if (whole != active) {
    score_blocks(task, level, first_block, blocks, s, &out);
    const int64_t stride = static_cast<int64_t>(s->scores.size()) / group_;
    for (int g = 0; g < group_; ++g) {
      if (!((active & ~whole) >> g & 1)) continue;
      kernels_.select(s->scores.data() + g * stride, blocks, wanted[g], static_cast<uint16_t>(1u << g),
                      s->chosen.data(), s->select.data());
    }
  }
  for (int i = 0; i < blocks; ++i) {
    const uint16_t chosen = s->chosen[i];
    if (chosen == 0) continue;
    const uint16_t readers = config_.attend_union ? active : chosen;
    const int from = std::max((first_block + i) << level, first),
              to = std::min((first_block + i + 1) << level, end);
    out.tokens += static_cast<int64_t>(to - from) * kPage * std::popcount(readers);
    if (readers != everyone && !out.masked) {
      out.masked = true;  // what came before was for everyone
      std::fill_n(s->masks.data(), out.count * group_, uint16_t{0xffff});
    }
    for (int p = from; p < to; ++p) {
      if (out.masked) {
        for (int g = 0; g < group_; ++g) s->masks[out.count * group_ + g] = readers >> g & 1 ? 0xffff : 0;
      }
      s->pages[out.count++] = pages[p];
    }
  }
  return out;
}

}  // namespace fluxion
