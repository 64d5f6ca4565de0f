// Tasks that read until they have enough: PSA (arXiv 2503.00392), Algorithm 1.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "runtime/engine.h"

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

// Algorithm 1, for one query head.
struct Head {
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

}  // namespace

void Engine::Progress::resize(int pages, int group) {
  order.resize(static_cast<size_t>(pages + 1) * group);
  ranked.resize(pages);
  placed.resize(pages);
  picked.resize(pages);
  page_lse.resize(static_cast<size_t>(pages) * group);
}

// Room for progressive tasks: only where asked for.
void Engine::reserve_progress() {
  if (progress_) return;
  const std::lock_guard lock(selection_mutex_);
  for (Scratch& s : scratch_) s.progress.resize(static_cast<int>(s.pages.size()), group_);
  selection_scratch_.progress.resize(static_cast<int>(selection_scratch_.pages.size()), group_);
  progress_ = true;  // last, as in reserve()
}

// Whether b * Hk + h can be done as the plan has it; the layer fails where not.
bool Engine::check_progressive(int group) {
  const std::string who = "Request " + std::to_string(group / shape_.kv_heads) + ", KV head " +
                          std::to_string(group % shape_.kv_heads);
  if (!(stop_[group] >= 0 && stop_[group] <= 1)) {
    record_failure(who + " is to stop at the share " + std::to_string(stop_[group]) +
                   " of its attention; a share is 0 to 1.");
  } else if (!progressive(group)) {
    return true;
  } else if (!(spread_[group] >= 0 && spread_[group] <= 1)) {
    record_failure(who + " is to score blocks with the spread " + std::to_string(spread_[group]) +
                   "; a spread is 0 to 1.");
  } else if (blk_[group] < kPage) {
    record_failure(who +
                   " is to stop early among single tokens; only blocks of 16 tokens or more come in an "
                   "order.");
  } else if (!residents_known()) {
    record_failure(who +
                   " is to stop early, and what its residents weigh is not known; call layer_resident "
                   "before layer_begin, or pass parts.");
  } else {
    return true;
  }
  return false;
}

// Makes the first `want` blocks of head g's order known, of which it has `sorted`: equal scores in the order
// of the blocks, NaN as -inf. What a task does not come to is never sorted.
void Engine::extend_order(const float* scores, int blocks, int g, int sorted, int want, int32_t* order,
                          Scratch* s) const {
  Progress& p = s->progress;
  const uint16_t bit = static_cast<uint16_t>(1u << g);
  kernels_.select(scores, blocks, want, bit, p.ranked.data(), s->select.data());
  int32_t* end = order + sorted;
  for (int i = 0; i < blocks; ++i) {
    *end = i;
    end += (p.ranked[i] & ~p.placed[i] & bit) != 0;
    p.placed[i] |= p.ranked[i] & bit;
  }
  const auto value = [&](int32_t i) { return std::max(-std::numeric_limits<float>::infinity(), scores[i]); };
  std::sort(order + sorted, end, [&](int32_t a, int32_t b) {
    const float x = value(a), y = value(b);
    return x > y || (x == y && a < b);
  });
}

