#include "lab/early_stop.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/chunks.h"

namespace fluxion {

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// A microbatch is so much of a head's order, at least a block (64 KiB of bf16 tiles with D = 128: merging its
// result costs a fiftieth of reading it), and a share of what the task has read where that is more: a task
// that reads far has large microbatches, which idle workers can help with, and reads too much by that share
// at most.
constexpr int kMicrobatchPages = 8;
constexpr int kReadShare = 16;

// Of `count` numbers, `stride` apart; NaN where one of them is.
double log_sum(const float* x, int count, int64_t stride) {
  if (count == 1) return *x;
  double top = -kInf, sum = 0;
  for (int i = 0; i < count; ++i) top = std::max<double>(top, x[i * stride]);
  const double base = top == -kInf ? 0 : top;
  for (int i = 0; i < count; ++i) sum += std::exp(x[i * stride] - base);
  return base + std::log(sum);
}

}  // namespace

// Algorithm 1, for one query head.
struct EarlyStop::Head {
  int32_t* order;       // blocks, best first
  int sorted = 0;       // how many of the order are known
  int walked = 0;       // how many were gone through
  double least = kInf;  // AS_min: log of the least weight that a token had, on average, in a block it chose
  int64_t left;         // N_left: tokens that it has not attended to

  // P_acc >= stop. res_lse, mid_lse: of what is resident and of what was read. False for NaN.
  bool enough(float res_lse, float mid_lse, double stop) const {
    const float both[] = {res_lse, mid_lse};
    const double rest = least + std::log(static_cast<double>(left));
    return 1 / (1 + std::exp(rest - log_sum(both, 2, 1))) >= stop;
  }
};

struct EarlyStop::Room : OwnScratch {
  std::vector<int32_t> order;                    // [G][pages + 1]: blocks by score, as far as known
  std::vector<uint16_t> ranked, placed, picked;  // [pages]: heads that have a block in their order, as of the
                                                 // next and of the last extension; that read it now
  std::vector<float> page_lse;                   // [pages][G], of the microbatch
};

void EarlyStop::reserve(int pages, int group, Scratch* scratch) const {
  Room& room = scratch->own<Room>();
  if (room.page_lse.size() >= static_cast<size_t>(pages) * group) return;
  room.order.resize(static_cast<size_t>(pages + 1) * group);
  room.ranked.resize(pages);
  room.placed.resize(pages);
  room.picked.resize(pages);
  room.page_lse.resize(static_cast<size_t>(pages) * group);  // last: the others are there when it is
}

void EarlyStop::check_shape(const LayerPlan& plan) const {
  if (shares_.batch == plan.batch && shares_.kv_heads == plan.kv_heads) return;
  throw std::invalid_argument("stop has the shape [" + std::to_string(shares_.batch) + ", " +
                              std::to_string(shares_.kv_heads) + "] and must have [" +
                              std::to_string(plan.batch) + ", " + std::to_string(plan.kv_heads) + "].");
}

// 0 and 1: the heads read their budgets.
bool EarlyStop::takes(const Layer& layer, const Task& task) const {
  const float stop = shares_.stop[layer.index(task)];
  return !(stop == 0 || stop == 1);
}

std::string EarlyStop::wrong(const Layer& layer, const Task& task) const {
  const float stop = shares_.stop[layer.index(task)], spread = shares_.spread[layer.index(task)];
  if (!(stop >= 0 && stop <= 1)) {
    return "is to stop at the share " + std::to_string(stop) + " of its attention; a share is 0 to 1";
  }
  if (!(spread >= 0 && spread <= 1))
    return "is to score blocks with the spread " + std::to_string(spread) + "; a spread is 0 to 1";
  if (!is_block_size(layer.blk(task))) {
    return "is to stop early among single tokens; only blocks of 16 tokens or more come in an order";
  }
  if (!layer.residents_known) {
    return "is to stop early, and what its residents weigh is not known; call layer_resident before "
           "layer_begin, or pass parts";
  }
  return "";
}

