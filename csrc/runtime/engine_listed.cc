// Tasks that read a list of tokens (blk kListed) instead of ranking the middle's blocks.
//
// A head with a budget of 1 or more attends to every token it lists; one with less to the ceil(budget *
// middle) of them with the largest exact q.k, of equal scores the earlier token, or to all where it lists no
// more; one with a budget of 0 to none. Each head keeps to its own list, whatever attend_union says. Only
// tokens are scored that a head lists which has to leave some of them out, or might have to where the plan
// asks for a record of what was chosen.
#include <algorithm>
#include <bit>

#include "runtime/engine.h"

namespace fluxion {

// What is wrong with the list of group b * Hk + h, or "": after that its pages may be read.
std::string Engine::check_list(int i) const {
  const ListedTokens& all = args_.listed;
  if (all.offsets == nullptr) return "the plan has no lists";
  const int64_t begin = all.offsets[i], end = all.offsets[i + 1];
  if (begin < 0 || begin > end || end > all.count) {
    return "it goes from " + std::to_string(begin) + " to " + std::to_string(end) + " of " +
           std::to_string(all.count) + " pages";
  }
  const int window = requests_[i / shape_.kv_heads].window_page;
  int least = sink_pages();
  for (int64_t j = begin; j < end; ++j) {
    const int page = all.pages[j];
    if (page < least || page >= window) {
      return "page " + std::to_string(page) + " is not one of " + std::to_string(least) + " to " +
             std::to_string(window - 1) + ", the middle's after the one before";
    }
    least = page + 1;
  }
  return "";
}

int Engine::listed_pages(int i) const {
  return static_cast<int>(args_.listed.offsets[i + 1] - args_.listed.offsets[i]);
}

Selection Engine::select_listed(const Task& task, Scratch* s) const {
  Selection out;
  const int i = task.request * shape_.kv_heads + task.head, count = listed_pages(i);
  const int32_t* logical = args_.listed.pages + args_.listed.offsets[i];
  const uint16_t* listed = args_.listed.masks + args_.listed.offsets[i] * group_;
  const int tokens = (requests_[task.request].window_page - sink_pages()) * kPage;
  const Wanted wanted = wanted_of(task, tokens, 1, tokens);
  uint16_t* masks = s->masks.data();
  for (int j = 0; j < count; ++j) {
    for (int g = 0; g < group_; ++g)
      masks[j * group_ + g] = wanted.active >> g & 1 ? listed[j * group_ + g] : uint16_t{0};
  }
  const int scored = rank_listed(task, listed, wanted, s);
  // The record is the owner's to write; selection() looks on.
  if (args_.listed.chosen != nullptr && s != &selection_scratch_)
    std::copy_n(masks, count * group_, args_.listed.chosen + args_.listed.offsets[i] * group_);
  // Down to the pages that some head reads.
  const int32_t* page = pages_of(task.request);
  int64_t rows = 0;
  for (int j = 0; j < count; ++j) {
    const uint16_t* from = masks + j * group_;
    uint16_t* to = masks + out.count * group_;
    uint16_t any = 0;
    for (int g = 0; g < group_; ++g) {
      any |= to[g] = from[g];
      out.tokens += std::popcount(from[g]);
      out.masked |= from[g] != 0xffff;
    }
    if (any == 0) continue;
    rows += std::popcount(any);
    s->pages[out.count++] = page[logical[j]];
  }
  out.reads.tile_bytes = (2 * rows + scored) * shape_.token_bytes();
  return out;
}

// Takes from the masks of the scratch what heads with a part of the middle leave out of their lists; how many
// keys it scored.
int Engine::rank_listed(const Task& task, const uint16_t* listed, const Wanted& wanted, Scratch* s) const {
  const int i = task.request * shape_.kv_heads + task.head, count = listed_pages(i);
  const float* budget = &budget_[state_at(task.request, task.head)];
  const bool recorded = args_.listed.scores != nullptr;
  unsigned ranked = 0, heads = 0;
  for (unsigned left = wanted.active; left != 0; left &= left - 1) {
    const int g = std::countr_zero(left);
    if (budget[g] >= 1) continue;
    int64_t tokens = 0;
    for (int j = 0; j < count; ++j) tokens += std::popcount(listed[j * group_ + g]);
    if (tokens > wanted.count[g]) ranked |= 1u << g;
    if (tokens > wanted.count[g] || recorded) heads |= 1u << g;
  }
  if (heads == 0) return 0;
  const int32_t* page = pages_of(task.request);
  const int32_t* logical = args_.listed.pages + args_.listed.offsets[i];
  int scored = 0;
  for (int j = 0; j < count; ++j) {
    uint16_t any = 0;
    for (unsigned left = heads; left != 0; left &= left - 1)
      any |= listed[j * group_ + std::countr_zero(left)];
    s->blocks[j] = any;
    for (unsigned bits = any; bits != 0; bits &= bits - 1)
      s->tokens[scored++] = page[logical[j]] * kPage + std::countr_zero(bits);
  }
  if (scored == 0) return 0;
  score_rows(task, scored, s);
  const int64_t stride = static_cast<int64_t>(s->scores.size()) / group_;
  // visit(j, t, at) for every scored token: at its place among them.
  const auto each = [&](const auto& visit) {
    int at = 0;
    for (int j = 0; j < count; ++j) {
      for (unsigned bits = static_cast<unsigned>(s->blocks[j]); bits != 0; bits &= bits - 1)
        visit(j, std::countr_zero(bits), at++);
    }
  };
  if (recorded && s != &selection_scratch_) {
    float* to = args_.listed.scores + args_.listed.offsets[i] * group_ * kPage;
    for (int g = 0; g < group_; ++g) {
      const float* scores = s->scores.data() + g * stride;
      each(
          [&](int j, int t, int at) { to[(static_cast<int64_t>(j) * group_ + g) * kPage + t] = scores[at]; });
    }
  }
  for (unsigned left = ranked; left != 0; left &= left - 1) {
    const int g = std::countr_zero(left);
    float* scores = s->scores.data() + g * stride;
    int tokens = 0;  // the head's own, drawn together: never ahead of where they come from
    if (std::popcount(heads) == 1) {
      tokens = scored;
    } else {
      each([&](int j, int t, int at) {
        scores[tokens] = scores[at];
        tokens += listed[j * group_ + g] >> t & 1;
      });
    }
    std::fill_n(s->chosen.data(), tokens, uint16_t{0});
    kernels_.select(scores, tokens, wanted.count[g], 1, s->chosen.data(), s->select.data());
    tokens = 0;
    for (int j = 0; j < count; ++j) {
      unsigned kept = 0;
      for (unsigned bits = listed[j * group_ + g]; bits != 0; bits &= bits - 1)
        kept |= (bits & -bits) & -static_cast<unsigned>(s->chosen[tokens++]);
      s->masks[j * group_ + g] = static_cast<uint16_t>(kept);
    }
  }
  return scored;
}

}  // namespace fluxion
