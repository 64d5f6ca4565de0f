#include "engine/blocks.h"

#include <algorithm>
#include <bit>

#include "engine/chunks.h"

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
  // Without branches, because the choices are unpredictable.
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
  if (wanted.ranked != 0) {
    out.reads.metadata_bytes = score_blocks(layer, task, at, layer.query(task), layer.group,
                                            layer.pool.spread(), s->scores.data(), stride, s);
  }
  choose_blocks(layer, wanted, s->scores.data(), stride, at.count, s->chosen.data(), s);
  list_blocks(layer, at, layer.pages(task), s->chosen.data(), s, &out);
  return out;
}

Selection read_blocks(const Layer& layer, const Task& task, Scratch* s, float* o, float* lse) {
  const Selection chosen = select_blocks(layer, task, s);
  attend(layer, task, chosen, s, o, lse);
  return chosen;
}

}  // namespace fluxion
