#include "engine/engine.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "kernels/feature_index.h"

namespace fluxion {

const char* const kStatNames =
    "layers,tasks,tasks_cpu,tasks_torch,failed_tasks,middle_tokens,"
    "tokens_read,tile_bytes,metadata_bytes,shared_tasks,shared_tile_bytes,shared_metadata_bytes";

namespace {

// A layer with this many chunks wakes workers that sleep. For fewer they would come too late.
constexpr int kWakeChunks = 3;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

[[noreturn]] void refuse(const std::string& sentence) { throw std::invalid_argument(sentence); }

double task_timeout() {
  const char* text = std::getenv("FLUXION_TASK_TIMEOUT_S");
  if (text == nullptr || *text == '\0') return 60.0;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  // Python reads the variable, too, and accepts no hexadecimal numbers.
  if (*end != '\0' || std::strpbrk(text, "xX") != nullptr || !(seconds > 0 && seconds <= 1e6)) {
    refuse("FLUXION_TASK_TIMEOUT_S is \"" + std::string(text) +
           "\"; it must be a number of seconds above 0, and at most 1000000.");
  }
  return seconds;
}

// Checks the configuration before any member is made from it.
const EngineConfig& checked(const EngineConfig& config, const PoolShape& shape) {
  if (config.q_heads < 1 || config.q_heads % shape.kv_heads != 0 ||
      config.q_heads / shape.kv_heads > kMaxGroup) {
    refuse("The model has " + std::to_string(config.q_heads) + " query heads and " +
           std::to_string(shape.kv_heads) + " KV heads; the first must be 1 to 16 times the second.");
  }
  if (config.sinks != shape.sink_pages * kPage) {
    refuse("sinks is " + std::to_string(config.sinks) + ", but the pool's metadata leaves out " +
           std::to_string(shape.sink_pages * kPage) + " tokens; give both the same number.");
  }
  if (config.window < kPage || config.window % kPage != 0) {
    refuse("window is " + std::to_string(config.window) + "; it must be a multiple of 16, at least 16.");
  }
  if (config.max_requests < 1 || config.max_pages < 1) {
    refuse("max_requests and max_pages must be at least 1.");
  }
  return config;
}

}  // namespace

Engine::Engine(std::shared_ptr<HostPool> pool, const EngineConfig& config)
    : pool_(std::move(pool)),
      config_(checked(config, pool_->shape())),
      shape_(pool_->shape()),
      timeout_s_(task_timeout()),
      step_(*pool_, config.window),
      layer_(*pool_, config_, step_),
      scratch_(pool_->workers().size()),
      worker_ns_(scratch_.size()),
      worker_helped_(scratch_.size()) {
  selection_scratch_.looks_on = true;
  reserve(config.max_requests, config.max_pages);
}

Engine::~Engine() { abandon(); }

void Engine::abandon() {
  end_layer(/*abandoned=*/true);
  state_.store(State::kNone, std::memory_order_relaxed);
}

// ---- room

void Engine::reserve(int requests, int pages) {
  if (requests <= step_.max_requests() && pages <= step_.max_pages()) return;
  if (static_cast<int64_t>(requests) * shape_.kv_heads > TaskQueue::kMaxTasks) {
    refuse(std::to_string(requests) + " requests with " + std::to_string(shape_.kv_heads) +
           " KV heads make more tasks than one layer can hold (" + std::to_string(TaskQueue::kMaxTasks) +
           ").");
  }
  const std::scoped_lock lock(foreign_mutex_, selection_mutex_);
  // Grows by half, so that a request that grows by a page every 16 steps seldom reallocates.
  const auto grown = [](int need, int have) { return need <= have ? have : std::max(need, have + have / 2); };
  const int max_requests =
      std::min<int>(grown(requests, step_.max_requests()), TaskQueue::kMaxTasks / shape_.kv_heads);
  const int max_pages = grown(pages, step_.max_pages());
  const size_t groups = static_cast<size_t>(max_requests) * shape_.kv_heads;
  const size_t states = static_cast<size_t>(max_requests) * config_.q_heads;
  skip_.resize(max_requests);
  corrupt_.resize(max_requests);
  order_.resize(groups);
  tasks_.resize(groups);
  kinds_.resize(groups);
  reads_.resize(groups);
  bundles_.reserve(max_requests, shape_.kv_heads);
  res_lse_.resize(states);
  mid_lse_.resize(states);
  parts_.resize(states * kParts);
  res_o_.resize(states * shape_.head_dim);
  mid_o_.resize(states * shape_.head_dim);
  waits_ = std::make_unique<std::atomic<uint8_t>[]>(groups);
  queue_.reserve(static_cast<int64_t>(groups));
  resize_scratch(max_pages, ranked_tokens_);
  // Last: if memory runs out half-way, there is room for the old sizes, and only for these.
  step_.reserve(max_requests, max_pages);
}

// Makes room for the open layer's kinds of tasks. Ranking a middle token by token takes 16 times the room of
// ranking its pages, so that room is made only on demand.
void Engine::reserve_tasks(int ranked_tokens) {
  const bool grows = ranked_tokens > ranked_tokens_;
  if (!grows && layer_.plan->kinds.empty()) return;
  const std::lock_guard lock(selection_mutex_);
  if (grows) {
    const int tokens = std::max(ranked_tokens, ranked_tokens_ + ranked_tokens_ / 2);
    resize_scratch(step_.max_pages(), tokens);
    ranked_tokens_ = tokens;  // last, as in reserve()
  }
  for (const auto& kind : layer_.plan->kinds) {
    for (Scratch& s : scratch_) kind->reserve(static_cast<int>(s.pages.size()), layer_.group, &s);
    kind->reserve(static_cast<int>(selection_scratch_.pages.size()), layer_.group, &selection_scratch_);
  }
}

void Engine::resize_scratch(int pages, int tokens) {
  // The resident pages use the same arrays as the middle's.
  const int most = std::max(pages, (config_.sinks + config_.window) / kPage + 1);
  const Scratch::Room room{most, tokens, layer_.group, shape_.head_dim, shape_.entry_bytes()};
  for (Scratch& s : scratch_) s.resize(room);
  selection_scratch_.resize(room);
}

// ---- a step

void Engine::step(const int32_t* rows, const int32_t* seq_lens, int batch, const int32_t* table,
                  int64_t table_stride, int64_t columns) {
  abandon();
  step_.clear();
  step_plan_ = nullptr;
  bundles_.clear_step();
  int longest = 1;
  for (int b = 0; b < batch; ++b) {
    if (seq_lens[b] >= 1 && seq_lens[b] <= columns * kPage) longest = std::max(longest, seq_lens[b]);
  }
  reserve(batch, (longest + kPage - 1) / kPage);
  step_.begin(rows, seq_lens, batch, table, table_stride, columns);
  try {
    bundles_.begin_step(layer_, &scratch_);
  } catch (...) {
    step_.clear();
    bundles_.clear_step();
    throw;
  }
}

// ---- a layer

void Engine::check_layer(const AttentionLayer& at, const LayerInput& in) const {
  pool_->check_layer(at.index);
  if (at.window.data != nullptr && in.k.data != nullptr && !step_.rows_differ()) {
    refuse("Two requests of the step have the same row; every request writes to a row of its own.");
  }
}

// The beginning of every phase of a layer. No thread computes meanwhile.
void Engine::open_input(const AttentionLayer& at, const LayerInput& in) {
  layer_.at = at;
  layer_.in = in;
  layer_.to = {};
  layer_.res_o = res_o_.data();
  layer_.res_lse = res_lse_.data();
  layer_.mid_o = mid_o_.data();
  layer_.mid_lse = mid_lse_.data();
  layer_.plan = nullptr;
  held_ = false;
  thrown_ = nullptr;
  std::fill(corrupt_.begin(), corrupt_.end(), nullptr);
  task_bytes_ = 0;
  next_item_.store(0, std::memory_order_relaxed);
  skip_bad_requests();
  appended_ = in.k.data != nullptr;
  items_ = step_.batch() * shape_.kv_heads;
}

void Engine::skip_bad_requests() {
  failure_ = step_.failure();
  const WindowView& window = layer_.at.window;
  for (int b = 0; b < step_.batch(); ++b) {
    const Request& r = step_.request(b);
    skip_[b] = !r.good;
    if (!r.good || window.data == nullptr || (r.row >= 0 && r.row < window.rows)) continue;
    skip_[b] = true;
    record_failure("Request " + std::to_string(b) + " has the row " + std::to_string(r.row) +
                   ", and the windows have the rows 0 to " + std::to_string(window.rows - 1) + ".");
  }
}

// Returns false when the workers are busy. Sleeping workers are not woken if they would come too late.
// residents: the work includes attention to the residents.
bool Engine::launch(WorkerPool::Fn work, bool residents, void* ctx) {
  const int64_t resident_bytes = step_.resident_pages() * shape_.kv_heads * shape_.window_tile_bytes();
  const int64_t bytes = task_bytes_ + (residents ? resident_bytes : 0);
  return pool_->workers().launch(work, ctx, /*wake=*/bytes >= kWakeChunks * config_.chunk_bytes);
}

// Merges the residents' LSE from a device's LSE of sinks and window, as resident_parts() does.
void Engine::take_parts(const float* parts) {
  alignas(64) float nothing[16] = {}, merged[16];
  for (int64_t i = 0; i < static_cast<int64_t>(step_.batch()) * config_.q_heads; ++i, parts += kParts) {
    res_lse_[i] =
        layer_.exact.merge_state(nothing, parts[kPartLseSink], nothing, parts[kPartLseLocal], 16, merged);
  }
}

int Engine::begin(const AttentionLayer& at, const LayerInput& in, const LayerOutput& to,
                  std::shared_ptr<const LayerPlan> plan) {
  const State state = state_.load(std::memory_order_relaxed);
  const bool follows = layer_.at.index == at.index && in.k.data == nullptr;
  const bool held = follows && state == State::kHeld && !to.on_device();
  const bool written = follows && state == State::kWritten && to.on_device();
  abandon();
  check_layer(at, in);
  if (!to.on_device() && !held && at.window.data == nullptr) {
    refuse("Layer " + std::to_string(at.index) +
           " has no residents; pass windows, or call layer_resident for this layer first.");
  }
  if (held) {  // everything else is as residents() left it, lost requests included
    layer_.at = at;
    layer_.in = in;
    held_ = true;
    task_bytes_ = 0;
    next_item_.store(0, std::memory_order_relaxed);
  } else {
    open_input(at, in);
    appended_ = written || in.k.data != nullptr;
  }
  layer_.to = to;
  layer_.plan = std::move(plan);
  if (to.on_device()) {
    layer_.at.window = {};
    layer_.mid_o = to.o;
    layer_.mid_lse = to.lse;
    if (in.k.data == nullptr) items_ = 0;
  }
  layer_.residents_known = held || to.parts != nullptr;
  if (to.parts != nullptr) take_parts(to.parts);
  // A group without a task reads nothing and merges with nothing.
  std::fill_n(reads_.data(), step_.batch() * shape_.kv_heads, Reads{});
  std::fill_n(layer_.mid_lse, static_cast<size_t>(step_.batch()) * config_.q_heads, kMinusInf);
  const Lanes lanes = make_tasks();
  owners_.store(0, std::memory_order_relaxed);
  {
    const std::scoped_lock lock(foreign_mutex_, selection_mutex_);
    queue_.open(lanes);
    state_.store(State::kOpen, std::memory_order_release);
  }
  if (queue_.count() + items_ > 0) {
    launched_ = launch(&Engine::worker_main, /*residents=*/layer_.at.window.data != nullptr && !held, this);
    if (!launched_) {
      abandon();
      throw_busy();
    }
  }
  return queue_.count();
}

void Engine::finish() {
  if (!open()) {
    throw std::runtime_error("layer_finish was called without layer_begin; begin a layer first.");
  }
  end_layer(/*abandoned=*/false);
  throw_failure();
  state_.store(State::kDone, std::memory_order_relaxed);
}

void Engine::attend(const AttentionLayer& at, const LayerInput& in, const LayerOutput& to) {
  if (at.newest > 0) return newest(at, in, to);
  if (step_plan_ == nullptr) throw std::runtime_error("The step has no plan for all of its layers.");
  LayerInput rest = in;
  if (step_looks_) {
    residents(at, in, parts_.data());
    rest.k = rest.v = {};
  }
  begin(at, rest, to, step_plan_);
  finish();
}

void Engine::throw_busy() {
  throw std::runtime_error("The workers run another layer; finish it before this one begins.");
}

// Throws the first failure of a layer whose work is done.
void Engine::throw_failure() {
  totals_[kStatLayers].fetch_add(1, std::memory_order_relaxed);
  clear_corrupt();
  record_thrown();
  if (!failure_.empty())
    throw std::runtime_error("Layer " + std::to_string(layer_.at.index) + ": " + failure_);
}

void Engine::check_finished() const {
  if (state_.load(std::memory_order_relaxed) == State::kDone) return;
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
  if (layer_.to.on_device()) {
    throw std::runtime_error("There is no result: the layer's residents are a device's, which merges them.");
  }
  const int64_t D = shape_.head_dim, states = static_cast<int64_t>(step_.batch()) * config_.q_heads;
  for (int64_t i = 0; i < states; ++i) {
    layer_.exact.merge_state(&res_o_[i * D], res_lse_[i], &mid_o_[i * D], mid_lse_[i], shape_.head_dim,
                             out + i * D);
  }
}

// ---- results and failures

void Engine::record_failure(const std::string& sentence) {
  const std::lock_guard lock(failure_mutex_);
  if (failure_.empty()) failure_ = sentence;
}

// Clears the output of requests that read corrupt memory.
void Engine::clear_corrupt() {
  for (int b = 0; b < step_.batch(); ++b) {
    if (corrupt_[b] == nullptr) continue;
    const int64_t at = int64_t{b} * config_.q_heads, numbers = int64_t{config_.q_heads} * shape_.head_dim;
    if (!layer_.to.on_device())
      std::memset(layer_.to.out + b * layer_.to.out_stride, 0, config_.q_heads * shape_.token_bytes());
    std::fill_n(layer_.mid_o + at * shape_.head_dim, numbers, 0.0f);
    std::fill_n(layer_.mid_lse + at, config_.q_heads, kMinusInf);
  }
}

void Engine::record_thrown() {
  if (thrown_ == nullptr) return;
  record_failure("Request " + std::to_string(thrower_.request) + ", KV head " +
                 std::to_string(thrower_.head) + " could not be computed: " + sentence_of(thrown_));
}

void Engine::fail_task(const Task& task, const std::string& what) {
  record_failure("Request " + std::to_string(task.request) + ", KV head " + std::to_string(task.head) + " " +
                 what + ".");
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
