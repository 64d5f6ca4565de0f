#include "predictor/measure.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/block_scores.h"
#include "engine/resident_parts.h"
#include "predictor/distribution.h"
#include "predictor/walk.h"
#include "runtime/host_memory.h"
#include "runtime/prefetch.h"

namespace fluxion {

namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

[[noreturn]] void refuse(const std::string& sentence) { throw std::invalid_argument(sentence); }

// Uninitialised: each worker touches its own memory, and only when it works.
template <class T>
std::unique_ptr<T[]> room(int64_t count) {
  return std::make_unique_for_overwrite<T[]>(static_cast<size_t>(count));
}

float norm(const float* x, int D) {
  double square = 0.0;
  for (int d = 0; d < D; ++d) square += static_cast<double>(x[d]) * x[d];
  return static_cast<float>(std::sqrt(square));
}

float element(const char* row, int d, DType dtype) {
  if (dtype == DType::kF32) return reinterpret_cast<const float*>(row)[d];
  return std::bit_cast<float>(static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(row)[d]) << 16);
}

double norm_of_row(const char* row, int D, DType dtype) {
  double square = 0.0;
  for (int d = 0; d < D; ++d) {
    const double x = element(row, d, dtype);
    square += x * x;
  }
  return std::sqrt(square);
}

using Memory = std::unique_ptr<char, decltype(&std::free)>;

Memory huge_pages(int64_t bytes) {
  Memory memory(static_cast<char*>(std::aligned_alloc(kHugePage, round_up(bytes, kHugePage))), &std::free);
  if (memory == nullptr) throw std::bad_alloc();
  madvise(memory.get(), bytes, MADV_HUGEPAGE);  // a refusal costs speed only
  return memory;
}

// Memory of the thread, kept until it asks for more, because page faults take as long as a third of a
// measurement. At most kMostKept bytes.
constexpr int64_t kMostKept = 64 << 20;
char* kept_memory(int64_t bytes) {
  thread_local Memory memory{nullptr, &std::free};
  thread_local int64_t size = 0;
  if (bytes > size) {
    size = 0;
    memory.reset();
    memory = huge_pages(bytes);
    size = bytes;
  }
  return memory.get();
}

// The largest of factor * x, over a multiple of 16 numbers; ignores NaN.
float largest_of(const float* x, int n, float factor) {
  float lanes[kPage];
  std::fill_n(lanes, kPage, kMinusInf);
  for (int i = 0; i < n; i += kPage) {
    for (int j = 0; j < kPage; ++j) lanes[j] = factor * x[i + j] > lanes[j] ? factor * x[i + j] : lanes[j];
  }
  return *std::max_element(lanes, lanes + kPage);
}

class Measurement {
 public:
  Measurement(const HostPool& pool, const MeasureArgs& args);
  void run();

 private:
  struct Scratch {
    std::unique_ptr<uint16_t[]> masks;
    std::unique_ptr<float[]> block_scores;  // [G][pages]
    std::unique_ptr<uint64_t[]> keys;       // [tokens]
    BlockScorer scorer;
  };
  // What every token and page of the middle adds to the outputs of one query and group. Weights are in units
  // of exp(unit_).
  struct Middle {
    double* page_weights;     // [G][pages]
    float* page_values;       // [G][pages][D]
    float *scores, *weights;  // [G][tokens]
  };

  void check() const;
  int64_t middle_bytes() const;
  int queries_together() const;
  void phase(void (Measurement::*item)(int, Scratch*), int first, int queries);
  void survey(int item, Scratch* s);
  void weigh(int item, float* o, float* lse);
  void weigh_pages(int item, const float* units);
  void mean_rows(const float* rows, int n, double weight, float* mean) const;
  void compare(int query);
  void find_budgets(int item, Scratch* s);
  void sink_norms(int n, int head, double* k, double* v) const;
  Aim aim(int state) const;
  void walk_blocks(int state, int g, int size, const Blocks& at, const Middle& m, Scratch* s);
  void walk_tokens(int state, int head, int g, const int32_t* pages, int tokens, const Middle& m, Scratch* s);
  void set_budget(int state, int size, uint32_t criteria, float value) const;