int64_t EarlyStop::bytes(const Layer& layer, const Task& task) const { return block_bytes(layer, task); }

// What it reads shows only when it is read.
Selection EarlyStop::select(const Layer& layer, const Task& task, Scratch* s) const {
  alignas(64) float o[kMaxGroup * kMaxHeadDim];
  float lse[kMaxGroup];
  Selection out;
  out.reads = run(layer, task, s, o, lse).reads;
  list_blocks(layer, blocks_of(layer, task), layer.pages(task), s->chosen.data(), s, &out);
  return out;
}

namespace {

// Makes the first `want` blocks of head g's order known, of which it has `sorted`: equal scores in the order
// of the blocks, NaN as -inf. What a task does not come to is never sorted. ranked, placed: [blocks].
void extend_order(const Layer& layer, const float* scores, int blocks, int g, int sorted, int want,
                  int32_t* order, uint16_t* ranked, uint16_t* placed, Scratch* s) {
  const uint16_t bit = static_cast<uint16_t>(1u << g);
  layer.kernels.select(scores, blocks, want, bit, ranked, s->select.data());
  int32_t* end = order + sorted;
  for (int i = 0; i < blocks; ++i) {
    *end = i;
    end += (ranked[i] & ~placed[i] & bit) != 0;
    placed[i] |= ranked[i] & bit;
  }
  const auto value = [&](int32_t i) { return std::max(-std::numeric_limits<float>::infinity(), scores[i]); };
  std::sort(order + sorted, end, [&](int32_t a, int32_t b) {
    const float x = value(a), y = value(b);
    return x > y || (x == y && a < b);
  });
}

// Attends to the microbatch's blocks, s->blocks[0..count) with the heads in picked[], and merges the result
// into o and lse; page_lse is that of its pages in their order.
void attend_microbatch(const Layer& layer, const Task& task, const Blocks& at, int count,
                       const uint16_t* picked, float* page_lse, Scratch* s, float* o, float* lse,
                       Selection* out) {
  const int G = layer.group;
  const bool together = layer.config.attend_union;
  const uint16_t everyone = static_cast<uint16_t>((1u << G) - 1);
  const int32_t* pages = layer.pages(task);
  Selection batch;
  batch.masked = !together && std::any_of(s->blocks.data(), s->blocks.data() + count,
                                          [&](int i) { return picked[i] != everyone; });
  uint16_t* masks = s->masks.data();
  for (int j = 0; j < count; ++j) {
    const int i = s->blocks[j], from = at.from(i), end = at.to(i);
    const uint16_t readers = together ? everyone : picked[i];
    std::copy(pages + from, pages + end, &s->pages[batch.count]);
    batch.count += end - from;
    batch.tokens += static_cast<int64_t>(end - from) * kPage * std::popcount(readers);
    for (int m = 0; batch.masked && m < (end - from) * G; ++m) *masks++ = readers >> (m % G) & 1 ? 0xffff : 0;
  }
  batch.reads.tile_bytes = batch.count * layer.shape.tile_bytes();
  alignas(64) float part_o[kMaxGroup * kMaxHeadDim];
  float part_lse[kMaxGroup];
  attend(layer, layer.query(task), G, task.head, batch, s->pages.data(), s->masks.data(), s, part_o, part_lse,
         page_lse);
  layer.merge(G, o, lse, part_o, part_lse);
  out->count += batch.count;
  out->tokens += batch.tokens;
  out->reads.tile_bytes += batch.reads.tile_bytes;
  ++out->microbatches;
}

}  // namespace

