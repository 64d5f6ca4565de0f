// The queue of one layer's tasks, pulled from by the native workers and by foreign executors.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace fluxion {

enum class Executor : int { kCpu = 0, kTorch = 1, kGpu = 2 };
inline constexpr int kExecutors = 3;
inline constexpr const char* kExecutorNames[kExecutors] = {"cpu", "torch", "gpu"};

// Tasks are the numbers 0..count-1; their order is their priority. The head is one word {round, count, next},
// so a pop is one fetch_add that tells both which task was taken and of which round: a pop that straddles two
// layers takes a task of exactly one of them. Each task therefore has one owner, by construction.
//
// The owner holds a claim (round and task in one number) and moves the task's state ready -> claimed -> done;
// every step compares the round. After a time-out what is not done becomes "void", and a claim of an earlier
// round, or of a void task, is refused for ever: a late delivery cannot touch a later layer.
class TaskQueue {
 public:
  static constexpr int kBits = 18;
  static constexpr int64_t kTaskMask = (int64_t{1} << kBits) - 1;
  // Room for one pop past the end by every thread there can be, so that `next` never carries into `count`.
  static constexpr int64_t kMaxTasks = kTaskMask - 4096;

  void reserve(int64_t tasks) {
    if (tasks <= capacity_) return;
    state_ = std::make_unique<std::atomic<uint64_t>[]>(tasks);
    capacity_ = tasks;
  }

  // Single threaded, while closed. count <= reserved.
  void open(int count) {
    round_ = round_ == kRoundMask ? 1 : round_ + 1;
    count_ = count;
    done_.store(0, std::memory_order_relaxed);
    for (int i = 0; i < count; ++i) state_[i].store(pack(Executor::kCpu, kReady), std::memory_order_relaxed);
    head_.store(round_ << (2 * kBits) | static_cast<uint64_t>(count) << kBits, std::memory_order_release);
  }

  // After it no pop succeeds. Single threaded.
  void close() { head_.store(round_ << (2 * kBits), std::memory_order_release); }

  // The claim of the next task, or -1. Any thread.
  int64_t pop(Executor executor) {
    // The load keeps the count bits safe from an idle executor that polls: next never runs far past count.
    uint64_t head = head_.load(std::memory_order_acquire);
    if (next_of(head) >= count_of(head)) return -1;
    head = head_.fetch_add(1, std::memory_order_acq_rel);
    const uint64_t task = next_of(head);
    if (task >= count_of(head)) return -1;
    const uint64_t round = head >> (2 * kBits);
    uint64_t expected = pack(round, Executor::kCpu, kReady);
    if (!state_[task].compare_exchange_strong(expected, pack(round, executor, kClaimed),
                                              std::memory_order_acq_rel)) {
      return -1;  // made void between the two
    }
    return static_cast<int64_t>(round << kBits | task);
  }

  static int task_of(int64_t claim) { return static_cast<int>(claim & kTaskMask); }

  // Whether the claim still holds, and whose it is. To be called, with finish(), under the lock that revoke()
  // takes; native workers, which run only while nothing is revoked, need neither.
  bool holds(int64_t claim, Executor* executor) const {
    if (claim < 0 || task_of(claim) >= capacity_) return false;
    const uint64_t seen = state_[task_of(claim)].load(std::memory_order_acquire);
    if (seen >> 8 != static_cast<uint64_t>(claim) >> kBits || (seen & 15) != kClaimed) return false;
    *executor = executor_of(seen);
    return true;
  }

  // The result of a claim that holds is written (or its failure recorded).
  void finish(int64_t claim) {
    std::atomic<uint64_t>& state = state_[task_of(claim)];
    state.store((state.load(std::memory_order_relaxed) & ~uint64_t{15}) | kDone, std::memory_order_release);
    done_.fetch_add(1, std::memory_order_acq_rel);
  }

  bool all_done() const { return done_.load(std::memory_order_acquire) == count_; }

  // Takes task i away from whoever has it. True when it was taken, false when it is done. Only while no
  // native worker runs, and under the lock.
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
  // Executor that took task i of the last round; -1 when nobody finished it.
  int owner(int i) const {
    const uint64_t seen = state_[i].load(std::memory_order_acquire);
    return (seen & 15) == kDone ? static_cast<int>(executor_of(seen)) : -1;
  }

 private:
  enum State : uint64_t { kReady = 1, kClaimed, kDone, kVoid };
  static constexpr uint64_t kRoundMask = (uint64_t{1} << (64 - 2 * kBits)) - 1;

  static uint64_t next_of(uint64_t head) { return head & kTaskMask; }
  static uint64_t count_of(uint64_t head) { return head >> kBits & kTaskMask; }
  // State word: round, executor (4 bits), state (4 bits).
  static uint64_t pack(uint64_t round, Executor executor, State state) {
    return round << 8 | static_cast<uint64_t>(executor) << 4 | state;
  }
  uint64_t pack(Executor executor, State state) const { return pack(round_, executor, state); }
  static Executor executor_of(uint64_t state) { return static_cast<Executor>(state >> 4 & 15); }

  std::unique_ptr<std::atomic<uint64_t>[]> state_;
  int64_t capacity_ = 0;
  uint64_t round_ = 0;
  int count_ = 0;
  alignas(64) std::atomic<uint64_t> head_{0};
  alignas(64) std::atomic<int> done_{0};
};

}  // namespace fluxion
