// A device that behaves as badly as the API allows, for the tests of the dispatcher: streams that are threads
// with random delays, calls that fail, batches that never finish or finish too late, a device that is lost.
// It computes in plain float64, and it counts what no host may do: lists, or tiles in device memory, that
// change while a batch is on its way.
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "device/device_api.h"

namespace {

using fluxion::DeviceApi;
using fluxion::DeviceBatch;
using fluxion::DeviceCopy;

constexpr int kPage = 16;

enum Call { kAttend, kSignal, kCopy, kAllocate, kStream, kCalls };

std::atomic<int> delay_us{0};
std::atomic<uint64_t> seed{1};
std::atomic<int64_t> calls[kCalls];
std::atomic<int64_t> fail_at[kCalls];  // the call of this number fails; 0: none
std::atomic<int64_t> hang_at{0};       // the attend() of this number waits for rogue_release
std::atomic<int64_t> lose_at{0};       // from the attend() of this number on the device is lost
std::atomic<bool> lost{false};
std::atomic<int64_t> held{0}, tasks{0}, changed{0}, hot_reads{0};
thread_local const char* sentence = "";

std::mutex hang_mutex;
std::condition_variable hang_ends;
bool released = false;

struct Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  bool end = false, busy = false;
  std::mt19937_64 random{seed.fetch_add(1)};
  std::thread thread{[this] { run(); }};

  void run() {
    for (;;) {
      std::function<void()> next;
      {
        std::unique_lock lock(mutex);
        busy = false;
        changed.notify_all();
        changed.wait(lock, [&] { return end || !work.empty(); });
        if (work.empty()) return;
        next = std::move(work.front());
        work.pop_front();
        busy = true;
      }
      if (const int most = delay_us.load(); most > 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random() % (most + 1)));
      if (!lost.load()) next();
    }
  }
  void add(std::function<void()> f) {
    const std::lock_guard lock(mutex);
    work.push_back(std::move(f));
    changed.notify_all();
  }
};

// The n-th call of its kind may be told to fail.
bool fails(Call call) {
  const int64_t n = calls[call].fetch_add(1) + 1;
  if (call == kAttend && n == lose_at.load()) lost.store(true);
  if (lost.load()) {
    sentence = "the device fell off the bus";
    return true;
  }
  if (n != fail_at[call].load()) return false;
  sentence = "the test asked for a failure";
  return true;
}

// Host memory that somebody may be writing, as a device reads it: whatever is there.
[[gnu::no_sanitize("thread", "address")]] void read_raw(const char* from, char* to, int64_t bytes) {
  const volatile uint32_t* words = reinterpret_cast<const volatile uint32_t*>(from);
  for (int64_t i = 0; i < bytes / 4; ++i) reinterpret_cast<uint32_t*>(to)[i] = words[i];
}

