#include "lab/listed.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>

#include "engine/chunks.h"

namespace fluxion {

namespace {

// Calls visit(j, t, at) for every scored token, number `at`. s->blocks[j]: the scored tokens of page j.
template <class Visit>
void each_scored(const Scratch* s, int count, const Visit& visit) {
  int at = 0;
  for (int j = 0; j < count; ++j) {
    for (unsigned bits = static_cast<unsigned>(s->blocks[j]); bits != 0; bits &= bits - 1)
      visit(j, std::countr_zero(bits), at++);
  }
}

}  // namespace

void ListedTokens::check_shape(const LayerPlan& plan) const {
  const int64_t groups = int64_t{plan.batch} * plan.kv_heads;
  if (all_.groups != groups) {
    throw std::invalid_argument("listed.offsets has the shape [" + std::to_string(all_.groups + 1) +
                                "] and must have [" + std::to_string(groups + 1) + "].");
  }
  if (const int group = plan.q_heads / plan.kv_heads; all_.count > 0 && all_.group != group) {
    throw std::invalid_argument("listed.masks has masks of " + std::to_string(all_.group) +
                                " heads and must have " + std::to_string(group) + " a group.");
  }
  if (all_.given_lse != nullptr && all_.q_heads != plan.q_heads) {
    throw std::invalid_argument("given.lse is of " + std::to_string(all_.q_heads) + " heads and must be of " +
                                std::to_string(plan.q_heads) + ".");
  }
}

int ListedTokens::count(const Layer& layer, const Task& task) const {
  const int64_t* offsets = all_.offsets + layer.index(task);
  return static_cast<int>(offsets[1] - offsets[0]);
}

bool ListedTokens::given(const Layer& layer, const Task& task) const {
  if (all_.given_lse == nullptr) return false;
  const float* lse = all_.given_lse + layer.state(task);
  return std::any_of(lse, lse + layer.group, [](float x) { return x != -INFINITY; });
}

std::string ListedTokens::wrong(const Layer& layer, const Task& task) const {
  if (all_.given_lse != nullptr && all_.head_dim != layer.shape.head_dim)
    return "is given " + std::to_string(all_.head_dim) + " numbers a head, and the pool has " +
           std::to_string(layer.shape.head_dim);
  const std::string unreadable = "has a list that cannot be read: ";
  const int64_t* offsets = all_.offsets + layer.index(task);
  if (offsets[0] < 0 || offsets[0] > offsets[1] || offsets[1] > all_.count) {
    return unreadable + "it goes from " + std::to_string(offsets[0]) + " to " + std::to_string(offsets[1]) +
           " of " + std::to_string(all_.count) + " pages";
  }
  const int window = layer.step.request(task.request).window_page;
  int least = layer.step.sink_pages();
  for (int64_t j = offsets[0]; j < offsets[1]; ++j) {
    const int page = all_.pages[j];
    if (page < least || page >= window) {
      return unreadable + "page " + std::to_string(page) + " is not one of " + std::to_string(least) +
             " to " + std::to_string(window - 1) + ", the middle's after the one before";
    }
    least = page + 1;
  }
  return "";
}

int64_t ListedTokens::bytes(const Layer& layer, const Task& task) const {
  return std::max<int64_t>(count(layer, task) * layer.shape.tile_bytes(), given(layer, task));
}

int ListedTokens::ranked_tokens(const Layer& layer, const Task& task) const {
  const float* part = layer.budget(task);
  const bool ranked = std::any_of(part, part + layer.group, [](float share) { return share < 1; });
  return ranked ? count(layer, task) * kPage : 0;
}

Selection ListedTokens::select(const Layer& layer, const Task& task, Scratch* s) const {
  Selection out;
  const int G = layer.group, pages = count(layer, task);
  const int64_t first = begin(layer, task);
  const int32_t* logical = all_.pages + first;
  const uint16_t* listed = all_.masks + first * G;
  const int tokens = layer.step.middle_tokens(task.request);
  const Wanted wanted = wanted_of(layer, task, tokens, 1, tokens);
  uint16_t* masks = s->masks.data();
  for (int j = 0; j < pages; ++j) {
    for (int g = 0; g < G; ++g) masks[j * G + g] = wanted.active >> g & 1 ? listed[j * G + g] : uint16_t{0};
  }
  const int scored = rank(layer, task, wanted, s);
  if (all_.chosen != nullptr && !s->looks_on) std::copy_n(masks, pages * G, all_.chosen + first * G);
  // Keeps the pages that some head reads.
  const int32_t* page = layer.pages(task);
  int64_t rows = 0;
  for (int j = 0; j < pages; ++j) {
    const uint16_t* from = masks + j * G;
    uint16_t* to = masks + out.count * G;
    uint16_t any = 0;
    for (int g = 0; g < G; ++g) {
      any |= to[g] = from[g];
      out.tokens += std::popcount(from[g]);
      out.masked |= from[g] != 0xffff;
    }
    if (any == 0) continue;
    rows += std::popcount(any);
    s->pages[out.count++] = page[logical[j]];
  }
  out.reads.tile_bytes = (2 * rows + scored) * layer.shape.row_bytes();
  return out;
}

Selection ListedTokens::run(const Layer& layer, const Task& task, Scratch* s, float* o, float* lse) const {
  const Selection chosen = TaskKind::run(layer, task, s, o, lse);
  const int64_t at = layer.state(task);
  if (given(layer, task))
    layer.merge(layer.group, o, lse, all_.given_o + at * layer.shape.head_dim, all_.given_lse + at);
  return chosen;
}

// Removes from the masks of the scratch what heads with a part of the middle leave out of their lists.
// Returns how many keys it scored: the lists of heads that must leave some out, or might have to, if the plan
// asks for a record of the choice.
int ListedTokens::rank(const Layer& layer, const Task& task, const Wanted& wanted, Scratch* s) const {
  const int G = layer.group, pages = count(layer, task);
  const int64_t first = begin(layer, task);
  const uint16_t* listed = all_.masks + first * G;
  const float* budget = layer.budget(task);
  unsigned ranked = 0, heads = 0;
  for (unsigned left = wanted.active; left != 0; left &= left - 1) {
    const int g = std::countr_zero(left);
    if (budget[g] >= 1) continue;
    int64_t tokens = 0;
    for (int j = 0; j < pages; ++j) tokens += std::popcount(listed[j * G + g]);
    if (tokens > wanted.count[g]) ranked |= 1u << g;
    if (tokens > wanted.count[g] || all_.scores != nullptr) heads |= 1u << g;
  }
  const int scored = heads == 0 ? 0 : score_listed(layer, task, heads, s);
  if (scored == 0) return 0;
  if (all_.scores != nullptr && !s->looks_on) {
    float* to = all_.scores + first * G * kPage;
    for (int g = 0; g < G; ++g) {
      const float* scores = s->scores.data() + g * s->stride(G);
      each_scored(s, pages, [&](int j, int t, int at) {
        to[(static_cast<int64_t>(j) * G + g) * kPage + t] = scores[at];
      });
    }
  }
  const bool alone = std::popcount(heads) == 1;
  for (unsigned left = ranked; left != 0; left &= left - 1) {
    const int g = std::countr_zero(left);
    keep_best(layer, listed, pages, g, scored, alone, wanted.count[g], s);
  }
  return scored;
}

// Scores what any of `heads` lists. Returns the number of tokens.
int ListedTokens::score_listed(const Layer& layer, const Task& task, unsigned heads, Scratch* s) const {
  const int G = layer.group, pages = count(layer, task);
  const int64_t first = begin(layer, task);
  const uint16_t* listed = all_.masks + first * G;
  const int32_t *page = layer.pages(task), *logical = all_.pages + first;
  int scored = 0;
  for (int j = 0; j < pages; ++j) {
    uint16_t any = 0;
    for (unsigned left = heads; left != 0; left &= left - 1) any |= listed[j * G + std::countr_zero(left)];
    s->blocks[j] = any;
    for (unsigned bits = any; bits != 0; bits &= bits - 1)
      s->tokens[scored++] = page[logical[j]] * kPage + std::countr_zero(bits);
  }
  if (scored > 0) score_rows(layer, task, scored, s);
  return scored;
}

// Leaves the best of its list in the masks of head g. alone: no other head's tokens were scored.
void ListedTokens::keep_best(const Layer& layer, const uint16_t* listed, int pages, int g, int scored,
                             bool alone, int best, Scratch* s) const {
  const int G = layer.group;
  float* scores = s->scores.data() + g * s->stride(G);
  int tokens = 0;  // the head's own, compacted in place
  if (alone) {
    tokens = scored;
  } else {
    each_scored(s, pages, [&](int j, int t, int at) {
      scores[tokens] = scores[at];
      tokens += listed[j * G + g] >> t & 1;
    });
  }
  std::fill_n(s->chosen.data(), tokens, uint16_t{0});
  layer.kernels.select(scores, tokens, best, 1, s->chosen.data(), s->select.data());
  tokens = 0;
  for (int j = 0; j < pages; ++j) {
    unsigned kept = 0;
    for (unsigned bits = listed[j * G + g]; bits != 0; bits &= bits - 1)
      kept |= (bits & -bits) & -static_cast<unsigned>(s->chosen[tokens++]);
    s->masks[j * G + g] = static_cast<uint16_t>(kept);
  }
}

}  // namespace fluxion