  int window_page(int query) const {
    return window_start_page(args_.lengths[query], shape_.sink_pages, args_.window);
  }
  const char* query(int query, int head) const {
    return args_.q + query * args_.q_stride + static_cast<int64_t>(head) * G_ * shape_.token_bytes();
  }
  Middle& middle_of(int item) { return middles_[item % middles_.size()]; }
  float* budget(int state, int c, int size) const {
    return args_.budgets + (static_cast<int64_t>(state) * args_.criterion_count + c) * kBlockSizes + size;
  }

  const HostPool& pool_;
  const MeasureArgs& args_;
  const PoolShape& shape_;
  const KernelTable& kernels_;
  const int D_, G_;
  int64_t max_pages_ = 0;  // of a middle
  std::vector<Scratch> scratch_;
  std::vector<Middle> middles_;         // of the KV heads of queries that are measured together
  Memory memory_{nullptr, &std::free};  // for them, if it is too large to be kept
  // [N][Hq], times D for each o: a state is a head of a query.
  std::vector<float> resident_o_, resident_lse_, o_, unit_, o_norm_, largest_;
  std::vector<double> total_;  // weight of everything, in units of exp(unit_)
  void (Measurement::*item_)(int, Scratch*) = nullptr;
  std::atomic<int> next_{0};
  int end_ = 0;  // of the items of a phase
};

Measurement::Measurement(const HostPool& pool, const MeasureArgs& args)
    : pool_(pool),
      args_(args),
      shape_(pool.shape()),
      kernels_(pool.kernels()),
      D_(shape_.head_dim),
      G_(args.q_heads / shape_.kv_heads) {
  check();
  for (int i = 0; i < args_.queries; ++i) {
    max_pages_ = std::max<int64_t>(max_pages_, window_page(i) - shape_.sink_pages);
  }
  const int64_t states = static_cast<int64_t>(args_.queries) * args_.q_heads, tokens = max_pages_ * kPage;
  for (std::vector<float>* v : {&resident_lse_, &unit_, &o_norm_}) v->resize(states);
  for (std::vector<float>* v : {&resident_o_, &o_}) v->resize(states * D_);
  total_.resize(states);
  largest_.resize(args_.queries);
  scratch_.resize(pool_.workers().size());
  for (Scratch& s : scratch_) {
    s.masks = room<uint16_t>((std::max(shape_.sink_pages, args_.window / kPage + 1) + 1) * int64_t{G_});
    s.block_scores = room<float>(G_ * max_pages_);
    s.keys = room<uint64_t>(tokens);
    s.scorer.resize(static_cast<int>(max_pages_), G_, shape_.entry_bytes());
  }
  middles_.resize(int64_t{queries_together()} * shape_.kv_heads);
  if (max_pages_ == 0) return;
  const int64_t bytes = middles_.size() * middle_bytes();
  if (bytes > kMostKept) memory_ = huge_pages(bytes);
  char* const memory = bytes > kMostKept ? memory_.get() : kept_memory(bytes);
  for (size_t i = 0; i < middles_.size(); ++i) {
    Middle& m = middles_[i];
    m.page_weights = reinterpret_cast<double*>(memory + i * middle_bytes());
    m.page_values = reinterpret_cast<float*>(m.page_weights + G_ * max_pages_);
    m.scores = m.page_values + G_ * max_pages_ * D_;
    m.weights = m.scores + G_ * tokens;
  }
}

int64_t Measurement::middle_bytes() const {
  const int64_t page = sizeof(double) + (D_ + 2 * kPage) * sizeof(float);
  return round_up(G_ * max_pages_ * page, 64);
}

// Enough that every worker has a head, and more if their memory is small.
int Measurement::queries_together() const {
  const int heads = shape_.kv_heads, workers = pool_.workers().size();
  const int64_t query = std::max<int64_t>(1, heads * middle_bytes());
  const int64_t together = std::max<int64_t>((workers + heads - 1) / heads, kMostKept / query);
  return static_cast<int>(std::min<int64_t>(args_.queries, together));
}

