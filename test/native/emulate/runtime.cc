#include "emulate/runtime.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "emulate/fibers.h"

namespace fluxion::emulate {

namespace {

using Work = std::function<void(Stream&)>;

// Calls until an injected failure; 0: none.
std::atomic<int64_t> fail_memory{0}, fail_launch{0}, fail_device{0};
std::atomic<bool> lost{false};

// Whether this call fails.
bool due(std::atomic<int64_t>& left) {
  int64_t n = left.load(std::memory_order_relaxed);
  while (n > 0 && !left.compare_exchange_weak(n, n - 1, std::memory_order_relaxed)) {
  }
  return n == 1;
}

// FLUXION_SIM_FAIL="kind:after", for servers.
[[maybe_unused]] const bool from_environment = [] {
  const char* text = std::getenv("FLUXION_SIM_FAIL");
  const std::string_view what(text != nullptr ? text : "");
  const size_t colon = what.find(':');
  if (colon != what.npos) inject(std::string(what.substr(0, colon)).c_str(), std::atoll(text + colon + 1));
  return true;
}();

thread_local cudaError_t last = cudaSuccess;

cudaError_t result(cudaError_t error) {
  if (error == cudaSuccess && lost.load(std::memory_order_relaxed)) error = cudaErrorLaunchFailure;
  if (error != cudaSuccess) last = error;
  return error;
}

// Types of memory: allocations and registrations, by their first byte.
struct Range {
  size_t bytes;
  cudaMemoryType type;
  bool owned;
};
struct Memory {
  std::mutex mutex;
  std::map<const char*, Range> ranges;
};
// Never destroyed: threads of streams may outlive the exit of the process.
Memory& memory() {
  static Memory* const all = new Memory;
  return *all;
}

const std::pair<const char* const, Range>* range_of(Memory& all, const void* at) {
  const char* p = static_cast<const char*>(at);
  auto next = all.ranges.upper_bound(p);
  if (next == all.ranges.begin()) return nullptr;
  --next;
  return p < next->first + next->second.bytes ? &*next : nullptr;
}

cudaError_t allocate(void** out, size_t bytes, size_t alignment, cudaMemoryType type) {
  *out = nullptr;
  if (due(fail_memory)) return result(cudaErrorMemoryAllocation);
  if (lost || bytes == 0) return result(cudaSuccess);
  void* fresh = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (fresh == nullptr) return result(cudaErrorMemoryAllocation);
  std::memset(fresh, 0xff, bytes);
  Memory& all = memory();
  const std::lock_guard lock(all.mutex);
  all.ranges[static_cast<char*>(fresh)] = {bytes, type, true};
  *out = fresh;
  return result(cudaSuccess);
}

cudaError_t forget(void* at, cudaMemoryType type) {
  if (at == nullptr) return result(cudaSuccess);
  Memory& all = memory();
  {
    const std::lock_guard lock(all.mutex);
    const auto found = all.ranges.find(static_cast<char*>(at));
    if (found == all.ranges.end() || !found->second.owned || found->second.type != type) {
      return result(cudaErrorInvalidValue);
    }
    all.ranges.erase(found);
  }
  std::free(at);
  return result(cudaSuccess);
}

}  // namespace

struct Graph {
  std::vector<Work> work;
};

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, reached = 0;

  void reach(uint64_t n) {
    const std::lock_guard lock(mutex);
    reached = reached > n ? reached : n;
    changed.notify_all();
  }
  void wait(uint64_t n) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return reached >= n; });
  }
};

