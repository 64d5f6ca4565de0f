#include "lab/hgca.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace fluxion {

namespace {

constexpr int kPiece = 64;               // pages of the middle that are scored at a time
constexpr int64_t kWakeBytes = 1 << 20;  // keys to score that justify waking workers

[[noreturn]] void refuse(const std::string& sentence) { throw std::invalid_argument(sentence); }

double log_add(double a, double b) {
  const double top = std::max(a, b);
  return std::isinf(top) ? top : top + std::log(std::exp(a - top) + std::exp(b - top));
}

}  // namespace

// A request whose state is made from its last queries.
struct Hgca::Evaluation {
  Row* row;
  int layer;
  HgcaQueries queries;
  const int32_t* pages;  // physical
  float scale;
};

Hgca::Hgca(std::shared_ptr<HostPool> pool, const HgcaConfig& config)
    : pool_(std::move(pool)),
      config_(config),
      shape_(pool_->shape()),
      kernels_(pool_->kernels()),
      group_(config.q_heads / shape_.kv_heads),
      slots_((shape_.sink_pages + config.window / kPage + 1) * kPage) {
  if (config.q_heads < 1 || config.q_heads % shape_.kv_heads != 0 || group_ > kMaxGroup) {
    refuse("The model has " + std::to_string(config.q_heads) + " query heads and " +
           std::to_string(shape_.kv_heads) + " KV heads; the first must be 1 to 16 times the second.");
  }
  if (config.window < kPage || config.window % kPage != 0) {
    refuse("window is " + std::to_string(config.window) + "; it must be a multiple of 16, at least 16.");
  }
  if (config.rows < 1) refuse("rows is " + std::to_string(config.rows) + "; it must be at least 1.");
  if (!(config.alpha >= 0 && config.alpha <= 1)) {
    refuse("alpha is " + std::to_string(config.alpha) + "; it must be from 0 to 1.");
  }
  if (!(config.beta >= 0) || std::isinf(config.beta)) {
    refuse("beta is " + std::to_string(config.beta) + "; it must be a finite number, at least 0.");
  }
  rows_.resize(config.rows);
  const size_t tokens = std::max(slots_, kPiece * kPage);
  ones_.assign(tokens, 1);
  scratch_.resize(pool_->workers().size());
  for (Scratch& s : scratch_) {
    s.pages.resize(slots_ / kPage);
    s.scores.resize(group_ * tokens);
    s.sums.resize(group_ * tokens);
    s.lse.resize(kHgcaQueries * group_);
  }
}

// The residents of a request of n tokens, in the order of their positions: the sinks, then the window.
int Hgca::resident_tokens(int n) const { return n - (window_page(n) - shape_.sink_pages) * kPage; }
int Hgca::resident_pages(int n) const { return (resident_tokens(n) + kPage - 1) / kPage; }
int Hgca::resident_page(int n, int i) const {
  return i < shape_.sink_pages ? i : window_page(n) + i - shape_.sink_pages;
}
// The page of a row's window that holds a logical page.
int Hgca::slot_page(int page) const {
  const WindowView one_row{nullptr, 0, 1, shape_.sink_pages, WindowView::ring_of(config_.window)};
  return static_cast<int>(one_row.slot(0, page));
}

float* Hgca::averages_of(Row* row, int layer, int head, int g) const {
  const int64_t state = (static_cast<int64_t>(layer) * shape_.kv_heads + head) * group_ + g;
  return row->averages.data() + state * slots_;
}

float Hgca::log_mass(const float* scores, int n, float scale) const {
  float mass[2];
  kernels_.block_mass(scores, ones_.data(), 1, n, scale, 1, 1, 1, mass);
  return mass[0];
}

// Calls body(item, scratch) for every item, on the workers if they are free.
template <class Body>
void Hgca::run(int items, int64_t bytes, const Body& body) {
  struct Job {
    const Body& body;
    std::vector<Scratch>& scratch;
    int items;
    std::atomic<int> next{0};
  } job{body, scratch_, items};
  const WorkerPool::Fn work = [](void* ctx, int worker) {
    Job* j = static_cast<Job*>(ctx);
    for (int i; (i = j->next.fetch_add(1, std::memory_order_relaxed)) < j->items;)
      j->body(i, &j->scratch[worker]);
  };
  WorkerPool& workers = pool_->workers();
  if (workers.launch(work, &job, bytes >= kWakeBytes)) {
    workers.join();
  } else {
    work(&job, 0);
  }
}

Hgca::Row* Hgca::row_of(int row) {
  std::unique_ptr<Row>& at = rows_[row];
  if (at == nullptr) {
    auto made = std::make_unique<Row>();
    made->lengths.resize(shape_.layers);
    made->averages.resize(static_cast<size_t>(shape_.layers) * config_.q_heads * slots_);
    made->context.resize(static_cast<size_t>(shape_.layers) * shape_.kv_heads);
    at = std::move(made);
  }
  return at.get();
}

