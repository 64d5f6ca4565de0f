#include "lab/single_tokens.h"

#include <algorithm>
#include <bit>

#include "engine/blocks.h"
#include "engine/chunks.h"

namespace fluxion {

int64_t SingleTokens::bytes(const Layer& layer, const Task& task) const { return block_bytes(layer, task); }

int SingleTokens::ranked_tokens(const Layer& layer, const Task& task) const {
  return layer.step.middle_tokens(task.request);
}

Selection SingleTokens::select(const Layer& layer, const Task& task, Scratch* s) const {
  Selection out;
  const int G = layer.group, tokens = layer.step.middle_tokens(task.request), pages = tokens / kPage;
  const int32_t* page = layer.pages(task) + layer.step.sink_pages();
  const Wanted wanted = wanted_of(layer, task, tokens, 1, tokens);
  std::fill_n(s->chosen.data(), tokens, wanted.whole);
  if (wanted.whole != wanted.active) {
    score_tokens(layer, task, page, pages, s);
    for (unsigned left = wanted.active & ~wanted.whole; left != 0; left &= left - 1) {
      const int g = std::countr_zero(left);
      layer.kernels.select(s->scores.data() + g * s->stride(G), tokens, wanted.count[g],
                           static_cast<uint16_t>(1u << g), s->chosen.data(), s->select.data());
    }
  }
  out.masked = true;
  int64_t rows = 0;
  for (int p = 0; p < pages; ++p) {
    uint16_t* masks = &s->masks[out.count * G];
    std::fill_n(masks, G, uint16_t{0});
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
  out.reads.tile_bytes = rows * 2 * layer.shape.row_bytes();
  return out;
}

}  // namespace fluxion
