#include "runtime/lfps.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace fluxion {
namespace {

constexpr int kFirst = 4;   // tokens whose attention says how sparse a head is: the paper's sinks
constexpr int kLocal = 5;   // the most recent tokens
constexpr int kPad = 2;     // pages beside the middle where the scan may mark neighbours
constexpr int kRoom = 256;  // tokens to be decoded that tables have room for from the start
constexpr float kNothing = -std::numeric_limits<float>::infinity();

uint16_t reversed(uint16_t mask) {
  uint32_t x = mask;
  x = (x & 0x5555) << 1 | (x >> 1 & 0x5555);
  x = (x & 0x3333) << 2 | (x >> 2 & 0x3333);
  x = (x & 0x0f0f) << 4 | (x >> 4 & 0x0f0f);
  return static_cast<uint16_t>(x << 8 | x >> 8);
}

double log_add(double a, double b) {
  const double most = std::max(a, b);
  return std::isinf(most) ? most : most + std::log(std::exp(a - most) + std::exp(b - most));
}

// Of scale * scores[from..to).
double lse_of(const float* scores, int from, int to, float scale) {
  double lse = kNothing;
  for (int i = from; i < to; ++i) lse = log_add(lse, static_cast<double>(scale) * scores[i]);
  return lse;
}

double element(const char* row, int d, DType dtype) {
  if (dtype == DType::kF32) return reinterpret_cast<const float*>(row)[d];
  return std::bit_cast<float>(static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(row)[d]) << 16);
}

double squared_norm(const char* q, int D, DType dtype) {
  double sum = 0;
  for (int d = 0; d < D; ++d) sum += element(q, d, dtype) * element(q, d, dtype);
  return sum;
}

[[noreturn]] void refuse(const std::string& sentence) { throw std::invalid_argument(sentence); }

}  // namespace

Lfps::Lfps(std::shared_ptr<HostPool> pool, const LfpsConfig& config)
    : pool_(std::move(pool)), config_(config), scratch_(pool_->workers().size()) {
  const PoolShape& shape = pool_->shape();
  if (config.q_heads < 1 || config.q_heads % shape.kv_heads != 0 ||
      config.q_heads / shape.kv_heads > kMaxGroup) {
    refuse("The model has " + std::to_string(config.q_heads) + " query heads and " +
           std::to_string(shape.kv_heads) + " KV heads; the first must be 1 to 16 times the second.");
  }
  if (config.rows < 1 || config.window < kPage || config.window % kPage != 0)
    refuse("LFPS needs at least one row, and a window of a multiple of 16 tokens.");
  if (!(config.decay > 0 && config.decay < 1) || !(config.alpha_vertical > 0) || !(config.alpha_slash > 0))
    refuse("The decay of LFPS lies between 0 and 1, and its alphas above 0.");
  if (config.renormalise < 1 || config.renormalise > 40)
    refuse("LFPS keeps 1 to 40 binary digits between two renormalisations.");
  group_ = config.q_heads / shape.kv_heads;
  digits_ = std::ldexp(1.0f, -config.renormalise);
  states_.resize(static_cast<size_t>(shape.layers) * config.rows);
}

// Room for `tokens` tokens, by an eighth more at a time.
void Lfps::reserve(State* state, int tokens) const {
  if (tokens <= state->capacity) return;
  const int old = state->capacity;
  const int capacity = (std::max(tokens, old + old / 8) + kPage - 1) / kPage * kPage;
  const auto grow = [&](std::vector<float>* all, int from, int to) {
    std::vector<float> grown(static_cast<size_t>(config_.q_heads) * 2 * to);
    for (int i = 0; i < config_.q_heads * 2 && from > 0; ++i)
      std::copy_n(all->begin() + static_cast<int64_t>(i) * from, from,
                  grown.begin() + static_cast<int64_t>(i) * to);
    all->swap(grown);
  };
  grow(&state->values, old, capacity);
  grow(&state->tops, old / kPage, capacity / kPage);
  state->capacity = capacity;
}

ScoreTable Lfps::vertical(State* state, int head) const {
  const int64_t at = 2 * static_cast<int64_t>(head) * state->capacity;
  return {&state->values[at], &state->tops[at / kPage], &state->heads[head].vertical, sinks(),
          state->vertical_end};
}