void Measurement::check() const {
  pool_.check_layer(args_.layer);
  if (args_.q_heads < 1 || args_.q_heads % shape_.kv_heads != 0 || G_ > kMaxGroup) {
    refuse("The queries have " + std::to_string(args_.q_heads) + " heads and the pool has " +
           std::to_string(shape_.kv_heads) + " KV heads; the first must be 1 to 16 times the second.");
  }
  if (args_.window < kPage || args_.window % kPage != 0) {
    refuse("window is " + std::to_string(args_.window) + "; it must be a multiple of 16, at least 16.");
  }
  if (args_.criterion_count < 1 || args_.criterion_count > 32) {
    refuse(std::to_string(args_.criterion_count) + " criteria were given; give 1 to 32.");
  }
  for (int c = 0; c < args_.criterion_count; ++c) {
    const float k = args_.criteria[2 * c], t = args_.criteria[2 * c + 1];
    if (!(k == 0 || k == 1 || k == 2) || !std::isfinite(t)) {
      refuse("Criterion " + std::to_string(c) + " has the kind " + std::to_string(k) + " and the threshold " +
             std::to_string(t) + "; kinds are 0, 1 and 2, and thresholds are finite.");
    }
  }
  int longest = 0;
  for (int i = 0; i < args_.queries; ++i) {
    const int n = args_.lengths[i];
    if (n < 1 || n > args_.page_count * kPage) {
      refuse("Query " + std::to_string(i) + " has the length " + std::to_string(n) + ", but the " +
             std::to_string(args_.page_count) + " pages given hold 1 to " +
             std::to_string(args_.page_count * kPage) + " tokens.");
    }
    longest = std::max(longest, n);
  }
  const std::string wrong = pool_.check_pages(args_.pages, (int64_t{longest} + kPage - 1) / kPage);
  if (!wrong.empty()) refuse("The request cannot be measured: " + wrong + ".");
}

// An item is a KV head of a query.
void Measurement::phase(void (Measurement::*item)(int, Scratch*), int first, int queries) {
  item_ = item;
  next_.store(first * shape_.kv_heads);
  end_ = (first + queries) * shape_.kv_heads;
  const WorkerPool::Fn body = [](void* arg, int worker) {
    auto* m = static_cast<Measurement*>(arg);
    for (int i; (i = m->next_.fetch_add(1, std::memory_order_relaxed)) < m->end_;) {
      (m->*m->item_)(i, &m->scratch_[worker]);
    }
  };
  WorkerPool& workers = pool_.workers();
  if (workers.launch(body, this)) {
    workers.join();
  } else {
    body(this, 0);
  }
}

void Measurement::run() {
  const int together = queries_together();
  for (int first = 0; first < args_.queries; first += together) {
    const int count = std::min(together, args_.queries - first);
    phase(&Measurement::survey, first, count);
    for (int i = first; i < first + count; ++i) compare(i);
    phase(&Measurement::find_budgets, first, count);
  }
}

// Compares all heads of a query, after all are surveyed.
void Measurement::compare(int query) {
  const int64_t at = static_cast<int64_t>(query) * args_.q_heads;
  float largest = 0.0f, largest_resident = 0.0f;
  for (int h = 0; h < args_.q_heads; ++h) {
    largest = std::max(largest, o_norm_[at + h]);
    largest_resident = std::max(largest_resident, args_.parts[(at + h) * kParts + 4]);
  }
  largest_[query] = largest;
  for (int h = 0; h < args_.q_heads; ++h) {
    float& error = args_.result[(at + h) * kResults + 1];  // survey left it as a distance
    if (error > 0.0f) error /= largest;
    args_.anchor[(at + h) * kAnchorFeatures + 27] = largest_resident;
  }
}

void Measurement::sink_norms(int n, int head, double* k, double* v) const {
  *k = *v = 0.0;
  const int sinks = std::min(n, shape_.sink_pages * kPage);
  alignas(64) char tile[kMaxTileBytes];
  for (int t = 0; t < sinks; ++t) {
    if (t % kPage == 0)
      kernels_.read_tile(pool_.tile(args_.layer, head, args_.pages[t / kPage]), D_,
                         std::min(kPage, sinks - t), tile);
    const char* row = tile + t % kPage * shape_.token_bytes();
    *k += norm_of_row(row, D_, kv_dtype(shape_.dtype)) / sinks;
    *v += norm_of_row(row + kPage * shape_.token_bytes(), D_, kv_dtype(shape_.dtype)) / sinks;
  }
}

