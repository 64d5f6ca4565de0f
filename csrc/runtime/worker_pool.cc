#include "runtime/worker_pool.h"

#include <linux/futex.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "runtime/topology.h"

namespace fluxion {
namespace {

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected) {
  static_assert(sizeof(std::atomic<uint32_t>) == 4);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

struct Start {
  WorkerPool* pool;
  int worker;
};

}  // namespace

WorkerPool::WorkerPool(int threads, std::vector<int> cores, int64_t spin_ns, bool pinned)
    : threads_(threads), pinned_(pinned), cores_(std::move(cores)), owner_(getpid()) {
  if (threads < 1 || threads > 4096) {
    throw std::invalid_argument("The number of workers is " + std::to_string(threads) +
                                ", but it counts the calling thread and must be between 1 and 4096.");
  }
  const Topology topology = read_topology();
  const std::vector<int>& allowed = topology.cores;
  spin_ns_ = idle_spin_ns(topology, spin_ns);
  if (cores_.empty()) cores_ = allowed;
  for (int c : cores_) {
    if (std::find(allowed.begin(), allowed.end(), c) == allowed.end()) {
      throw std::invalid_argument("Core " + std::to_string(c) +
                                  " is not among the cores this process may run on; choose from `cores` of "
                                  "topology() or widen the affinity (taskset, cpuset).");
    }
  }
  for (size_t i = 0; pinned && i < cores_.size(); ++i) {
    const size_t first =
        i == 0 ? cores_.size() : i;  // the first worker that is pinned to it: 0 is the caller
    (first < static_cast<size_t>(threads_) ? worker_cores_ : other_cores_).push_back(cores_[i]);
  }
  handles_.reserve(threads_);  // so that every started thread is recorded
  // Pool threads block signals: these belong to the threads that Python knows.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = 0;
  for (int w = 1; w < threads_ && error == 0; ++w) error = start_thread(w, pinned);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) {
    const size_t started = handles_.size();
    stop_.store(true);
    signal_.fetch_add(1);
    futex_wake_all(&signal_);
    for (pthread_t h : handles_) pthread_join(h, nullptr);
    throw std::runtime_error("Only " + std::to_string(started + 1) + " of " + std::to_string(threads_) +
                             " workers could be started (" + std::strerror(error) +
                             "); lower the number of workers or raise the process limit (ulimit -u).");
  }
}

// Returns an error number of pthread_create; 0: success.
int WorkerPool::start_thread(int worker, bool pinned) {
  std::unique_ptr<Start> start(new (std::nothrow) Start{this, worker});
  if (start == nullptr) return ENOMEM;
  pthread_attr_t attr;
  pthread_attr_init(&attr);
  CoreSet mine(cores_[worker % cores_.size()]);
  if (!pinned) {
    for (int core : cores_) mine.add(core);
  }
  pthread_attr_setaffinity_np(&attr, CoreSet::kBytes, mine.get());
  pthread_t handle;
  int error = pthread_create(&handle, &attr, &WorkerPool::thread_main, start.get());
  pthread_attr_destroy(&attr);
  // A sandbox may forbid threads to choose their cores, and a cpuset may have changed. Unpinned threads cost
  // speed only.
  if (error == EPERM || error == EINVAL)
    error = pthread_create(&handle, nullptr, &WorkerPool::thread_main, start.get());
  if (error != 0) return error;
  start.release();  // the thread owns it
  handles_.push_back(handle);
  return 0;
}

WorkerPool::~WorkerPool() {
  // In a forked child the threads do not exist; joining them would hang.
  if (getpid() != owner_) return;
  stop_.store(true);
  signal_.fetch_add(1);
  futex_wake_all(&signal_);
  for (pthread_t h : handles_) pthread_join(h, nullptr);
}

void* WorkerPool::thread_main(void* arg) {
  const Start start = *static_cast<Start*>(arg);
  delete static_cast<Start*>(arg);
  char name[16];
  std::snprintf(name, sizeof(name), "fluxion-%d", start.worker);
  pthread_setname_np(pthread_self(), name);
  start.pool->work(start.worker);
  return nullptr;
}

