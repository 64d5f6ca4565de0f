// The C ABI: what host code does through the table of functions (device/device_api.h), for tests and
// measurements.
#include <algorithm>

#include "cuda/ffi_checks.h"

namespace fluxion::device {
namespace {

int64_t workspace(int64_t tasks, int64_t longest, int64_t group, int64_t head_dim) {
  return workspace_bytes(narrow(tasks, 0, INT32_MAX, "tasks"), narrow(longest, 0, INT32_MAX, "longest"),
                         narrow(group, 1, kMaxGroup, "group"), narrow(head_dim, 32, kMaxHeadDim, "head_dim"));
}

int64_t plan(int64_t tasks, int64_t entries, int64_t group, int64_t head_dim, int64_t element) {
  return plan_bytes(narrow(tasks, 0, INT32_MAX, "tasks"), narrow(entries, 0, INT32_MAX, "entries"),
                    narrow(group, 1, kMaxGroup, "group"), narrow(head_dim, 32, kMaxHeadDim, "head_dim"),
                    narrow(element, 2, 4, "element"));
}

void attend_tasks(int64_t stream, TensorView tasks, int64_t longest, TensorView entries, TensorView masks,
                  TensorView hot, int64_t group, int64_t head_dim, int64_t element, double scale,
                  TensorView o, TensorView lse, TensorView workspace_t, TensorView plan_t) {
  static_assert(sizeof(DeviceTask) == 24);
  DeviceBatch batch{};
  expect_pinned(tasks, "tasks", kBytes, {-1, 24}, 2);
  batch.tasks = reinterpret_cast<const DeviceTask*>(data<char>(tasks));
  batch.tasks_count = narrow(tasks.size(0), 0, INT32_MAX, "The number of tasks");
  batch.longest = narrow(longest, 0, INT32_MAX, "longest");
  batch.group = narrow(group, 1, kMaxGroup, "group");
  batch.head_dim = narrow(head_dim, 32, kMaxHeadDim, "head_dim");
  batch.element = narrow(element, 2, 4, "element");
  expect_pinned(entries, "entries", kInt32, {-1}, 1);
  batch.tiles = data<int32_t>(entries);
  batch.entries = narrow(entries.size(0), 0, INT32_MAX, "The number of entries");
  if (masks.numel() > 0) {
    expect_pinned(masks, "masks", kUInt16, {entries.size(0), group}, 2);
    batch.masks = data<uint16_t>(masks);
  }
  if (hot.numel() > 0) batch.hot = data<char>(hot);
  batch.scale = static_cast<float>(scale);
  expect_reachable(o, "o", kFloat32, {batch.tasks_count, group, head_dim}, 3);
  expect_reachable(lse, "lse", kFloat32, {batch.tasks_count, group}, 2);
  batch.o = data<float>(o);
  batch.lse = data<float>(lse);
  expect_device(workspace_t, "workspace", kBytes, {-1}, 1);
  narrow(workspace_t.numel(), workspace_bytes(batch.tasks_count, batch.longest, batch.group, batch.head_dim),
         INT64_MAX, "The size of workspace");
  batch.workspace = data<char>(workspace_t);
  if (plan_t.numel() > 0) {
    expect_pinned(plan_t, "plan", kInt32, {-1}, 1);
    const int64_t bytes =
        plan_bytes(batch.tasks_count, batch.entries, batch.group, batch.head_dim, batch.element);
    if (bytes == 0) Raise("ValueError") << "FlashInfer has no kernel for such groups; pass no plan.";
    narrow(4 * plan_t.numel(), bytes, INT64_MAX, "The size of plan");
    if (batch.masks != nullptr) Raise("ValueError") << "FlashInfer knows no masks; pass no plan.";
    const int64_t q_bytes = int64_t{batch.group} * batch.head_dim * batch.element;
    int64_t listed = 0;
    for (int t = 0; t < batch.tasks_count; ++t) {
      const DeviceTask& task = batch.tasks[t];
      if (static_cast<const char*>(task.q) != static_cast<const char*>(batch.tasks[0].q) + t * q_bytes)
        Raise("ValueError") << "FlashInfer reads the tasks' q one behind the other; they are not.";
      listed += task.count;
    }
    const bool hot_alone =
        std::all_of(batch.tiles, batch.tiles + batch.entries, [](int32_t x) { return x < 0; });
    if (listed > batch.entries || !hot_alone)
      Raise("ValueError") << "FlashInfer reads hot tiles alone, and every entry once; pass no plan.";
    batch.plan = data<int32_t>(plan_t);
  }
  guard([&] { attend(stream_of(stream), batch); });
}

void copy_tiles_of(int64_t stream, TensorView source, TensorView slots, int64_t tile_bytes, TensorView hot) {
  expect_pinned(source, "source", kInt64, {-1}, 1);
  expect_pinned(slots, "slots", kInt32, {source.size(0)}, 1);
  DeviceCopy copy{};
  copy.from = reinterpret_cast<const char* const*>(data<int64_t>(source));
  copy.to = data<int32_t>(slots);
  copy.count = narrow(source.size(0), 0, INT32_MAX, "The number of tiles");
  copy.tile_bytes = tile_bytes;
  copy.hot = data<char>(hot);
  guard([&] { copy_tiles(stream_of(stream), copy); });
}

void copy_in_order_of(int64_t stream, TensorView source, TensorView to) {
  expect_pinned(source, "source", kBytes, {-1}, 1);
  expect_device(to, "to", kBytes, {source.size(0)}, 1);
  expect_aligned(source, "source", 1, 0);
  expect_aligned(to, "to", 1, 0);
  if (source.size(0) % 16 != 0) Raise("ValueError") << "source has no multiple of 16 bytes.";
  guard([&] { copy_in_order(stream_of(stream), data<char>(source), data<char>(to), source.size(0)); });
}

void signal_of(int64_t stream, TensorView word, int64_t value) {
  expect_pinned(word, "word", kInt32, {-1}, 1);
  narrow(word.numel(), 1, INT32_MAX, "The size of word");
  guard([&] {
    signal(stream_of(stream), reinterpret_cast<uint32_t*>(data<int32_t>(word)), static_cast<uint32_t>(value));
  });
}

}  // namespace
}  // namespace fluxion::device

TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_bytes, fluxion::device::workspace);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_bytes, fluxion::device::plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend, fluxion::device::attend_tasks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_tiles, fluxion::device::copy_tiles_of);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_in_order, fluxion::device::copy_in_order_of);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(signal, fluxion::device::signal_of);
