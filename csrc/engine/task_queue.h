// The queue of one layer's tasks, pulled from by the native workers and by foreign executors.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

namespace fluxion {

// The synchronisation types of this file. test/fuzz substitutes its own, whose every access is a point where
// its scheduler may switch to another thread.
struct RealThreads {
  template <class T>
  using Atomic = std::atomic<T>;
  using Mutex = std::mutex;
};

enum class Executor : int { kCpu = 0, kTorch = 1, kAny = 2 };
inline constexpr int kExecutors = 2;  // kAny is not an executor
inline constexpr int kLanes = kExecutors + 1;
inline constexpr const char* kExecutorNames[kLanes] = {"cpu", "torch", "any"};

// Tasks are the numbers 0..count-1 in consecutive lanes: one lane for each executor alone, then one for any
// executor. The order within a lane is the priority. A lane's head is one word {round, end, next}, so a pop
// is one fetch_add that tells both task and round. A pop that straddles two layers takes a task of exactly
// one of them. So each task has one owner.
//
// The owner holds a claim (round and task in one number) and moves the task's state ready -> claimed -> done;
// every step compares the round. After a time-out, unfinished tasks become void. A claim of an earlier round
// or of a void task is always refused: a late delivery cannot touch a later layer.
template <class Sync>
class BasicTaskQueue {
  template <class T>
  using Atomic = typename Sync::template Atomic<T>;

 public:
  static constexpr int kBits = 18;
  static constexpr int64_t kTaskMask = (int64_t{1} << kBits) - 1;
  // Room for one pop past the end by every possible thread, so that `next` never carries into `end`.
  static constexpr int64_t kMaxTasks = kTaskMask - 4096;

  void reserve(int64_t tasks) {
    if (tasks <= capacity_) return;
    state_ = std::make_unique<Atomic<uint64_t>[]>(tasks);
    capacity_ = tasks;
  }

  // lanes: tasks of each lane, together at most what is reserved. Single-threaded, while closed.
  void open(const std::array<int, kLanes>& lanes) {
    round_ = round_ == kRoundMask ? 1 : round_ + 1;
    count_ = 0;
    done_.store(0, std::memory_order_relaxed);
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint64_t begin = count_;
      const uint64_t ready = pack(round_, static_cast<Executor>(lane), kReady);
      for (const int end = count_ + lanes[lane]; count_ < end; ++count_)
        state_[count_].store(ready, std::memory_order_relaxed);
      heads_[lane].word.store(round_ << (2 * kBits) | static_cast<uint64_t>(count_) << kBits | begin,
                              std::memory_order_release);
    }
  }

  // Afterwards every pop fails. Single-threaded.
  void close() {
    for (Head& head : heads_) head.word.store(round_ << (2 * kBits), std::memory_order_release);
  }

  // Claims the next task of the executor's own lane, else of the common one; -1 if none. Any thread.
  int64_t pop(Executor executor) {
    const int64_t own = pop(executor, executor);
    return own >= 0 ? own : pop(Executor::kAny, executor);
  }

  static int task_of(int64_t claim) { return static_cast<int>(claim & kTaskMask); }

  // Whether the claim still holds, and whose it is. Call this and finish() under the lock that revoke()
  // takes. Native workers need no lock, because nothing is revoked while they run.
  bool holds(int64_t claim, Executor* executor) const {
    if (claim < 0 || task_of(claim) >= capacity_) return false;
    const uint64_t seen = state_[task_of(claim)].load(std::memory_order_acquire);
    if (seen >> 8 != static_cast<uint64_t>(claim) >> kBits || (seen & 15) != kClaimed) return false;
    *executor = executor_of(seen);
    return true;
  }

  // Marks the task of a claim that holds as done, after its result or failure was recorded.
  void finish(int64_t claim) {
    Atomic<uint64_t>& state = state_[task_of(claim)];
    state.store((state.load(std::memory_order_relaxed) & ~uint64_t{15}) | kDone, std::memory_order_release);
    done_.fetch_add(1, std::memory_order_acq_rel);
  }

  bool all_done() const { return done_.load(std::memory_order_acquire) == count_; }

