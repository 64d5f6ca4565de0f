// One decode step, layer by layer: resident attention, the task queue, the merge.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/block_scores.h"
#include "runtime/pool.h"
#include "runtime/sharing.h"
#include "runtime/stage.h"
#include "runtime/task_queue.h"
#include "runtime/worker_pool.h"

namespace fluxion {

// A stage of a task (its scan, its attention) reads this much at a time, and idle workers help with the rest:
// 20 to 40 us on one core, a hundred times what it costs to claim a chunk and to merge its result.
inline constexpr int64_t kChunkBytes = 512 << 10;
inline constexpr int kMaxChunks = 64;  // of a stage: bounds the partial results
// From this many chunks on, a layer wakes workers that sleep: before, the others would be done by the time
// they came.
inline constexpr int kWakeChunks = 3;

struct EngineConfig {
  int q_heads;
  int sinks;         // tokens, a multiple of 16; equal to the pool's sink_pages * 16
  int window;        // tokens, a multiple of 16
  int max_requests;  // capacities to start with: step() grows them
  int max_pages;     // of the longest request
  bool attend_union;
  double guard = 0;  // share of a head's attention that may be left out before it reads more; 0: no guard
  int64_t chunk_bytes = kChunkBytes;  // what a stage of a task reads at a time
  bool share_prefixes = false;        // see Bundle
  int64_t cached_bytes = 0;           // of tiles that the last cache keeps from one request to the next
};

// The blk of a task that reads a list of tokens.
inline constexpr int kListed = -1;

// Tokens that tasks of blk kListed read (engine_listed.cc): group b * Hk + h has the pages
// [offsets[b * Hk + h], offsets[b * Hk + h + 1]).
struct ListedTokens {
  const int64_t* offsets = nullptr;  // [B * Hk + 1]; nullptr: no task has a list
  const int32_t* pages = nullptr;    // [count]: logical pages of the request, ascending, in its middle
  const uint16_t* masks = nullptr;   // [count][G]: bit t = the head has token t of the page
  int64_t count = 0;
  // What the tasks chose of the lists, written by the CPU's tasks by the time layer_finish() returns;
  // nullptr: nobody asks. With it every head with a part of the middle is scored, also where it leaves
  // nothing out.
  uint16_t* chosen = nullptr;  // [count][G]: tokens attended to
  float* scores = nullptr;     // [count][G][16]: q.k of what such heads list
};

// What layer_begin() reads and writes; everything pointed to, except blk, budget, value, owner, stop, spread
// and parts, must live until layer_finish() returns. B requests of the current step; absent parts have data
// == nullptr.
struct LayerArgs {
  int layer;
  const char* q;       // [B][Hq][D] KV dtype, the last two contiguous
  int64_t q_stride;    // bytes
  TokenView k, v;      // [B][Hk][D]: the token at position n-1 of each request; absent: it is written already
  WindowView window;   // absent: set_resident() gives the resident results
  const int32_t* blk;  // [B][Hk]: 0 (no task), 1 (single tokens), 16, 32, 64, 128, kListed
  ListedTokens listed;
  const float* budget;   // [B][Hq]: fraction of the middle a head reads
  const float* value;    // [B][Hk]: priority, largest first
  const int32_t* owner;  // [B][Hk]: the Executor that alone may take the task, or kAny; nullptr: kAny for all
  float scale;           // multiplies q.k
  // Attention to the middle, or to a part of it, that needs no task and is merged into what the tasks find;
  // o is read where lse is not -inf. nullptr: of no head.
  const float* given_o;    // [B][Hq][D]
  const float* given_lse;  // [B][Hq]
  // [B][Hk]: in (0, 1) the group's heads read until each has this share of its attention, by PSA's estimate
  // (engine_progressive.cc), and at most their budgets; 0 and 1: they read their budgets. nullptr: 0 for all.
  // Early exit needs layer_resident(), or parts.
  const float* stop;
  const float* spread;  // [B][Hk]: KernelTable::score's, of the groups that stop early; nullptr: 1 for all
  char* out;            // [B][Hq][D] KV dtype, the last two contiguous
  int64_t out_stride;   // bytes
  // Instead of a window and of `out`, where the residents are a device's: the middle's result, unmerged. o is
  // written where lse is not -inf. k and v go to the host alone.
  float* mid_o = nullptr;    // [B][Hq][D]
  float* mid_lse = nullptr;  // [B][Hq], natural log
  // What the device found of the residents (ResidentArgs::parts), for early exit and the guard. nullptr: it
  // is not known.
  const float* parts = nullptr;