// Full attention of one query and group, in its parts, and all results that do not need its ranking.
void Measurement::survey(int item, Scratch* s) {
  const int i = item / shape_.kv_heads, head = item % shape_.kv_heads;
  const int n = args_.lengths[i], sinks = shape_.sink_pages, start = window_page(i);
  const int pages = (n + kPage - 1) / kPage, middle = start - sinks;
  const int64_t state = static_cast<int64_t>(i) * args_.q_heads + head * G_;
  const char* tiles = pool_.tiles(args_.layer, head);
  const char* q = query(i, head);
  float* o = &resident_o_[state * D_];
  float* lse = &resident_lse_[state];
  float* parts = args_.parts + state * kParts;
  const int last = n - (pages - 1) * kPage;
  const TileRun local{tiles, args_.pages + start, std::max(pages - start, 0), last};
  const TileRun resident{tiles, args_.pages, std::min(pages, sinks), local.count > 0 ? kPage : last};
  resident_parts(kernels_, *kernel_table(kernels_.isa, DType::kF32), q, G_, D_, args_.scale, resident, local,
                 s->masks.get(), o, lse, parts);
  float middle_o[kMaxGroup * kMaxHeadDim], middle_lse[kMaxGroup];
  weigh(item, middle_o, middle_lse);

  double sink_k, sink_v;
  sink_norms(n, head, &sink_k, &sink_v);
  float shapes[8] = {};
  float mean_norms[2] = {};
  float* mean_k = args_.mean_k + static_cast<int64_t>(item) * D_;
  std::fill_n(mean_k, D_, 0.0f);
  if (middle > 0) {
    const double* sums = pool_.moments(args_.layer, head, args_.pages[start - 1]);
    const double tokens = middle * kPage;
    float mean_v[kMaxHeadDim];
    for (int d = 0; d < D_; ++d) {
      mean_k[d] = static_cast<float>(sums[d] / tokens);
      mean_v[d] = static_cast<float>(sums[D_ + d] / tokens);
    }
    mean_norms[0] = norm(mean_k, D_);
    mean_norms[1] = norm(mean_v, D_);
    shape_of_sums(sums + 2 * D_, tokens, shapes);
    shape_of_sums(sums + 2 * D_ + 4, tokens, shapes + 4);
  }

  const KernelTable& exact = *kernel_table(kernels_.isa, DType::kF32);
  const auto feature = [](float x) { return x == kMinusInf ? kEmptyLse : x; };
  for (int g = 0; g < G_; ++g) {
    const int64_t at = state + g;
    float* full = &o_[at * D_];
    const float full_lse = exact.merge_state(o + g * D_, lse[g], middle_o + g * D_, middle_lse[g], D_, full);
    o_norm_[at] = norm(full, D_);
    double square = 0.0;
    for (int d = 0; d < D_; ++d) {
      const double x = static_cast<double>(o[g * D_ + d]) - full[d];
      square += x * x;
    }
    float* result = args_.result + at * kResults;
    result[0] = o_norm_[at];
    result[1] = static_cast<float>(std::sqrt(square));
    result[2] = middle_lse[g] == kMinusInf ? 0.0f : std::min(1.0f, std::exp(middle_lse[g] - full_lse));
    float* anchor = args_.anchor + at * kAnchorFeatures;
    const float* part = parts + g * kParts;
    anchor[0] = static_cast<float>(sink_k);
    anchor[1] = static_cast<float>(sink_v);
    std::copy_n(mean_norms, 2, anchor + 2);
    std::copy_n(shapes, 8, anchor + 4);
    std::fill_n(anchor + 12, 4, 0.0f);  // of the scores: find_budgets()
    anchor[16] = feature(part[0]);
    anchor[17] = feature(middle_lse[g]);
    anchor[18] = feature(part[1]);
    anchor[19] = part[2];
    anchor[20] = norm(middle_o + g * D_, D_);
    anchor[21] = part[3];
    anchor[22] = static_cast<float>(norm_of_row(q + g * shape_.token_bytes(), D_, kv_dtype(shape_.dtype)));
    std::fill_n(anchor + 23, 4, 0.0f);  // budgets: find_budgets()
  }
}

