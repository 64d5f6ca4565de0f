#include "device/far_tiles.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>
#include <utility>

namespace fluxion {

FarTiles::FarTiles(const char* arena, const FarShape& shape, int parity, std::shared_ptr<const void> memory)
    : shape_(shape), memory_(std::move(memory)) {
  const FarLists at = far_slot(shape, static_cast<uint32_t>(parity));
  counts_ = reinterpret_cast<const int32_t*>(arena + at.counts);
  pages_ = reinterpret_cast<const int32_t*>(arena + at.pages);
  heads_ = reinterpret_cast<const uint16_t*>(arena + at.heads);
}

void FarTiles::check_shape(const LayerPlan& plan) const {
  if (plan.batch <= shape_.max_requests && plan.kv_heads == shape_.kv_heads) return;
  throw std::invalid_argument("The device's lists are for " + std::to_string(shape_.max_requests) +
                              " requests and " + std::to_string(shape_.kv_heads) +
                              " KV heads, and the plan has " + std::to_string(plan.batch) + " and " +
                              std::to_string(plan.kv_heads) + ".");
}

std::string FarTiles::wrong(const Layer& layer, const Task& task) const {
  const int count = counts_[layer.index(task)];
  const int most = std::min(layer.step.middle_tokens(task.request) / kPage, shape_.max_pages);
  if (count >= 0 && count <= most) return "";
  return "has " + std::to_string(count) + " tiles by the device's list, and its middle " +
         std::to_string(most);
}

int64_t FarTiles::bytes(const Layer& layer, const Task& task) const {
  return counts_[layer.index(task)] * layer.shape.tile_bytes();
}

Selection FarTiles::select(const Layer& layer, const Task& task, Scratch* s) const {
  Selection out;
  const int G = layer.group;
  const int64_t first = int64_t{layer.index(task)} * shape_.max_pages;
  out.count = counts_[layer.index(task)];
  std::copy_n(pages_ + first, out.count, s->pages.data());
  out.reads.tile_bytes = out.count * layer.shape.tile_bytes();
  out.tokens = int64_t{out.count} * kPage * G;
  if (layer.config.attend_union) return out;
  out.masked = true;
  out.tokens = 0;
  for (int j = 0; j < out.count; ++j) {
    const uint16_t heads = heads_[first + j];
    out.tokens += kPage * std::popcount(heads);
    for (int g = 0; g < G; ++g) s->masks[j * G + g] = heads >> g & 1 ? 0xffff : 0;
  }
  return out;
}

}  // namespace fluxion
