// One decode step, layer by layer: resident attention, the task queue, the merge.
//
// A layer goes through these states; step() and abandon() lead back to kNone from any of them:
//
//   kNone -- append() ----> kWritten --+
//     |  --- residents() -> kHeld -----+-- begin() -> kOpen -- finish() -> kDone
//     |  -------------------------------+
//     |  --- attend() (begin and finish by the step's plan) -----------> kDone
//     |  --- newest() -> kNone
//
// append(), residents(), newest(), begin() and attend() may be called in every state. They drop the state of
// the previous layer, except what begin() takes from append() or residents() of the same layer.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/bundle.h"
#include "engine/layer.h"
#include "engine/task_kind.h"
#include "engine/task_queue.h"
#include "runtime/failure.h"
#include "runtime/worker_pool.h"

namespace fluxion {

// Threads: step, residents, append, begin and finish belong to one thread at a time. The foreign functions
// may be called from any thread at any time.
//
// Ownership. A worker takes one resident item or one task and has it until it is done: scan, selection,
// attention and merge use that worker's scratch. Scan and attention are stages of chunks (chunks.h). A worker
// that finds the queue empty helps with the chunks of other workers.
//
// Phases of a layer. Between begin and finish, the item that fills a page writes that page's metadata and
// moments (seal_page). No task reads that page, because it is in no request's middle yet. Coarse entries and
// tags are direct-mapped: the entry of a block that completes now may hold an entry that another request's
// task reads. They are therefore read-only until the last task is done; then finish writes them
// (seal_blocks).
class Engine {
 public:
  // Throws std::invalid_argument for a geometry that does not fit the pool. FLUXION_TASK_TIMEOUT_S (default
  // 60) is how many seconds finish waits for foreign executors.
  Engine(std::shared_ptr<HostPool> pool, const EngineConfig& config);
  ~Engine();

  // See Step::begin. A request with a bad length or page id fails every layer of the step; the other requests
  // are computed.
  void step(const int32_t* rows, const int32_t* seq_lens, int batch, const int32_t* table,
            int64_t table_stride, int64_t columns);
  int batch() const { return step_.batch(); }

  // Appends the step's token and computes the resident attention of a layer, before anything is planned. If
  // the next call is begin() of the same layer and passes no k, it uses both. Writes parts: [B][Hq][kParts]
  // (kernels/feature_index.h). Bad requests get -inf and 0, and fail the layer in finish(). Throws as begin()
  // does.
  void residents(const AttentionLayer& at, const LayerInput& in, float* parts);
  // Appends the step's token to the host pool, for a plan that needs it there; the residents are on a device.
  // A begin() of the same layer that follows must not pass k again.
  void append(int layer, const TokenView& k, const TokenView& v);
  // Computes a whole sliding-window layer (AttentionLayer::newest), without plan, tasks and residents. Throws
  // as begin() and finish() do.
  void newest(const AttentionLayer& at, const LayerInput& in, const LayerOutput& to);
  // Returns the number of tasks. Throws std::invalid_argument if the residents are neither attended to nor in
  // a window; then nothing was begun.
  int begin(const AttentionLayer& at, const LayerInput& in, const LayerOutput& to,
            std::shared_ptr<const LayerPlan> plan);
  // Throws std::runtime_error with the layer's first failure; the engine is ready for the next layer either
  // way.
  void finish();
  // Plans every layer of the current step, for attend(). looks: the plan's kinds depend on the residents.
  void plan_step(std::shared_ptr<const LayerPlan> plan, bool looks) {
    step_plan_ = std::move(plan);
    step_looks_ = looks;
  }
  // Computes a whole layer: newest(); or begin() by the step's plan, after residents() if it looks, and
  // finish(). Throws as they do, and std::runtime_error if the step has no plan.
  void attend(const AttentionLayer& at, const LayerInput& in, const LayerOutput& to);
  // The last layer's output before rounding to the KV dtype, [B][Hq][D], and what each task read, [B][Hk] (0
  // without a task). Both throw std::runtime_error unless the layer finished without a failure and no step or
  // layer was begun since. result() also throws for a layer on a device.
  void result(float* out) const;
  const Reads* reads() const;
  // The exception of a request that read corrupt memory in the layer that was finished last, or nullptr. The
  // output of such a request is zero.
  const std::exception_ptr& corrupt(int request) const { return corrupt_[request]; }
  // Ends an open layer without a result: drops work that no worker has begun, and voids claims.
  void abandon();

  // Foreign executors. A claim is what pop() returned; TaskQueue::task_of(claim) is the index of the task.
  int64_t pop(Executor executor);
  int task(int64_t claim_or_index);  // b * Hk + h
  // Returns whether the claim still held; if not, drops the result. o: [G][D], lse: [G]; tokens: how many it
  // read, summed over the heads.
  bool deliver(int64_t claim, const float* o, const float* lse, int64_t tokens, const Reads& reads);
  bool fail(int64_t claim, const std::string& message);
  // What a task reads. pages: [max]; masks: [max][G]. Returns the number of pages written.
  int selection(int64_t claim_or_index, int32_t* pages, uint16_t* masks, int max);

  void stats(int64_t* out) const;  // [kStatCount], cumulative
  // [workers], cumulative over finished layers: the compute time of each worker, and the chunks that it did
  // for tasks of other workers. Only these counts depend on timing.
  void worker_counts(int64_t* ns, int64_t* helped_chunks) const;
  int last_tasks() const { return queue_.count(); }
  int owner(int i) const { return queue_.owner(i); }