// Makes room for this many pages in each list of the layer; workers only fill it.
void Hgca::reserve(Row* row, int layer, int64_t pages) {
  for (int h = 0; h < shape_.kv_heads; ++h) {
    Contextual& set = row->context[static_cast<size_t>(layer) * shape_.kv_heads + h];
    const size_t had = set.pages.capacity(), need = static_cast<size_t>(pages);
    if (need <= had && need * group_ <= set.masks.capacity()) continue;
    const size_t room = std::max(need, had + had / 2);
    set.pages.reserve(room);
    set.masks.reserve(room * group_);
  }
}

void Hgca::release(int row) {
  listed_.clear();
  if (row >= 0 && row < config_.rows) rows_[row].reset();
}

int64_t Hgca::bytes() const {
  size_t sum = 0;
  for (const std::unique_ptr<Row>& row : rows_) {
    if (row == nullptr) continue;
    sum += row->lengths.size() * sizeof(int32_t) + row->averages.size() * sizeof(float);
    for (const Contextual& set : row->context) {
      sum += sizeof(set) + set.pages.capacity() * sizeof(int32_t) + set.masks.capacity() * sizeof(uint16_t);
    }
  }
  return static_cast<int64_t>(sum);
}

// "" or why a request cannot be read.
std::string Hgca::check(int row, int length, const int32_t* pages, int64_t page_count) const {
  if (row < 0 || row >= config_.rows) {
    return "its row " + std::to_string(row) + " is not one of 0 to " + std::to_string(config_.rows - 1);
  }
  if (length < 1 || length > page_count * kPage) {
    return "it has " + std::to_string(length) + " tokens, but its pages hold 1 to " +
           std::to_string(page_count * kPage);
  }
  return pool_->check_pages(pages, (length + kPage - 1) / kPage);
}

// Whether the state of `known` tokens can be updated to n: no token was missed.
bool Hgca::follows(int known, int n) const {
  return known > 0 && known < n && (window_page(n) == window_page(known) || window_page(n) * kPage <= known);
}

// Lists the tokens of a page whose weight, of a head at weights[g * stride], exceeds the threshold.
void Hgca::add_page(Contextual* set, int page, const float* weights, int64_t stride, float threshold) const {
  uint16_t masks[kMaxGroup], any = 0;
  for (int g = 0; g < group_; ++g) {
    unsigned mask = config_.beta == 0 ? 0xffff : 0;
    for (int t = 0; t < kPage; ++t) mask |= static_cast<unsigned>(weights[g * stride + t] > threshold) << t;
    any |= masks[g] = static_cast<uint16_t>(mask);
  }
  if (any == 0) return;
  set->pages.push_back(page);
  set->masks.insert(set->masks.end(), masks, masks + group_);
}

void Hgca::evaluate(const Evaluation& at, int head, Scratch* s) const {
  evaluate_residents(at, head, s);
  evaluate_middle(at, head, s);
}

// Averages of the residents. Of r residents, query i of m does not see the last m - 1 - i.
void Hgca::evaluate_residents(const Evaluation& at, int head, Scratch* s) const {
  const int n = at.queries.length, m = at.queries.count;
  const int count = resident_pages(n), residents = resident_tokens(n);
  const int64_t stride = static_cast<int64_t>(s->scores.size()) / group_;
  for (int i = 0; i < count; ++i) s->pages[i] = at.pages[resident_page(n, i)];
  std::fill(s->sums.begin(), s->sums.end(), 0.0f);
  for (int i = 0; i < m; ++i) {
    const char* q = at.queries.q + i * at.queries.stride + head * group_ * shape_.token_bytes();
    kernels_.score_tokens(q, group_, shape_.head_dim, pool_->tiles(at.layer, head), s->pages.data(), count,
                          s->scores.data(), stride);
    const int seen = residents - (m - 1 - i);
    for (int g = 0; g < group_; ++g) {
      const float* scores = &s->scores[g * stride];
      kernels_.add_weights(scores, seen, at.scale, log_mass(scores, seen, at.scale), 1.0f, 1.0f,
                           &s->sums[g * stride]);
    }
  }
  for (int g = 0; g < group_; ++g) {
    float* to = averages_of(at.row, at.layer, head, g);
    for (int i = 0; i < residents; ++i) {
      const int by = std::min(m, residents - i);
      to[slot_page(resident_page(n, i / kPage)) * kPage + i % kPage] = s->sums[g * stride + i] / by;
    }
  }
}