uint32_t WorkerPool::wait_for_signal(uint32_t seen) {
  uint32_t signal = signal_.load(std::memory_order_acquire);
  if (signal != seen) return signal;
  const int64_t deadline = now_ns() + spin_ns_;
  do {
    for (int i = 0; i < 32; ++i) {
      cpu_pause();
      signal = signal_.load(std::memory_order_acquire);
      if (signal != seen) return signal;
    }
  } while (now_ns() < deadline);
  // Either launch() sees this sleeper and wakes it, or the kernel sees the new signal and does not sleep.
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while ((signal = signal_.load(std::memory_order_seq_cst)) == seen) futex_wait(&signal_, seen);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  return signal;
}

void WorkerPool::work(int worker) {
  uint32_t seen = 0;
  uint64_t entered = 0;
  for (;;) {
    seen = wait_for_signal(seen);
    if (stop_.load(std::memory_order_acquire)) return;
    // A worker late for one launch may enter the next before seeing its signal: the launch number keeps it
    // from entering that one again.
    uint64_t gate = gate_.load(std::memory_order_acquire);
    while ((gate & kOpen) && gate >> 32 != entered) {
      if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        entered = gate >> 32;
        failure_.guard([&] { fn_(ctx_, worker); });
        gate_.fetch_sub(1, std::memory_order_release);
        break;
      }
    }
  }
}

// Takes two system calls, in the rare launch that needs them.
void WorkerPool::leave_workers_core() const {
  if (other_cores_.empty()) return;
  const int here = sched_getcpu();
  if (std::find(worker_cores_.begin(), worker_cores_.end(), here) == worker_cores_.end()) return;
  CoreSet allowed = CoreSet::of_thread(0);
  for (int core : other_cores_) {
    if (!allowed.has(core)) continue;
    CoreSet(core).bind_caller();
    allowed.bind_caller();
    return;
  }
}

bool WorkerPool::launch(Fn fn, void* ctx, bool wake) {
  if (busy_.exchange(true, std::memory_order_acquire)) return false;
  fn_ = fn;
  ctx_ = ctx;
  if (threads_ == 1) return true;
  if (wake) leave_workers_core();
  launches_ = launches_ == UINT32_MAX ? 1 : launches_ + 1;
  gate_.store(static_cast<uint64_t>(launches_) << 32 | kOpen, std::memory_order_release);
  signal_.fetch_add(1, std::memory_order_seq_cst);
  if (wake && sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake_all(&signal_);
  return true;
}

void WorkerPool::join() {
  failure_.guard([this] { fn_(ctx_, 0); });
  if (threads_ > 1) {
    gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
    wait_until([this] { return (gate_.load(std::memory_order_acquire) & kCount) == 0; });
  }
  // Both usually point into the caller's frame.
  fn_ = nullptr;
  ctx_ = nullptr;
  std::exception_ptr failure = failure_.take();
  busy_.store(false, std::memory_order_release);
  if (failure != nullptr) std::rethrow_exception(std::move(failure));
}

void WorkerPool::parallel_for(int count, ItemFn fn, void* ctx, bool wake) {
  struct Loop {
    ItemFn fn;
    void* ctx;
    int count;
    alignas(64) std::atomic<int> next;
  } loop{fn, ctx, count, {0}};
  const Fn body = [](void* arg, int) {
    auto* l = static_cast<Loop*>(arg);
    for (int i; (i = l->next.fetch_add(1, std::memory_order_relaxed)) < l->count;) l->fn(l->ctx, i);
  };
  if (count > 1 && threads_ > 1 && launch(body, &loop, wake)) {
    join();
  } else {
    body(&loop, 0);
  }
}

bool WorkerPool::each(Fn fn, void* ctx) {
  struct Round {
    Fn fn;
    void* ctx;
    int threads;
    std::atomic<int> done;
  } round{fn, ctx, getpid() == owner_ ? threads_ : 1, {0}};
  const Fn body = [](void* arg, int worker) {
    auto* r = static_cast<Round*>(arg);
    struct Done {
      Round* round;
      ~Done() { round->done.fetch_add(1, std::memory_order_release); }
    };
    {
      const Done done{r};
      r->fn(r->ctx, worker);
    }
    // The gate stays open until worker 0 returns, and it returns last.
    if (worker == 0) wait_until([r] { return r->done.load(std::memory_order_acquire) == r->threads; });
  };
  if (!launch(body, &round)) return false;
  join();
  return true;
}

}  // namespace fluxion
