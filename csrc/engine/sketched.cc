#include "engine/sketched.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "engine/chunks.h"

namespace fluxion {

namespace {

int pages_of(const Layer& layer, const Task& task) { return layer.step.middle_tokens(task.request) / kPage; }

}  // namespace

void Sketched::check_shape(const LayerPlan& plan) const {
  if (batch_ == plan.batch && kv_heads_ == plan.kv_heads) return;
  throw std::invalid_argument("left has the shape [" + std::to_string(batch_) + ", " +
                              std::to_string(kv_heads_) + "] and must have [" + std::to_string(plan.batch) +
                              ", " + std::to_string(plan.kv_heads) + "].");
}

std::string Sketched::wrong(const Layer& layer, const Task& task) const {
  if (!layer.shape.sketched) {
    return "is to be read by sketches of its keys, and the pool has none; create the pool with sketches";
  }
  if (!layer.residents_known) {
    return "is to be read by sketches, and what its residents weigh is not known; call layer_resident before "
           "layer_begin, or pass parts";
  }
  const float left = left_[layer.index(task)];
  if (!(left >= 0 && left <= 1))
    return "may leave the share " + std::to_string(left) + " of its attention; a share is 0 to 1";
  return "";
}

// Of tiles an eighth, or so.
int64_t Sketched::bytes(const Layer& layer, const Task& task) const {
  return pages_of(layer, task) * (layer.shape.sketch_bytes() + layer.shape.tile_bytes() / 8);
}

int Sketched::ranked_tokens(const Layer& layer, const Task& task) const {
  return layer.step.middle_tokens(task.request);
}

Selection Sketched::select(const Layer& layer, const Task& task, Scratch* s) const {
  const int G = layer.group, pages = pages_of(layer, task);
  const int32_t* page = layer.pages(task) + layer.step.sink_pages();
  const float left = left_[layer.index(task)];
  Selection out;
  uint16_t* kept = s->chosen.data();  // of each page: what some head chose
  if (left > 0) {
    out.reads.metadata_bytes = score_sketches(layer, task, page, pages, s);
    std::fill_n(kept, pages, uint16_t{0});
    for (int g = 0; g < G; ++g) {
      layer.kernels.keep_mass(s->scores.data() + g * s->stride(G), pages * kPage, layer.in.scale,
                              layer.res_lse[layer.state(task) + g], left, kept, s->select.data());
    }
  } else {
    std::fill_n(kept, pages, uint16_t{0xffff});
  }
  int64_t rows = 0;
  for (int p = 0; p < pages; ++p) {
    if (kept[p] == 0) continue;
    rows += std::popcount(kept[p]);
    out.masked |= kept[p] != 0xffff;
    std::fill_n(&s->masks[out.count * G], G, kept[p]);
    s->pages[out.count++] = page[p];
  }
  out.tokens = rows * G;
  out.reads.tile_bytes = 2 * rows * layer.shape.row_bytes();
  return out;
}

Selection Sketched::run(const Layer& layer, const Task& task, Scratch* s, float* o, float* lse) const {
  const Selection chosen = select(layer, task, s);
  const int64_t rows = chosen.tokens / layer.group;
  // Of tiles of 8 bits a row cannot be read without most of its tile.
  if (rows == 0 || layer.shape.dtype == DType::kInt8 || 2 * rows > chosen.count * kPage) {
    attend(layer, task, chosen, s, o, lse);
    return chosen;
  }
  int count = 0;
  for (int j = 0; j < chosen.count; ++j) {
    for (unsigned left = s->masks[j * layer.group]; left != 0; left &= left - 1)
      s->tokens[count++] = s->pages[j] * kPage + std::countr_zero(left);
  }
  attend_tokens(layer, task, count, s, o, lse);
  return chosen;
}

}  // namespace fluxion
