// What a task reads: its blocks scored, the best of every head, and the pages of those.
#include <algorithm>
#include <bit>
#include <cmath>

#include "runtime/engine.h"
#include "runtime/guard.h"

namespace fluxion {

int blocks_of_budget(float budget, int tokens, int blk, int blocks) {
  const double wanted = std::ceil(static_cast<double>(budget) * tokens / blk * (1 - 1e-6));
  return static_cast<int>(std::clamp(wanted, 1.0, static_cast<double>(blocks)));
}

Engine::Wanted Engine::wanted_of(const Task& task, int tokens, int blk, int blocks) const {
  Wanted wanted;
  const float* budget = &budget_[state_at(task.request, task.head)];
  for (int g = 0; g < group_; ++g) {
    if (!(budget[g] > 0)) continue;
    wanted.active |= 1u << g;
    wanted.count[g] = budget[g] >= 1 ? blocks : blocks_of_budget(budget[g], tokens, blk, blocks);
    if (wanted.count[g] == blocks) wanted.whole |= 1u << g;
  }
  return wanted;
}

// Single tokens by their exact scores. Each head reads its own choice, whatever attend_union says: of all
// sets of so many tokens, the one with the most attention weight.
Selection Engine::select_tokens(const Task& task, Scratch* s) const {
  Selection out;
  const int first = sink_pages(), pages = requests_[task.request].window_page - first, tokens = pages * kPage;
  const int32_t* page = pages_of(task.request) + first;
  const Wanted wanted = wanted_of(task, tokens, 1, tokens);
  std::fill_n(s->chosen.data(), tokens, wanted.whole);
  if (wanted.whole != wanted.active) {
    const int64_t stride = static_cast<int64_t>(s->scores.size()) / group_;
    score_tokens(task, page, pages, s);
    for (int g = 0; g < group_; ++g) {
      if (!((wanted.active & ~wanted.whole) >> g & 1)) continue;
      kernels_.select(s->scores.data() + g * stride, tokens, wanted.count[g], static_cast<uint16_t>(1u << g),
                      s->chosen.data(), s->select.data());
    }
  }
  out.masked = true;
  int64_t rows = 0;
  for (int p = 0; p < pages; ++p) {
    uint16_t* masks = &s->masks[out.count * group_];
    std::fill_n(masks, group_, uint16_t{0});
    uint16_t readers = 0;
    for (int t = 0; t < kPage; ++t) {
      const uint16_t chosen = s->chosen[p * kPage + t];
      readers |= chosen;
      rows += chosen != 0;
      for (unsigned heads = chosen; heads != 0; heads &= heads - 1)
        masks[std::countr_zero(heads)] |= static_cast<uint16_t>(1u << t);
      out.tokens += std::popcount(chosen);
    }
    if (readers != 0) s->pages[out.count++] = page[p];
  }
  out.reads.tile_bytes = rows * 2 * shape_.token_bytes();
  return out;
}

Engine::Wanted Engine::wanted_of(const Task& task, const Blocks& at) const {
  Wanted wanted = wanted_of(task, at.tokens(), blk_of(task), at.count);
  // With the union, one head that reads everything decides for all: no scan.
  if (config_.attend_union && wanted.whole != 0) wanted.whole = wanted.active;
  wanted.ranked = wanted.active & ~wanted.whole;
  return wanted;
}

// chosen[blocks]: the heads that read each block.
void Engine::choose(const Wanted& wanted, const float* scores, int64_t stride, int blocks, uint16_t* chosen,
                    Scratch* s) const {
  std::fill_n(chosen, blocks, wanted.whole);
  for (unsigned left = wanted.ranked; left != 0; left &= left - 1) {
    const int g = std::countr_zero(left);
    kernels_.select(scores + g * stride, blocks, wanted.count[g], static_cast<uint16_t>(1u << g), chosen,
                    s->select.data());
  }
}

Blocks Engine::blocks_of(const Task& task) const {
  return Blocks(blk_of(task), sink_pages(), requests_[task.request].window_page);
}

Selection Engine::select(const Task& task, Scratch* s) const {
  if (blk_of(task) == 1) return select_tokens(task, s);
  if (blk_of(task) == kListed) return select_listed(task, s);
  Selection out;
  const Blocks at = blocks_of(task);
  if (progressive(task.request * shape_.kv_heads + task.head)) {
    // What it reads shows only when it is read.
    alignas(64) float o[kMaxGroup * kMaxHeadDim];
    float lse[kMaxGroup];
    out.reads = progress(task, s, o, lse).reads;
    list_pages(at, pages_of(task.request), s->chosen.data(), s, &out);
    return out;
  }
  const Wanted wanted = wanted_of(task, at);
  const int64_t stride = static_cast<int64_t>(s->scores.size()) / group_;
  out.ranked = wanted.ranked;
  if (wanted.ranked != 0) {
    out.reads.metadata_bytes = score_blocks(task, at, query(task.request, task.head), group_, pool_->spread(),
                                            s->scores.data(), stride, s);
  }
  choose(wanted, s->scores.data(), stride, at.count, s->chosen.data(), s);
  list_pages(at, pages_of(task.request), s->chosen.data(), s, &out);
  return out;
}

// What read_more() reads: of each head that left out too much twice its blocks, less those that were read.
// ranked: the selection's.
Selection Engine::widen(const Task& task, uint16_t ranked, Scratch* s) const {
  Selection out;
  const Blocks at = blocks_of(task);
  const int64_t state = state_at(task.request, task.head);
  const int64_t stride = static_cast<int64_t>(s->scores.size()) / group_;
  const BlocksRead read{
      at,          s->scores.data(), stride,          s->chosen.data(), config_.attend_union,
      args_.scale, &res_lse_[state], &mid_lse_[state]};
  const uint16_t heads = heads_to_widen(kernels_, read, ranked, config_.guard);
  if (heads == 0) return out;
  const Wanted wanted = wanted_of(task, at.tokens(), blk_of(task), at.count);
  std::fill_n(s->added.data(), at.count, uint16_t{0});
  for (int g = 0; g < group_; ++g) {
    if (!(heads >> g & 1)) continue;
    kernels_.select(s->scores.data() + g * stride, at.count, std::min(2 * wanted.count[g], at.count),
                    static_cast<uint16_t>(1u << g), s->added.data(), s->select.data());
  }
  for (int i = 0; i < at.count; ++i) {
    const uint16_t readers = config_.attend_union && s->chosen[i] != 0 ? uint16_t{0xffff} : s->chosen[i];
    s->added[i] &= ~readers;
  }
  list_pages(at, pages_of(task.request), s->added.data(), s, &out);
  return out;
}

// The pages of the blocks that heads chose, with their masks, and what it takes to read them.
void Engine::list_pages(const Blocks& at, const int32_t* pages, const uint16_t* chosen, Scratch* s,
                        Selection* out) const {
  const uint16_t everyone = static_cast<uint16_t>((1u << group_) - 1);
  // Which blocks are chosen no branch could foretell.
  int32_t* blocks = s->blocks.data();
  int count = 0;
  for (int i = 0; i < at.count; ++i) {
    blocks[count] = i;
    count += chosen[i] != 0;
  }
  out->masked = !config_.attend_union &&
                std::any_of(blocks, blocks + count, [&](int32_t i) { return chosen[i] != everyone; });
  int32_t* to = s->pages.data();
  uint16_t* masks = s->masks.data();
  for (int j = 0; j < count; ++j) {
    const int from = at.from(blocks[j]), end = at.to(blocks[j]);
    to = std::copy(pages + from, pages + end, to);
    if (config_.attend_union) continue;
    const uint16_t readers = chosen[blocks[j]];
    out->tokens += static_cast<int64_t>(end - from) * kPage * std::popcount(readers);
    if (!out->masked) continue;
    for (int p = from; p < end; ++p) {
      for (int g = 0; g < group_; ++g) *masks++ = readers >> g & 1 ? 0xffff : 0;
    }
  }
  out->count = static_cast<int>(to - s->pages.data());
  if (config_.attend_union) out->tokens = static_cast<int64_t>(out->count) * kPage * group_;
  out->reads.tile_bytes = out->count * shape_.tile_bytes();
}

}  // namespace fluxion
