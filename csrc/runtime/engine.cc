#include "runtime/engine.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "kernels/feature_index.h"

namespace fluxion {

const char* const kStatNames =
    "layers,tasks,tasks_cpu,tasks_torch,tasks_gpu,failed_tasks,widened_tasks,middle_tokens,"
    "tokens_read,tile_bytes,metadata_bytes,shared_tasks,shared_tile_bytes,shared_metadata_bytes,"
    "microbatches";

namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

[[noreturn]] void refuse(const std::string& sentence) { throw std::invalid_argument(sentence); }

double task_timeout() {
  const char* text = std::getenv("FLUXION_TASK_TIMEOUT_S");
  if (text == nullptr || *text == '\0') return 60.0;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end != '\0' || !(seconds > 0)) {
    refuse("FLUXION_TASK_TIMEOUT_S is \"" + std::string(text) +
           "\"; it must be a number of seconds above 0.");
  }
  return seconds;
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

[[noreturn]] void throw_busy() {
  throw std::runtime_error("The workers run another layer; finish it before this one begins.");
}

// An unsigned number that orders as the float does, NaN lowest.
uint32_t ordered(float value) {
  if (std::isnan(value)) return 0;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

}  // namespace

Engine::Engine(std::shared_ptr<HostPool> pool, const EngineConfig& config)
    : pool_(std::move(pool)),
      config_(config),
      shape_(pool_->shape()),
      kernels_(pool_->kernels()),
      exact_(*kernel_table(kernels_.isa, DType::kF32)),
      scratch_(pool_->workers().size()),
      worker_ns_(scratch_.size()),
      worker_helped_(scratch_.size()) {
  if (config.q_heads < 1 || config.q_heads % shape_.kv_heads != 0 ||
      config.q_heads / shape_.kv_heads > kMaxGroup) {
    refuse("The model has " + std::to_string(config.q_heads) + " query heads and " +
           std::to_string(shape_.kv_heads) + " KV heads; the first must be 1 to 16 times the second.");
  }
  if (config.sinks != shape_.sink_pages * kPage) {
    refuse("sinks is " + std::to_string(config.sinks) + ", but the pool's metadata leaves out " +
           std::to_string(shape_.sink_pages * kPage) + " tokens; give both the same number.");
  }
  if (config.window < kPage || config.window % kPage != 0) {
    refuse("window is " + std::to_string(config.window) + "; it must be a multiple of 16, at least 16.");
  }
  if (config.max_requests < 1 || config.max_pages < 1) {
    refuse("max_requests and max_pages must be at least 1.");
  }
  if (!(config.guard >= 0) || std::isinf(config.guard)) {
    refuse("guard is " + number(config.guard) +
           "; it must be a share of attention above 0, or 0 for no guard.");
  }
  timeout_s_ = task_timeout();
  group_ = config.q_heads / shape_.kv_heads;
  reserve(config.max_requests, config.max_pages);
}

Engine::~Engine() { abandon(); }

void Engine::abandon() {
  drain(/*abandoned=*/true);
  held_layer_ = written_layer_ = -1;
}

void Engine::reserve(int requests, int pages) {
  if (requests <= max_requests_ && pages <= max_pages_) return;
  if (static_cast<int64_t>(requests) * shape_.kv_heads > TaskQueue::kMaxTasks) {
    refuse(std::to_string(requests) + " requests with " + std::to_string(shape_.kv_heads) +
           " KV heads make more tasks than one layer can hold (" + std::to_string(TaskQueue::kMaxTasks) +
           ").");
  }
  const std::scoped_lock lock(foreign_mutex_, selection_mutex_);
  // By half more at a time, so that a request that grows by a page every 16 steps seldom pays for it.
  const auto grown = [](int need, int have) { return need <= have ? have : std::max(need, have + have / 2); };
  const int max_requests =
      std::min<int>(grown(requests, max_requests_), TaskQueue::kMaxTasks / shape_.kv_heads);
  const int max_pages = grown(pages, max_pages_);
  const size_t groups = static_cast<size_t>(max_requests) * shape_.kv_heads;
  const size_t states = static_cast<size_t>(max_requests) * config_.q_heads;
  requests_.resize(max_requests);
  skip_.resize(max_requests);
  sorted_rows_.resize(max_requests);
  table_.resize(static_cast<size_t>(max_requests) * max_pages);
  blk_.resize(groups);
  order_.resize(groups);
  tasks_.resize(groups);
  reads_.resize(groups);
  bundled_.reserve(groups);
  bundles_.reserve(groups);
  bundle_of_.resize(groups);
  families_.reserve(max_requests);
  middle_ends_.resize(max_requests);
  budget_.resize(states);
  stop_.resize(groups);
  spread_.resize(groups);
  res_lse_.resize(states);
  own_mid_lse_.resize(states);
  res_o_.resize(states * shape_.head_dim);
  own_mid_o_.resize(states * shape_.head_dim);
  parts_ = std::make_unique<std::atomic<uint8_t>[]>(groups);
  queue_.reserve(static_cast<int64_t>(groups));
  for (Scratch& s : scratch_) resize(&s, max_pages, max_tokens_);
  resize(&selection_scratch_, max_pages, max_tokens_);
  // Last: where memory ran out half-way there is room for the old sizes, and only for these.
  max_requests_ = max_requests;
  max_pages_ = max_pages;
}

// Room to rank the single tokens of a middle this long: 16 times that of its pages, so only where asked for.
void Engine::reserve_tokens(int tokens) {
  if (tokens <= max_tokens_) return;
  const std::lock_guard lock(selection_mutex_);
  const int max_tokens = std::max(tokens, max_tokens_ + max_tokens_ / 2);
  for (Scratch& s : scratch_) resize(&s, max_pages_, max_tokens);
  resize(&selection_scratch_, max_pages_, max_tokens);
  max_tokens_ = max_tokens;  // last, as in reserve()
}

void Engine::resize(Scratch* s, int max_pages, int max_tokens) const {
  // The resident pages use the same arrays as the middle's.
  const size_t pages = std::max(max_pages, (config_.sinks + config_.window) / kPage + 1);
  const size_t units = std::max<size_t>(pages, max_tokens);
  s->scores.resize(units * group_);
  s->chosen.resize(units);
  s->added.resize(config_.guard > 0 ? pages : 0);
  s->blocks.resize(pages);
  s->pages.resize(pages);
  s->tokens.resize(max_tokens);
  s->masks.resize(pages * group_);
  // A step with families needs more, and has it already where single tokens ask for room.
  const size_t parts = static_cast<size_t>(kMaxChunks - 1) * group_;
  s->part_o.resize(std::max(s->part_o.size(), parts * shape_.head_dim));
  s->part_lse.resize(std::max(s->part_lse.size(), parts));
  s->select.resize(select_scratch_bytes(static_cast<int>(units)) / sizeof(float) + 1);
  if (progress_) s->progress.resize(static_cast<int>(pages), group_);
  s->scorer.resize(static_cast<int>(pages), kMaxHeads, shape_.entry_bytes());
}

void Engine::step(const int32_t* rows, const int32_t* seq_lens, int batch, const int32_t* table,
                  int64_t table_stride, int64_t columns) {
  abandon();
  finished_ = false;
  batch_ = 0;
  step_failure_.clear();
  resident_pages_ = 0;
  int longest = 1;
  for (int b = 0; b < batch; ++b) {
    if (seq_lens[b] >= 1 && seq_lens[b] <= columns * kPage) longest = std::max(longest, seq_lens[b]);
  }
  reserve(batch, (longest + kPage - 1) / kPage);
  for (int b = 0; b < batch; ++b) {
    Request& r = requests_[b];
    r = {rows[b], seq_lens[b], window_start_page(seq_lens[b], sink_pages(), config_.window), true};
    std::string wrong;
    if (r.length < 1 || r.length > columns * kPage) {
      wrong = "it has " + std::to_string(r.length) + " tokens, but its row of the page table holds 1 to " +
              std::to_string(columns * kPage);
    } else {
      const int count = (r.length + kPage - 1) / kPage;
      const int32_t* from = table + b * table_stride;
      wrong = pool_->check_pages(from, count);
      std::copy_n(from, count, table_.data() + static_cast<int64_t>(b) * max_pages_);
    }
    r.good = wrong.empty();
    if (r.good) {
      const int end = (r.length - 1) / kPage + 1;
      resident_pages_ += end - r.window_page + std::min(sink_pages(), r.window_page);
    }
    if (!r.good && step_failure_.empty()) {
      step_failure_ = "Request " + std::to_string(b) + " cannot be computed: " + wrong + ".";
    }
  }
  std::copy_n(rows, batch, sorted_rows_.data());
  std::sort(sorted_rows_.begin(), sorted_rows_.begin() + batch);
  rows_differ_ =
      std::adjacent_find(sorted_rows_.begin(), sorted_rows_.begin() + batch) == sorted_rows_.begin() + batch;
  find_families(batch);
  batch_ = batch;  // last: with it the step's families count
}

void Engine::check_requests(const LayerArgs& args) {
  failure_ = step_failure_;
  for (int b = 0; b < batch_; ++b) {
    const Request& r = requests_[b];
    skip_[b] = !r.good;
    if (!r.good || args.window.data == nullptr || (r.row >= 0 && r.row < args.window.rows)) continue;
    skip_[b] = true;
    record_failure("Request " + std::to_string(b) + " has the row " + std::to_string(r.row) +
                   ", and the windows have the rows 0 to " + std::to_string(args.window.rows - 1) + ".");
  }
}

// Fills tasks_ in the order of the queue; how many each lane has.
std::array<int, kLanes> Engine::make_tasks() {
  const int heads = shape_.kv_heads;
  int count = 0;
  std::array<int, kLanes> lanes{};
  bool early = false;     // some task may stop early
  int single_tokens = 0;  // the longest middle that is ranked token by token
  int64_t middle_tokens = 0;
  task_bytes_ = 0;
  load_ = {};
  const bool device = device_least_.load(std::memory_order_relaxed) >= 0;
  for (int b = 0; b < batch_; ++b) {
    if (skip_[b]) continue;
    const int middle = (requests_[b].window_page - sink_pages()) * kPage;
    middle_tokens += static_cast<int64_t>(middle) * config_.q_heads;
    for (int h = 0; h < heads; ++h) {
      const int i = b * heads + h;
      parts_[i].store(1, std::memory_order_relaxed);
      const int blk = blk_[i];
      if (blk == 0) continue;
      if (blk == kListed) {
        const std::string wrong = check_list(i);
        if (!wrong.empty()) {
          record_failure("Request " + std::to_string(b) + ", KV head " + std::to_string(h) +
                         " has a list that cannot be read: " + wrong + ".");
        }
        if (!wrong.empty() || listed_pages(i) == 0) continue;
      } else if (blk != 1 && blk != 16 && blk != 32 && blk != 64 && blk != 128) {
        record_failure("Request " + std::to_string(b) + ", KV head " + std::to_string(h) +
                       " asks for blocks of " + std::to_string(blk) +
                       " tokens; a block has 1, 16, 32, 64 or 128 (0 for no task, -1 for a list).");
        continue;
      }
      const float* budget = &budget_[state_at(b, h)];
      if (middle == 0 || std::none_of(budget, budget + group_, [](float f) { return f > 0; })) continue;
      int lane = args_.owner == nullptr ? static_cast<int>(Executor::kAny) : args_.owner[i];
      if (lane < 0 || lane >= kLanes) {
        record_failure("Request " + std::to_string(b) + ", KV head " + std::to_string(h) + " has the owner " +
                       std::to_string(lane) + "; executors are 0 to " + std::to_string(kExecutors - 1) +
                       ", and any of them is " + std::to_string(static_cast<int>(Executor::kAny)) + ".");
        continue;
      }
      if (!check_progressive(i)) continue;
      early |= progressive(i);
      if (device && (blk <= 1 || progressive(i))) lane = static_cast<int>(Executor::kCpu);
      const float largest = std::min(1.0f, *std::max_element(budget, budget + group_));
      const int64_t before = task_bytes_;
      if (blk == kListed) {
        if (*std::min_element(budget, budget + group_) < 1)
          single_tokens = std::max(single_tokens, listed_pages(i) * kPage);
        task_bytes_ += listed_pages(i) * shape_.tile_bytes();
      } else {
        if (blk == 1) single_tokens = std::max(single_tokens, middle);
        task_bytes_ += static_cast<int64_t>((largest + 1.0f / 16) * (middle / kPage) * shape_.tile_bytes());
      }
      if (device) {
        const bool ranked = blk > 1 && *std::min_element(budget, budget + group_) < 1;
        add_load(lane, middle / kPage, task_bytes_ - before,
                 ranked ? middle / blk * shape_.entry_bytes() : 0);
      }
      parts_[i].store(2, std::memory_order_relaxed);
      ++lanes[lane];
      order_[count++] = static_cast<uint64_t>(lane) << (32 + TaskQueue::kBits) | static_cast<uint64_t>(i);
    }
  }
  reserve_tokens(single_tokens);
  if (early) reserve_progress();
  make_bundles();
  // Lane, value, index: the index has kBits.
  for (int n = 0; n < count; ++n) {
    const int i = TaskQueue::task_of(static_cast<int64_t>(order_[n]));
    order_[n] |= static_cast<uint64_t>(~ordered(value_of(i))) << TaskQueue::kBits;
  }
  std::sort(order_.begin(), order_.begin() + count);
  for (int i = 0; i < count; ++i) {
    const int packed = TaskQueue::task_of(static_cast<int64_t>(order_[i]));
    tasks_[i] = {packed / heads, packed % heads};
  }
  totals_[kStatMiddleTokens].fetch_add(middle_tokens, std::memory_order_relaxed);
  totals_[kStatTasks].fetch_add(count, std::memory_order_relaxed);
  return lanes;
}

void Engine::check_rows(const WindowView& window, const TokenView& k) const {
  if (window.data != nullptr && k.data != nullptr && !rows_differ_) {
    refuse("Two requests of the step have the same row; every request writes to a row of its own.");
  }
}

// False when the workers are taken. Those that sleep are left alone where they would come too late to be of
// use.
bool Engine::launch(WorkerPool::Fn work) {
  const bool residents = args_.window.data != nullptr && !held_;
  const int64_t bytes =
      task_bytes_ + (residents ? resident_pages_ * shape_.kv_heads * shape_.tile_bytes() : 0);
  return pool_->workers().launch(work, this, /*wake=*/bytes >= kWakeChunks * config_.chunk_bytes);
}

void Engine::layer_resident(const ResidentArgs& args) {
  abandon();
  finished_ = false;
  pool_->check_layer(args.layer);
  check_rows(args.window, args.k);
  args_ = LayerArgs{};
  args_.layer = args.layer;
  args_.q = args.q;
  args_.q_stride = args.q_stride;
  args_.k = args.k;
  args_.v = args.v;
  args_.window = args.window;
  args_.scale = args.scale;
  parts_out_ = args.parts;
  held_ = false;
  task_bytes_ = 0;
  check_requests(args_);
  appended_ = args.k.data != nullptr;
  items_ = batch_ * shape_.kv_heads;
  next_item_.store(0, std::memory_order_relaxed);
  if (items_ > 0) {
    if (!launch(&Engine::parts_main)) throw_busy();
    pool_->workers().join();
  }
  held_layer_ = args.layer;
}

void Engine::layer_append(int layer, const TokenView& k, const TokenView& v) {
  abandon();
  finished_ = false;
  pool_->check_layer(layer);
  args_ = LayerArgs{};
  args_.layer = layer;
  args_.k = k;
  args_.v = v;
  held_ = false;
  task_bytes_ = 0;
  check_requests(args_);
  appended_ = true;
  items_ = batch_ * shape_.kv_heads;
  next_item_.store(0, std::memory_order_relaxed);
  if (items_ > 0) {
    if (!launch(&Engine::append_main)) throw_busy();
    pool_->workers().join();
  }
  written_layer_ = layer;
}

// The residents' LSE from what a device says of sinks and window, as resident_parts() has it.
void Engine::take_parts(const float* parts) {
  alignas(64) float nothing[16] = {}, merged[16];
  for (int64_t i = 0; i < static_cast<int64_t>(batch_) * config_.q_heads; ++i, parts += kParts)
    res_lse_[i] = exact_.merge_state(nothing, parts[kPartLseSink], nothing, parts[kPartLseLocal], 16, merged);
}

int Engine::layer_begin(const LayerArgs& args) {
  const bool bare = args.k.data == nullptr && args.window.data == nullptr;
  const bool held = held_layer_ == args.layer && bare && !args.on_device();
  const bool written = written_layer_ == args.layer && bare && args.on_device();
  abandon();
  finished_ = false;
  pool_->check_layer(args.layer);
  check_rows(args.window, args.k);
  args_ = args;
  held_ = held;
  // Of a held layer, these are as layer_resident() left them.
  if (!held) {
    check_requests(args);
    appended_ = written || args.k.data != nullptr;
  }
  mid_o_ = args.on_device() ? args.mid_o : own_mid_o_.data();
  mid_lse_ = args.on_device() ? args.mid_lse : own_mid_lse_.data();
  if (args.parts != nullptr) take_parts(args.parts);
  const size_t groups = static_cast<size_t>(batch_) * shape_.kv_heads;
  std::copy_n(args.blk, groups, blk_.data());
  std::copy_n(args.budget, static_cast<size_t>(batch_) * config_.q_heads, budget_.data());
  const auto copy_or = [&](const float* from, float otherwise, float* to) {
    from != nullptr ? std::copy_n(from, groups, to) : std::fill_n(to, groups, otherwise);
  };
  copy_or(args.stop, 0.0f, stop_.data());
  copy_or(args.spread, 1.0f, spread_.data());
  // A group without a task reads nothing and merges with nothing.
  std::fill_n(reads_.data(), groups, Reads{});
  std::fill_n(mid_lse_, static_cast<size_t>(batch_) * config_.q_heads, kMinusInf);
  const std::array<int, kLanes> lanes = make_tasks();
  items_ = held || args.window.data != nullptr || args.k.data != nullptr ? static_cast<int>(groups) : 0;
  next_item_.store(0, std::memory_order_relaxed);
  owners_.store(0, std::memory_order_relaxed);
  resident_given_ = false;
  {
    const std::scoped_lock lock(foreign_mutex_, selection_mutex_);
    queue_.open(lanes);
    open_.store(true, std::memory_order_release);
  }
  const int64_t least = device_least_.load(std::memory_order_relaxed);
  if (load_.own > 0 || (load_.tasks > 0 && load_.bytes() >= least)) wake();
  launched_ = queue_.count() + items_ > 0;
  if (launched_ && !launch(&Engine::worker_main)) {
    launched_ = false;
    abandon();
    throw_busy();
  }
  return queue_.count();
}

void Engine::set_resident(const float* o, const float* lse) {
  if (!open_.load(std::memory_order_acquire) || merges_itself() || args_.on_device()) {
    throw std::runtime_error(
        "Resident results belong between layer_begin without a window and layer_finish; none are expected "
        "now.");
  }
  const size_t states = static_cast<size_t>(batch_) * config_.q_heads;
  std::copy_n(o, states * shape_.head_dim, res_o_.data());
  std::copy_n(lse, states, res_lse_.data());
  resident_given_ = true;
}

void Engine::layer_finish() {
  if (!open_.load(std::memory_order_acquire)) {
    throw std::runtime_error("layer_finish was called without layer_begin; begin a layer first.");
  }
  drain(/*abandoned=*/false);
  totals_[kStatLayers].fetch_add(1, std::memory_order_relaxed);
  if (args_.on_device()) {
    for (int i = 0; i < batch_ * shape_.kv_heads; ++i) take_given(i / shape_.kv_heads, i % shape_.kv_heads);
  } else if (!merges_itself()) {
    if (!resident_given_ && batch_ > 0)
      record_failure("No resident results were given; call set_resident first.");
    for (int b = 0; b < batch_ && failure_.empty(); ++b) {
      for (int h = 0; h < shape_.kv_heads; ++h) merge(b, h);
    }
  }
  if (!failure_.empty()) throw std::runtime_error("Layer " + std::to_string(args_.layer) + ": " + failure_);
  finished_ = true;
}

void Engine::check_finished() const {
  if (finished_) return;
  throw std::runtime_error(
      "There is no result: no layer of this step was finished, or the last one failed; ask after a "
      "layer_finish that threw nothing.");
}

const Reads* Engine::reads() const {
  check_finished();
  return reads_.data();
}

void Engine::result(float* out) const {
  check_finished();
  if (args_.on_device()) {
    throw std::runtime_error("There is no result: the layer's residents are a device's, which merges them.");
  }
  const int64_t D = shape_.head_dim, states = static_cast<int64_t>(batch_) * config_.q_heads;
  for (int64_t i = 0; i < states; ++i) {
    exact_.merge_state(&res_o_[i * D], res_lse_[i], &mid_o_[i * D], mid_lse_[i], shape_.head_dim,
                       out + i * D);
  }
}

// Ends the open layer, if there is one: afterwards nobody reads or writes what args_ points to. An abandoned
// layer starts no work that it has not started: its pages and rows may belong to somebody else by now.
void Engine::drain(bool abandoned) {
  if (!open_.load(std::memory_order_acquire)) return;
  if (abandoned) {
    next_item_.store(items_, std::memory_order_relaxed);
    const std::lock_guard lock(foreign_mutex_);
    queue_.close();
  }
  if (launched_) pool_->workers().join();
  launched_ = false;
  wait_or_revoke(!abandoned);
  {
    const std::scoped_lock lock(foreign_mutex_, selection_mutex_);
    queue_.close();
    open_.store(false, std::memory_order_release);
  }
  if (!abandoned) seal_coarse();
  for (size_t w = 0; w < scratch_.size(); ++w) {
    Scratch& s = scratch_[w];
    worker_ns_[w].fetch_add(s.busy_ns, std::memory_order_relaxed);
    worker_helped_[w].fetch_add(s.helped_chunks, std::memory_order_relaxed);
    s.busy_ns = s.helped_chunks = 0;
    for (int i = 0; i < kStatCount; ++i) {
      if (s.stats[i] == 0) continue;
      totals_[i].fetch_add(s.stats[i], std::memory_order_relaxed);
      s.stats[i] = 0;
    }
  }
}

void Engine::wait_or_revoke(bool wait) {
  using Clock = std::chrono::steady_clock;
  for (int i = 0; wait && i < 2000 && !queue_.all_done(); ++i) cpu_pause();
  if (queue_.all_done()) return;
  const auto start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  while (wait && !queue_.all_done()) {
    const double seconds = elapsed();
    if (seconds >= timeout_s_) break;
    if (seconds < 1e-3) {
      sched_yield();
    } else {
      const timespec pause{0, 20'000};
      nanosleep(&pause, nullptr);
    }
  }
  revoke_rest(queue_, foreign_mutex_, [&](int i, Executor executor) {
    if (!wait) return;
    totals_[kStatFailedTasks].fetch_add(1, std::memory_order_relaxed);
    record_failure("Task " + std::to_string(i) + " (request " + std::to_string(tasks_[i].request) +
                   ", KV head " + std::to_string(tasks_[i].head) + ") belongs to the executor \"" +
                   kExecutorNames[static_cast<int>(executor)] + "\" and was not delivered within " +
                   number(timeout_s_) +
                   " s; look for that executor's error, or raise FLUXION_TASK_TIMEOUT_S.");
  });
}

// Half of the full pages end no coarse block.
bool Engine::ends_coarse(int b) const { return !skip_[b] && requests_[b].length % (2 * kPage) == 0; }

void Engine::seal_coarse() {
  if (!appended_) return;
  bool any = false;
  for (int b = 0; b < batch_; ++b) any |= ends_coarse(b);
  if (!any) return;
  // Every head seals in the order of requests, in which they are tagged: where two share a place, entries and
  // tag are of the last one.
  const auto seal_head = [](void* self, int h) {
    const Engine& e = *static_cast<Engine*>(self);
    for (int b = 0; b < e.batch_; ++b) {
      if (!e.ends_coarse(b)) continue;
      e.pool_->seal_blocks(e.args_.layer, h, e.pages_of(b), e.requests_[b].length / kPage - 1);
    }
  };
  pool_->workers().parallel_for(shape_.kv_heads, seal_head, this, /*wake=*/false);
  for (int b = 0; b < batch_; ++b) {
    if (ends_coarse(b)) pool_->tag_blocks(args_.layer, pages_of(b), requests_[b].length / kPage - 1);
  }
}

void Engine::record_failure(const std::string& sentence) {
  const std::lock_guard lock(failure_mutex_);
  if (failure_.empty()) failure_ = sentence;
}

void Engine::stats(int64_t* out) const {
  for (int i = 0; i < kStatCount; ++i) out[i] = totals_[i].load(std::memory_order_relaxed);
}

void Engine::worker_counts(int64_t* ns, int64_t* helped_chunks) const {
  for (size_t w = 0; w < worker_ns_.size(); ++w) {
    ns[w] = worker_ns_[w].load(std::memory_order_relaxed);
    helped_chunks[w] = worker_helped_[w].load(std::memory_order_relaxed);
  }
}

}  // namespace fluxion
