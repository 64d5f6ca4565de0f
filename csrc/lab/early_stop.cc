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

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// The LSE of `count` numbers, `stride` apart; NaN if one of them is.
double log_sum(const float* x, int count, int64_t stride) {
  if (count == 1) return *x;
  double top = kMinusInf, sum = 0;
  for (int i = 0; i < count; ++i) top = std::max<double>(top, x[i * stride]);
  const double base = top == kMinusInf ? 0 : top;
  for (int i = 0; i < count; ++i) sum += std::exp(x[i * stride] - base);
  return base + std::log(sum);
}

double log_add(double a, double b) {
  const double top = std::max(a, b);
  return top == kMinusInf ? top : top + std::log(std::exp(a - top) + std::exp(b - top));
}

float or_least(float score) { return std::max(kMinusInf, score); }  // -inf for NaN

// Blocks of its order that a head takes in a microbatch, after the task has read `read` blocks. At least 64
// KiB of bf16 tiles with D = 128: merging the result costs a fiftieth of reading them. At least a share of
// what was read: a task that reads far has large microbatches, which idle workers can help with, and reads at
// most that share too much.
int microbatch(int read, int level) {
  constexpr int kPages = 8, kReadShare = 16;
  return std::max({1, kPages >> level, read / kReadShare});
}

}  // namespace

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
  room.page_lse.resize(static_cast<size_t>(pages) * group);  // last: the other arrays exist when it does
}

void EarlyStop::check_shape(const LayerPlan& plan) const {
  if (shares_.batch == plan.batch && shares_.kv_heads == plan.kv_heads) return;
  throw std::invalid_argument("stop has the shape [" + std::to_string(shares_.batch) + ", " +
                              std::to_string(shares_.kv_heads) + "] and must have [" +
                              std::to_string(plan.batch) + ", " + std::to_string(plan.kv_heads) + "].");
}

// With 0 and 1 the heads read their budgets.
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

// The selection is known only after reading.
Selection EarlyStop::select(const Layer& layer, const Task& task, Scratch* s) const {
  alignas(64) float o[kMaxGroup * kMaxHeadDim];
  float lse[kMaxGroup];
  Selection out;
  out.reads = run(layer, task, s, o, lse).reads;
  list_blocks(layer, blocks_of(layer, task), layer.pages(task), s->chosen.data(), s, &out);
  return out;
}

// The progress of a head. Weights are logs of sums of exp(logit).
struct EarlyStop::Head {
  float resident;  // weight of the residents
  float middle;    // weight of what it has attended to
  double least;    // least weight per token among the blocks it chose itself; +inf: it chose none
  int64_t left;    // tokens of the middle that it has not attended to

  // Whether it stops. False for NaN, and before anything was chosen.
  bool enough(double stop) const {
    const double rest = least + std::log(static_cast<double>(left));
    return 1 / (1 + std::exp(rest - log_add(resident, middle))) >= stop;
  }
};

// The progress of a task.
struct EarlyStop::Walk {
  const Layer& layer;
  const Task& task;
  const Blocks at;
  const Wanted wanted;
  Scratch* const s;
  Room& room;
  const int G = layer.group;
  const bool together = layer.config.attend_union;
  Head heads[kMaxGroup];
  int sorted[kMaxGroup] = {};  // blocks of a head's order that are known
  int walked[kMaxGroup] = {};  // blocks of it that it has come to
  int count = 0;               // blocks of the microbatch

  Walk(const Layer& l, const Task& t, Scratch* scratch)
      : layer(l),
        task(t),
        at(blocks_of(l, t)),
        wanted(wanted_of(l, t, at.tokens(), l.blk(t), at.count)),
        s(scratch),
        room(scratch->own<Room>()) {
    for (uint16_t* of : {s->chosen.data(), room.ranked.data(), room.placed.data(), room.picked.data()})
      std::fill_n(of, at.count, uint16_t{0});
    const float* resident = layer.res_lse + layer.state(task);
    for (int g = 0; g < G; ++g) {
      heads[g] = {resident[g], kMinusInf, std::numeric_limits<double>::infinity(), at.tokens()};
    }
  }

  int32_t* order(int g) const { return &room.order[g * static_cast<int64_t>(room.ranked.size() + 1)]; }
  const float* scores(int g) const { return &s->scores[g * s->stride(G)]; }
  // Already attended to for another head.
  bool had(int block) const { return together && s->chosen[block] != 0; }

  // Finds the first `want` blocks of head g's order: equal scores in the order of the blocks, NaN as -inf.
  // Blocks that a task does not reach are never sorted.
  void extend_order(int g, int want) {
    const uint16_t bit = static_cast<uint16_t>(1u << g);
    const float* of = scores(g);
    layer.kernels.select(of, at.count, want, bit, room.ranked.data(), s->select.data());
    int32_t *first = order(g) + sorted[g], *end = first;
    for (int i = 0; i < at.count; ++i) {
      *end = i;
      end += (room.ranked[i] & ~room.placed[i] & bit) != 0;
      room.placed[i] |= room.ranked[i] & bit;
    }
    std::sort(first, end, [&](int32_t a, int32_t b) {
      const float x = or_least(of[a]), y = or_least(of[b]);
      return x > y || (x == y && a < b);
    });
    sorted[g] = want;
  }