  bool on_device() const { return mid_lse != nullptr; }
};

// What layer_resident() reads and writes, by the time it returns. The same as in LayerArgs, but for parts.
struct ResidentArgs {
  int layer;
  const char* q;
  int64_t q_stride;
  TokenView k, v;     // absent: the token is written already
  WindowView window;  // present
  float scale;
  float* parts;  // [B][Hq][kParts] (kernels/feature_index.h)
};

enum Stat {
  kStatLayers,
  kStatTasks,
  kStatTasksCpu,  // these three in the order of Executor
  kStatTasksTorch,
  kStatTasksGpu,
  kStatFailedTasks,
  kStatWidenedTasks,  // that the guard made read more
  kStatMiddleTokens,  // summed over the query heads of every layer, streaming ones included
  kStatTokensRead,    // summed over heads: what they attended to in the middle
  kStatTileBytes,     // see Reads; what a bundle reads together counts once
  kStatMetadataBytes,
  kStatSharedTasks,          // that were done in bundles
  kStatSharedTileBytes,      // that a bundle's tasks had in common: tile_bytes had been so much more without
  kStatSharedMetadataBytes,  // the same of metadata_bytes
  kStatMicrobatches,         // of tasks that stop early
  kStatCount
};
extern const char* const kStatNames;  // comma separated, in the order of Stat

// Bytes that a task read of the middle. Of blocks the whole tiles, of single tokens (blk 1) the rows of K and
// V attended to, each once a group; the keys that single tokens were chosen by are not counted. Of listed
// tokens the same rows, and the keys that were ranked. What the guard adds is read by itself, and counts once
// more where another head of the group has read it; so does what heads that stop early read in different
// microbatches. What the tasks of a bundle read together counts for each of them.
struct Reads {
  int64_t tile_bytes = 0;
  int64_t metadata_bytes = 0;
};

// What one task reads: scratch.pages[0..count) and, when masked, scratch.masks[count][G].
struct Selection {
  int count = 0;
  bool masked = false;
  bool near = false;    // a cache has most of it
  uint16_t ranked = 0;  // heads whose blocks were chosen by their scores, which are in the scratch
  int64_t tokens = 0;   // summed over heads
  int microbatches = 0;
  Reads reads;
};

// What the open layer has for a device, by the sizes of the plan: what the tasks will read, about.
struct DeviceLoad {
  int own = 0;                                 // tasks for the device alone
  int tasks = 0;                               // tasks that it may take
  int64_t tile_bytes = 0, metadata_bytes = 0;  // of these
  int64_t cpu_bytes = 0;                       // tiles and metadata of the CPU's own tasks
  int longest = 0;                             // most pages that a task of the first two may read

  int64_t bytes() const { return tile_bytes + metadata_bytes + cpu_bytes; }
};

// A task as a device needs it, beside its query and what it reads.
struct ForeignTask {
  int layer, head;
  float scale;
  Selection chosen;
};

// Blocks a head reads of a middle of `tokens` tokens in `blocks` blocks: ceil(budget * tokens / blk), at
// least one, at most all. A millionth is forgiven, so that a budget which float32 rounds up
// (0.05) buys none too many.
int blocks_of_budget(float budget, int tokens, int blk, int blocks);

// Threads: step, layer_resident, layer_begin, set_resident and layer_finish belong to one thread at a time.
// The foreign functions may be called from any thread at any time.
//
// Who does what. A worker takes the residents of a group or a task, and has it until it is done: the task's
// scan, selection, attention and merge use its scratch. Scan and attention are stages of chunks (Stage): a
// worker that finds the queue dry helps with those of the others. What a chunk is depends on the task's sizes
// alone, and the owner merges the chunks in their order, so neither the number of workers nor their timing
// changes a bit of the result.
//
// Phases of a layer. Between begin and finish each page that fills gets its own metadata and moments
// (seal_page) from the item that appends to it: nobody reads that page, because it is in no request's middle
// yet. Coarse entries and tags are direct-mapped, so the entry of a block that completes now may be the one
// another request's task reads; therefore they are read-only until the last task is done, and layer_finish
// writes them (seal_blocks) then.
class Engine {
 public:
  // Throws std::invalid_argument for a geometry that does not fit the pool. FLUXION_TASK_TIMEOUT_S (default
  // 60): how long layer_finish waits for foreign executors.
  Engine(std::shared_ptr<HostPool> pool, const EngineConfig& config);
  ~Engine();

