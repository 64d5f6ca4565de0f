// FlashInfer's paged decode for batches whose tiles are all in device memory, hot or gathered.
//
// A task is one of FlashInfer's requests, with one KV head. A tile is one of its pages: 16 tokens' keys, then
// their values. FlashInfer's planner cuts the tasks' lists into parts, as many as the device runs at once: so
// a task's last bits depend on its batch. Parts are float32, and merge_parts makes one of them, with the
// natural LSE that hosts want: FlashInfer's merging of parts does not compile for float32.
#include <algorithm>
#include <tuple>
#include <vector>

#include "cuda/device.cuh"
#include "cuda/kernels.h"
#include "cuda/parts.cuh"

#if defined(FLUXION_SIMULATED)
#include "emulate/flashinfer.h"
#elif defined(FLUXION_FLASHINFER)
#include <flashinfer/attention/decode.cuh>
#include <flashinfer/attention/default_decode_params.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/attention/variants.cuh>
#endif

namespace fluxion::device {

#if defined(FLUXION_SIMULATED) || defined(FLUXION_FLASHINFER)

namespace {

using Params = ::flashinfer::BatchDecodeParams<nv_bfloat16, nv_bfloat16, float, int32_t>;
using Variant = ::flashinfer::DefaultAttention</*use_custom_mask=*/false, /*use_sliding_window=*/false,
                                               /*use_logits_soft_cap=*/false, /*use_alibi=*/false>;

// Parts of a batch; where it has more tasks, one of each. An H200 runs about as many blocks at once.
constexpr int kMostParts = 1024;
constexpr uint32_t kLeastPages = 128 / kPage;  // of a part, as in FlashInfer's planner

// A launch of FlashInfer's kernel, as BatchDecodeWithPagedKVCacheDispatched makes it on devices from sm_80
// on.
template <int kG, int kD>
struct Kernel {
  static constexpr uint32_t kStages = 2;
  static constexpr uint32_t kVector = kD / 32 > 8 ? kD / 32 : 8;
  static constexpr uint32_t kX = kD / kVector, kY = kG;
  static constexpr uint32_t kThreads = kX * kY > 128 ? kX * kY : 128;
  static constexpr uint32_t kZ = kThreads / (kX * kY);
  static constexpr uint32_t kTile = kG == 1 ? 4 : 1;
  static constexpr size_t kTiles = size_t{2} * kStages * kTile * kY * kZ * kD * sizeof(nv_bfloat16);
  static constexpr size_t kStates = size_t{kZ} * kY * kD * sizeof(float);
  static constexpr size_t kOffsets = size_t{kTile} * kThreads * sizeof(void*),
                          kSums = size_t{2} * kY * kZ * sizeof(float);
  static constexpr size_t kShared =
      (kTiles > kStates ? kTiles : kStates) + (kOffsets > kSums ? kOffsets : kSums);
  static_assert(kShared <= 48 << 10, "more would have to be asked for");

  static constexpr auto kernel =
      ::flashinfer::BatchDecodeWithPagedKVCacheKernel<::flashinfer::PosEncodingMode::kNone, kStages, kTile,
                                                      kVector, kX, kY, kZ, Variant, Params>;

  // Blocks that the device runs at once.
  static uint32_t grid() {
    static const uint32_t blocks = [] {
      int device = 0, each = 0, processors = 0;
      check(cudaGetDevice(&device), "looking for a device");
      check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
            "looking at the device");
      check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, kX * kY * kZ, kShared),
            "looking at FlashInfer's kernel");
      return static_cast<uint32_t>(processors * each);
    }();
    return blocks;
  }
};

// The lists as FlashInfer reads them, in a batch's pinned `plan`.
struct Plan {
  int32_t *indices, *indptr, *last, *task_of, *number_of, *first_part, *chunk;
  int parts = 0;

  Plan(int32_t* at, int tasks, int entries)
      : indices(at),
        indptr(indices + entries),
        last(indptr + tasks + 1),
        task_of(last + tasks),
        number_of(task_of + tasks + kMostParts),
        first_part(number_of + tasks + kMostParts),
        chunk(first_part + tasks + 1) {}

  static int64_t words(int tasks, int entries) {
    return int64_t{entries} + 5 * int64_t{tasks} + 2 * kMostParts + 3;
  }

  void lists(const DeviceBatch& b) {
    int32_t* next = indices;
    for (int t = 0; t < b.tasks_count; ++t) {
      indptr[t] = static_cast<int32_t>(next - indices);
      last[t] = kPage;
      const int32_t* tiles = b.tiles + b.tasks[t].first;
      for (int i = 0; i < b.tasks[t].count; ++i) *next++ = -1 - tiles[i];
    }
    indptr[b.tasks_count] = static_cast<int32_t>(next - indices);
  }