struct Stream {
  // The default stream has no thread.
  explicit Stream(bool threaded) {
    if (threaded) thread_ = std::thread([this] { loop(); });
  }
  ~Stream() {
    {
      const std::lock_guard lock(mutex);
      stop_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

  void submit(Work work) {
    if (!thread_.joinable()) {
      const std::lock_guard lock(mutex);
      work(*this);
      return;
    }
    const std::lock_guard lock(mutex);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }

  void synchronize() {
    std::unique_lock lock(mutex);
    changed_.wait(lock, [&] { return work_.empty(); });
  }

  std::mutex mutex;
  Fibers fibers;
  std::unique_ptr<Graph> recording;  // of the thread that captures

 private:
  void loop() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed_.wait(lock, [&] { return stop_ || !work_.empty(); });
      if (work_.empty()) return;
      {
        // Destroys what the work holds before its end is announced.
        const Work work = std::move(work_.front());
        lock.unlock();
        work(*this);
      }
      lock.lock();
      work_.pop_front();
      changed_.notify_all();
    }
  }

  std::condition_variable changed_;
  std::deque<Work> work_;
  bool stop_ = false;
  std::thread thread_;
};

namespace {

Stream& of(Stream* stream) {
  static Stream* const whole = new Stream(false);
  return stream != nullptr ? *stream : *whole;
}

// Events are reached on a lost device, too, so that every wait ends.
cudaError_t submit(Stream* stream, Work work, bool always = false) {
  if (lost && !always) return result(cudaSuccess);
  Stream& s = of(stream);
  if (s.recording) {
    s.recording->work.push_back(std::move(work));
  } else {
    s.submit(std::move(work));
  }
  // A failure of later work is returned by the next call.
  return stream == nullptr ? result(cudaSuccess) : cudaSuccess;
}

}  // namespace

cudaError_t launch(dim3 grid, dim3 block, size_t shared_bytes, Stream* stream, std::function<void()> thread) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024 || grid.x == 0 || grid.x > INT32_MAX || grid.y == 0 || grid.y > 65535 ||
      grid.z == 0 || grid.z > 65535 || shared_bytes > 48 << 10) {
    return result(cudaErrorInvalidConfiguration);
  }
  if (due(fail_launch)) return result(cudaErrorLaunchOutOfResources);
  return submit(stream, [=, thread = std::move(thread)](Stream& s) {
    if (due(fail_device)) lost = true;
    if (!lost) s.fibers.run(grid, block, shared_bytes, thread);
  });
}

uint64_t nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

void pause() { std::this_thread::sleep_for(std::chrono::microseconds(10)); }

bool inject(const char* kind, int64_t after) {
  const std::string_view what(kind);
  if (what == "none") {
    fail_memory = fail_launch = fail_device = 0;
    lost = false;
    last = cudaSuccess;
  } else if (what == "memory") {
    fail_memory = after;
  } else if (what == "launch") {
    fail_launch = after;
  } else if (what == "lost") {
    fail_device = after;
  } else {
    return false;
  }
  return true;
}

}  // namespace fluxion::emulate

using namespace fluxion::emulate;

namespace {

struct ErrorText {
  cudaError_t error;
  const char *name, *text;
};

const ErrorText& text_of(cudaError_t error) {
#define FLUXION_ERROR(name, text) \
  {                               \
    name, #name, text             \
  }
  static const ErrorText all[] = {
      FLUXION_ERROR(cudaSuccess, "no error"),
      FLUXION_ERROR(cudaErrorInvalidValue, "invalid argument"),
      FLUXION_ERROR(cudaErrorMemoryAllocation, "out of memory"),
      FLUXION_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
      FLUXION_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
      FLUXION_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
      FLUXION_ERROR(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
      FLUXION_ERROR(cudaErrorHostMemoryAlreadyRegistered,
                    "part or all of the requested memory range is already mapped"),
      FLUXION_ERROR(cudaErrorHostMemoryNotRegistered,
                    "pointer does not correspond to a registered memory region"),
      FLUXION_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
      FLUXION_ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
  };
#undef FLUXION_ERROR
  static const ErrorText unknown{error, "cudaErrorUnknown", "unknown error"};
  for (const ErrorText& known : all) {
    if (known.error == error) return known;
  }
  return unknown;
}

}  // namespace

const char* cudaGetErrorName(cudaError_t error) { return text_of(error).name; }
const char* cudaGetErrorString(cudaError_t error) { return text_of(error).text; }

cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }

