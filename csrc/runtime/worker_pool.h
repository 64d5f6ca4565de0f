// Persistent threads that run one function at a time.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

#include "kernels/api.h"
#include "runtime/topology.h"

namespace fluxion {

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Waits between two looks at what another thread will change. Pauses first, then yields the core, so that a
// machine with more threads than cores makes progress.
class Backoff {
 public:
  void wait(int pauses = 1) {
    if (paused_ >= kPauses) {
      sched_yield();
      return;
    }
    for (int i = 0; i < pauses; ++i) cpu_pause();
    paused_ += pauses;
  }

 private:
  static constexpr int kPauses = 2000;
  int paused_ = 0;
};

template <typename Ready>
void wait_until(Ready ready) {
  for (Backoff backoff; !ready();) backoff.wait();
}

// The first exception of several threads that work together. Allocates nothing, because the exception may be
// that memory ran out.
class FirstFailure {
 public:
  // Any thread. Returns false if body() threw.
  template <typename Body>
  bool guard(const Body& body) noexcept {
    try {
      body();
      return true;
    } catch (...) {
      if (!taken_.exchange(true, std::memory_order_relaxed)) failure_ = std::current_exception();
      return false;
    }
  }
  // Returns and clears the exception; nullptr: none. For one thread, when it knows that all others are done.
  std::exception_ptr take() noexcept {
    if (!taken_.load(std::memory_order_relaxed)) return nullptr;
    taken_.store(false, std::memory_order_relaxed);
    return std::exchange(failure_, nullptr);
  }
  // Takes the exception, and throws it if there is one.
  void rethrow() {
    if (std::exception_ptr failure = take()) std::rethrow_exception(std::move(failure));
  }

 private:
  std::atomic<bool> taken_{false};
  std::exception_ptr failure_;
};

// The calling thread is worker 0 and is never pinned; workers 1..n-1 are threads of the pool. If these are
// pinned and a caller launches on the core of another worker, it moves to a core without a worker. The
// scheduler would leave both on that core for milliseconds.
//
// Invariant of the gate: a worker runs the published function only between entering (count + 1, possible only
// while the gate is open) and leaving (count - 1). join() closes the gate and waits for the count to reach
// zero, so a worker that wakes too late finds it closed and is never waited for. The function must therefore
// hand out its work dynamically: any subset of the workers, worker 0 alone included, has to be able to finish
// it.
//
// A function may throw on any worker. The others finish the rest of the work; then the waiting thread gets
// the first exception, and the pool is free.
class WorkerPool {
 public:
  using Fn = void (*)(void* ctx, int worker);
  using ItemFn = void (*)(void* ctx, int item);

  // cores: cores to pin to, worker w on cores[w % size]; empty: every allowed core. pinned: false lets the
  // scheduler move workers among the cores. Throws std::invalid_argument for a bad count or a core this
  // process may not use, std::runtime_error when a thread cannot be started. spin_ns: idle_spin_ns().
  WorkerPool(int threads, std::vector<int> cores, int64_t spin_ns = kIdleSpinNs, bool pinned = true);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int size() const { return threads_; }
  const std::vector<int>& cores() const { return cores_; }
  bool pinned() const { return pinned_; }

  // Starts fn(ctx, w) on the threads and returns at once. Returns false, with nothing started, if the pool is
  // busy. wake: also wake threads that sleep. That costs the caller a system call of some 10 us, and them as
  // much to come. (Not inlined: GCC 12 then takes the caller's ctx for a dangling pointer, though join()
  // clears it.)
  [[gnu::noinline]] FLUXION_API bool launch(Fn fn, void* ctx, bool wake = true);
  // Runs fn(ctx, 0) in the caller, then waits for every worker that entered. Follows a launch() that returned
  // true. Throws the first exception of a worker, when all are done.
  FLUXION_API void join();

  // Calls fn(ctx, i) for i in [0, count), over all workers; in the caller alone while a launch() is
  // outstanding. wake: as for launch(). Throws as join() does; then some items were not done.
  void parallel_for(int count, ItemFn fn, void* ctx, bool wake = true);
  // Calls fn(ctx, w) once on every worker; returns false if the pool is busy. For first touch; not for the
  // hot path. Throws as join() does; then some workers were left out.
  FLUXION_API bool each(Fn fn, void* ctx);

 private:
  static void* thread_main(void* arg);
  int start_thread(int worker, bool pinned);
  void work(int worker);
  uint32_t wait_for_signal(uint32_t seen);
  void leave_workers_core() const;

  static constexpr uint64_t kOpen = 1ull << 31;
  static constexpr uint64_t kCount = kOpen - 1;

  int threads_;
  bool pinned_;
  std::vector<int> cores_;
  std::vector<int> worker_cores_,
      other_cores_;  // of cores_: those that workers are pinned to, and the others
  std::vector<pthread_t> handles_;
  pid_t owner_;
  int64_t spin_ns_;

  // Written before the gate opens, read after it is entered.
  Fn fn_ = nullptr;
  void* ctx_ = nullptr;
  uint32_t launches_ = 0;  // 0 is never the number of a launch
  FirstFailure failure_;

  alignas(64) std::atomic<uint64_t> gate_{0};    // launch number << 32, open bit, number of workers inside
  alignas(64) std::atomic<uint32_t> signal_{0};  // futex word: one more at every launch and at the end
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<bool> busy_{false};
};

}  // namespace fluxion