  const HostPool& pool() const { return *pool_; }
  const EngineConfig& config() const { return config_; }
  int group() const { return layer_.group; }

 private:
  using Lanes = std::array<int, kLanes>;
  enum class State : uint8_t { kNone, kWritten, kHeld, kOpen, kDone };

  void reserve(int requests, int pages);
  void reserve_tasks(int ranked_tokens);
  void resize_scratch(int pages, int tokens);
  void check_finished() const;
  void check_layer(const AttentionLayer& at, const LayerInput& in) const;
  void open_input(const AttentionLayer& at, const LayerInput& in);
  void skip_bad_requests();
  void take_parts(const float* parts);
  bool open() const { return state_.load(std::memory_order_acquire) == State::kOpen; }
  bool launch(WorkerPool::Fn work, bool residents, void* ctx);
  template <class Body>
  void each_group(bool residents, const Body& body);
  void throw_failure();
  [[noreturn]] static void throw_busy();
  void record_failure(const std::string& sentence);
  void record_thrown();
  void clear_corrupt();
  void fail_task(const Task& task, const std::string& what);

  // make_tasks.cc
  Lanes make_tasks();
  const TaskKind* kind_of(const Task& task) const;
  bool make_task(const Task& task, int* lane, int* ranked_tokens);
  void sort_tasks(int count);

  // work.cc
  static void worker_main(void* self, int worker);
  void work(int worker);
  template <class Body>
  void attempt(const Task& task, const Bundle* with, const Body& body) noexcept;
  void help(int worker);
  void resident_item(const Task& task, Scratch* scratch);
  void run_task(const Task& task, Scratch* scratch);
  void task_done(const Task& task, const Selection& chosen, Scratch* scratch);
  void part_done(const Task& task);
  void lose(int request, const std::exception_ptr& corrupt);
  void merge(const Task& task);

  // end_layer.cc
  void end_layer(bool abandoned);
  void wait_or_revoke(bool wait);
  bool ends_coarse(int b) const;
  void seal_coarse();

  // foreign.cc
  int resolve(int64_t claim_or_index) const;

  std::shared_ptr<HostPool> pool_;
  EngineConfig config_;
  const PoolShape shape_;
  double timeout_s_;
  Step step_;
  Layer layer_;
  int ranked_tokens_ = 0;  // room of the scratch for scores; 0 until a layer asks for them

  std::shared_ptr<const LayerPlan> step_plan_;  // of every layer of the step, for attend()
  bool step_looks_ = false;
  std::vector<float> parts_;  // [B][Hq][kParts], which attend() has residents() write

  // This layer.
  std::atomic<State> state_{State::kNone};  // of layer_; any thread may ask whether it is open
  bool launched_ = false;                   // workers run its items and tasks
  bool held_ = false;                       // it began with the results of residents() in res_o_, res_lse_
  bool appended_ = false;                   // the step's token was written
  std::vector<uint8_t> skip_;               // [B]: a bad request
  std::vector<uint64_t> order_;
  std::vector<Task> tasks_;
  std::vector<const TaskKind*> kinds_;  // [B][H]: kind of each task; nullptr: blocks
  Bundles bundles_;
  std::vector<Reads> reads_;                              // [B][H]
  std::vector<float> res_o_, res_lse_, mid_o_, mid_lse_;  // [B][Hq][D], [B][Hq]
  std::unique_ptr<std::atomic<uint8_t>[]> waits_;         // [B][H]: results a group still waits for
  int items_ = 0;                                         // resident items: B * H, or 0
  int64_t task_bytes_ = 0;                                // upper estimate of what the tasks read
  alignas(64) std::atomic<int> next_item_{0};
  TaskQueue queue_;
  alignas(64) std::atomic<int> owners_{0};  // workers that have a task or may yet get one

  std::vector<Scratch> scratch_;  // one for each worker
  std::mutex failure_mutex_;
  std::string failure_;
  std::exception_ptr thrown_;  // first exception of a worker in this layer, and its task
  Task thrower_{};
  std::vector<std::exception_ptr> corrupt_;  // [B]: CorruptMemory

  std::mutex foreign_mutex_;    // guards claims of foreign executors and what they reach
  std::mutex selection_mutex_;  // guards selection_scratch_
  Scratch selection_scratch_;

  std::atomic<int64_t> totals_[kStatCount] = {};
  std::vector<std::atomic<int64_t>> worker_ns_, worker_helped_;
};

// ---- implementation

// An exception fails the layer, and the worker goes on, because others wait for what it has claimed. Corrupt
// memory ends the task's request, or all requests of its bundle. Allocates nothing, because memory may have
// run out.
template <class Body>
void Engine::attempt(const Task& task, const Bundle* with, const Body& body) noexcept {
  try {
    body();
  } catch (const CorruptMemory&) {
    if (with == nullptr) return lose(task.request, std::current_exception());
    for (int i = 0; i < with->count; ++i) lose(layer_.task(with->tasks[i]).request, std::current_exception());
  } catch (...) {
    totals_[kStatFailedTasks].fetch_add(1, std::memory_order_relaxed);
    const std::lock_guard lock(failure_mutex_);
    if (thrown_ != nullptr) return;
    thrown_ = std::current_exception();
    thrower_ = task;
  }
}

}  // namespace fluxion