  // rows, seq_lens: [batch]; table: [batch][columns] with a row stride in elements. Copies them. A request
  // with a bad length or page id fails every layer of the step; the other requests are computed.
  void step(const int32_t* rows, const int32_t* seq_lens, int batch, const int32_t* table,
            int64_t table_stride, int64_t columns);
  int batch() const { return batch_; }

  // Appends the step's token and computes the resident attention of a layer, before anything is planned. The
  // layer_begin that comes next uses both if it is of the same layer and brings neither k nor a window, and
  // otherwise drops the attention; so do step() and abandon(). Bad requests are left out, with parts of
  // nothing (-inf and 0), and fail the layer in layer_finish(). Throws as layer_begin() does, and abandons an
  // open layer as it does.
  void layer_resident(const ResidentArgs& args);
  // Appends the step's token to the host alone, for a plan that needs it there. The layer_begin that comes
  // next, of the same layer and on a device, brings neither k nor v.
  void layer_append(int layer, const TokenView& k, const TokenView& v);
  // Returns the number of tasks. A layer that was begun and not finished is abandoned first.
  int layer_begin(const LayerArgs& args);
  // o: [B][Hq][D], lse: [B][Hq], both contiguous. Copies them.
  void set_resident(const float* o, const float* lse);
  // Throws std::runtime_error with the layer's first failure; the engine is ready for the next layer either
  // way.
  void layer_finish();
  // Of the last layer: its output before it was rounded to the KV dtype, [B][Hq][D], and what each task read,
  // [B][Hk] (0 where there was none). They throw std::runtime_error unless the layer was finished without a
  // failure, and no step or layer was begun since; result() also for a layer on a device.
  void result(float* out) const;
  const Reads* reads() const;
  // Ends an open layer without its result: what no worker has begun is not done, claims no longer hold.
  void abandon();

  // Foreign executors. A claim is what pop() returned; TaskQueue::task_of(claim) is the index of the task.
  int64_t pop(Executor executor);
  int task(int64_t claim_or_index);  // b * Hk + h
  // Whether the claim still held; the result is dropped when it did not. o: [G][D], lse: [G]; tokens: how
  // many it read, summed over the heads.
  bool deliver(int64_t claim, const float* o, const float* lse, int64_t tokens, const Reads& reads);
  bool fail(int64_t claim, const std::string& message);
  // What a task reads before the guard. pages: [max]; masks: [max][G]. Returns how many pages were written.
  int selection(int64_t claim_or_index, int32_t* pages, uint16_t* masks, int max);

  // For a dispatcher, which serves Executor::kGpu from a thread of its own. While one is there, tasks that a
  // device would do badly go to the CPU's lane: lists and single tokens, whose ranking reads keys, and tasks
  // that stop early. least: bytes of all tasks from which on a layer is worth its while. Between two layers.
  void attach_device(int64_t least) { device_least_.store(least, std::memory_order_relaxed); }
  void detach_device() { device_least_.store(-1, std::memory_order_relaxed); }
  // Changes whenever a layer opens that is worth its while, or has tasks for the device alone; with wake(),
  // too.
  uint32_t opened() const { return opened_.load(std::memory_order_acquire); }
  // Until opened() is not `seen`: sleeps.
  void wait_opened(uint32_t seen) const { opened_.wait(seen, std::memory_order_acquire); }
  void wake();
  DeviceLoad device_load();
  // As pop(), but with own_lane only what is for this executor alone.
  int64_t pop(Executor executor, bool own_lane);
  // As selection(), with all it takes to compute the task. q: [G][D] KV dtype, a copy, because the step's
  // queries are somebody else's once the layer ends. The CPU's workers take none of the locks here.
  ForeignTask foreign_task(int64_t claim, int32_t* pages, uint16_t* masks, int max, char* q);
  double timeout_s() const { return timeout_s_; }