// Every active head goes through the blocks in the order of its own scores, all of them a microbatch at a
// time, until it has enough: until
//
//   P_acc = AS_acc / (AS_acc + AS_min * N_left) >= stop
//
// with AS_acc the weight (sum of exp(scale * q.k)) of all it has attended to, residents included: they are
// blocks that are always computed. AS_min is the least weight among the blocks it chose itself, as these come
// in its order; those it attends to for another head's sake (attend_union) count in AS_acc and N_left alone.
// AS_min and N_left are per token, because the first and the last block may be cut; where none is, it is the
// same. A budget bounds how far down its order a head may go.
//
// o: [G][D], lse: [G], of what was read. Leaves in chosen[] the heads that read each block.
Selection Engine::progress(const Task& task, Scratch* s, float* o, float* lse) const {
  Selection out;
  Progress& p = s->progress;
  const int group = task.request * shape_.kv_heads + task.head, G = group_, D = shape_.head_dim;
  const Blocks at = blocks_of(task);
  const Wanted wanted = wanted_of(task, at.tokens(), blk_of(task), at.count);
  const char* q = query(task.request, task.head);
  const float* res_lse = &res_lse_[state_at(task.request, task.head)];
  const int64_t stride = static_cast<int64_t>(s->scores.size()) / G;
  out.reads.metadata_bytes = score_blocks(task, at, q, G, spread_[group], s->scores.data(), stride, s);
  std::fill_n(o, G * D, 0.0f);
  std::fill_n(lse, G, -std::numeric_limits<float>::infinity());
  for (uint16_t* heads : {s->chosen.data(), p.ranked.data(), p.placed.data(), p.picked.data()})
    std::fill_n(heads, at.count, uint16_t{0});
  Head heads[kMaxGroup];
  for (int g = 0; g < G; ++g) {
    heads[g].order = &p.order[g * static_cast<int64_t>(p.ranked.size() + 1)];
    heads[g].left = at.tokens();
  }
  const int least_blocks = std::max(1, kMicrobatchPages >> at.level);
  int read = 0;
  for (uint16_t going = wanted.active; going != 0;) {
    const int quota = std::max(least_blocks, read / kReadShare);
    int count = 0;
    for (unsigned rest = going; rest != 0; rest &= rest - 1) {
      const int g = std::countr_zero(rest);
      const uint16_t bit = static_cast<uint16_t>(1u << g);
      Head& head = heads[g];
      int taken = 0;
      while (taken < quota && head.walked < wanted.count[g]) {
        if (head.walked == head.sorted) {
          const int want = std::min(wanted.count[g], std::max(2 * head.sorted, 4 * quota));
          extend_order(&s->scores[g * stride], at.count, g, head.sorted, want, head.order, s);
          head.sorted = want;
        }
        const int i = head.order[head.walked++];
        if (s->chosen[i] != 0 && config_.attend_union) continue;  // it has been attended to
        if (p.picked[i] == 0) s->blocks[count++] = i;
        p.picked[i] |= bit;
        ++taken;
      }
      if (taken == 0) going &= ~bit;
    }
    if (count == 0) break;
    attend_microbatch(task, at, count, s, o, lse, &out);
    for (int j = 0, page = 0; j < count; ++j) {
      const int i = s->blocks[j], pages = at.to(i) - at.from(i);
      const uint16_t picked = p.picked[i];
      for (unsigned rest = picked; rest != 0; rest &= rest - 1) {
        const int g = std::countr_zero(rest);
        const double weight = log_sum(&p.page_lse[static_cast<int64_t>(page) * G + g], pages, G);
        heads[g].least = std::min(heads[g].least, weight - std::log(pages * kPage));
      }
      const uint16_t readers = config_.attend_union ? uint16_t{0xffff} : picked;
      for (int g = 0; g < G; ++g) heads[g].left -= readers >> g & 1 ? pages * kPage : 0;
      s->chosen[i] |= picked;
      p.picked[i] = 0;
      page += pages;
    }
    read += count;
    for (unsigned rest = going; rest != 0; rest &= rest - 1) {
      const int g = std::countr_zero(rest);
      if (heads[g].enough(res_lse[g], lse[g], stop_[group])) going &= ~(1u << g);
    }
  }
  return out;
}

// Attends to the microbatch's blocks, s->blocks[0..count) with the heads in picked[], and merges the result
// into o and lse; page_lse is that of its pages in their order.
void Engine::attend_microbatch(const Task& task, const Blocks& at, int count, Scratch* s, float* o,
                               float* lse, Selection* out) const {
  Progress& p = s->progress;
  const int G = group_, D = shape_.head_dim;
  const uint16_t everyone = static_cast<uint16_t>((1u << G) - 1);
  const int32_t* pages = pages_of(task.request);
  Selection batch;
  batch.masked = !config_.attend_union && std::any_of(s->blocks.data(), s->blocks.data() + count,
                                                      [&](int i) { return p.picked[i] != everyone; });
  uint16_t* masks = s->masks.data();
  for (int j = 0; j < count; ++j) {
    const int i = s->blocks[j], from = at.from(i), end = at.to(i);
    const uint16_t readers = config_.attend_union ? everyone : p.picked[i];
    std::copy(pages + from, pages + end, &s->pages[batch.count]);
    batch.count += end - from;
    batch.tokens += static_cast<int64_t>(end - from) * kPage * std::popcount(readers);
    for (int m = 0; batch.masked && m < (end - from) * G; ++m) *masks++ = readers >> (m % G) & 1 ? 0xffff : 0;
  }
  batch.reads.tile_bytes = batch.count * shape_.tile_bytes();
  alignas(64) float part_o[kMaxGroup * kMaxHeadDim];
  float part_lse[kMaxGroup];
  attend(query(task.request, task.head), G, task.head, batch, s->pages.data(), s->masks.data(), s, part_o,
         part_lse, p.page_lse.data());
  for (int g = 0; g < G; ++g)
    lse[g] = exact_.merge_state(o + g * D, lse[g], part_o + g * D, part_lse[g], D, o + g * D);
  out->count += batch.count;
  out->tokens += batch.tokens;
  out->reads.tile_bytes += batch.reads.tile_bytes;
  ++out->microbatches;
}

}  // namespace fluxion