  // The best block that head g has not reached; -1 at the end of its budget. quota: of a microbatch.
  int next(int g, int quota) {
    for (; walked[g] < wanted.count[g]; ++walked[g]) {
      if (walked[g] == sorted[g])
        extend_order(g, std::min(wanted.count[g], std::max(2 * sorted[g], 4 * quota)));
      const int block = order(g)[walked[g]];
      if (!had(block)) return block;
    }
    return -1;
  }

  // Takes up to `quota` blocks of the order of every head in `going`. Removes heads that have none left.
  void pick(int quota, uint16_t* going) {
    count = 0;
    for (unsigned rest = *going; rest != 0; rest &= rest - 1) {
      const int g = std::countr_zero(rest);
      const uint16_t bit = static_cast<uint16_t>(1u << g);
      int taken = 0;
      for (int block; taken < quota && (block = next(g, quota)) >= 0; ++taken, ++walked[g]) {
        if (room.picked[block] == 0) s->blocks[count++] = block;
        room.picked[block] |= bit;
      }
      if (taken == 0) *going &= ~bit;
    }
  }

  // Attends to the microbatch and merges the result into o and lse; page_lse is that of its pages in their
  // order.
  void attend_picked(float* o, float* lse, Selection* out) {
    const uint16_t everyone = static_cast<uint16_t>((1u << G) - 1);
    const int32_t* pages = layer.pages(task);
    Selection batch;
    batch.masked = !together && std::any_of(s->blocks.data(), s->blocks.data() + count,
                                            [&](int i) { return room.picked[i] != everyone; });
    uint16_t* masks = s->masks.data();
    for (int j = 0; j < count; ++j) {
      const int i = s->blocks[j], from = at.from(i), end = at.to(i);
      const uint16_t readers = together ? everyone : room.picked[i];
      std::copy(pages + from, pages + end, &s->pages[batch.count]);
      batch.count += end - from;
      batch.tokens += static_cast<int64_t>(end - from) * kPage * std::popcount(readers);
      for (int m = 0; batch.masked && m < (end - from) * G; ++m)
        *masks++ = readers >> (m % G) & 1 ? 0xffff : 0;
    }
    batch.reads.tile_bytes = batch.count * layer.shape.tile_bytes();
    alignas(64) float part_o[kMaxGroup * kMaxHeadDim];
    float part_lse[kMaxGroup];
    attend(layer, layer.query(task), G, task.head, batch, s->pages.data(), s->masks.data(), s, part_o,
           part_lse, room.page_lse.data());
    layer.merge(G, o, lse, part_o, part_lse);
    out->count += batch.count;
    out->tokens += batch.tokens;
    out->reads.tile_bytes += batch.reads.tile_bytes;
  }

  // Updates the heads by the microbatch. Leaves in chosen[] the heads that read each block.
  void learn(const float* mid_lse) {
    for (int j = 0, page = 0; j < count; ++j) {
      const int i = s->blocks[j], pages = at.to(i) - at.from(i);
      const uint16_t picked = room.picked[i];
      for (unsigned rest = picked; rest != 0; rest &= rest - 1) {
        const int g = std::countr_zero(rest);
        const double lse = log_sum(&room.page_lse[static_cast<int64_t>(page) * G + g], pages, G);
        heads[g].least = std::min(heads[g].least, lse - std::log(pages * kPage));
      }
      const uint16_t readers = together ? uint16_t{0xffff} : picked;
      for (int g = 0; g < G; ++g) heads[g].left -= readers >> g & 1 ? pages * kPage : 0;
      s->chosen[i] |= picked;
      room.picked[i] = 0;
      page += pages;
    }
    for (int g = 0; g < G; ++g) heads[g].middle = mid_lse[g];
  }
};

Selection EarlyStop::run(const Layer& layer, const Task& task, Scratch* s, float* o, float* lse) const {
  Selection out;
  Walk walk(layer, task, s);
  const int G = walk.G;
  const double stop = shares_.stop[layer.index(task)];
  std::fill_n(o, G * layer.shape.head_dim, 0.0f);
  std::fill_n(lse, G, kMinusInf);
  uint16_t going = walk.wanted.active;
  if (going == 0) return out;
  out.reads.metadata_bytes =
      score_blocks(layer, task, walk.at, layer.query(task), G, shares_.spread[layer.index(task)],
                   s->scores.data(), s->stride(G), s);
  for (int read = 0;; read += walk.count) {
    const int quota = microbatch(read, walk.at.level);
    for (unsigned rest = going; rest != 0; rest &= rest - 1) {
      const int g = std::countr_zero(rest);
      if (walk.heads[g].enough(stop)) going &= ~(1u << g);
    }
    walk.pick(quota, &going);
    if (walk.count == 0) return out;
    walk.attend_picked(o, lse, &out);
    walk.learn(lse);
  }
}

}  // namespace fluxion
