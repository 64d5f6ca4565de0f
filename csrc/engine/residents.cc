#include "engine/residents.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "engine/resident_parts.h"

namespace fluxion {

namespace {

// The residents of a request: pages of its window, listed in the scratch, sinks first.
struct Resident {
  int sinks, local;  // pages
  int tokens;        // of the last page
};

Resident list_residents(const Layer& layer, const Task& task, Scratch* s) {
  const Request& r = layer.step.request(task.request);
  const WindowView& w = layer.at.window;
  const int end = (r.length - 1) / kPage + 1;
  int32_t* pages = s->pages.data();
  const auto list = [&](int first, int last) {
    for (int p = first; p < last; ++p) *pages++ = static_cast<int32_t>(w.slot(r.row, p));
    return std::max(last - first, 0);
  };
  Resident found;
  found.sinks = list(0, std::min(end, w.sink_pages));
  found.local = list(r.window_page, end);
  found.tokens = (r.length - 1) % kPage + 1;
  return found;
}

const char* window_tiles(const Layer& layer, const Task& task) {
  return layer.at.window.data + task.head * layer.at.window.head_stride;
}

// Masks of `count` pages: the tokens of the first page before `hidden`, and those of the last page from
// `last_tokens` on, are left out. nullptr if no token is left out.
const uint16_t* end_masks(int count, int group, int hidden, int last_tokens, Scratch* s) {
  if (hidden == 0 && last_tokens == kPage) return nullptr;
  uint16_t* masks = s->masks.data();
  std::fill_n(masks, count * group, uint16_t{0xffff});
  const auto drop = [&](int page, uint32_t kept) {
    for (int g = 0; g < group; ++g) masks[page * group + g] &= static_cast<uint16_t>(kept);
  };
  drop(0, 0xffffu << hidden);
  drop(count - 1, (1u << last_tokens) - 1);
  return masks;
}

void add_sinks(const Layer& layer, const Task& task) {
  if (layer.at.sinks == nullptr) return;
  const int D = layer.shape.head_dim;
  const int64_t at = layer.state(task);
  const float* sink = layer.at.sinks + int64_t{task.head} * layer.group;
  for (int g = 0; g < layer.group; ++g) {
    float* o = &layer.res_o[(at + g) * D];
    layer.res_lse[at + g] = layer.exact.merge_state(o, layer.res_lse[at + g], nullptr, sink[g], D, o);
  }
}

}  // namespace

void append_token(const Layer& layer, const HostPool& pool, const Task& task) {
  if (layer.in.k.data == nullptr) return;
  const auto [b, h] = task;
  const Request& r = layer.step.request(b);
  const int position = r.length - 1, logical = position / kPage, offset = position % kPage;
  const char *k = layer.in.k.at(b, h), *v = layer.in.v.at(b, h);
  const int32_t* pages = layer.pages(task);
  pool.write_token(layer.at.index, h, pages[logical], offset, k, v);
  if (offset == kPage - 1) pool.seal_page(layer.at.index, h, pages, logical);
  const WindowView& w = layer.at.window;
  if (w.data == nullptr) return;
  char* to = w.data + h * w.head_stride + w.slot(r.row, logical) * layer.shape.window_tile_bytes();
  pool.read_token(layer.at.index, h, pages[logical], offset, to);
}

void attend_residents(const Layer& layer, const Task& task, Scratch* s) {
  const Resident found = list_residents(layer, task, s);
  const int count = found.sinks + found.local, G = layer.group;
  const uint16_t* masks = end_masks(count, G, 0, found.tokens, s);
  const int64_t at = layer.state(task);
  layer.window_kernels.attend(layer.query(task), G, layer.shape.head_dim, layer.at.scale,
                              window_tiles(layer, task), s->pages.data(), masks, count, 0,
                              &layer.res_o[at * layer.shape.head_dim], &layer.res_lse[at]);
  add_sinks(layer, task);
}

void attend_newest(const Layer& layer, const Task& task, Scratch* s) {
  const int length = layer.step.request(task.request).length, first = std::max(length - layer.at.newest, 0);
  const int begin = first / kPage, count = (length - 1) / kPage + 1 - begin, G = layer.group;
  const uint16_t* masks = end_masks(count, G, first % kPage, (length - 1) % kPage + 1, s);
  const int64_t at = layer.state(task);
  layer.kernels.attend(layer.query(task), G, layer.shape.head_dim, layer.at.scale, layer.tiles(task),
                       layer.pages(task) + begin, masks, count, 0, &layer.res_o[at * layer.shape.head_dim],
                       &layer.res_lse[at]);
  if (const Canary* canary = layer.pool.canary())
    canary->read_tiles(layer.pool, layer.at.index, task.head, layer.pages(task) + begin,
                       length - int64_t{begin} * kPage);
  add_sinks(layer, task);
}

void attend_parts(const Layer& layer, const Task& task, Scratch* s, float* parts) {
  const Resident found = list_residents(layer, task, s);
  const char* tiles = window_tiles(layer, task);
  const int32_t* pages = s->pages.data();
  const int64_t at = layer.state(task);
  resident_parts(layer.window_kernels, layer.exact, layer.query(task), layer.group, layer.shape.head_dim,
                 layer.at.scale, {tiles, pages, found.sinks, found.local > 0 ? kPage : found.tokens},
                 {tiles, pages + found.sinks, found.local, found.tokens}, s->masks.data(),
                 &layer.res_o[at * layer.shape.head_dim], &layer.res_lse[at], parts);
  add_sinks(layer, task);
}

void no_parts(const Layer& layer, float* parts) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  for (int g = 0; g < layer.group; ++g, parts += kParts) {
    std::fill_n(parts, kParts, 0.0f);
    parts[kPartLseSink] = parts[kPartLseLocal] = kNone;
  }
}

}  // namespace fluxion
