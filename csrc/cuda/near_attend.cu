// Attention to the chosen tiles that have copies: near_attend.
#include "cuda/attention.cuh"
#include "cuda/near.h"
#include "cuda/parts.cuh"

namespace fluxion::device {

namespace {

struct AttendArgs {
  NearView near;
  int64_t tile_bytes;
  int group, head_dim, parts;
  float scale;
  float* partial;      // [groups][parts][G][D]
  float* partial_lse;  // [groups][parts][G]
};

// The tiles that one block of threads attends to.
struct NearTiles {
  const char* copies;
  const int32_t* slots;
  const uint16_t* masks;  // nullptr: every head reads every tile
  int64_t tile_bytes;
  int group;

  __device__ const char* tile(int i) const { return copies + slots[i] * tile_bytes; }
  __device__ uint32_t mask(int i, int g) const {
    return masks == nullptr ? 0xffffu : masks[static_cast<int64_t>(i) * group + g];
  }
};

// Grid: groups, parts.
template <class T, int kG>
__global__ void __launch_bounds__(kAttendThreads) attend_kernel(AttendArgs a) {
  const int task_number = blockIdx.x, part = blockIdx.y, G = a.group, D = a.head_dim;
  const NearTask task = a.near.tasks[task_number];
  const Split split = Split::of(task.count);
  if (part >= split.parts && part > 0) return;
  const int first = part * split.tiles, left = task.count - first;
  const int64_t entry = int64_t{task_number} * a.near.shape.max_pages + first;
  const NearTiles tiles{a.near.tiles, a.near.near_slots + entry,
                        a.near.shape.together ? nullptr : a.near.masks + entry * G, a.tile_bytes, G};
  auto& s = shared<AttendShared<T, kG>>();
  const int64_t place = split.parts > 1 ? int64_t{task_number} * a.parts + part : task_number;
  float* o = (split.parts > 1 ? a.partial : a.near.o) + place * G * D;
  float* lse = (split.parts > 1 ? a.partial_lse : a.near.lse) + place * G;
  attend_list<T, kG>(s, static_cast<const T*>(task.q), G, D, a.scale, tiles,
                     left < split.tiles ? left : split.tiles, o, lse);
  if (split.parts <= 1 && threadIdx.x < static_cast<unsigned>(G)) lse[threadIdx.x] *= kLn2;
}

// Grid: groups, heads.
__global__ void __launch_bounds__(kMergeThreads) merge_parts_kernel(AttendArgs a) {
  const int task_number = blockIdx.x, g = blockIdx.y, G = a.group, D = a.head_dim;
  const int parts = Split::of(a.near.tasks[task_number].count).parts;
  if (parts <= 1) return;
  const int64_t first = int64_t{task_number} * a.parts * G + g, to = int64_t{task_number} * G + g;
  merge_parts(a.partial + first * D, a.partial_lse + first, parts, G, D, a.near.o + to * D, a.near.lse + to);
}

template <class T>
void attend_of(cudaStream_t stream, unsigned groups, const AttendArgs& args) {
  const unsigned parts = static_cast<unsigned>(args.parts > 1 ? args.parts : 1);
  with_group<T>(args.group, [&](auto group) {
    constexpr int kG = group.value;
    launch("the launch of near_attend", attend_kernel<T, kG>, dim3(groups, parts), dim3(kAttendThreads),
           sizeof(AttendShared<T, kG>), stream, args);
  });
  if (parts > 1) {
    launch("the launch of near_attend's merge", merge_parts_kernel,
           dim3(groups, static_cast<unsigned>(args.group)), dim3(kMergeThreads), 0, stream, args);
  }
}

}  // namespace

int64_t near_workspace_bytes(int groups, int max_pages, int group, int head_dim) {
  const int parts = Split::most(max_pages);
  return parts <= 1 ? 0 : int64_t{groups} * parts * group * (head_dim + 1) * 4;
}

void near_attend(const Near& near, const Port& port, cudaStream_t stream, int rows, float scale, float* o,
                 float* lse) {
  if (rows == 0) return;
  const NearView& v = near.view();
  const MailboxShape& s = port.view().shape;
  const int groups = rows * s.kv_heads;
  AttendArgs args{};
  args.near = v;
  args.tile_bytes = int64_t{2} * kPage * s.head_dim * s.element;
  args.group = s.q_heads / s.kv_heads;
  args.head_dim = s.head_dim;
  args.parts = Split::most(v.shape.max_pages);
  args.scale = scale;
  args.partial = reinterpret_cast<float*>(v.workspace);
  args.partial_lse = args.partial + int64_t{groups} * args.parts * args.group * args.head_dim;
  if (s.element == 2) {
    attend_of<BF16>(stream, static_cast<unsigned>(groups), args);
  } else {
    attend_of<float>(stream, static_cast<unsigned>(groups), args);
  }
  const auto of = [](const float* o, const float* lse) {
    return Result{reinterpret_cast<const char*>(o), lse, 4, false};
  };
  merge(stream, int64_t{rows} * s.q_heads, s.head_dim, of(o, lse), of(v.o, v.lse), reinterpret_cast<char*>(o),
        4, lse);
}

}  // namespace fluxion::device