// Attention of one query and group to the middle alone, in one pass over it: o [G][D], lse [G]. Leaves what
// every token and page adds to it.
void Measurement::weigh(int item, float* o, float* lse) {
  const int i = item / shape_.kv_heads, head = item % shape_.kv_heads;
  const int64_t state = static_cast<int64_t>(i) * args_.q_heads + head * G_;
  const int pages = window_page(i) - shape_.sink_pages, tokens = pages * kPage;
  std::fill_n(o, G_ * D_, 0.0f);
  std::fill_n(lse, G_, kMinusInf);
  if (pages == 0) return;
  const Middle& m = middle_of(item);
  kernels_.score_tokens(query(i, head), G_, D_, pool_.tiles(args_.layer, head),
                        args_.pages + shape_.sink_pages, pages, m.scores, tokens);
  float units[kMaxGroup];
  for (int g = 0; g < G_; ++g) {
    const float largest = largest_of(&m.scores[int64_t{g} * tokens], tokens, args_.scale);
    units[g] = largest == kMinusInf ? 0.0f : std::min(largest, std::numeric_limits<float>::max());
  }
  weigh_pages(item, units);
  for (int g = 0; g < G_; ++g) {
    double weight = 0.0;
    for (int p = 0; p < pages; ++p) weight += m.page_weights[g * pages + p];
    unit_[state + g] = units[g];
    total_[state + g] = std::exp(static_cast<double>(resident_lse_[state + g]) - units[g]) + weight;
    if (weight == 0.0) continue;
    lse[g] = static_cast<float>(units[g] + std::log(weight));
    mean_rows(&m.page_values[int64_t{g} * pages * D_], pages, weight, o + g * D_);
  }
}

// The weights of every token and page of one query and group, in units of exp(units[g]), and values.
void Measurement::weigh_pages(int item, const float* units) {
  const int i = item / shape_.kv_heads, head = item % shape_.kv_heads;
  const int pages = window_page(i) - shape_.sink_pages, tokens = pages * kPage;
  const Middle& m = middle_of(item);
  kernels_.page_values(m.scores, tokens, G_, D_, args_.scale, units, pool_.tiles(args_.layer, head),
                       args_.pages + shape_.sink_pages, pages, m.weights, m.page_values, int64_t{pages} * D_);
  for (int g = 0; g < G_; ++g) {
    for (int p = 0; p < pages; ++p) {
      const float* weights = &m.weights[int64_t{g} * tokens + p * kPage];
      double sum = 0.0;
      for (int t = 0; t < kPage; ++t) sum += weights[t];
      m.page_weights[g * pages + p] = sum;
    }
  }
}

// mean [D]: the sum of n rows over `weight`.
void Measurement::mean_rows(const float* rows, int n, double weight, float* mean) const {
  constexpr int kTogether = 64;  // rows whose sum is float32
  const float zeros[kMaxHeadDim] = {};
  double sum[kMaxHeadDim] = {};
  for (int first = 0; first < n; first += kTogether) {
    float part[kMaxHeadDim] = {};
    kernels_.add_rows(rows + int64_t{first} * D_, std::min(kTogether, n - first), 0.0f, zeros, D_, part);
    for (int d = 0; d < D_; ++d) sum[d] += part[d];
  }
  for (int d = 0; d < D_; ++d) mean[d] = static_cast<float>(sum[d] / weight);
}