// Takes up to `quota` blocks of the order of every head that goes on into s->blocks; how many blocks these
// are. Heads that have none left go on no more.
int EarlyStop::pick(const Layer& layer, const Blocks& at, const Wanted& wanted, int quota, uint16_t* going,
                    Head* heads, Scratch* s) const {
  Room& room = s->own<Room>();
  int count = 0;
  for (unsigned rest = *going; rest != 0; rest &= rest - 1) {
    const int g = std::countr_zero(rest);
    const uint16_t bit = static_cast<uint16_t>(1u << g);
    Head& head = heads[g];
    int taken = 0;
    while (taken < quota && head.walked < wanted.count[g]) {
      if (head.walked == head.sorted) {
        const int want = std::min(wanted.count[g], std::max(2 * head.sorted, 4 * quota));
        extend_order(layer, &s->scores[g * s->stride(layer.group)], at.count, g, head.sorted, want,
                     head.order, room.ranked.data(), room.placed.data(), s);
        head.sorted = want;
      }
      const int i = head.order[head.walked++];
      if (s->chosen[i] != 0 && layer.config.attend_union) continue;  // it has been attended to
      if (room.picked[i] == 0) s->blocks[count++] = i;
      room.picked[i] |= bit;
      ++taken;
    }
    if (taken == 0) *going &= ~bit;
  }
  return count;
}

// Leaves in chosen[] the heads that read each block.
Selection EarlyStop::run(const Layer& layer, const Task& task, Scratch* s, float* o, float* lse) const {
  Selection out;
  Room& room = s->own<Room>();
  const int i_group = layer.index(task), G = layer.group;
  const bool together = layer.config.attend_union;
  const Blocks at = blocks_of(layer, task);
  const Wanted wanted = wanted_of(layer, task, at.tokens(), layer.blk(task), at.count);
  const float* res_lse = layer.res_lse + layer.state(task);
  out.reads.metadata_bytes = score_blocks(layer, task, at, layer.query(task), G, shares_.spread[i_group],
                                          s->scores.data(), s->stride(G), s);
  std::fill_n(o, G * layer.shape.head_dim, 0.0f);
  std::fill_n(lse, G, -std::numeric_limits<float>::infinity());
  for (uint16_t* heads : {s->chosen.data(), room.ranked.data(), room.placed.data(), room.picked.data()})
    std::fill_n(heads, at.count, uint16_t{0});
  Head heads[kMaxGroup];
  for (int g = 0; g < G; ++g) {
    heads[g].order = &room.order[g * static_cast<int64_t>(room.ranked.size() + 1)];
    heads[g].left = at.tokens();
  }
  const int least_blocks = std::max(1, kMicrobatchPages >> at.level);
  int read = 0;
  for (uint16_t going = wanted.active; going != 0;) {
    const int count = pick(layer, at, wanted, std::max(least_blocks, read / kReadShare), &going, heads, s);
    if (count == 0) break;
    attend_microbatch(layer, task, at, count, room.picked.data(), room.page_lse.data(), s, o, lse, &out);
    for (int j = 0, page = 0; j < count; ++j) {
      const int i = s->blocks[j], pages = at.to(i) - at.from(i);
      const uint16_t picked = room.picked[i];
      for (unsigned rest = picked; rest != 0; rest &= rest - 1) {
        const int g = std::countr_zero(rest);
        const double weight = log_sum(&room.page_lse[static_cast<int64_t>(page) * G + g], pages, G);
        heads[g].least = std::min(heads[g].least, weight - std::log(pages * kPage));
      }
      const uint16_t readers = together ? uint16_t{0xffff} : picked;
      for (int g = 0; g < G; ++g) heads[g].left -= readers >> g & 1 ? pages * kPage : 0;
      s->chosen[i] |= picked;
      room.picked[i] = 0;
      page += pages;
    }
    read += count;
    for (unsigned rest = going; rest != 0; rest &= rest - 1) {
      const int g = std::countr_zero(rest);
      if (heads[g].enough(res_lse[g], lse[g], shares_.stop[i_group])) going &= ~(1u << g);
    }
  }
  return out;
}

}  // namespace fluxion
