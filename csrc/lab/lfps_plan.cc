// What a step looks at: Lfps::plan.
#include <bit>
#include <cstring>

#include "lab/lfps_parts.h"
#include "lab/listed.h"

namespace fluxion {
namespace {

using namespace lfps;

constexpr int kFirst = 4;  // tokens whose attention says how sparse a head is: the paper's sinks
constexpr int kLocal = 5;  // the most recent tokens

constexpr int kBitsets = 6;  // that `candidates` needs besides its result

// The LSE of scale * scores[from..to).
double lse_of(const float* scores, int from, int to, float scale) {
  double lse = kNothing;
  for (int i = from; i < to; ++i) lse = log_add(lse, static_cast<double>(scale) * scores[i]);
  return lse;
}

uint64_t reversed(uint64_t x) {
  x = (x & 0x5555555555555555) << 1 | (x >> 1 & 0x5555555555555555);
  x = (x & 0x3333333333333333) << 2 | (x >> 2 & 0x3333333333333333);
  x = (x & 0x0f0f0f0f0f0f0f0f) << 4 | (x >> 4 & 0x0f0f0f0f0f0f0f0f);
  return __builtin_bswap64(x);
}

// Bits from + 63, from + 62, ..., from of a bitset; from >= -64.
uint64_t backwards(const uint64_t* bits, int from) {
  const int word = from >> 6, shift = from & 63;
  return reversed(bits[word] >> shift | bits[word + 1] << 1 << (63 - shift));
}

}  // namespace

int64_t Lfps::plan(const LfpsStep& step, const LfpsPlan& plan) {
  check(step);
  const PoolShape& shape = pool_->shape();
  const int heads = shape.kv_heads;
  int most = 0;      // pages of a middle
  size_t words = 0;  // of 64 tokens, of a request
  for (int b = 0; b < step.batch; ++b) {
    const int n = step.seq_lens[b];
    if ((n + kPage - 1) / kPage > plan.columns)
      refuse("The page table is too short for request " + std::to_string(b) + ".");
    const std::string wrong = pool_->check_pages(plan.table + b * plan.table_stride, (n + kPage - 1) / kPage);
    if (!wrong.empty()) refuse("Request " + std::to_string(b) + " cannot be planned: " + wrong + ".");
    most = std::max(most, window_start_page(n, shape.sink_pages, config_.window) - shape.sink_pages);
    State* state = at(step.layer, step.rows[b]).get();
    reserve(state, n);
    words = std::max<size_t>(words, words_of(n));
    // The middle and the offsets grow with the request.
    const int start = window_start_page(n, shape.sink_pages, config_.window) * kPage;
    for (int head = 0; head < config_.q_heads; ++head) {
      vertical(state, head).extend(start);
      slash(state, head).extend(n - sinks());
    }
    state->vertical_end = std::max(state->vertical_end, start);
    state->slash_end = std::max(state->slash_end, n - sinks());
  }
  if (static_cast<int64_t>(step.batch) * heads * most > plan.capacity)
    refuse("There is no room for the lists of " + std::to_string(most) + " pages.");
  for (Scratch& s : scratch_) s.bits.resize(std::max(s.bits.size(), (kBitsets + group_) * (words + 2)));
  const int groups = step.batch * heads;
  counts_.resize(std::max<size_t>(counts_.size(), groups));
  for_groups(groups, [&](int i, Scratch* scratch) {
    const int64_t to = static_cast<int64_t>(i) * most;
    counts_[i] =
        plan_group(step, plan, i / heads, i % heads, plan.pages + to, plan.masks + to * group_, scratch);
  });
  // Closes the gaps between the lists.
  int64_t count = 0;
  plan.offsets[0] = 0;
  for (int i = 0; i < groups; ++i) {
    const int64_t from = static_cast<int64_t>(i) * most;
    std::memmove(plan.pages + count, plan.pages + from, counts_[i] * sizeof(int32_t));
    std::memmove(plan.masks + count * group_, plan.masks + from * group_,
                 static_cast<size_t>(counts_[i]) * group_ * sizeof(uint16_t));
    plan.offsets[i + 1] = count += counts_[i];
  }
  for (Scratch& s : scratch_) {
    planned_ += s.counts[0];
    passed_ += s.counts[1];
    candidates_ += s.counts[2];
    s.counts = {};
  }
  return count;
}

// Returns how many pages the group lists.
int Lfps::plan_group(const LfpsStep& step, const LfpsPlan& plan, int b, int h, int32_t* pages,
                     uint16_t* masks, Scratch* s) const {
  const PoolShape& shape = pool_->shape();
  const int n = step.seq_lens[b], first = shape.sink_pages;
  const int middle = window_start_page(n, first, config_.window) - first;
  const int64_t at_head = static_cast<int64_t>(b) * config_.q_heads + h * group_;
  const int64_t at_group = static_cast<int64_t>(b) * shape.kv_heads + h;
  State* state = at(step.layer, step.rows[b]).get();
  plan.blk[at_group] = ListedTokens::kBlk;
  plan.value[at_group] = 0;
  std::fill_n(plan.budget + at_head, group_, 0.0f);
  std::fill_n(plan.given_lse + at_head, group_, kNothing);
  if (middle == 0) return 0;
  const uint16_t passed = pass_by(step, plan, b, h);
  s->counts[0] += group_;
  s->counts[1] += std::popcount(passed);
  for (int g = 0; g < group_; ++g) {
    uint64_t* chosen = s->bitset(kBitsets + g, words_of(n));
    // A budget below 1 ranks, so that the choice comes with its scores. A head that is passed by lists
    // nothing, but has a task, which merges what is given.
    plan.budget[at_head + g] = static_cast<float>(std::min(plan.k, 1 - 1e-6));
    if (passed >> g & 1) {
      std::fill_n(chosen, words_of(n), uint64_t{0});
      continue;
    }
    candidates(state, h * group_ + g, n, chosen, s);
  }
  const int end = first + middle;
  int count = 0;
  int64_t tokens = 0;
  for (int w = first / kPagesAWord; w < words_of(end * kPage); ++w) {
    uint64_t any = 0;
    for (int g = 0; g < group_; ++g) {
      const uint64_t bits = s->bitset(kBitsets + g, words_of(n))[w];
      any |= bits;
      tokens += std::popcount(bits);
    }
    if (any == 0) continue;
    for (int page = std::max(first, w * kPagesAWord); page < std::min(end, (w + 1) * kPagesAWord); ++page) {
      const int shift = page % kPagesAWord * kPage;
      uint16_t* to = masks + static_cast<int64_t>(count) * group_;
      for (int g = 0; g < group_; ++g)
        to[g] = static_cast<uint16_t>(s->bitset(kBitsets + g, words_of(n))[w] >> shift);
      pages[count] = page;
      count += (any >> shift & 0xffff) != 0;
    }
  }
  s->counts[2] += tokens;
  plan.value[at_group] = static_cast<float>(2.0 * count * kPage + static_cast<double>(tokens));
  return count;
}

// Eq. 5 and 6: the heads of the group whose attention goes to the first tokens. For these the middle becomes
// one token: the mean value, with the estimated weight of all its tokens.
uint16_t Lfps::pass_by(const LfpsStep& step, const LfpsPlan& plan, int b, int h) const {
  if (config_.bypass >= 1) return 0;
  const PoolShape& shape = pool_->shape();
  const int n = step.seq_lens[b], D = shape.head_dim;
  const int end_page = window_start_page(n, shape.sink_pages, config_.window);
  const double middle = (end_page - shape.sink_pages) * kPage;
  const int32_t* pages = plan.table + b * plan.table_stride;
  // The middle has a token, so there are kFirst and kLocal others.
  constexpr int kTokens = kFirst + kLocal;
  int32_t tokens[kTokens];
  for (int i = 0; i < kTokens; ++i) {
    const int position = i < kFirst ? i : n - kTokens + i;
    tokens[i] = pages[position / kPage] * kPage + position % kPage;
  }
  const char* q = plan.q + b * plan.q_stride + static_cast<int64_t>(h) * group_ * shape.token_bytes();
  float scores[kMaxGroup][kTokens];
  pool_->kernels().score_rows(q, group_, D, pool_->tiles(step.layer, h), tokens, kTokens, scores[0], kTokens);
  const double* sums = pool_->moments(step.layer, h, pages[end_page - 1]);
  const State& state = *at(step.layer, step.rows[b]);
  const double odds = std::log(config_.bypass / (1 - config_.bypass));
  uint16_t passed = 0;
  for (int g = 0; g < group_; ++g, q += shape.token_bytes()) {
    const double sink = lse_of(scores[g], 0, kFirst, plan.scale);
    const double local = lse_of(scores[g], kFirst, kTokens, plan.scale);
    double mean = 0;
    for (int d = 0; d < D; ++d) mean += element(q, d, kv_dtype(shape.dtype)) * sums[d];
    mean *= plan.scale / middle;
    const double variance = state.heads[h * group_ + g].spread * squared_norm(q, D, kv_dtype(shape.dtype));
    const double global = std::log(middle) + mean + variance / 2;
    if (!(sink - std::max(global, local) > odds)) continue;
    passed |= 1u << g;
    const int64_t to = static_cast<int64_t>(b) * config_.q_heads + h * group_ + g;
    plan.given_lse[to] = static_cast<float>(global);
    for (int d = 0; d < D; ++d) plan.given_o[to * D + d] = static_cast<float>(sums[D + d] / middle);
  }
  return passed;
}

// Eq. 7 to 9: the candidates of a head of a request with n tokens: chosen[words_of(n)] by position.
//
// Codes decide most entries. An entry with the code of the limit is read only if its position is not decided
// otherwise.
void Lfps::candidates(State* state, int head, int n, uint64_t* chosen, Scratch* s) const {
  ScoreTable by_position = vertical(state, head), by_offset = slash(state, head);
  const Limits position = by_position.limits(config_.alpha_vertical);
  const Limits offset = by_offset.limits(config_.alpha_slash);
  by_position.encode(state->capacity, position);
  by_offset.encode(state->capacity, offset);
  const int words = words_of(n);
  const int start = sinks(), end = window_start_page(n, start / kPage, config_.window) * kPage;
  const int from = start / kWord, to = words_of(end);
  const auto middle = [&](int w) {
    const int first = std::max(start - kWord * w, 0), last = std::min(end - kWord * w, kWord);
    return ~uint64_t{0} << first & ~uint64_t{0} >> (kWord - last);
  };
  // found[w] for w in [from, to): which of the positions wanted(w) have an entry above a limit.
  const auto above = [&](float Limits::* limit, const auto& wanted, uint64_t* found) {
    uint64_t *above_v = s->bitset(0, words), *equal_v = s->bitset(1, words);
    uint64_t *above_s = s->bitset(2, words), *equal_s = s->bitset(3, words), *open = s->bitset(4, words);
    const KernelTable& kernels = pool_->kernels();
    kernels.compare_codes(by_position.codes, words, by_position.statistics->code.of(position.*limit), above_v,
                          equal_v);
    kernels.compare_codes(by_offset.codes, words, by_offset.statistics->code.of(offset.*limit), above_s,
                          equal_s);
    above_s[-1] = equal_s[-1] = above_s[words] = equal_s[words] = 0;
    const auto has = [](const uint64_t* bits, int i) { return (bits[i / kWord] >> i % kWord & 1) != 0; };
    // Undecided entries lie apart, so all are prefetched before the first is read. Offset d is position n - 1
    // - d.
    for (int w = from; w < to; ++w) {
      const int least = n - kWord * (w + 1);  // offset of the word's last position
      const uint64_t these = wanted(w);
      found[w] = (above_v[w] | backwards(above_s, least)) & these;
      open[w] = (equal_v[w] | backwards(equal_s, least)) & these & ~found[w];
      for (uint64_t left = open[w]; left != 0; left &= left - 1) {
        const int p = kWord * w + std::countr_zero(left);
        __builtin_prefetch(has(equal_v, p) ? &by_position.values[p] : &by_offset.values[n - 1 - p]);
      }
    }
    for (int w = from; w < to; ++w) {
      for (uint64_t left = open[w]; left != 0; left &= left - 1) {
        const int p = kWord * w + std::countr_zero(left), d = n - 1 - p;
        if ((has(equal_v, p) && by_position.values[p] > position.*limit) ||
            (has(equal_s, d) && by_offset.values[d] > offset.*limit))
          found[w] |= left & -left;
      }
    }
  };
  std::fill_n(chosen, words, uint64_t{0});
  uint64_t* first = config_.expand ? s->bitset(kBitsets - 1, words) : chosen;
  above(&Limits::first, middle, first);
  // The page that left the window last: its tokens could not be chosen in earlier steps.
  first[(end - kPage) / kWord] |= uint64_t{0xffff} << (end - kPage) % kWord;
  if (!config_.expand) return;
  first[from - 1] = first[to] = 0;
  const auto beside = [&](int w) {
    const uint64_t before = first[w - 1], now = first[w], after = first[w + 1];
    const uint64_t near = now << 1 | before >> 63 | now << 2 | before >> 62 | now >> 1 | after << 63;
    return near & ~now & middle(w);
  };
  above(&Limits::mean, beside, chosen);
  for (int w = from; w < to; ++w) chosen[w] |= first[w];
}

}  // namespace fluxion
