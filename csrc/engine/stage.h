// A stage of a task in chunks, which its owner and idle workers claim one by one.
#pragma once

#include <atomic>
#include <cstdint>

#include "runtime/worker_pool.h"

namespace fluxion {

// One owner runs one stage at a time; any thread may help. A claim is one fetch_add on a word that also holds
// the number of chunks. A late claim, after the owner has gone on, gets a chunk of the stage that is open
// then, or none. The owner leaves a stage only when every claimed chunk is done, so fn_ and ctx_ change only
// without claims.
//
// Memory: the scratch that a chunk uses, of the thread that runs it.
template <class Memory>
class alignas(64) Stage {
 public:
  // Calls body(chunk, memory) for every chunk, in any order and on many threads at once; returns when all are
  // done. Returns the nanoseconds that the owner only waited for helpers. Throws the first exception of any
  // chunk, when all are done.
  template <class Body>
  int64_t run(int chunks, Memory* memory, const Body& body) {
    if (chunks == 1) {
      body(0, memory);
      return 0;
    }
    fn_ = [](const void* ctx, int chunk, Memory* at) { (*static_cast<const Body*>(ctx))(chunk, at); };
    ctx_ = &body;
    helped_.store(0, std::memory_order_relaxed);
    head_.store(static_cast<uint64_t>(chunks) << 32, std::memory_order_release);
    int own = 0;
    for (int i; (i = claim()) >= 0; ++own) failure_.guard([&] { body(i, memory); });
    const auto done = [&] { return own + helped_.load(std::memory_order_acquire) == chunks; };
    int64_t waited = 0;
    if (!done()) {
      const int64_t start = now_ns();
      wait_until(done);
      waited = now_ns() - start;
    }
    failure_.rethrow();
    return waited;
  }

  // Runs chunks of the open stage until none is left. Returns how many.
  int help(Memory* memory) {
    int chunks = 0;
    for (int i; (i = claim()) >= 0; ++chunks) {
      failure_.guard([&] { fn_(ctx_, i, memory); });
      helped_.fetch_add(1, std::memory_order_release);
    }
    return chunks;
  }

 private:
  int claim() {
    // The load avoids needless writes to the owner's cache line.
    if (left(head_.load(std::memory_order_acquire)) <= 0) return -1;
    const uint64_t head = head_.fetch_add(1, std::memory_order_acq_rel);
    return left(head) > 0 ? static_cast<int>(head & UINT32_MAX) : -1;
  }
  static int64_t left(uint64_t head) {
    return static_cast<int64_t>(head >> 32) - static_cast<int64_t>(head & UINT32_MAX);
  }

  std::atomic<uint64_t> head_{0};  // number of chunks << 32, next chunk
  std::atomic<int> helped_{0};     // chunks that helpers have done
  void (*fn_)(const void* ctx, int chunk, Memory* memory) = nullptr;
  const void* ctx_ = nullptr;
  FirstFailure failure_;  // of the open stage's chunks
};

}  // namespace fluxion