  void stats(int64_t* out) const;  // [kStatCount], cumulative
  // [workers], cumulative, of finished layers: the time that each worker has computed, and the chunks it did
  // of tasks of others. These alone depend on timing.
  void worker_counts(int64_t* ns, int64_t* helped_chunks) const;
  int last_tasks() const { return queue_.count(); }
  int owner(int i) const { return queue_.owner(i); }

  const HostPool& pool() const { return *pool_; }
  const std::shared_ptr<HostPool>& shared_pool() const { return pool_; }
  const EngineConfig& config() const { return config_; }
  int group() const { return group_; }

 private:
  struct Request {
    int row;
    int length;
    int window_page;  // first logical page of the window
    bool good;
  };
  struct Task {
    int32_t request;
    int32_t head;
  };
  // Heads of a group that read something, that read everything, and that choose by scores; how many blocks
  // each wants.
  struct Wanted {
    uint16_t active = 0;
    uint16_t whole = 0;
    uint16_t ranked = 0;
    int count[kMaxGroup];
  };
  // Tasks of one family (Families), of one KV head and block size, that only the CPU may take: whoever takes
  // the first of them from the queue does them all, and the turns of the others are empty. Of the blocks
  // before end_page, which all of them have, an entry is read once for all heads, and so is a tile, or it is
  // left to the last cache (`attends_together`). What a head chooses and attends to is what it would alone.
  struct Bundle {
    int begin, count;  // of bundled_
    int end_page;      // a block's end
    float value;       // the sum of its tasks'
  };
  struct Member {
    Task task;
    Blocks at;
    Wanted wanted;
    Selection chose;  // its reads as if it were alone
  };
  // Scratch of the bundle at hand, grown when a step has families.
  struct Together {
    std::vector<Member> members;
    int64_t stride;                // blocks of the longest member
    std::vector<char> queries;     // [heads][D] KV dtype
    std::vector<float> scores;     // [heads][stride]
    std::vector<uint16_t> chosen;  // [members][stride]: heads of the member's group
    std::vector<int32_t> pages;    // of the shared blocks
    std::vector<uint16_t> masks;   // [pages][heads]
    std::vector<float> o, lse;     // [heads][D], [heads]
  };
  // Scratch of a task that stops early.
  struct Progress {
    std::vector<int32_t> order;                    // [G][max_pages + 1]: blocks by score, as far as known
    std::vector<uint16_t> ranked, placed, picked;  // [max_pages]: heads that have a block in their order, as
                                                   // of the next and of the last extension; that read it now
    std::vector<float> page_lse;                   // [max_pages][G], of the microbatch
    void resize(int pages, int group);
  };
  struct Scratch {
    Stage<Scratch> stage;          // of the task that this worker has
    std::vector<float> scores;     // [G][units]: of blocks, or of tokens
    std::vector<uint16_t> chosen;  // [units]: heads that chose a block or token
    std::vector<uint16_t> added;   // [max_pages]: heads that read a block because of the guard; only with one
    std::vector<int32_t> blocks;   // [max_pages]: blocks that some head reads
    std::vector<int32_t> pages;    // [max_pages]
    std::vector<int32_t> tokens;   // [max_tokens]: of the pool's tiles
    std::vector<uint16_t> masks;   // [max_pages][G]
    std::vector<float> select;
    std::vector<float> part_o;    // [kMaxChunks - 1][heads][D]: attention of a stage's chunks but the first
    std::vector<float> part_lse;  // [kMaxChunks - 1][heads]
    BlockScorer scorer;
    Together together;
    Progress progress;
    int64_t stats[kStatCount] = {};
    int64_t busy_ns = 0, helped_chunks = 0;
  };

  void reserve(int requests, int pages);
  void reserve_tokens(int tokens);
  void reserve_progress();
  void resize(Scratch* scratch, int pages, int tokens) const;
  void check_finished() const;
  const int32_t* pages_of(int request) const {
    return table_.data() + static_cast<int64_t>(request) * max_pages_;
  }
  int sink_pages() const { return config_.sinks / kPage; }
  const char* query(int request, int head) const;
  int64_t state_at(int request,
                   int head) const;  // first of the group's states in res_lse_, mid_lse_; * D in the o's

