// Attention of tasks to tiles in host memory, read in place, and in hot slots (DeviceApi::attend). Where all
// tiles are in device memory and nothing is masked, it is FlashInfer's.
#include <algorithm>

#include "cuda/attention.cuh"
#include "cuda/kernels.h"
#include "cuda/parts.cuh"

namespace fluxion::device {

namespace {

struct AttendArgs {
  const DeviceTask* tasks;
  const int32_t* tiles;
  const uint16_t* masks;
  const char* hot;
  int64_t tile_bytes;
  int group, head_dim, parts;
  float scale;
  float* o;
  float* lse;
  float* partial;      // [tasks][parts][G][D]
  float* partial_lse;  // [tasks][parts][G]
};

struct ListedTiles {
  const char* region;
  const char* hot;
  const int32_t* tiles;
  const uint16_t* masks;  // of the first of them, or nullptr
  int64_t tile_bytes;
  int group;

  __device__ const char* tile(int i) const {
    const int32_t at = tiles[i];
    return at >= 0 ? region + at * tile_bytes : hot + (-1 - int64_t{at}) * tile_bytes;
  }
  __device__ uint32_t mask(int i, int g) const {
    return masks == nullptr ? 0xffffu : masks[static_cast<int64_t>(i) * group + g];
  }
};

// Grid: tasks, parts.
template <class T, int kG>
__global__ void __launch_bounds__(kAttendThreads) attend_kernel(AttendArgs a) {
  const int task_number = blockIdx.x, part = blockIdx.y, G = a.group, D = a.head_dim;
  const DeviceTask task = a.tasks[task_number];
  const Split split = Split::of(task.count);
  if (part >= split.parts && part > 0) return;
  const int first = part * split.tiles, left = task.count - first;
  const int64_t entry = int64_t{task.first} + first;
  const ListedTiles tiles{task.tiles,      a.hot,
                          a.tiles + entry, a.masks == nullptr ? nullptr : a.masks + entry * G,
                          a.tile_bytes,    G};
  auto& s = shared<AttendShared<T, kG>>();
  const int64_t place = split.parts > 1 ? int64_t{task_number} * a.parts + part : task_number;
  float* o = (split.parts > 1 ? a.partial : a.o) + place * G * D;
  float* lse = (split.parts > 1 ? a.partial_lse : a.lse) + place * G;
  attend_list<T, kG>(s, static_cast<const T*>(task.q), G, D, a.scale, tiles,
                     left < split.tiles ? left : split.tiles, o, lse);
  if (split.parts <= 1 && threadIdx.x < static_cast<unsigned>(G)) lse[threadIdx.x] *= kLn2;
}

// Grid: tasks, heads.
__global__ void __launch_bounds__(kMergeThreads) merge_parts_kernel(AttendArgs a) {
  const int task_number = blockIdx.x, g = blockIdx.y, G = a.group, D = a.head_dim;
  const int parts = Split::of(a.tasks[task_number].count).parts;
  if (parts <= 1) return;
  const int64_t first = int64_t{task_number} * a.parts * G + g, to = int64_t{task_number} * G + g;
  merge_parts(a.partial + first * D, a.partial_lse + first, parts, G, D, a.o + to * D, a.lse + to);
}

template <class T>
void attend_of(cudaStream_t stream, const DeviceBatch& b, const AttendArgs& args) {
  const unsigned tasks = static_cast<unsigned>(b.tasks_count);
  const unsigned parts = static_cast<unsigned>(args.parts > 1 ? args.parts : 1);
  with_group<T>(b.group, [&](auto group) {
    constexpr int kG = group.value;
    launch("the launch of attend", attend_kernel<T, kG>, dim3(tasks, parts), dim3(kAttendThreads),
           sizeof(AttendShared<T, kG>), stream, args);
  });
  if (parts > 1) {
    launch("the launch of attend's merge", merge_parts_kernel, dim3(tasks, static_cast<unsigned>(b.group)),
           dim3(kMergeThreads), 0, stream, args);
  }
}

}  // namespace

int64_t workspace_bytes(int tasks, int longest, int group, int head_dim) {
  const int parts = Split::most(longest);
  const int64_t own = parts <= 1 ? 0 : int64_t{tasks} * parts * group * (head_dim + 1) * 4;
  return flash_serves(group, head_dim, 2) ? std::max(own, flash_workspace_bytes(tasks, group, head_dim))
                                          : own;
}

int64_t plan_bytes(int tasks, int entries, int group, int head_dim, int element) {
  return flash_serves(group, head_dim, element) ? flash_plan_bytes(tasks, entries) : 0;
}

void attend(cudaStream_t stream, const DeviceBatch& b) {
  if (b.tasks_count == 0) return;
  if (b.plan != nullptr) return attend_flash(stream, b);
  AttendArgs args{};
  args.tasks = b.tasks;
  args.tiles = b.tiles;
  args.masks = b.masks;
  args.hot = b.hot;
  args.tile_bytes = int64_t{2} * kPage * b.head_dim * b.element;
  args.group = b.group;
  args.head_dim = b.head_dim;
  args.parts = Split::most(b.longest);
  args.scale = b.scale;
  args.o = b.o;
  args.lse = b.lse;
  args.partial = reinterpret_cast<float*>(b.workspace);
  args.partial_lse = args.partial + int64_t{b.tasks_count} * args.parts * b.group * b.head_dim;
  if (b.element == 2) {
    attend_of<BF16>(stream, b, args);
  } else {
    attend_of<float>(stream, b, args);
  }
}

}  // namespace fluxion::device
