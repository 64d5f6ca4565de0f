#include "engine/sketched.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "engine/chunks.h"

namespace fluxion {

namespace {

// Tokens below those attended to exactly may hold this many times the share that may be left, up to a half.
constexpr float kExactTimes = 4.0f, kExactMost = 0.5f;
// The part of that share that pages skipped by the first look may hold.
constexpr float kSkippedPart = 0.5f;
// The weight of a page in units of its best token: about the sum of its 16 tokens.
constexpr float kTokensOfPage = 4.0f;
// Logits further apart than this are not compared, because their weights might not be finite.
constexpr float kComparable = 60.0f;

int pages_of(const Layer& layer, const Task& task) { return layer.step.middle_tokens(task.request) / kPage; }

int rounded(int pages) { return (pages + kPage - 1) / kPage * kPage; }

class Choice : public OwnScratch {
 public:
  void reserve(int pages, int group) {
    stride_ = rounded(pages);
    for (auto* scores : {&about_, &most_}) scores->resize(static_cast<size_t>(group) * stride_);
    marks_.resize(stride_ / kPage);
    near_.resize(stride_ / kPage);
    for (auto* masks : {&kept_, &exact_}) masks->resize(static_cast<size_t>(group) * stride_);
    for (auto* list : {&pages_, &at_}) list->resize(stride_);
    light_.resize(stride_);
  }

  // Lists in s->pages those of `pages` that may matter to some head. Returns how many.
  int skim(const Layer& layer, const Task& task, const int32_t* pages, int count, float left, Scratch* s) {
    const int G = layer.group, n = rounded(count);
    skim_sketches(layer, task, pages, count, about_.data(), most_.data(), stride_, s);
    std::fill_n(near_.data(), n / kPage, uint16_t{0});
    for (int g = 0; g < G; ++g) {
      float *about = &about_[g * stride_], *most = &most_[g * stride_], more = 0;
      const float lse = layer.res_lse[layer.state(task) + g];
      const float sum = layer.exact.weigh(about, n, layer.at.scale, lse, &unit_[g]);
      layer.exact.weigh(most, n, layer.at.scale, unit_[g], &more);
      const float all = sum + power(lse, unit_[g]);
      const float allowed = kSkippedPart / kTokensOfPage * left * all * power(unit_[g], more);
      float bound = 0;
      if (more - unit_[g] < kComparable)
        layer.exact.light_bounds(most, n, &allowed, 1, s->select.data(), &bound);
      layer.exact.mark_heavy(most, n, bound, marks_.data());
      for (int i = 0; i < n / kPage; ++i) near_[i] |= marks_[i];
    }
    int found = 0;
    std::fill_n(skipped_, G, 0.0f);
    for (int p = 0; p < count; ++p) {
      if (near_[p / kPage] >> p % kPage & 1) {
        s->pages[found++] = pages[p];
      } else {
        for (int g = 0; g < G; ++g) skipped_[g] += kTokensOfPage * about_[g * stride_ + p];
      }
    }
    return found;
  }

  // Each head chooses among the tokens of s->pages, whose scores become weights.
  void choose(const Layer& layer, const Task& task, int count, float left, Scratch* s) {
    const int n = count * kPage;
    const float shares[2] = {left, std::max(left, std::min(kExactTimes * left, kExactMost))};
    score_sketches(layer, task, s->pages.data(), count, s);
    for_each_head(layer, n * sizeof(float), s, [&](int g, Scratch* helper) {
      float* weights = &s->scores[g * s->stride(layer.group)];
      const float lse = layer.res_lse[layer.state(task) + g], before = unit_[g];
      const float sum = layer.exact.weigh(weights, n, layer.at.scale, lse, &unit_[g]);
      const float skipped = skipped_[g] > 0 ? skipped_[g] * power(before, unit_[g]) : 0;
      const float all = sum + skipped + power(lse, unit_[g]);
      float allowed[2], bounds[2];
      for (int j = 0; j < 2; ++j)
        allowed[j] = std::max(shares[j] * all - skipped, (1 - kSkippedPart) * shares[j] * all);
      layer.exact.light_bounds(weights, n, allowed, 2, helper->select.data(), bounds);
      layer.exact.mark_heavy(weights, n, bounds[0], &kept_[g * stride_]);
      layer.exact.mark_heavy(weights, n, bounds[1], &exact_[g * stride_]);
    });
  }