ScoreTable Lfps::slash(State* state, int head) const {
  const int64_t at = (2 * static_cast<int64_t>(head) + 1) * state->capacity;
  return {&state->values[at], &state->tops[at / kPage], &state->heads[head].slash, config_.window,
          state->slash_end};
}

// body(i, scratch) for i in [0, count), over the workers, or in the caller alone while they are busy.
template <class Body>
void Lfps::for_groups(int count, const Body& body) {
  struct Job {
    Lfps* self;
    const Body* body;
    int count;
    std::atomic<int> next{0};
  } job{this, &body, count};
  const auto run = [](void* ctx, int worker) {
    Job* job = static_cast<Job*>(ctx);
    for (int i; (i = job->next.fetch_add(1, std::memory_order_relaxed)) < job->count;)
      (*job->body)(i, &job->self->scratch_[worker]);
  };
  if (count > 1 && pool_->workers().launch(run, &job, /*wake=*/false)) return pool_->workers().join();
  run(&job, 0);
}

void Lfps::begin(int layer, int row, int length, const int32_t* pages, int64_t page_count,
                 const char* queries, int m, float scale) {
  pool_->check_layer(layer);
  if (row < 0 || row >= config_.rows) refuse("There is no request row " + std::to_string(row) + ".");
  if (m < 1 || length < m || (length + kPage - 1) / kPage > page_count)
    refuse("The request has " + std::to_string(length) + " tokens, " + std::to_string(page_count) +
           " pages and " + std::to_string(m) + " queries; pass at most as many queries as tokens.");
  const std::string wrong = pool_->check_pages(pages, (length + kPage - 1) / kPage);
  if (!wrong.empty()) refuse("The score tables cannot be begun: " + wrong + ".");
  std::unique_ptr<State>& slot = states_[static_cast<size_t>(layer) * config_.rows + row];
  if (!slot) slot = std::make_unique<State>();
  State* state = slot.get();
  std::fill(state->values.begin(), state->values.end(), 0.0f);
  std::fill(state->tops.begin(), state->tops.end(), 0.0f);
  state->heads.assign(config_.q_heads, Head{});
  reserve(state, length + kRoom);
  state->vertical_end = sinks();
  state->slash_end = config_.window;
  for_groups(pool_->shape().kv_heads, [&](int h, Scratch* scratch) {
    begin_group(state, layer, h, length, pages, queries, m, scale, scratch);
  });
}

// Eq. 4: the weights of the last m rows, summed by position and by offset.
void Lfps::begin_group(State* state, int layer, int kv_head, int length, const int32_t* pages,
                       const char* queries, int m, float scale, Scratch* s) const {
  const PoolShape& shape = pool_->shape();
  const KernelTable& kernels = pool_->kernels();
  const int first = sinks(), D = shape.head_dim;
  if (length <= first) return;
  const int count = (length + kPage - 1) / kPage - shape.sink_pages, tokens = count * kPage;
  const int together = kMaxGroup / group_;  // rows whose keys are read once
  s->scores.resize(std::max<size_t>(s->scores.size(), static_cast<size_t>(together) * group_ * tokens));
  s->weights.resize(std::max<size_t>(s->weights.size(), tokens));
  s->none.resize(std::max<size_t>(s->none.size(), tokens));
  alignas(64) char packed[kMaxGroup * kMaxHeadDim * sizeof(float)];
  const int64_t group_bytes = group_ * shape.token_bytes();
  const float share = static_cast<float>(1 / (2 * m * (1 - config_.decay)));
  for (int from = 0; from < m; from += together) {
    const int rows = std::min(together, m - from);
    for (int r = 0; r < rows; ++r) {
      const int64_t head = static_cast<int64_t>(from + r) * config_.q_heads + kv_head * group_;
      std::memcpy(packed + r * group_bytes, queries + head * shape.token_bytes(), group_bytes);
    }
    kernels.score_tokens(packed, rows * group_, D, pool_->tiles(layer, kv_head), pages + shape.sink_pages,
                         count, s->scores.data(), tokens);
    for (int r = 0; r < rows; ++r) {
      const int position = length - m + from + r;  // of the row's token
      const int seen = position + 1 - first;
      if (seen <= 0) continue;
      for (int g = 0; g < group_; ++g) {
        const float* scores = &s->scores[static_cast<int64_t>(r * group_ + g) * tokens];
        float mass[2];
        kernels.block_mass(scores, s->none.data(), 1, seen, scale, 1, 1, 1, mass);
        kernels.add_weights(scores, seen, scale, mass[1], 0, 1, s->weights.data());
        const int head = kv_head * group_ + g;
        float* by_position = vertical(state, head).values + first;
        float* by_offset = slash(state, head).values + position - first;
        for (int i = 0; i < seen; ++i) {
          const float weight = share * s->weights[i];
          by_position[i] += weight;
          by_offset[-i] += weight;
        }
        if (position != length - 1) continue;
        double sum = 0, squares = 0;
        for (int i = 0; i < seen; ++i) {
          const double score = static_cast<double>(scale) * scores[i];
          sum += score;
          squares += score * score;
        }
        const double variance = std::max(0.0, squares / seen - sum / seen * (sum / seen));
        const double norm =
            squared_norm(packed + static_cast<int64_t>(r * group_ + g) * shape.token_bytes(), D, shape.dtype);
        state->heads[head].spread = norm > 0 ? variance / norm : 0;
      }
    }
  }
  for (int g = 0; g < group_; ++g) {
    for (ScoreTable table : {vertical(state, kv_head * group_ + g), slash(state, kv_head * group_ + g)}) {
      for (int i = 0; i < state->capacity; ++i)
        table.tops[i / kPage] = std::max(table.tops[i / kPage], table.values[i]);
    }
  }
}