float number(const char* at, int64_t i, int element) {
  if (element == 4) {
    float value;
    std::memcpy(&value, at + 4 * i, 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, at + 2 * i, 2);
  const uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint64_t sum_of(const DeviceBatch& b) {
  uint64_t sum = 14695981039346656037u;
  const auto add = [&](const void* from, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i)
      sum = (sum ^ static_cast<const unsigned char*>(from)[i]) * 1099511628211u;
  };
  add(b.tasks, sizeof(*b.tasks) * b.tasks_count);
  for (int t = 0; t < b.tasks_count; ++t) {
    const fluxion::DeviceTask& task = b.tasks[t];
    add(task.q, static_cast<size_t>(b.group) * b.head_dim * b.element);
    add(b.tiles + task.first, sizeof(int32_t) * task.count);
    if (b.masks != nullptr) add(b.masks + int64_t{task.first} * b.group, 2 * size_t(task.count) * b.group);
  }
  return sum;
}

// Of what a batch reads in device memory.
uint64_t slots_of(const DeviceBatch& b) {
  uint64_t sum = 14695981039346656037u;
  const int64_t tile_bytes = int64_t{2} * kPage * b.head_dim * b.element;
  for (int t = 0; t < b.tasks_count; ++t) {
    for (int i = 0; i < b.tasks[t].count; ++i) {
      const int64_t slot = -1 - int64_t{b.tiles[b.tasks[t].first + i]};
      for (int64_t at = 0; slot >= 0 && at < tile_bytes; at += 8) {
        uint64_t word;
        std::memcpy(&word, b.hot + slot * tile_bytes + at, 8);
        sum = (sum ^ word) * 1099511628211u;
      }
    }
  }
  return sum;
}

struct Result {
  std::vector<float> o, lse;
};

Result compute(const DeviceBatch& b) {
  const int D = b.head_dim, G = b.group;
  const int64_t row = int64_t{D} * b.element, tile_bytes = 2 * kPage * row;
  Result out{std::vector<float>(int64_t{b.tasks_count} * G * D), std::vector<float>(b.tasks_count * G)};
  std::vector<char> raw(tile_bytes);
  for (int t = 0; t < b.tasks_count; ++t) {
    const fluxion::DeviceTask& task = b.tasks[t];
    std::vector<double> top(G, -std::numeric_limits<double>::infinity()), weight(G), sum(G * D);
    for (int i = 0; i < task.count; ++i) {
      const int32_t at = b.tiles[task.first + i];
      const char* tile = raw.data();
      if (at < 0) {
        hot_reads.fetch_add(1);
        tile = b.hot + (-1 - int64_t{at}) * tile_bytes;
      } else {
        read_raw(task.tiles + at * tile_bytes, raw.data(), tile_bytes);
      }
      for (int g = 0; g < G; ++g) {
        const uint16_t mask = b.masks == nullptr ? 0xffff : b.masks[(int64_t{task.first} + i) * G + g];
        for (int token = 0; token < kPage; ++token) {
          if (!(mask >> token & 1)) continue;
          double score = 0;
          for (int d = 0; d < D; ++d) {
            score += double{number(static_cast<const char*>(task.q) + g * row, d, b.element)} *
                     number(tile + token * row, d, b.element);
          }
          score *= b.scale;
          const double most = std::max(top[g], score), old = std::exp(top[g] - most),
                       w = std::exp(score - most);
          weight[g] = weight[g] * old + w;
          for (int d = 0; d < D; ++d)
            sum[g * D + d] = sum[g * D + d] * old + w * number(tile + (kPage + token) * row, d, b.element);
          top[g] = most;
        }
      }
    }
    for (int g = 0; g < G; ++g) {
      const bool none = weight[g] == 0;
      out.lse[t * G + g] = static_cast<float>(none ? top[g] : top[g] + std::log(weight[g]));
      for (int d = 0; d < D; ++d)
        out.o[(int64_t{t} * G + g) * D + d] = static_cast<float>(none ? 0 : sum[g * D + d] / weight[g]);
    }
  }
  return out;
}

int stream_create(void** stream) {
  if (fails(kStream)) return 1;
  *stream = new Stream;
  held.fetch_add(1);
  return 0;
}

int stream_synchronize(void* stream) {
  auto* s = static_cast<Stream*>(stream);
  std::unique_lock lock(s->mutex);
  s->changed.wait(lock, [&] { return s->work.empty() && !s->busy; });
  return lost.load();
}

int stream_destroy(void* stream) {
  auto* s = static_cast<Stream*>(stream);
  {
    const std::lock_guard lock(s->mutex);
    s->end = true;
    s->changed.notify_all();
  }
  s->thread.join();
  delete s;
  held.fetch_sub(1);
  return 0;
}

int stream_query(void*) {
  if (!lost.load()) return 0;
  sentence = "the device fell off the bus";
  return 6;
}

int allocate(int64_t bytes, void** memory) {
  if (fails(kAllocate)) return 2;
  *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(*memory, 0xff, bytes);  // NaN: nobody may count on zeros
  held.fetch_add(1);
  return 0;
}

int free_memory(void* memory) {
  std::free(memory);
  held.fetch_sub(1);
  return 0;
}

int registered(void*, int64_t) { return 0; }
int unregistered(void*) { return 0; }

int64_t workspace_bytes(int32_t, int32_t, int32_t, int32_t) { return 64; }
int64_t plan_bytes(int32_t, int32_t, int32_t, int32_t, int32_t) { return 0; }

int attend(void* stream, const DeviceBatch* batch) {
  if (fails(kAttend)) return 3;
  const bool hangs = calls[kAttend].load() == hang_at.load();
  const DeviceBatch b = *batch;
  tasks.fetch_add(b.tasks_count);
  static_cast<Stream*>(stream)->add([b, hangs, sum = sum_of(b)] {
    const uint64_t slots = slots_of(b);
    const Result result = compute(b);
    if (hangs) {
      std::unique_lock lock(hang_mutex);
      hang_ends.wait(lock, [] { return released; });
    }
    if (sum_of(b) != sum || slots_of(b) != slots) changed.fetch_add(1);
    std::memcpy(b.o, result.o.data(), result.o.size() * sizeof(float));
    std::memcpy(b.lse, result.lse.data(), result.lse.size() * sizeof(float));
  });
  return 0;
}

int copy_tiles(void* stream, const DeviceCopy* copy) {
  if (fails(kCopy)) return 4;
  const DeviceCopy c = *copy;
  static_cast<Stream*>(stream)->add([c] {
    std::vector<char> raw(c.tile_bytes);
    for (int i = 0; i < c.count; ++i) {
      read_raw(c.from[i], raw.data(), c.tile_bytes);
      std::memcpy(c.hot + c.to[i] * c.tile_bytes, raw.data(), c.tile_bytes);
    }
  });
  return 0;
}

int signal(void* stream, uint32_t* word, uint32_t value) {
  if (fails(kSignal)) return 5;
  static_cast<Stream*>(stream)->add([=] { __atomic_store_n(word, value, __ATOMIC_RELEASE); });
  return 0;
}

const char* error() { return sentence; }

const DeviceApi api{fluxion::kDeviceApiVersion,
                    stream_create,
                    stream_destroy,
                    stream_synchronize,
                    stream_query,
                    allocate,
                    free_memory,
                    allocate,
                    free_memory,
                    registered,
                    unregistered,
                    workspace_bytes,
                    plan_bytes,
                    attend,
                    copy_tiles,
                    signal,
                    error};
const DeviceApi foreign{
    fluxion::kDeviceApiVersion + 1, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}};

}  // namespace