  void find_families(int batch);
  bool launch(WorkerPool::Fn work);
  void check_requests(const LayerArgs& args);
  void take_parts(const float* parts);
  void check_rows(const WindowView& window, const TokenView& k) const;
  // Whether the layer's parts are merged as they come, and not with what set_resident() brings.
  bool merges_itself() const { return held_ || args_.window.data != nullptr; }
  // Whether the residents' LSE is in res_lse_ before the tasks begin.
  bool residents_known() const { return held_ || args_.parts != nullptr; }
  std::array<int, kLanes> make_tasks();
  void add_load(int lane, int pages, int64_t tile_bytes, int64_t metadata_bytes);
  void make_bundles();
  bool joins(int i, int blk) const;
  // Whose turn in the queue task b * Hk + h does the work; nullptr: its own.
  const Bundle* bundle_of(int i) const {
    return bundles_.empty() || bundle_of_[i] < 0 ? nullptr : &bundles_[bundle_of_[i]];
  }
  float value_of(int i) const {
    const Bundle* bundle = bundle_of(i);
    return bundle != nullptr && bundled_[bundle->begin] == i ? bundle->value : args_.value[i];
  }
  static void worker_main(void* self, int worker);
  void work(int worker);
  static void parts_main(void* self, int worker);
  static void append_main(void* self, int worker);
  void help(int worker);
  int chunks_of(int64_t bytes, int units) const;
  void resident_item(int item, Scratch* scratch);
  void parts_item(int item, Scratch* scratch);
  void append_token(int request, int head);
  int resident_pages(int request, int first, int end, int32_t* pages) const;
  void run_task(int i, Scratch* scratch);
  void finish_task(const Task& task, Selection chosen, Scratch* scratch);
  void run_bundle(const Bundle& bundle, Scratch* scratch);
  void gather_members(const Bundle& bundle, Scratch* scratch) const;
  int64_t select_together(const Bundle& bundle, Scratch* scratch) const;
  struct SharedTiles {
    int64_t once = 0;   // every one that a member chose
    int64_t apart = 0;  // those of every member
  };
  SharedTiles shared_tiles(const Bundle& bundle, const Scratch* scratch) const;
  bool attends_together(const Bundle& bundle, const SharedTiles& tiles) const;
  Selection list_shared(const Bundle& bundle, Scratch* scratch) const;
  void finish_member(const Bundle& bundle, int m, bool together, bool near, Scratch* scratch);
  Blocks blocks_of(const Task& task) const;
  int blk_of(const Task& task) const { return blk_[task.request * shape_.kv_heads + task.head]; }
  void attend(const Task& task, const Selection& selection, Scratch* scratch, float* o, float* lse) const;
  void attend(const char* q, int heads, int kv_head, const Selection& selection, const int32_t* pages,
              const uint16_t* masks, Scratch* scratch, float* o, float* lse, float* page_lse = nullptr) const;
  int64_t score_blocks(const Task& task, const Blocks& at, const char* q, int heads, float spread,
                       float* scores, int64_t stride, Scratch* scratch) const;
  void score_tokens(const Task& task, const int32_t* pages, int count, Scratch* scratch) const;
  Selection select(const Task& task, Scratch* scratch) const;
  Selection select_tokens(const Task& task, Scratch* scratch) const;
  std::string check_list(int i) const;
  int listed_pages(int i) const;
  Selection select_listed(const Task& task, Scratch* scratch) const;
  void score_rows(const Task& task, int count, Scratch* scratch) const;
  int rank_listed(const Task& task, const uint16_t* listed, const Wanted& wanted, Scratch* scratch) const;
  bool progressive(int group) const { return stop_[group] > 0 && stop_[group] < 1; }
  bool check_progressive(int group);
  Selection progress(const Task& task, Scratch* scratch, float* o, float* lse) const;
  void extend_order(const float* scores, int blocks, int head, int sorted, int want, int32_t* order,
                    Scratch* scratch) const;
  void attend_microbatch(const Task& task, const Blocks& at, int count, Scratch* scratch, float* o,
                         float* lse, Selection* out) const;
  void read_more(const Task& task, Selection* chosen, Scratch* scratch);
  Selection widen(const Task& task, uint16_t ranked, Scratch* scratch) const;
  void choose(const Wanted& wanted, const float* scores, int64_t stride, int blocks, uint16_t* chosen,
              Scratch* scratch) const;
  void list_pages(const Blocks& at, const int32_t* pages, const uint16_t* chosen, Scratch* scratch,
                  Selection* out) const;
  Wanted wanted_of(const Task& task, int tokens, int blk, int blocks) const;
  Wanted wanted_of(const Task& task, const Blocks& at) const;
  void part_done(int request, int head);
  void take_given(int request, int head);
  void merge(int request, int head);