  // Lists what some head chose: tiles and masks, and the tokens that are attended to exactly.
  Selection list(const Layer& layer, int count, Scratch* s) {
    const int G = layer.group;
    for (int g = 1; g < G; ++g) {
      for (int p = 0; p < count; ++p) {
        kept_[p] |= kept_[g * stride_ + p];
        exact_[p] |= exact_[g * stride_ + p];
      }
    }
    Selection out;
    exact_rows = rows = light_pages_ = 0;
    for (int p = 0; p < count; ++p) {
      const unsigned bits = kept_[p], exact = exact_[p];
      if (bits == 0) continue;
      for (unsigned left = exact; left != 0; left &= left - 1)
        s->tokens[exact_rows++] = s->pages[p] * kPage + std::countr_zero(left);
      if (bits != exact) {
        at_[light_pages_] = p;
        pages_[light_pages_] = s->pages[p];
        light_[light_pages_++] = static_cast<uint16_t>(bits & ~exact);
      }
      rows += std::popcount(bits);
      out.masked |= bits != 0xffff;
      std::fill_n(&s->masks[out.count * G], G, static_cast<uint16_t>(bits));
      s->pages[out.count++] = s->pages[p];
    }
    out.tokens = int64_t{rows} * G;
    return out;
  }

  // The chosen tokens that are not attended to exactly.
  Weighed light(int group, const Scratch* s) const {
    return {pages_.data(),     at_.data(),       light_.data(),    light_pages_,
            rows - exact_rows, s->scores.data(), s->stride(group), unit_};
  }

  int exact_rows = 0, rows = 0;  // tokens that list() found, for all heads
  bool tiles = false;            // whether whole tiles are attended to, with masks

 private:
  // The weight of this LSE, in units of e^unit.
  static float power(float lse, float unit) { return std::exp(lse - unit); }

  int stride_ = 0;  // pages, of one head
  std::vector<float> about_, most_;
  std::vector<uint16_t> marks_, near_;  // one bit a page: of one head, of all
  std::vector<uint16_t> kept_, exact_;  // one bit a token, [G][pages]
  // Pages with light tokens, their places among the scored pages, and masks of these tokens.
  std::vector<int32_t> pages_, at_;
  std::vector<uint16_t> light_;
  int light_pages_ = 0;
  float unit_[kMaxGroup], skipped_[kMaxGroup];
};

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

// Estimate: all sketches and a tenth of the tiles.
int64_t Sketched::bytes(const Layer& layer, const Task& task) const {
  return pages_of(layer, task) * (layer.shape.sketch_bytes() + layer.shape.tile_bytes() / 10);
}

int Sketched::ranked_tokens(const Layer& layer, const Task& task) const {
  return layer.step.middle_tokens(task.request);
}

void Sketched::reserve(int pages, int group, Scratch* scratch) const {
  scratch->own<Choice>().reserve(pages, group);
}

Selection Sketched::select(const Layer& layer, const Task& task, Scratch* s) const {
  const PoolShape& shape = layer.shape;
  const int32_t* pages = layer.pages(task) + layer.step.sink_pages();
  const int all = pages_of(layer, task);
  const float left = left_[layer.index(task)];
  Choice& choice = s->own<Choice>();
  if (left >= 1) {
    choice.rows = 0;
    return {};
  }
  if (left == 0) {
    Selection out;
    choice.rows = all * kPage;
    choice.tiles = true;
    std::copy_n(pages, all, s->pages.data());
    out.count = all;
    out.tokens = int64_t{all} * kPage * layer.group;
    out.reads.tile_bytes = all * shape.tile_bytes();
    std::fill_n(s->masks.data(), all * layer.group, uint16_t{0xffff});
    return out;
  }
  const int near = choice.skim(layer, task, pages, all, left, s);
  choice.choose(layer, task, near, left, s);
  Selection out = choice.list(layer, near, s);
  // An 8-bit row cannot be read without most of its tile.
  choice.tiles = shape.dtype == DType::kInt8 || 2 * choice.exact_rows > out.count * kPage;
  out.reads.metadata_bytes =
      all * shape.skimmed_bytes() + near * (shape.sketch_bytes() - shape.skimmed_bytes());
  out.reads.tile_bytes =
      choice.tiles ? out.count * shape.tile_bytes() : (choice.rows + choice.exact_rows) * shape.row_bytes();
  return out;
}

Selection Sketched::run(const Layer& layer, const Task& task, Scratch* s, float* o, float* lse) const {
  const Selection chosen = select(layer, task, s);
  const Choice& choice = s->own<Choice>();
  if (choice.tiles || choice.rows == 0) {
    attend(layer, task, chosen, s, o, lse);
  } else if (choice.exact_rows == 0) {
    attend_weighed(layer, task, choice.light(layer.group, s), s, o, lse);
  } else {
    attend_tokens(layer, task, choice.exact_rows, s, o, lse);
    if (choice.exact_rows == choice.rows) return chosen;
    float more_o[kMaxGroup * kMaxHeadDim], more_lse[kMaxGroup];
    attend_weighed(layer, task, choice.light(layer.group, s), s, more_o, more_lse);
    layer.merge(layer.group, o, lse, more_o, more_lse);
  }
  return chosen;
}

}  // namespace fluxion