#define ROGUE extern "C" __attribute__((visibility("default")))

ROGUE int64_t rogue_api() { return reinterpret_cast<int64_t>(&api); }
ROGUE int64_t rogue_foreign_api() { return reinterpret_cast<int64_t>(&foreign); }

// Well behaved again, but for delays of up to so many microseconds before every piece of work.
ROGUE void rogue_reset(int64_t new_seed, int64_t new_delay_us) {
  seed = static_cast<uint64_t>(new_seed);
  delay_us = static_cast<int>(new_delay_us);
  for (int c = 0; c < kCalls; ++c) calls[c] = fail_at[c] = 0;
  hang_at = lose_at = 0;
  lost = false;
  tasks = changed = hot_reads = 0;
  const std::lock_guard lock(hang_mutex);
  released = false;
}

ROGUE void rogue_fail(int64_t call, int64_t n) { fail_at[call] = calls[call] + n; }
ROGUE void rogue_hang(int64_t n) { hang_at = calls[kAttend] + n; }
ROGUE void rogue_lose(int64_t n) { lose_at = calls[kAttend] + n; }
ROGUE void rogue_drop() { lost = true; }
ROGUE void rogue_release() {
  const std::lock_guard lock(hang_mutex);
  released = true;
  hang_ends.notify_all();
}
ROGUE int64_t rogue_calls(int64_t call) { return calls[call]; }
ROGUE int64_t rogue_tasks() { return tasks; }
ROGUE int64_t rogue_hot_reads() { return hot_reads; }
ROGUE int64_t rogue_changed() { return changed; }  // batches whose lists or slots changed under way
ROGUE int64_t rogue_held() { return held; }        // streams and pieces of memory not given back
