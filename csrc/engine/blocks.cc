#include "engine/blocks.h"

#include <algorithm>
#include <bit>

#include "engine/chunks.h"
#include "engine/guard.h"

namespace fluxion {

Blocks blocks_of(const Layer& layer, const Task& task) {
  return Blocks(layer.blk(task), layer.step.sink_pages(), layer.step.request(task.request).window_page);
}

int64_t block_bytes(const Layer& layer, const Task& task) {
  const float* budget = layer.budget(task);
  const float largest = std::min(1.0f, *std::max_element(budget, budget + layer.group));
  const int pages = layer.step.middle_tokens(task.request) / kPage;
  return static_cast<int64_t>((largest + 1.0f / 16) * pages * layer.shape.tile_bytes());
}

Wanted wanted_blocks(const Layer& layer, const Task& task, const Blocks& at) {
  Wanted wanted = wanted_of(layer, task, at.tokens(), layer.blk(task), at.count);
  // With the union, one head that reads everything decides for all: no scan.
  if (layer.config.attend_union && wanted.whole != 0) wanted.whole = wanted.active;
  wanted.ranked = wanted.active & ~wanted.whole;
  return wanted;
}

void choose_blocks(const Layer& layer, const Wanted& wanted, const float* scores, int64_t stride, int blocks,
                   uint16_t* chosen, Scratch* s) {
  std::fill_n(chosen, blocks, wanted.whole);
  for (unsigned left = wanted.ranked; left != 0; left &= left - 1) {
    const int g = std::countr_zero(left);
    layer.kernels.select(scores + g * stride, blocks, wanted.count[g], static_cast<uint16_t>(1u << g), chosen,
                         s->select.data());
  }
}

void list_blocks(const Layer& layer, const Blocks& at, const int32_t* pages, const uint16_t* chosen,
                 Scratch* s, Selection* out) {
  const int G = layer.group;
  const bool together = layer.config.attend_union;
  const uint16_t everyone = static_cast<uint16_t>((1u << G) - 1);
  // Which blocks are chosen no branch could foretell.
  int32_t* blocks = s->blocks.data();
  int count = 0;
  for (int i = 0; i < at.count; ++i) {
    blocks[count] = i;
    count += chosen[i] != 0;
  }
  out->masked =
      !together && std::any_of(blocks, blocks + count, [&](int32_t i) { return chosen[i] != everyone; });
  int32_t* to = s->pages.data();
  uint16_t* masks = s->masks.data();
  for (int j = 0; j < count; ++j) {
    const int from = at.from(blocks[j]), end = at.to(blocks[j]);
    to = std::copy(pages + from, pages + end, to);
    if (together) continue;
    const uint16_t readers = chosen[blocks[j]];
    out->tokens += static_cast<int64_t>(end - from) * kPage * std::popcount(readers);
    if (!out->masked) continue;
    for (int p = from; p < end; ++p) {
      for (int g = 0; g < G; ++g) *masks++ = readers >> g & 1 ? 0xffff : 0;
    }
  }
  out->count = static_cast<int>(to - s->pages.data());
  if (together) out->tokens = static_cast<int64_t>(out->count) * kPage * G;
  out->reads.tile_bytes = out->count * layer.shape.tile_bytes();
}

Selection select_blocks(const Layer& layer, const Task& task, Scratch* s) {
  Selection out;
  const Blocks at = blocks_of(layer, task);
  const Wanted wanted = wanted_blocks(layer, task, at);
  const int64_t stride = s->stride(layer.group);
  out.ranked = wanted.ranked;
  if (wanted.ranked != 0) {
    out.reads.metadata_bytes = score_blocks(layer, task, at, layer.query(task), layer.group,
                                            layer.pool.spread(), s->scores.data(), stride, s);
  }
  choose_blocks(layer, wanted, s->scores.data(), stride, at.count, s->chosen.data(), s);
  list_blocks(layer, at, layer.pages(task), s->chosen.data(), s, &out);
  return out;
}

Selection read_blocks(const Layer& layer, const Task& task, Selection chosen, Scratch* s, float* o,
                      float* lse) {
  attend(layer, task, chosen, s, o, lse);
  read_more(layer, task, &chosen, s);
  return chosen;
}

namespace {

// What the guard reads: of each head that left out too much twice its blocks, less those that were read.
// ranked: the selection's.
Selection widen(const Layer& layer, const Task& task, uint16_t ranked, Scratch* s) {
  Selection out;
  const Blocks at = blocks_of(layer, task);
  const int64_t state = layer.state(task), stride = s->stride(layer.group);
  const bool together = layer.config.attend_union;
  const BlocksRead read{at,
                        s->scores.data(),
                        stride,
                        s->chosen.data(),
                        together,
                        layer.in.scale,
                        &layer.res_lse[state],
                        &layer.mid_lse[state]};
  const uint16_t heads = heads_to_widen(layer.kernels, read, ranked, layer.config.guard);
  if (heads == 0) return out;
  const Wanted wanted = wanted_of(layer, task, at.tokens(), layer.blk(task), at.count);
  std::fill_n(s->added.data(), at.count, uint16_t{0});
  for (unsigned left = heads; left != 0; left &= left - 1) {
    const int g = std::countr_zero(left);
    layer.kernels.select(s->scores.data() + g * stride, at.count, std::min(2 * wanted.count[g], at.count),
                         static_cast<uint16_t>(1u << g), s->added.data(), s->select.data());
  }
  for (int i = 0; i < at.count; ++i)
    s->added[i] &= ~(together && s->chosen[i] != 0 ? uint16_t{0xffff} : s->chosen[i]);
  list_blocks(layer, at, layer.pages(task), s->added.data(), s, &out);
  return out;
}

}  // namespace

void read_more(const Layer& layer, const Task& task, Selection* chosen, Scratch* s) {
  if (!(layer.config.guard > 0) || !layer.residents_known || chosen->ranked == 0) return;
  const Selection more = widen(layer, task, chosen->ranked, s);
  if (more.count == 0) return;
  alignas(64) float o[kMaxGroup * kMaxHeadDim];
  float lse[kMaxGroup];
  attend(layer, task, more, s, o, lse);
  layer.merge(layer.group, layer.middle_o(task), layer.middle_lse(task), o, lse);
  chosen->tokens += more.tokens;
  chosen->reads.tile_bytes += more.reads.tile_bytes;
  s->stats[kStatWidenedTasks] += 1;
}

}  // namespace fluxion