  // grid: blocks that the device runs at once.
  void cut(const DeviceBatch& b, uint32_t grid) {
    std::vector<int32_t> counts(static_cast<size_t>(b.tasks_count));
    for (int t = 0; t < b.tasks_count; ++t) counts[static_cast<size_t>(t)] = b.tasks[t].count;
    const uint32_t most = std::min(grid, static_cast<uint32_t>(kMostParts));
    const uint32_t pages = std::get<0>(
        ::flashinfer::PartitionPagedKVCacheBinarySearchMinNumPagePerBatch(most, 1, counts, kLeastPages));
    *chunk = static_cast<int32_t>(pages) * kPage;
    parts = 0;
    for (int t = 0; t < b.tasks_count; ++t) {
      first_part[t] = parts;
      for (int at = 0, n = 0; at < b.tasks[t].count; at += static_cast<int>(pages), ++n, ++parts) {
        task_of[parts] = t;
        number_of[parts] = n;
      }
    }
    first_part[b.tasks_count] = parts;
  }
};

// Grid: tasks, heads.
__global__ void __launch_bounds__(kMergeThreads)
    merge_flash_kernel(const float* partial, const float* partial_lse, const int32_t* first_part, int G,
                       int D, float* o, float* lse) {
  const int task = static_cast<int>(blockIdx.x), g = static_cast<int>(blockIdx.y);
  const int first = first_part[task];
  const int64_t from = int64_t{first} * G + g, to = int64_t{task} * G + g;
  merge_parts(partial + from * D, partial_lse + from, first_part[task + 1] - first, G, D, o + to * D,
              lse + to);
}

template <int kG, int kD>
void run(cudaStream_t stream, const DeviceBatch& b) {
  using K = Kernel<kG, kD>;
  Plan plan(b.plan, b.tasks_count, b.entries);
  plan.lists(b);
  plan.cut(b, K::grid());
  auto* partial = reinterpret_cast<float*>(b.workspace);
  auto* partial_lse = partial + int64_t{plan.parts} * kG * kD;
  if (plan.parts > 0) {
    // FlashInfer's structures are of what may be written, and are only read.
    auto* tiles = reinterpret_cast<nv_bfloat16*>(const_cast<char*>(b.hot));
    auto* q = static_cast<nv_bfloat16*>(const_cast<void*>(b.tasks[0].q));
    const int64_t strides[] = {int64_t{2} * kPage * kD, int64_t{kPage} * kD,
                               kD};  // of a page, a head, a token
    const ::flashinfer::paged_kv_t<nv_bfloat16, int32_t> pages(
        1, kPage, kD, static_cast<uint32_t>(b.tasks_count), ::flashinfer::QKVLayout::kHND, tiles,
        tiles + kPage * kD, strides, plan.indices, plan.indptr, plan.last);
    Params params(q, nullptr, pages, partial, partial_lse, nullptr, kG, kG * kD, kD, /*window_left=*/-1,
                  /*logits_soft_cap=*/0.0f, b.scale, /*rope_scale=*/1.0f, /*rope_theta=*/1.0f);
    params.padded_batch_size = static_cast<uint32_t>(plan.parts);
    params.request_indices = plan.task_of;
    params.kv_tile_indices = plan.number_of;
    params.o_indptr = plan.first_part;
    params.kv_chunk_size_ptr = plan.chunk;
    params.partition_kv = true;
    launch("the launch of FlashInfer's decode", K::kernel, dim3(static_cast<unsigned>(plan.parts)),
           dim3(K::kX, K::kY, K::kZ), K::kShared, stream, params);
  }
  launch("the launch of FlashInfer's merge", merge_flash_kernel,
         dim3(static_cast<unsigned>(b.tasks_count), static_cast<unsigned>(kG)), dim3(kMergeThreads), 0,
         stream, partial, partial_lse, plan.first_part, kG, kD, b.o, b.lse);
}

using Run = void (*)(cudaStream_t, const DeviceBatch&);

template <int kD>
Run run_of(int group) {
  switch (group) {  // FlashInfer's DISPATCH_GQA_GROUP_SIZE
    case 1:
      return run<1, kD>;
    case 2:
      return run<2, kD>;
    case 3:
      return run<3, kD>;
    case 4:
      return run<4, kD>;
    case 6:
      return run<6, kD>;
    case 8:
      return run<8, kD>;
    case 16:
      return run<16, kD>;
    default:
      return nullptr;
  }
}

// nullptr: FlashInfer has no kernel for such groups.
Run run_of(int group, int head_dim) {
  switch (head_dim) {
    case 64:
      return run_of<64>(group);
    case 128:
      return run_of<128>(group);
    case 256:
      return run_of<256>(group);
    default:
      return nullptr;
  }
}

}  // namespace

bool flash_serves(int group, int head_dim, int element) {
  return element == 2 && run_of(group, head_dim) != nullptr;
}

int64_t flash_plan_bytes(int tasks, int entries) { return Plan::words(tasks, entries) * 4; }

int64_t flash_workspace_bytes(int tasks, int group, int head_dim) {
  return (int64_t{tasks} + kMostParts) * group * (head_dim + 1) * 4;
}

void attend_flash(cudaStream_t stream, const DeviceBatch& b) { run_of(b.group, b.head_dim)(stream, b); }

#else

bool flash_serves(int, int, int) { return false; }
int64_t flash_plan_bytes(int, int) { return 0; }
int64_t flash_workspace_bytes(int, int, int) { return 0; }
void attend_flash(cudaStream_t, const DeviceBatch&) {
  throw Failure("FlashInfer was not there when this was built");
}

#endif

}  // namespace fluxion::device