// Finds the budgets of one query and group, and the statistics of its scores as an anchor.
void Measurement::find_budgets(int item, Scratch* s) {
  const int i = item / shape_.kv_heads, head = item % shape_.kv_heads;
  const int64_t state = static_cast<int64_t>(i) * args_.q_heads + head * G_;
  const int pages = window_page(i) - shape_.sink_pages, tokens = pages * kPage;
  if (pages == 0) {
    std::fill_n(budget(static_cast<int>(state), 0, 0), int64_t{G_} * args_.criterion_count * kBlockSizes,
                0.0f);
    for (int c = 0; c < G_ * args_.criterion_count && !args_.single_tokens; ++c)
      *budget(static_cast<int>(state), c, 0) = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  const Middle& middle = middle_of(item);
  for (int g = 0; g < G_; ++g) {
    float* anchor = args_.anchor + (state + g) * kAnchorFeatures;
    const double length = anchor[22];
    if (length > 0.0)
      shape_of_scores(&middle.scores[int64_t{g} * tokens], tokens, args_.scale / length, anchor + 12);
    const int one = static_cast<int>(state) + g;
    if (args_.single_tokens) {
      walk_tokens(one, head, g, args_.pages + shape_.sink_pages, tokens, middle, s);
    } else {
      set_budget(one, 0, every(args_.criterion_count), std::numeric_limits<float>::quiet_NaN());
    }
  }
  for (int size = 1; size < kBlockSizes; ++size) {
    const Blocks at(kMeasuredBlocks[size], shape_.sink_pages, window_page(i));
    s->scorer.score(pool_, args_.layer, head, at, args_.pages, query(i, head), G_, pool_.spread(),
                    s->block_scores.get(), pages);
    for (int g = 0; g < G_; ++g) {
      const int64_t one = state + g;
      walk_blocks(static_cast<int>(one), g, size, at, middle, s);
      args_.anchor[one * kAnchorFeatures + 22 + size] = *budget(static_cast<int>(one), 0, size);
    }
  }
}

Aim Measurement::aim(int state) const {
  const int64_t at = int64_t{state} * D_;
  return {.resident = &resident_o_[at],
          .o = &o_[at],
          .resident_weight = std::exp(static_cast<double>(resident_lse_[state]) - unit_[state]),
          .total = total_[state],
          .resident_error = args_.result[int64_t{state} * kResults + 1],
          .o_norm = o_norm_[state],
          .largest = largest_[state / args_.q_heads],
          .criteria = args_.criteria,
          .criterion_count = args_.criterion_count};
}

void Measurement::set_budget(int state, int size, uint32_t criteria, float value) const {
  for (; criteria != 0; criteria &= criteria - 1) *budget(state, std::countr_zero(criteria), size) = value;
}

void Measurement::walk_blocks(int state, int g, int size, const Blocks& at, const Middle& m, Scratch* s) {
  const Aim wanted = aim(state);
  Walk walk(wanted, D_);
  set_budget(state, size, every(args_.criterion_count) & ~walk.open(), 0.0f);
  if (walk.open() == 0) return;
  const int middle = at.end_page - at.first_page, blk = kMeasuredBlocks[size];
  const float* values = &m.page_values[int64_t{g} * middle * D_];
  const double* weights = &m.page_weights[int64_t{g} * middle];
  const float* o = &o_[int64_t{state} * D_];
  Order order(&s->block_scores[int64_t{g} * middle], at.count, s->keys.get());
  // The full set needs no arithmetic.
  for (int count = 1; count < at.count && walk.open() != 0; ++count) {
    const int block = order[count - 1];
    const int from = at.from(block) - at.first_page, to = at.to(block) - at.first_page;
    double weight = 0.0;
    for (int p = from; p < to; ++p) weight += weights[p];
    const float square = kernels_.add_rows(values + int64_t{from} * D_, to - from, static_cast<float>(weight),
                                           o, D_, walk.sum());
    set_budget(state, size, walk.step(weight, square),
               budget_of_blocks(count, middle * kPage, blk, at.count));
  }
  set_budget(state, size, walk.open(), 1.0f);
}

void Measurement::walk_tokens(int state, int head, int g, const int32_t* pages, int tokens, const Middle& m,
                              Scratch* s) {
  constexpr int kAhead = 8;  // tokens between the one fetched and the one in use
  constexpr int kLine = 64;
  const Aim wanted = aim(state);
  Walk walk(wanted, D_);
  set_budget(state, 0, every(args_.criterion_count) & ~walk.open(), 0.0f);
  if (walk.open() == 0) return;
  const float* weights = &m.weights[int64_t{g} * tokens];
  const float* o = &o_[int64_t{state} * D_];
  const int together = shape_.dtype == DType::kInt8 ? kInt8Values : 1;  // values
  const int64_t bytes = together > 1 ? together * D_ : shape_.token_bytes();
  Order order(&m.scores[int64_t{g} * tokens], tokens, s->keys.get());
  const auto tile = [&](int token) { return pool_.tile(args_.layer, head, pages[token / kPage]); };
  for (int count = 1; count < tokens && walk.open() != 0; ++count) {
    const int token = order[count - 1];
    const int ahead = order.ahead(count - 1 + kAhead);
    const int row = kPage + ahead % kPage;
    const char* next = tile(ahead) + row / together * bytes;
    for (int64_t b = 0; b < bytes; b += kLine) prefetch(next + b);
    const float square = kernels_.add_value(tile(token), token % kPage, weights[token], o, D_, walk.sum());
    set_budget(state, 0, walk.step(weights[token], square), budget_of_blocks(count, tokens, 1, tokens));
  }
  set_budget(state, 0, walk.open(), 1.0f);
}

}  // namespace

float budget_of_blocks(int count, int tokens, int blk, int blocks) {
  if (count <= 0) return 0.0f;
  if (count >= blocks) return 1.0f;
  // Cut blocks can leave some out although the others, counted as whole, have as many tokens as the middle.
  const float budget = static_cast<float>(static_cast<double>(count) * blk / tokens);
  return std::min(budget, std::nextafter(1.0f, 0.0f));
}

void measure(const HostPool& pool, const MeasureArgs& args) { Measurement(pool, args).run(); }

}  // namespace fluxion
