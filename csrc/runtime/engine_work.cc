// What the workers do in a layer: resident items, then tasks from the queue.
#include <algorithm>
#include <cstring>
#include <limits>

#include "runtime/engine.h"
#include "runtime/resident.h"

namespace fluxion {

const char* Engine::query(int request, int head) const {
  return args_.q + request * args_.q_stride + static_cast<int64_t>(head) * group_ * shape_.token_bytes();
}

int64_t Engine::state_at(int request, int head) const {
  return static_cast<int64_t>(request) * config_.q_heads + static_cast<int64_t>(head) * group_;
}

void Engine::worker_main(void* self, int worker) { static_cast<Engine*>(self)->work(worker); }

void Engine::work(int worker) {
  Scratch* scratch = &scratch_[worker];
  const int64_t start = now_ns();
  for (int i; (i = next_item_.fetch_add(1, std::memory_order_relaxed)) < items_;) resident_item(i, scratch);
  // Before the first pop: whoever finds the queue dry then knows of all who have a task.
  owners_.fetch_add(1, std::memory_order_relaxed);
  for (int64_t claim; (claim = queue_.pop(Executor::kCpu)) >= 0;) {
    run_task(TaskQueue::task_of(claim), scratch);
    queue_.finish(claim);
  }
  owners_.fetch_sub(1, std::memory_order_release);
  scratch->busy_ns += now_ns() - start;
  help(worker);
}

void Engine::parts_main(void* self_ptr, int worker) {
  Engine* self = static_cast<Engine*>(self_ptr);
  Scratch* scratch = &self->scratch_[worker];
  const int64_t start = now_ns();
  for (int i; (i = self->next_item_.fetch_add(1, std::memory_order_relaxed)) < self->items_;)
    self->parts_item(i, scratch);
  scratch->busy_ns += now_ns() - start;
}

void Engine::append_main(void* self_ptr, int) {
  Engine* self = static_cast<Engine*>(self_ptr);
  const int heads = self->shape_.kv_heads;
  for (int i; (i = self->next_item_.fetch_add(1, std::memory_order_relaxed)) < self->items_;)
    if (!self->skip_[i / heads]) self->append_token(i / heads, i % heads);
}

// This step's token of one request and KV head: to the host and to the window.
void Engine::append_token(int b, int h) {
  if (args_.k.data == nullptr) return;
  const Request& r = requests_[b];
  const int position = r.length - 1, logical = position / kPage, offset = position % kPage;
  const char *k = args_.k.at(b, h), *v = args_.v.at(b, h);
  pool_->write_token(args_.layer, h, pages_of(b)[logical], offset, k, v);
  if (offset == kPage - 1) pool_->seal_page(args_.layer, h, pages_of(b), logical);
  const WindowView& w = args_.window;
  if (w.data == nullptr) return;
  const int64_t bytes = shape_.token_bytes();
  char* to = w.data + h * w.head_stride + w.slot(r.row, logical) * shape_.tile_bytes() + offset * bytes;
  std::memcpy(to, k, bytes);
  std::memcpy(to + kPage * bytes, v, bytes);
}

// The window's pages that hold logical pages first..end-1; how many there are.
int Engine::resident_pages(int request, int first, int end, int32_t* pages) const {
  int count = 0;
  for (int p = first; p < end; ++p)
    pages[count++] = static_cast<int32_t>(args_.window.slot(requests_[request].row, p));
  return count;
}

// Appends the token of one request and KV head, then attends to the sinks and the window. Where
// layer_resident() did both, the item only takes its turn in the merge.
void Engine::resident_item(int item, Scratch* scratch) {
  const int b = item / shape_.kv_heads, h = item % shape_.kv_heads;
  if (skip_[b]) return;
  if (held_) return part_done(b, h);
  append_token(b, h);
  const WindowView& w = args_.window;
  if (w.data == nullptr) return;
  const Request& r = requests_[b];
  const int tokens = (r.length - 1) % kPage + 1, end = (r.length - 1) / kPage + 1;
  int32_t* pages = scratch->pages.data();
  int count = resident_pages(b, 0, std::min(end, w.sink_pages), pages);
  count += resident_pages(b, r.window_page, end, pages + count);
  const uint16_t* masks = nullptr;
  if (tokens != kPage) {
    std::fill_n(scratch->masks.data(), (count - 1) * group_, uint16_t{0xffff});
    std::fill_n(scratch->masks.data() + (count - 1) * group_, group_,
                static_cast<uint16_t>((1u << tokens) - 1));
    masks = scratch->masks.data();
  }
  const int64_t at = state_at(b, h);
  kernels_.attend(query(b, h), group_, shape_.head_dim, args_.scale, w.data + h * w.head_stride, pages, masks,
                  count, 0, &res_o_[at * shape_.head_dim], &res_lse_[at]);
  part_done(b, h);
}

// The same for layer_resident(), with sinks and window apart.
void Engine::parts_item(int item, Scratch* scratch) {
  const int b = item / shape_.kv_heads, h = item % shape_.kv_heads;
  const int64_t at = state_at(b, h);
  float* parts = parts_out_ + at * kParts;
  if (skip_[b]) {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    for (int g = 0; g < group_; ++g, parts += kParts) {
      std::fill_n(parts, kParts, 0.0f);
      parts[kPartLseSink] = parts[kPartLseLocal] = kNone;
    }
    return;
  }
  append_token(b, h);
  const WindowView& w = args_.window;
  const Request& r = requests_[b];
  const int tokens = (r.length - 1) % kPage + 1, end = (r.length - 1) / kPage + 1;
  const char* tiles = w.data + h * w.head_stride;
  int32_t* pages = scratch->pages.data();
  const int sinks = resident_pages(b, 0, std::min(end, w.sink_pages), pages);
  const int local = resident_pages(b, r.window_page, end, pages + sinks);
  resident_parts(kernels_, exact_, query(b, h), group_, shape_.head_dim, args_.scale,
                 {tiles, pages, sinks, local > 0 ? kPage : tokens}, {tiles, pages + sinks, local, tokens},
                 scratch->masks.data(), &res_o_[at * shape_.head_dim], &res_lse_[at], parts);
}

void Engine::run_task(int i, Scratch* scratch) {
  const Task& task = tasks_[i];
  const int group = task.request * shape_.kv_heads + task.head;
  if (const Bundle* bundle = bundle_of(group)) {
    if (bundled_[bundle->begin] == group) run_bundle(*bundle, scratch);
    return;
  }
  const int64_t at = state_at(task.request, task.head);
  float *o = &mid_o_[at * shape_.head_dim], *lse = &mid_lse_[at];
  if (progressive(group)) return finish_task(task, progress(task, scratch, o, lse), scratch);
  const Selection chosen = select(task, scratch);
  attend(task, chosen, scratch, o, lse);
  finish_task(task, chosen, scratch);
}

// After a task's selection was attended to. The scratch has its scores and choice.
void Engine::finish_task(const Task& task, Selection chosen, Scratch* scratch) {
  if (config_.guard > 0 && residents_known() && chosen.ranked != 0) read_more(task, &chosen, scratch);
  scratch->stats[kStatTasksCpu] += 1;
  scratch->stats[kStatTokensRead] += chosen.tokens;
  scratch->stats[kStatTileBytes] += chosen.reads.tile_bytes;
  scratch->stats[kStatMetadataBytes] += chosen.reads.metadata_bytes;
  scratch->stats[kStatMicrobatches] += chosen.microbatches;
  reads_[task.request * shape_.kv_heads + task.head] = chosen.reads;
  if (merges_itself()) part_done(task.request, task.head);
}

// The guard: after a task's selection was attended to, what it shows to be missing.
void Engine::read_more(const Task& task, Selection* chosen, Scratch* scratch) {
  const Selection more = widen(task, chosen->ranked, scratch);
  if (more.count == 0) return;
  alignas(64) float o[kMaxGroup * kMaxHeadDim];
  float lse[kMaxGroup];
  attend(task, more, scratch, o, lse);
  const int D = shape_.head_dim;
  const int64_t at = state_at(task.request, task.head);
  for (int g = 0; g < group_; ++g) {
    float* mid = &mid_o_[(at + g) * D];
    mid_lse_[at + g] = exact_.merge_state(mid, mid_lse_[at + g], o + g * D, lse[g], D, mid);
  }
  chosen->tokens += more.tokens;
  chosen->reads.tile_bytes += more.reads.tile_bytes;
  scratch->stats[kStatWidenedTasks] += 1;
}

// The later of a group's resident item and task merges the two.
void Engine::part_done(int request, int head) {
  std::atomic<uint8_t>& parts = parts_[request * shape_.kv_heads + head];
  if (parts.fetch_sub(1, std::memory_order_acq_rel) == 1) merge(request, head);
}

// Into the middle's state of a group, whose task is done.
void Engine::take_given(int request, int head) {
  if (args_.given_lse == nullptr) return;
  const int64_t at = state_at(request, head), D = shape_.head_dim;
  for (int64_t i = at; i < at + group_; ++i) {
    float* mid = &mid_o_[i * D];
    mid_lse_[i] =
        exact_.merge_state(mid, mid_lse_[i], args_.given_o + i * D, args_.given_lse[i], shape_.head_dim, mid);
  }
}

void Engine::merge(int request, int head) {
  take_given(request, head);
  const int64_t at = state_at(request, head), D = shape_.head_dim;
  char* out =
      args_.out + request * args_.out_stride + static_cast<int64_t>(head) * group_ * shape_.token_bytes();
  for (int g = 0; g < group_; ++g) {
    kernels_.merge_state(&res_o_[(at + g) * D], res_lse_[at + g], &mid_o_[(at + g) * D], mid_lse_[at + g],
                         shape_.head_dim, out + g * shape_.token_bytes());
  }
}

}  // namespace fluxion