cudaError_t cudaSetDevice(int device) { return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return result(cudaSuccess);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {"simulated device", 0, 0, static_cast<int>(std::thread::hardware_concurrency()), 0};
  size_t free;
  return cudaMemGetInfo(&free, &properties->totalGlobalMem);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  *free = static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * page;
  *total = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page;
  return result(cudaSuccess);
}

cudaError_t cudaDriverGetVersion(int* version) { return *version = 0, result(cudaSuccess); }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 0, result(cudaSuccess); }

cudaError_t cudaMalloc(void** at, size_t bytes) { return allocate(at, bytes, 256, cudaMemoryTypeDevice); }
cudaError_t cudaFree(void* at) { return forget(at, cudaMemoryTypeDevice); }
cudaError_t cudaHostAlloc(void** at, size_t bytes, unsigned) {
  return allocate(at, bytes, 4096, cudaMemoryTypeHost);
}
cudaError_t cudaFreeHost(void* at) { return forget(at, cudaMemoryTypeHost); }

cudaError_t cudaHostRegister(void* at, size_t bytes, unsigned) {
  if (at == nullptr || bytes == 0) return result(cudaErrorInvalidValue);
  if (due(fail_memory)) return result(cudaErrorMemoryAllocation);
  Memory& all = memory();
  const std::lock_guard lock(all.mutex);
  const char* first = static_cast<char*>(at);
  const auto next = all.ranges.lower_bound(first);
  if (range_of(all, at) != nullptr || (next != all.ranges.end() && next->first < first + bytes)) {
    return result(cudaErrorHostMemoryAlreadyRegistered);
  }
  all.ranges[first] = {bytes, cudaMemoryTypeHost, false};
  return result(cudaSuccess);
}

cudaError_t cudaHostUnregister(void* at) {
  Memory& all = memory();
  const std::lock_guard lock(all.mutex);
  const auto found = all.ranges.find(static_cast<char*>(at));
  if (found == all.ranges.end() || found->second.owned) return result(cudaErrorHostMemoryNotRegistered);
  all.ranges.erase(found);
  return result(cudaSuccess);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* at) {
  Memory& all = memory();
  const std::lock_guard lock(all.mutex);
  const auto* range = range_of(all, at);
  void* pointer = const_cast<void*>(at);
  *attributes = {range != nullptr ? range->second.type : cudaMemoryTypeUnregistered, 0, pointer, pointer};
  return result(cudaSuccess);
}

cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  return submit(stream, [=](Stream&) { std::memset(at, value, bytes); });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = lost ? nullptr : new Stream(true);
  return result(cudaSuccess);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (stream == nullptr) return result(cudaErrorInvalidResourceHandle);
  delete stream;
  return result(cudaSuccess);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (of(stream).recording) return result(cudaErrorStreamCaptureUnsupported);
  of(stream).synchronize();
  return result(cudaSuccess);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new Event;
  return result(cudaSuccess);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  event->wait(event->recorded);  // a stream may still use it
  delete event;
  return result(cudaSuccess);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (of(stream).recording) return result(cudaErrorStreamCaptureUnsupported);
  uint64_t n;
  {
    const std::lock_guard lock(event->mutex);
    n = ++event->recorded;
  }
  return submit(stream, [=](Stream&) { event->reach(n); }, true);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  uint64_t n;
  {
    const std::lock_guard lock(event->mutex);
    n = event->recorded;
  }
  event->wait(n);
  return result(cudaSuccess);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (stream == nullptr || stream->recording) return result(cudaErrorStreamCaptureUnsupported);
  stream->recording = std::make_unique<Graph>();
  return result(cudaSuccess);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  if (stream == nullptr || !stream->recording) return result(cudaErrorInvalidValue);
  *graph = stream->recording.release();
  return result(cudaSuccess);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new Graph(*graph);
  return result(cudaSuccess);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return result(cudaSuccess);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return result(cudaSuccess);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  if (due(fail_launch)) return result(cudaErrorLaunchOutOfResources);
  return submit(stream, [work = exec->work](Stream& s) {
    for (const Work& one : work) one(s);
  });
}