  // Takes task i from its owner or from the queue. Returns false if it is done already. Only while no native
  // worker runs, and under the lock.
  bool revoke(int i, Executor* executor) {
    uint64_t seen = state_[i].load(std::memory_order_acquire);
    while ((seen & 15) == kReady || (seen & 15) == kClaimed) {
      *executor = executor_of(seen);
      if (state_[i].compare_exchange_weak(seen, (seen & ~uint64_t{15}) | kVoid, std::memory_order_acq_rel)) {
        done_.fetch_add(1, std::memory_order_acq_rel);
        return true;
      }
    }
    return false;
  }

  int count() const { return count_; }
  // The executor that did task i of the last round; -1 if it was not finished.
  int owner(int i) const {
    const uint64_t seen = state_[i].load(std::memory_order_acquire);
    return (seen & 15) == kDone ? static_cast<int>(executor_of(seen)) : -1;
  }

 private:
  enum State : uint64_t { kReady = 1, kClaimed, kDone, kVoid };
  static constexpr uint64_t kRoundMask = (uint64_t{1} << (64 - 2 * kBits)) - 1;

  struct alignas(64) Head {
    Atomic<uint64_t> word{0};
  };

  // Claims the next task of one lane; -1 when there is none.
  int64_t pop(Executor lane, Executor executor) {
    Atomic<uint64_t>& word = heads_[static_cast<int>(lane)].word;
    // Without the load, an executor that polls could push next far past the end, into the end bits.
    uint64_t head = word.load(std::memory_order_acquire);
    if (next_of(head) >= end_of(head)) return -1;
    head = word.fetch_add(1, std::memory_order_acq_rel);
    const uint64_t task = next_of(head);
    if (task >= end_of(head)) return -1;
    const uint64_t round = head >> (2 * kBits);
    uint64_t expected = pack(round, lane, kReady);
    if (!state_[task].compare_exchange_strong(expected, pack(round, executor, kClaimed),
                                              std::memory_order_acq_rel)) {
      return -1;  // made void between the two
    }
    return static_cast<int64_t>(round << kBits | task);
  }

  static uint64_t next_of(uint64_t head) { return head & kTaskMask; }
  static uint64_t end_of(uint64_t head) { return head >> kBits & kTaskMask; }
  // State word: round, executor (4 bits; the lane of a ready task), state (4 bits).
  static uint64_t pack(uint64_t round, Executor executor, State state) {
    return round << 8 | static_cast<uint64_t>(executor) << 4 | state;
  }
  static Executor executor_of(uint64_t state) { return static_cast<Executor>(state >> 4 & 15); }

  std::unique_ptr<Atomic<uint64_t>[]> state_;
  int64_t capacity_ = 0;
  uint64_t round_ = 0;
  int count_ = 0;
  Head heads_[kLanes];
  alignas(64) Atomic<int> done_{0};
};

using TaskQueue = BasicTaskQueue<RealThreads>;

// How executors with threads of their own claim and finish tasks, and how unfinished tasks are revoked: all
// under one lock.

template <class Queue, class Mutex>
int64_t claim_next(Queue& queue, Mutex& mutex, Executor executor) {
  const std::lock_guard lock(mutex);
  return queue.pop(executor);
}

// Ends a claim with a result or a failure: write(task, executor), if the claim still holds. Returns whether.
template <class Queue, class Mutex, class Write>
bool settle(Queue& queue, Mutex& mutex, int64_t claim, Write write) {
  const std::lock_guard lock(mutex);
  Executor executor;
  if (!queue.holds(claim, &executor)) return false;
  write(Queue::task_of(claim), executor);
  queue.finish(claim);
  return true;
}

// Revokes every unfinished task: lost(task, executor). Only while no native worker runs.
template <class Queue, class Mutex, class Lost>
void revoke_rest(Queue& queue, Mutex& mutex, Lost lost) {
  const std::lock_guard lock(mutex);
  for (int i = 0; i < queue.count(); ++i) {
    Executor executor;
    if (queue.revoke(i, &executor)) lost(i, executor);
  }
}

}  // namespace fluxion