void Lfps::check(const LfpsStep& step) const {
  pool_->check_layer(step.layer);
  for (int b = 0; b < step.batch; ++b) {
    if (step.rows[b] < 0 || step.rows[b] >= config_.rows || step.seq_lens[b] < 1 ||
        !begun(step.layer, step.rows[b]))
      refuse("Row " + std::to_string(step.rows[b]) + " has no score tables; begin them first.");
  }
}

int64_t Lfps::plan(const LfpsStep& step, const LfpsPlan& plan) {
  check(step);
  const PoolShape& shape = pool_->shape();
  const int heads = shape.kv_heads;
  int most = 0;  // pages of a middle
  for (int b = 0; b < step.batch; ++b) {
    const int n = step.seq_lens[b];
    if ((n + kPage - 1) / kPage > plan.columns)
      refuse("The page table is too short for request " + std::to_string(b) + ".");
    const std::string wrong = pool_->check_pages(plan.table + b * plan.table_stride, (n + kPage - 1) / kPage);
    if (!wrong.empty()) refuse("Request " + std::to_string(b) + " cannot be planned: " + wrong + ".");
    most = std::max(most, window_start_page(n, shape.sink_pages, config_.window) - shape.sink_pages);
    State* state = at(step.layer, step.rows[b]).get();
    reserve(state, n);
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
  for (Scratch& s : scratch_) {
    s.first.resize(std::max<size_t>(s.first.size(), most + 2 * kPad));
    s.chosen.resize(std::max<size_t>(s.chosen.size(), static_cast<size_t>(most) * group_));
  }
  const int groups = step.batch * heads;
  counts_.resize(std::max<size_t>(counts_.size(), groups));
  for_groups(groups, [&](int i, Scratch* scratch) {
    const int64_t to = static_cast<int64_t>(i) * most;
    counts_[i] =
        plan_group(step, plan, i / heads, i % heads, plan.pages + to, plan.masks + to * group_, scratch);
  });
  // The lists close up.
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

// How many pages the group lists.
int Lfps::plan_group(const LfpsStep& step, const LfpsPlan& plan, int b, int h, int32_t* pages,
                     uint16_t* masks, Scratch* s) const {
  const PoolShape& shape = pool_->shape();
  const int n = step.seq_lens[b], first = shape.sink_pages;
  const int middle = window_start_page(n, first, config_.window) - first;
  const int64_t at_head = static_cast<int64_t>(b) * config_.q_heads + h * group_;
  const int64_t at_group = static_cast<int64_t>(b) * shape.kv_heads + h;
  State* state = at(step.layer, step.rows[b]).get();
  constexpr int kListed = -1;
  plan.blk[at_group] = kListed;
  plan.value[at_group] = 0;
  std::fill_n(plan.budget + at_head, group_, 0.0f);
  std::fill_n(plan.given_lse + at_head, group_, kNothing);
  if (middle == 0) return 0;
  const uint16_t passed = pass_by(step, plan, b, h);
  s->counts[0] += group_;
  s->counts[1] += std::popcount(passed);
  for (int g = 0; g < group_; ++g) {
    uint16_t* chosen = &s->chosen[static_cast<int64_t>(g) * middle];
    if (passed >> g & 1) {
      std::fill_n(chosen, middle, uint16_t{0});
      continue;
    }
    candidates(state, h * group_ + g, n, chosen, s);
    // Below 1 a budget ranks, so that the choice comes with its scores.
    plan.budget[at_head + g] = static_cast<float>(std::min(plan.k, 1 - 1e-6));
  }
  int count = 0;
  int64_t tokens = 0;
  for (int p = 0; p < middle; ++p) {
    uint16_t any = 0;
    for (int g = 0; g < group_; ++g) {
      const uint16_t mask = s->chosen[static_cast<int64_t>(g) * middle + p];
      masks[static_cast<int64_t>(count) * group_ + g] = mask;
      any |= mask;
      tokens += std::popcount(mask);
    }
    pages[count] = first + p;
    count += any != 0;
  }
  s->counts[2] += tokens;
  plan.value[at_group] = static_cast<float>(2.0 * count * kPage + static_cast<double>(tokens));
  return count;
}

// Eq. 5 and 6: the group's heads whose attention goes to the first tokens. Of these the middle becomes one
// token: the mean value, with what the tokens are estimated to weigh together.
uint16_t Lfps::pass_by(const LfpsStep& step, const LfpsPlan& plan, int b, int h) const {
  if (config_.bypass >= 1) return 0;
  const PoolShape& shape = pool_->shape();
  const int n = step.seq_lens[b], D = shape.head_dim;
  const int end_page = window_start_page(n, shape.sink_pages, config_.window);
  const double middle = (end_page - shape.sink_pages) * kPage;
  const int32_t* pages = plan.table + b * plan.table_stride;
  const int last = (n - 1) / kPage;
  const int32_t looked_at[3] = {pages[0], pages[std::max(0, last - 1)], pages[last]};
  const char* q = plan.q + b * plan.q_stride + static_cast<int64_t>(h) * group_ * shape.token_bytes();
  alignas(64) float scores[kMaxGroup][3 * kPage];
  pool_->kernels().score_tokens(q, group_, D, pool_->tiles(step.layer, h), looked_at, 3, scores[0],
                                3 * kPage);
  const double* sums = pool_->moments(step.layer, h, pages[end_page - 1]);
  const State& state = *at(step.layer, step.rows[b]);
  const double odds = std::log(config_.bypass / (1 - config_.bypass));
  uint16_t passed = 0;
  for (int g = 0; g < group_; ++g, q += shape.token_bytes()) {
    // In the middle there is a token, so the last page is not the first, and there are kLocal tokens.
    const int end = kPage + kPage + (n - 1) % kPage + 1;
    const double sink = lse_of(scores[g], 0, kFirst, plan.scale);
    const double local = lse_of(scores[g], end - kLocal, end, plan.scale);
    double mean = 0;
    for (int d = 0; d < D; ++d) mean += element(q, d, shape.dtype) * sums[d];
    mean *= plan.scale / middle;
    const double variance = state.heads[h * group_ + g].spread * squared_norm(q, D, shape.dtype);
    const double global = std::log(middle) + mean + variance / 2;
    if (!(sink - std::max(global, local) > odds)) continue;
    passed |= 1u << g;
    const int64_t to = static_cast<int64_t>(b) * config_.q_heads + h * group_ + g;
    plan.given_lse[to] = static_cast<float>(global);
    for (int d = 0; d < D; ++d) plan.given_o[to * D + d] = static_cast<float>(sums[D + d] / middle);
  }
  return passed;
}

// Eq. 7 to 9: chosen[pages of the middle], the head's candidates.
void Lfps::candidates(State* state, int head, int n, uint16_t* chosen, Scratch* s) const {
  const KernelTable& kernels = pool_->kernels();
  const ScoreTable by_position = vertical(state, head), by_offset = slash(state, head);
  const Limits position = by_position.limits(config_.alpha_vertical);
  const Limits offset = by_offset.limits(config_.alpha_slash);
  const int first_page = sinks() / kPage;
  const int end_page = window_start_page(n, first_page, config_.window), middle = end_page - first_page;
  uint16_t* first = s->first.data() + kPad;
  std::fill_n(s->first.data(), middle + 2 * kPad, uint16_t{0});
  // Pages and blocks of offsets 16 at a time: which of them have an entry above the limit.
  const auto blocks_above = [&](const ScoreTable& table, int from, int to, float limit, const auto& visit) {
    for (int i = from / kPage * kPage; i < to; i += kPage) {
      // Past the table's end there may be less than a vector's worth of tops.
      uint16_t hot = 0;
      if (i + kPage <= state->capacity / kPage) {
        kernels.above(table.tops + i, 1, limit, &hot);
      } else {
        for (int j = i; j < to; ++j) hot |= static_cast<uint16_t>((table.tops[j] > limit) << (j - i));
      }
      // They lie apart, and the next table is asked about most of their positions, too.
      for (unsigned left = hot; left != 0; left &= left - 1)
        __builtin_prefetch(table.values + static_cast<int64_t>(i + std::countr_zero(left)) * kPage);
      for (unsigned left = hot; left != 0; left &= left - 1) {
        const int block = i + std::countr_zero(left);
        if (block < from || block >= to) continue;
        uint16_t mask;
        kernels.above(table.values + static_cast<int64_t>(block) * kPage, 1, limit, &mask);
        visit(block, mask);
      }
    }
  };
  blocks_above(by_position, first_page, end_page, position.first,
               [&](int page, uint16_t mask) { first[page - first_page] |= mask; });
  // Offset d is position n - 1 - d: a block of offsets is 16 positions backwards, of two pages.
  const int least = (n - end_page * kPage) / kPage, beyond = (n - 1 - sinks()) / kPage + 1;
  blocks_above(by_offset, least, beyond, offset.first, [&](int block, uint16_t mask) {
    const int from = n - kPage - block * kPage - sinks();  // of the middle, -15 and more
    const int page = (from + kPage) / kPage - 1;
    const uint32_t wide = static_cast<uint32_t>(reversed(mask)) << (from - page * kPage);
    first[page] |= static_cast<uint16_t>(wide);
    first[page + 1] |= static_cast<uint16_t>(wide >> kPage);
  });
  first[-1] = first[middle] = first[middle + 1] = 0;
  // What has come from the window last: nobody could attend to it from here so far.
  first[middle - 1] = 0xffff;
  if (!config_.expand) {
    std::copy_n(first, middle, chosen);
    return;
  }
  const float* backwards = by_offset.values + n - kPage - sinks();
  constexpr int kAhead = 16;
  for (int p = 0; p < middle; ++p) {
    if (p + kAhead < middle && first[p + kAhead] != 0) {
      __builtin_prefetch(by_position.values + static_cast<int64_t>(first_page + p + kAhead) * kPage);
      __builtin_prefetch(backwards - static_cast<int64_t>(p + kAhead) * kPage);
      __builtin_prefetch(backwards - static_cast<int64_t>(p + kAhead - 1) * kPage - 1);
    }
    const uint32_t before = first[p - 1], now = first[p], after = first[p + 1];
    chosen[p] = static_cast<uint16_t>(now);
    if ((before | now | after) == 0) continue;
    const uint32_t near =
        (now << 1 | before >> 15 | now << 2 | before >> 14 | now >> 1 | after << 15) & ~now & 0xffff;
    if (near == 0) continue;
    uint16_t on_position, on_offset;
    kernels.above(by_position.values + static_cast<int64_t>(first_page + p) * kPage, 1, position.mean,
                  &on_position);
    kernels.above(backwards - static_cast<int64_t>(p) * kPage, 1, offset.mean, &on_offset);
    chosen[p] |= near & (on_position | reversed(on_offset));
  }
}

void Lfps::update(const LfpsStep& step, const LfpsChoice& choice) {
  check(step);
  const int heads = pool_->shape().kv_heads;
  int64_t most = 0;  // pages of a list
  for (int i = 0; i < step.batch * heads; ++i)
    most = std::max(most, choice.offsets[i + 1] - choice.offsets[i]);
  for (Scratch& s : scratch_) {
    for (std::vector<float>* to : {&s.scores, &s.weights})
      to->resize(std::max<size_t>(to->size(), most * kPage + 1));
    s.none.resize(std::max<size_t>(s.none.size(), most * kPage + 1));
    s.positions.resize(std::max<size_t>(s.positions.size(), most * kPage + 1));
  }
  for_groups(step.batch * heads,
             [&](int i, Scratch* scratch) { update_group(step, choice, i / heads, i % heads, scratch); });
}

// Eq. 10: what the chosen tokens weigh beside all tokens but the sinks, half of it to either table.
void Lfps::update_group(const LfpsStep& step, const LfpsChoice& choice, int b, int h, Scratch* s) const {
  const KernelTable& kernels = pool_->kernels();
  const int64_t group = static_cast<int64_t>(b) * pool_->shape().kv_heads + h;
  const int64_t from = choice.offsets[group], to = choice.offsets[group + 1];
  const int n = step.seq_lens[b];
  State* state = at(step.layer, step.rows[b]).get();
  for (int g = 0; g < group_; ++g) {
    const int64_t at_head = static_cast<int64_t>(b) * config_.q_heads + h * group_ + g;
    if (choice.given_lse[at_head] != kNothing) continue;
    int count = 0;
    float sane = 0;  // NaN once a score is no finite number
    for (int64_t i = from; i < to; ++i) {
      for (unsigned left = choice.chosen[i * group_ + g]; left != 0; left &= left - 1) {
        const int t = std::countr_zero(left);
        s->positions[count] = choice.pages[i] * kPage + t;
        s->scores[count] = choice.scores[(i * group_ + g) * kPage + t];
        sane += 0 * s->scores[count++];
      }
    }
    float mass[2] = {0, kNothing};
    if (count > 0)
      kernels.block_mass(s->scores.data(), s->none.data(), 1, count, choice.scale, 1, 1, 1, mass);
    const float lse = static_cast<float>(log_add(choice.local_lse[at_head], mass[1]));
    if (!std::isfinite(lse + sane)) continue;  // nothing to learn from
    Head& head = state->heads[h * group_ + g];
    head.unit *= config_.decay;
    const float share = static_cast<float>(0.5 / head.unit);
    kernels.add_weights(s->scores.data(), count, choice.scale, lse, 0, 1, s->weights.data());
    ScoreTable by_position = vertical(state, h * group_ + g), by_offset = slash(state, h * group_ + g);
    for (int i = 0; i < count; ++i) by_position.add(s->positions[i], share * s->weights[i]);
    for (int i = 0; i < count; ++i) by_offset.add(n - 1 - s->positions[i], share * s->weights[i]);
    if (head.unit < digits_) renormalise(state, h * group_ + g);
  }
}

void Lfps::renormalise(State* state, int head) const {
  vertical(state, head).multiply(state->capacity, digits_);
  slash(state, head).multiply(state->capacity, digits_);
  state->heads[head].unit /= digits_;
}

void Lfps::release(int row) {
  if (row < 0 || row >= config_.rows) refuse("There is no request row " + std::to_string(row) + ".");
  for (int layer = 0; layer < pool_->shape().layers; ++layer)
    states_[static_cast<size_t>(layer) * config_.rows + row].reset();
}

int64_t Lfps::bytes() const {
  int64_t bytes = 0;
  for (const std::unique_ptr<State>& state : states_) {
    if (!state) continue;
    bytes += static_cast<int64_t>((state->values.size() + state->tops.size()) * sizeof(float) +
                                  state->heads.size() * sizeof(Head));
  }
  return bytes;
}

void Lfps::tables(int layer, int row, int head, float* by_position, float* by_offset, int n) const {
  pool_->check_layer(layer);
  if (row < 0 || row >= config_.rows || head < 0 || head >= config_.q_heads || !begun(layer, row))
    refuse("Row " + std::to_string(row) + " has no score tables; begin them first.");
  State* state = at(layer, row).get();
  const float unit = static_cast<float>(state->heads[head].unit);
  for (int i = 0; i < n; ++i) {
    by_position[i] = i < state->capacity ? unit * vertical(state, head).values[i] : 0;
    by_offset[i] = i < state->capacity ? unit * slash(state, head).values[i] : 0;
  }
}

}  // namespace fluxion
