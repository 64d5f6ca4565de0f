// The C ABI of probe/probe.h, and host memory to probe.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "ffi/objects.h"
#include "probe/probe.h"
#include "runtime/host_memory.h"

namespace fluxion {
namespace {

const KernelTable& table_of(const ffi::String& isa, DType dtype) {
  if (const KernelTable* table = kernel_table(isa.c_str(), dtype)) return *table;
  Raise("ValueError") << "This CPU cannot run the instruction set \"" << isa.c_str()
                      << "\"; choose one of topology()[\"isas\"].";
  TVM_FFI_UNREACHABLE();
}

DType kv_dtype(const TensorView& q) {
  if (same(q.dtype(), kBFloat16)) return DType::kBF16;
  expect(q, "q", kFloat32, {-1, -1, -1}, 3);
  return DType::kF32;
}

// first [tasks + 1] int64: from 0, never falling, to `pieces`.
ProbeTasks tasks_of(const TensorView& first, int64_t pieces) {
  expect(first, "first", kInt64, {-1}, 1);
  const int64_t* at = data<int64_t>(first);
  const int64_t n = first.size(0);
  bool good = n >= 1 && n <= INT32_MAX && at[0] == 0 && at[n - 1] == pieces;
  for (int64_t i = 1; good && i < n; ++i) good = at[i - 1] <= at[i] && at[i] - at[i - 1] <= INT32_MAX;
  if (!good) {
    Raise("ValueError") << "first must rise from 0 to the number of pieces, " << pieces
                        << ": one element a task, and the end.";
  }
  return {at, static_cast<int>(n - 1)};
}

ProbeRuns runs_of(const TensorView& ns) {
  expect(ns, "ns", kInt64, {-1}, 1);
  if (ns.size(0) < 1 || ns.size(0) > INT32_MAX) Raise("ValueError") << "ns has no element; pass one a run.";
  return {data<int64_t>(ns), static_cast<int>(ns.size(0))};
}

const int32_t* ids_of(const TensorView& ids, const char* name, int64_t limit) {
  expect(ids, name, kInt32, {-1}, 1);
  const int32_t* id = data<int32_t>(ids);
  const auto bad = [limit](int32_t i) { return i < 0 || i >= limit; };
  const int32_t* end = id + ids.size(0);
  if (const int32_t* at = std::find_if(id, end, bad); at != end) {
    Raise("ValueError") << name << " holds " << *at << "; pass ids from 0 to " << limit - 1 << ".";
  }
  return id;
}

// q [tasks, G, D].
void check_queries(const TensorView& q, int tasks) {
  expect(q, "q", q.dtype(), {tasks, -1, -1}, 3);
  const int64_t G = q.size(1), D = q.size(2);
  if (G < 1 || G > kMaxGroup || D < kMinHeadDim || D > kMaxHeadDim || D % 16 != 0) {
    Raise("ValueError") << "q has " << G << " heads of " << D << "; pass 1 to " << kMaxGroup
                        << " heads of a multiple of 16 from " << kMinHeadDim << " to " << kMaxHeadDim << ".";
  }
}

int64_t companion_abi_version() { return kAbiVersion; }

struct SharedMemory {
  std::shared_ptr<HostMemory> memory;
  void AllocData(DLTensor* t) { t->data = memory->data(); }
  void FreeData(DLTensor*) {}
};

ffi::Tensor host_memory(Workers workers, int64_t bytes) {
  if (bytes < 1) Raise("ValueError") << "bytes is " << bytes << "; ask for at least 1.";
  return guarded([&] {
    auto memory = std::make_shared<HostMemory>(bytes);
    struct Shares {
      HostMemory& memory;
      int64_t size;
    } shares{*memory, round_up((bytes + workers->pool->size() - 1) / workers->pool->size(), kHugePage)};
    const auto body = [](void* arg, int worker) {
      const Shares& s = *static_cast<Shares*>(arg);
      const int64_t end = s.memory.bytes();
      touch(s.memory.data() + std::min(worker * s.size, end),
            s.memory.data() + std::min((worker + 1) * s.size, end));
    };
    if (!workers->pool->each(body, &shares)) {
      throw std::runtime_error("The workers run a layer; finish it before memory is touched by them.");
    }
    return ffi::Tensor::FromNDAlloc(SharedMemory{std::move(memory)}, ffi::ShapeView(&bytes, 1),
                                    DLDataType{kDLUInt, 8, 1}, DLDevice{kDLCPU, 0});
  });
}

int64_t probe_read(Workers workers, ffi::String isa, TensorView memory, int64_t piece_bytes,
                   TensorView pieces, TensorView first, int64_t streams, int64_t ahead, TensorView ns) {
  expect(memory, "memory", DLDataType{kDLUInt, 8, 1}, {-1}, 1);
  if (piece_bytes < 64 || piece_bytes % 64 != 0) {
    Raise("ValueError") << "piece_bytes is " << piece_bytes << "; pass a multiple of 64.";
  }
  if ((streams != 1 && streams != 2 && streams != 4) || ahead < 0 || ahead > 1 << 20) {
    Raise("ValueError") << "A read of " << streams << " streams, " << ahead
                        << " lines ahead, is not served; choose 1, 2 or 4 streams and 0 to 1048576 lines.";
  }
  expect(first, "first", kInt64, {-1}, 1);
  const int64_t held = memory.size(0) / piece_bytes;
  const bool listed = pieces.numel() > 0;
  const int64_t end = first.numel() > 0 ? data<int64_t>(first)[first.size(0) - 1] : 0;
  const int64_t count = listed ? pieces.size(0) : end;
  if (!listed && count > held) {
    Raise("ValueError") << "The memory holds " << held << " pieces and " << count << " were to be read.";
  }
  const ReadProbe what{data<char>(memory), listed ? ids_of(pieces, "pieces", held) : nullptr, piece_bytes,
                       static_cast<int>(streams), ahead};
  const ProbeTasks tasks = tasks_of(first, count);
  return guarded([&] {
    return static_cast<int64_t>(probe(*workers->pool, table_of(isa, DType::kF32), tasks, what, runs_of(ns)));
  });
}

void probe_attend(Workers workers, ffi::String isa, TensorView q, double scale, TensorView tiles,
                  TensorView pages, TensorView first, TensorView masks, TensorView o, TensorView lse,
                  TensorView ns) {
  const DType dtype = kv_dtype(q);
  const ProbeTasks tasks = tasks_of(first, pages.numel());
  check_queries(q, tasks.count);
  const int64_t G = q.size(1), D = q.size(2);
  // 8-bit tiles: [., bytes] uint8.
  const bool packed = dtype == DType::kBF16 && same(tiles.dtype(), DLDataType{kDLUInt, 8, 1});
  const DType stored = packed ? DType::kInt8 : dtype;
  if (packed) {
    expect(tiles, "tiles", tiles.dtype(), {-1, 2 * kPage * stored_bytes(stored, static_cast<int>(D))}, 2);
  } else {
    expect(tiles, "tiles", q.dtype(), {-1, 2, kPage, D}, 4);
  }
  if (masks.numel() > 0) expect(masks, "masks", kUInt16, {pages.size(0), G}, 2);
  expect(o, "o", kFloat32, {tasks.count, G, D}, 3);
  expect(lse, "lse", kFloat32, {tasks.count, G}, 2);
  const AttendProbe what{data<char>(q),
                         static_cast<int>(G),
                         static_cast<int>(D),
                         static_cast<float>(scale),
                         data<char>(tiles),
                         ids_of(pages, "pages", tiles.size(0)),
                         masks.numel() > 0 ? data<uint16_t>(masks) : nullptr,
                         data<float>(o),
                         data<float>(lse)};
  guarded([&] {
    probe(*workers->pool, table_of(isa, stored), dtype == DType::kBF16 ? 2 : 4, tasks, what, runs_of(ns));
  });
}

void probe_score(Workers workers, ffi::String isa, TensorView q, TensorView entries, TensorView index,
                 TensorView first, double spread, ffi::Optional<TensorView> out, TensorView ns) {
  const DType dtype = kv_dtype(q);
  const ProbeTasks tasks = tasks_of(first, index.numel());
  check_queries(q, tasks.count);
  const int64_t G = q.size(1), D = q.size(2);
  expect(entries, "entries", q.dtype(), {-1, 2, D}, 3);
  if (out) expect(*out, "out", kFloat32, {index.size(0) * G}, 1);
  const ScoreProbe what{data<char>(q),
                        static_cast<int>(G),
                        static_cast<int>(D),
                        data<char>(entries),
                        ids_of(index, "index", entries.size(0)),
                        static_cast<float>(spread),
                        out ? data<float>(*out) : nullptr};
  guarded([&] {
    probe(*workers->pool, table_of(isa, dtype), dtype == DType::kBF16 ? 2 : 4, tasks, what, runs_of(ns));
  });
}

void probe_select(Workers workers, ffi::String isa, TensorView scores, TensorView first, TensorView k,
                  TensorView heads, TensorView ns) {
  expect(heads, "heads", kUInt16, {-1}, 1);
  const ProbeTasks tasks = tasks_of(first, heads.size(0));
  expect(k, "k", kInt32, {tasks.count}, 1);
  const int64_t G = heads.size(0) > 0 ? scores.numel() / heads.size(0) : 0;
  expect(scores, "scores", kFloat32, {heads.size(0) * G}, 1);
  if (G < 1 || G > kMaxGroup) {
    Raise("ValueError") << "There are " << G << " scores a block; pass those of 1 to " << kMaxGroup
                        << " heads.";
  }
  for (int i = 0; i < tasks.count; ++i) {
    const int32_t wanted = data<int32_t>(k)[i];
    if (tasks.size(i) > 0 && (wanted < 1 || wanted > tasks.size(i))) {
      Raise("ValueError") << "k is " << wanted << " for a task of " << tasks.size(i) << " blocks.";
    }
  }
  const SelectProbe what{static_cast<int>(G), data<float>(scores), data<int32_t>(k), data<uint16_t>(heads)};
  guarded([&] { probe(*workers->pool, table_of(isa, DType::kF32), tasks, what, runs_of(ns)); });
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(companion_abi_version, fluxion::companion_abi_version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(host_memory, fluxion::host_memory);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(probe_read, fluxion::probe_read);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(probe_attend, fluxion::probe_attend);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(probe_score, fluxion::probe_score);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(probe_select, fluxion::probe_select);