// Finds the contextual set of the whole middle. Scores it twice, first for the sums of the queries' weights,
// so the scratch holds only a piece of it, whatever its length. Every query sees all of it.
void Hgca::evaluate_middle(const Evaluation& at, int head, Scratch* s) const {
  Contextual* set = &at.row->context[static_cast<size_t>(at.layer) * shape_.kv_heads + head];
  set->pages.clear();
  set->masks.clear();
  const int first = shape_.sink_pages, end = window_page(at.queries.length), m = at.queries.count;
  const int64_t stride = static_cast<int64_t>(s->scores.size()) / group_;
  const auto score = [&](int i, int page, int count) {
    const char* q = at.queries.q + i * at.queries.stride + head * group_ * shape_.token_bytes();
    kernels_.score_tokens(q, group_, shape_.head_dim, pool_->tiles(at.layer, head), at.pages + page, count,
                          s->scores.data(), stride);
  };
  if (config_.beta > 0) {
    std::fill_n(s->lse.data(), m * group_, -std::numeric_limits<double>::infinity());
    for (int page = first; page < end; page += kPiece) {
      const int count = std::min(kPiece, end - page);
      for (int i = 0; i < m; ++i) {
        score(i, page, count);
        for (int g = 0; g < group_; ++g) {
          double& lse = s->lse[i * group_ + g];
          lse = log_add(lse, log_mass(&s->scores[g * stride], count * kPage, at.scale));
        }
      }
    }
  }
  const float threshold = config_.beta / static_cast<float>((end - first) * kPage);
  for (int page = first; page < end; page += kPiece) {
    const int count = std::min(kPiece, end - page);
    if (config_.beta > 0) std::fill(s->sums.begin(), s->sums.end(), 0.0f);
    for (int i = 0; i < m && config_.beta > 0; ++i) {
      score(i, page, count);
      for (int g = 0; g < group_; ++g) {
        kernels_.add_weights(&s->scores[g * stride], count * kPage, at.scale,
                             static_cast<float>(s->lse[i * group_ + g]), 1.0f, 1.0f / m,
                             &s->sums[g * stride]);
      }
    }
    for (int p = 0; p < count; ++p) add_page(set, page + p, &s->sums[p * kPage], stride, threshold);
  }
}

void Hgca::establish(int layer, int row, const HgcaQueries& given, const int32_t* pages, int64_t page_count,
                     float scale) {
  pool_->check_layer(layer);
  const std::string wrong = check(row, given.length, pages, page_count);
  if (!wrong.empty()) refuse("The request cannot be evaluated: " + wrong + ".");
  if (given.count < 1 || given.count > kHgcaQueries || given.count > given.length) {
    refuse(std::to_string(given.count) + " queries were given of " + std::to_string(given.length) +
           " tokens; give 1 to " + std::to_string(kHgcaQueries) + ", at most one a token.");
  }
  HgcaQueries queries = given;
  // With a window this short, earlier queries do not see all of the middle.
  queries.count = std::min(queries.count, config_.window);
  queries.q += (given.count - queries.count) * given.stride;
  listed_.clear();
  Row* r = row_of(row);
  const int middle = window_page(queries.length) - shape_.sink_pages;
  reserve(r, layer, middle);
  const Evaluation at{r, layer, queries, pages, scale};
  run(shape_.kv_heads, shape_.kv_heads * queries.count * middle * shape_.tile_bytes(),
      [&](int head, Scratch* s) { evaluate(at, head, s); });
  r->lengths[layer] = queries.length;
}

// Lists salient tokens of the pages that leave the window between `from` and `to` tokens.
void Hgca::evict(Row* row, int layer, int head, int from, int to) const {
  const float threshold = config_.beta / static_cast<float>(resident_tokens(from));
  Contextual* set = &row->context[static_cast<size_t>(layer) * shape_.kv_heads + head];
  for (int page = window_page(from); page < window_page(to); ++page)
    add_page(set, page, averages_of(row, layer, head, 0) + slot_page(page) * kPage, slots_, threshold);
}

