#include "lab/lfps.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "lab/lfps_parts.h"

namespace fluxion {

using namespace lfps;

namespace {

constexpr int kRoom = 256;  // room of new tables for tokens to be decoded

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

// Makes room for `tokens` tokens; grows by at least an eighth.
void Lfps::reserve(State* state, int tokens) const {
  if (tokens <= state->capacity) return;
  const int old = state->capacity;
  const int capacity = words_of(std::max(tokens, old + old / 8)) * kWord;
  const auto grow = [&](auto* all) {
    std::remove_reference_t<decltype(*all)> grown(static_cast<size_t>(config_.q_heads) * 2 * capacity);
    for (int i = 0; i < config_.q_heads * 2 && old > 0; ++i)
      std::copy_n(all->begin() + static_cast<int64_t>(i) * old, old,
                  grown.begin() + static_cast<int64_t>(i) * capacity);
    all->swap(grown);
  };
  grow(&state->values);
  grow(&state->codes);
  state->capacity = capacity;
}

ScoreTable Lfps::vertical(State* state, int head) const {
  const int64_t at = 2 * static_cast<int64_t>(head) * state->capacity;
  return {&state->values[at], &state->codes[at], &state->heads[head].vertical, sinks(), state->vertical_end};
}

ScoreTable Lfps::slash(State* state, int head) const {
  const int64_t at = (2 * static_cast<int64_t>(head) + 1) * state->capacity;
  return {&state->values[at], &state->codes[at], &state->heads[head].slash, config_.window, state->slash_end};
}

void Lfps::begin(int layer, int row, int length, const int32_t* pages, int64_t page_count,
                 const char* queries, int m, float scale) {
  pool_->check_layer(layer);
  if (row < 0 || row >= config_.rows) refuse("There is no request row " + std::to_string(row) + ".");
  if (m < 1 || length < m || length > page_count * kPage)
    refuse("The request has " + std::to_string(length) + " tokens, " + std::to_string(page_count) +
           " pages and " + std::to_string(m) + " queries; pass at most as many queries as tokens.");
  const std::string wrong = pool_->check_pages(pages, (length + kPage - 1) / kPage);
  if (!wrong.empty()) refuse("The score tables cannot be begun: " + wrong + ".");
  std::unique_ptr<State>& slot = states_[static_cast<size_t>(layer) * config_.rows + row];
  if (!slot) slot = std::make_unique<State>();
  State* state = slot.get();
  std::fill(state->values.begin(), state->values.end(), 0.0f);
  state->heads.assign(config_.q_heads, Head{});
  reserve(state, length + kRoom);
  state->vertical_end = sinks();
  state->slash_end = config_.window;
  for_groups(
      pool_->shape().kv_heads,
      [&](int h, Scratch* scratch) {
        begin_group(state, layer, h, length, pages, queries, m, scale, scratch);
      },
      /*wake=*/true);  // a whole prompt is scored
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
        const double norm = squared_norm(packed + static_cast<int64_t>(r * group_ + g) * shape.token_bytes(),
                                         D, kv_dtype(shape.dtype));
        state->heads[head].spread = norm > 0 ? variance / norm : 0;
      }
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

// Eq. 10: adds the weight of the chosen tokens among all tokens but the sinks, half of it to either table.
void Lfps::update_group(const LfpsStep& step, const LfpsChoice& choice, int b, int h, Scratch* s) const {
  const KernelTable& kernels = pool_->kernels();
  const int64_t group = static_cast<int64_t>(b) * pool_->shape().kv_heads + h;
  const int64_t from = choice.offsets[group], to = choice.offsets[group + 1];
  const int n = step.seq_lens[b];
  State* state = at(step.layer, step.rows[b]).get();
  for (int g = 0; g < group_; ++g) {
    const int64_t at_head = static_cast<int64_t>(b) * config_.q_heads + h * group_ + g;
    if (choice.given_lse[at_head] != kNothing) continue;
    ScoreTable by_position = vertical(state, h * group_ + g), by_offset = slash(state, h * group_ + g);
    int count = 0;
    float sane = 0;  // NaN once a score is no finite number
    for (int64_t i = from; i < to; ++i) {
      for (unsigned left = choice.chosen[i * group_ + g]; left != 0; left &= left - 1) {
        const int t = std::countr_zero(left), position = choice.pages[i] * kPage + t;
        s->positions[count] = position;
        // They lie apart, and no cache has them.
        __builtin_prefetch(&by_position.values[position], 1);
        __builtin_prefetch(&by_offset.values[n - 1 - position], 1);
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
    bytes += static_cast<int64_t>(state->values.size() * sizeof(float) + state->codes.size() +
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