  void drain(bool abandoned);
  void wait_or_revoke(bool wait);
  bool ends_coarse(int b) const;
  void seal_coarse();
  void record_failure(const std::string& sentence);
  int resolve(int64_t claim_or_index) const;
  Selection select_foreign(int task, int32_t* pages, uint16_t* masks, int max);

  std::shared_ptr<HostPool> pool_;
  EngineConfig config_;
  const PoolShape shape_;
  const KernelTable& kernels_;
  const KernelTable& exact_;  // the same ISA's of float32
  int group_;
  double timeout_s_;

  // This step.
  int batch_ = 0;
  int max_requests_ = 0, max_pages_ = 0;
  bool progress_ = false;  // there is room for tasks that stop early
  int max_tokens_ = 0;     // room for the scores of single tokens; 0 until a layer asks for them
  std::vector<Request> requests_;
  std::vector<int32_t> table_;  // [max_requests][max_pages]
  std::vector<int32_t> sorted_rows_;
  bool rows_differ_ = true;
  int64_t resident_pages_ = 0;  // of all requests
  std::string step_failure_;
  Families families_;
  std::vector<int32_t> middle_ends_;  // [B]: logical page; of a bad request 0

  // This layer.
  std::atomic<bool> open_{false};
  bool launched_ = false;
  bool resident_given_ = false;
  int held_layer_ = -1;     // whose resident attention layer_resident() left in res_o_, res_lse_
  int written_layer_ = -1;  // whose token layer_append() wrote
  bool held_ = false;       // this layer began with it
  bool appended_ = false;   // this layer wrote the step's token
  float* parts_out_ = nullptr;
  bool finished_ = false;  // the last layer, without a failure
  LayerArgs args_{};
  std::vector<uint8_t> skip_;  // [B]: a bad request
  std::vector<int32_t> blk_;
  std::vector<float> budget_;
  std::vector<float> stop_, spread_;
  std::vector<uint64_t> order_;
  std::vector<Task> tasks_;
  std::vector<Bundle> bundles_;
  std::vector<int32_t> bundled_;    // b * Hk + h of their tasks
  std::vector<int32_t> bundle_of_;  // [B][Hk]: or -1; meaningless while there are no bundles
  std::vector<Reads> reads_;        // [B][Hk]
  std::vector<float> res_o_, res_lse_, own_mid_o_, own_mid_lse_;  // [B][Hq][D], [B][Hq]
  float *mid_o_ = nullptr, *mid_lse_ = nullptr;                   // own_mid_*, or a device's
  std::unique_ptr<std::atomic<uint8_t>[]> parts_;                 // [B][Hk]: results a group still waits for
  int items_ = 0;                                                 // resident items: B * Hk, or 0
  int64_t task_bytes_ = 0;                                        // that the tasks read, at most about
  alignas(64) std::atomic<int> next_item_{0};
  TaskQueue queue_;
  DeviceLoad load_;
  alignas(64) std::atomic<int> owners_{0};  // workers that have a task or may yet get one

  std::vector<Scratch> scratch_;  // one a worker
  std::mutex failure_mutex_;
  std::string failure_;

  std::mutex foreign_mutex_;    // claims of foreign executors; everything they reach
  std::mutex selection_mutex_;  // selection_scratch_
  Scratch selection_scratch_;
  std::atomic<int64_t> device_least_{-1};
  alignas(64) std::atomic<uint32_t> opened_{0};

  std::atomic<int64_t> totals_[kStatCount] = {};
  std::vector<std::atomic<int64_t>> worker_ns_, worker_helped_;
};

}  // namespace fluxion