// Adds the weights of a step's query over its residents to the averages, of which `known` tokens have one.
void Hgca::observe(const HgcaStep& step, int b, int head, int known, Scratch* s) const {
  const int row = step.rows[b], n = step.seq_lens[b];
  const int count = resident_pages(n), residents = resident_tokens(n);
  const int64_t stride = static_cast<int64_t>(s->scores.size()) / group_;
  const WindowView& w = step.window;
  const int32_t* table = step.table + b * step.table_stride;
  for (int i = 0; i < count; ++i) {
    const int page = resident_page(n, i);
    s->pages[i] = w.data != nullptr ? static_cast<int32_t>(w.slot(row, page)) : table[page];
  }
  const char* tiles = w.data != nullptr ? w.data + head * w.head_stride : pool_->tiles(step.layer, head);
  const char* q = step.q + b * step.q_stride + head * group_ * shape_.token_bytes();
  const KernelTable& kernels = w.data != nullptr ? pool_->window_kernels() : kernels_;
  kernels.score_tokens(q, group_, shape_.head_dim, tiles, s->pages.data(), count, s->scores.data(), stride);
  const float alpha = config_.alpha;
  for (int g = 0; g < group_; ++g) {
    const float* scores = &s->scores[g * stride];
    const float lse = log_mass(scores, residents, step.scale);
    float* averages = averages_of(rows_[row].get(), step.layer, head, g);
    for (int i = 0; i < count; ++i) {
      const int page = resident_page(n, i), tokens = std::min(kPage, residents - i * kPage);
      const int old = std::clamp(known - page * kPage, 0, tokens);
      float* to = averages + slot_page(page) * kPage;
      kernels_.add_weights(scores + i * kPage, old, step.scale, lse, 1.0f - alpha, alpha, to);
      kernels_.add_weights(scores + i * kPage + old, tokens - old, step.scale, lse, 0.0f, 1.0f, to + old);
    }
  }
}

int64_t Hgca::step(const HgcaStep& step) {
  pool_->check_layer(step.layer);
  const int heads = shape_.kv_heads;
  listed_.assign(static_cast<size_t>(step.batch) * heads, nullptr);
  int64_t bytes = 0;
  for (int b = 0; b < step.batch; ++b) {
    const int n = step.seq_lens[b];
    const int32_t* pages = step.table + b * step.table_stride;
    if (!check(step.rows[b], n, pages, step.columns).empty()) continue;
    if (step.window.data != nullptr && step.rows[b] >= step.window.rows) continue;
    Row* r = row_of(step.rows[b]);
    int& known = r->lengths[step.layer];
    if (!follows(known, n)) known = 0;
    Contextual* sets = &r->context[static_cast<size_t>(step.layer) * heads];
    for (int h = 0; h < heads; ++h) listed_[static_cast<size_t>(b) * heads + h] = &sets[h];
    const int middle = window_page(n) - shape_.sink_pages;
    const int leaving = known == 0 ? middle : window_page(n) - window_page(known);
    bytes += heads * (resident_pages(n) + (known == 0 ? middle : 0)) * shape_.tile_bytes() / 2;
    size_t longest = 0;
    for (int h = 0; h < heads && known != 0; ++h) longest = std::max(longest, sets[h].pages.size());
    if (leaving > 0) reserve(r, step.layer, static_cast<int64_t>(longest) + leaving);
  }
  run(step.batch * heads, bytes, [&](int item, Scratch* s) {
    if (listed_[item] == nullptr) return;
    const int b = item / heads, head = item % heads, n = step.seq_lens[b];
    Row* r = rows_[step.rows[b]].get();
    const int known = r->lengths[step.layer];
    if (known == 0) {
      const HgcaQueries query{step.q + b * step.q_stride, step.q_stride, 1, n};
      evaluate({r, step.layer, query, step.table + b * step.table_stride, step.scale}, head, s);
    } else {
      evict(r, step.layer, head, known, n);
      observe(step, b, head, known, s);
    }
  });
  for (int b = 0; b < step.batch; ++b) {
    if (listed_[static_cast<size_t>(b) * heads] != nullptr)
      rows_[step.rows[b]]->lengths[step.layer] = step.seq_lens[b];
  }
  return listed_pages();
}

int64_t Hgca::listed_pages() const {
  size_t pages = 0;
  for (const Contextual* set : listed_) pages += set == nullptr ? 0 : set->pages.size();
  return static_cast<int64_t>(pages);
}

void Hgca::lists(int64_t* offsets, int32_t* pages, uint16_t* masks) const {
  int64_t at = 0;
  *offsets = 0;
  for (const Contextual* set : listed_) {
    if (set != nullptr) {
      std::copy(set->pages.begin(), set->pages.end(), pages + at);
      std::copy(set->masks.begin(), set->masks.end(), masks + at * group_);
      at += static_cast<int64_t>(set->pages.size());
    }
    *++offsets = at;
  }
}

int Hgca::averages(int layer, int row, float* out, int64_t room) const {
  pool_->check_layer(layer);
  Row* r = row < 0 || row >= config_.rows ? nullptr : rows_[row].get();
  const int n = r == nullptr ? 0 : r->lengths[layer];
  if (n == 0) return 0;
  const int residents = resident_tokens(n);
  if (residents > room) refuse("There are " + std::to_string(residents) + " residents; pass room for them.");
  for (int head = 0; head < config_.q_heads; ++head) {
    const float* from = averages_of(r, layer, head / group_, head % group_);
    for (int i = 0; i < residents; ++i)
      out[head * room + i] = from[slot_page(resident_page(n, i / kPage)) * kPage + i % kPage];
  }
  return residents;
}

}  // namespace fluxion
