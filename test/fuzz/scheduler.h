// A scheduler of fibers with a weak memory: at every access to shared memory another thread may continue, and
// stores become visible late. One run is one interleaving, selected by a Chooser.
//
// Memory. A store to an atomic becomes visible at once or waits in its thread's buffer. Stores leave the
// buffer in any order that their memory orders and locations allow. A sequentially consistent fence, and a
// releasing read-modify-write, empty the buffer. Plain memory (Cell) is checked with vector clocks: the run
// fails unless release and acquire order an access after every conflicting one.
//
// Time. A waiting thread (pause) continues only after something became visible. A thread that waits with
// patience may time out, by choice. If all threads wait, time passes for one of these; if there is none, the
// run hangs.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fuzz {

inline constexpr int kMaxThreads = 8;

using Clock = std::array<uint32_t, kMaxThreads>;

inline void join(Clock* to, const Clock& from) {
  for (int i = 0; i < kMaxThreads; ++i) (*to)[i] = std::max((*to)[i], from[i]);
}

// Selects one of n continuations of a run; 0 is the ordinary one.
class Chooser {
 public:
  virtual ~Chooser() = default;
  virtual int choose(int n) = 0;
  // Whether a rare event happens now.
  virtual bool seldom() = 0;
};

struct Location {
  uint64_t value = 0;
  Clock clock{};     // of the release that wrote the value
  uint64_t run = 0;  // the run of the clock
};

class Scheduler {
 public:
  static Scheduler& get() {
    static thread_local Scheduler scheduler;
    return scheduler;
  }

  // Runs the bodies as threads until all have ended. False if the run failed: see failure().
  bool run(Chooser* chooser, std::vector<std::function<void()>> bodies);
  const std::string& failure() const { return failure_; }
  int64_t points() const { return points_; }
  // Hash of all choices of the run.
  uint64_t trace() const { return trace_; }

  // Used by the threads of a run.
  bool running() const { return current_ >= 0; }
  uint64_t runs() const { return runs_; }
  int self() const { return current_; }
  [[noreturn]] void fail(std::string sentence);
  void check(bool holds, const char* sentence) {
    if (!holds) fail(sentence);
  }
  // A point at which other threads may continue.
  void point();
  // Waits until something became visible since the previous call.
  void pause();
  // Whether this thread, which waits with patience, times out now.
  bool spent();
  int choose(int n);
  bool seldom();
  // Rules of the run: whether time-outs may happen at all. fault(): an event happened that excuses failures.
  void rules(bool impatient) { impatient_ = impatient, faults_ = 0; }
  void fault() { ++faults_; }
  int faults() const { return faults_; }

  uint64_t load(Location* at, std::memory_order order);
  void store(Location* at, uint64_t value, std::memory_order order);
  template <class Change>
  uint64_t modify(Location* at, std::memory_order order, Change change);
  void fence();
  void lock(Location* mutex);
  void unlock(Location* mutex);

  Clock& clock() { return threads_[current_].clock; }

 private:
  enum class State : uint8_t { kReady, kPaused, kLocked, kEnded };
  struct Store {
    Location* at;
    uint64_t value;
    Clock clock;
    bool release;
  };
  struct Thread {
    State state = State::kEnded;
    bool patient = false, expired = false;
    uint64_t seen = 0;  // version_ at its last pause
    Location* mutex = nullptr;
    Clock clock{};
    std::vector<Store> buffer;
    std::function<void()> body;
    std::unique_ptr<char[]> stack;
    ucontext_t context;
    jmp_buf at;
    bool started = false;
  };
  static constexpr size_t kStack = 128 << 10;
  static constexpr int64_t kMaxPoints = 20000;

  static void entry();
  void switch_to(int next);
  void leave();
  bool can_run(const Thread& t) const;
  void release_own(Thread* t, Location* at);
  void flush(Thread* t, size_t index);
  void drain(Thread* t);
  void publish(const Store& store);
  int next();
  void mix(int choice, int n) {
    trace_ = (trace_ ^ (choice * 64 + n)) * 0x9e3779b97f4a7c15ull + (trace_ >> 29);
  }

  Chooser* chooser_ = nullptr;
  std::array<Thread, kMaxThreads> threads_;
  int count_ = 0, ended_ = 0, current_ = -1;
  uint64_t version_ = 0, trace_ = 0;
  int64_t points_ = 0;
  uint64_t runs_ = 0;
  bool impatient_ = false;
  int faults_ = 0;
  std::string failure_;
  jmp_buf main_;
};

inline bool Scheduler::run(Chooser* chooser, std::vector<std::function<void()>> bodies) {
  chooser_ = chooser;
  ++runs_;
  count_ = static_cast<int>(bodies.size());
  ended_ = 0;
  points_ = 0;
  trace_ = 0;
  version_ = 1;
  failure_.clear();
  for (int i = 0; i < count_; ++i) {
    Thread& t = threads_[i];
    t.state = State::kReady;
    t.patient = t.expired = false;
    t.seen = 0;
    t.clock = {};
    t.clock[i] = 1;
    t.buffer.clear();
    t.body = std::move(bodies[i]);
  }
  if (_setjmp(main_) == 0) {
    current_ = 0;
    switch_to(next());
  }
  current_ = -1;
  // Restart fibers that were left in the middle of a run.
  if (!failure_.empty()) {
    for (Thread& t : threads_) t.started = false;
  }
  return failure_.empty();
}

inline void Scheduler::entry() {
  Scheduler& s = get();
  for (;;) {
    s.threads_[s.current_].body();
    s.leave();
  }
}

// Ends the current thread.
inline void Scheduler::leave() {
  threads_[current_].state = State::kEnded;
  ++ended_;
  const int self = current_;
  if (_setjmp(threads_[self].at) != 0) return;  // reached in the next run
  const int to = next();
  if (to < 0) _longjmp(main_, 1);
  switch_to(to);
}

inline void Scheduler::switch_to(int to) {
  current_ = to;
  Thread& t = threads_[to];
  if (t.started) _longjmp(t.at, 1);
  t.started = true;
  if (t.stack == nullptr) t.stack = std::make_unique<char[]>(kStack);
  getcontext(&t.context);
  t.context.uc_stack.ss_sp = t.stack.get();
  t.context.uc_stack.ss_size = kStack;
  t.context.uc_link = nullptr;
  makecontext(&t.context, &Scheduler::entry, 0);
  setcontext(&t.context);
}

inline void Scheduler::fail(std::string sentence) {
  failure_ = std::move(sentence);
  _longjmp(main_, 1);
}

inline bool Scheduler::can_run(const Thread& t) const {
  switch (t.state) {
    case State::kReady:
      return true;
    case State::kPaused:
      return t.expired || t.seen != version_;
    case State::kLocked:
      return t.mutex->value == 0;
    case State::kEnded:
      return false;
  }
  return false;
}

// The next thread: the current one if it can run and no other is chosen. -1: all have ended.
inline int Scheduler::next() {
  for (;;) {
    int options[kMaxThreads + 1], n = 0, buffered = 0;
    for (int i = 0; i < count_; ++i) {
      const int t = (current_ + i) % count_;
      if (can_run(threads_[t])) options[n++] = t;
      buffered += static_cast<int>(threads_[t].buffer.size());
    }
    if (buffered > 0) options[n++] = -1;  // or a store becomes visible
    if (n == 0) {
      if (ended_ == count_) return -1;
      int waiting = 0;
      for (int i = 0; i < count_; ++i)
        if (threads_[i].state == State::kPaused && threads_[i].patient) options[waiting++] = i;
      if (waiting == 0 || !impatient_) fail("it hangs");
      // Without a fault, no thread may depend on a time-out.
      if (faults_ == 0) fail("it hangs until somebody loses patience");
      threads_[options[choose(waiting)]].expired = true;
      continue;
    }
    const int choice = n == 1 ? 0 : choose(n);
    if (options[choice] >= 0) return options[choice];
    int at = buffered == 1 ? 0 : choose(buffered);
    for (int i = 0; i < count_; ++i) {
      Thread& t = threads_[i];
      if (at < static_cast<int>(t.buffer.size())) {
        flush(&t, at);
        break;
      }
      at -= static_cast<int>(t.buffer.size());
    }
  }
}

inline void Scheduler::point() {
  if (current_ < 0) return;
  if (++points_ > kMaxPoints) fail("it goes on for ever");
  const int self = current_, to = next();
  if (to == self) return;
  if (_setjmp(threads_[self].at) == 0) switch_to(to);
}

inline void Scheduler::pause() {
  Thread& t = threads_[current_];
  t.state = t.seen == version_ ? State::kPaused : State::kReady;
  t.seen = version_;
  point();
  t.state = State::kReady;
  t.patient = false;
}

inline bool Scheduler::spent() {
  Thread& t = threads_[current_];
  t.patient = true;  // until the next pause
  if (t.expired) {
    t.expired = false;
    return true;
  }
  if (!impatient_ || !seldom()) return false;
  fault();
  return true;
}

inline int Scheduler::choose(int n) {
  const int choice = chooser_->choose(n);
  mix(choice, n);
  return choice;
}

inline bool Scheduler::seldom() {
  const bool yes = chooser_->seldom();
  mix(yes, 63);
  return yes;
}

inline void Scheduler::publish(const Store& store) {
  store.at->value = store.value;
  store.at->clock = store.clock;
  store.at->run = runs_;
  ++version_;
}

// Makes a buffered store visible, after the stores that must precede it: those to its location, and before a
// release all.
inline void Scheduler::flush(Thread* t, size_t index) {
  const Store store = t->buffer[index];
  for (size_t i = 0; i < index;) {
    if (store.release || t->buffer[i].at == store.at) {
      const size_t before = t->buffer.size();
      flush(t, i);
      index -= before - t->buffer.size();
    } else {
      ++i;
    }
  }
  publish(store);
  t->buffer.erase(t->buffer.begin() + static_cast<std::ptrdiff_t>(index));
}

inline void Scheduler::drain(Thread* t) {
  while (!t->buffer.empty()) flush(t, 0);
}

inline uint64_t Scheduler::load(Location* at, std::memory_order order) {
  point();
  Thread& t = threads_[current_];
  for (size_t i = t.buffer.size(); i-- > 0;)
    if (t.buffer[i].at == at) return t.buffer[i].value;
  if (order != std::memory_order_relaxed && at->run == runs_) join(&t.clock, at->clock);
  return at->value;
}

inline void Scheduler::store(Location* at, uint64_t value, std::memory_order order) {
  point();
  Thread& t = threads_[current_];
  const bool release = order != std::memory_order_relaxed;
  t.buffer.push_back({at, value, release ? t.clock : Clock{}, release});
  if (release) ++t.clock[current_];
  if (order == std::memory_order_seq_cst) {
    drain(&t);
  } else if (choose(2) == 0) {
    flush(&t, t.buffer.size() - 1);
  }
}

template <class Change>
uint64_t Scheduler::modify(Location* at, std::memory_order order, Change change) {
  point();
  Thread& t = threads_[current_];
  const bool release = order == std::memory_order_release || order == std::memory_order_acq_rel ||
                       order == std::memory_order_seq_cst;
  const bool acquire = order != std::memory_order_relaxed && order != std::memory_order_release;
  if (release) {
    drain(&t);
  } else {
    for (size_t i = 0; i < t.buffer.size();) {
      if (t.buffer[i].at == at) {
        flush(&t, i);
        i = 0;
      } else {
        ++i;
      }
    }
  }
  const uint64_t before = at->value;
  if (at->run != runs_) at->clock = {};
  at->run = runs_;
  if (acquire) join(&t.clock, at->clock);
  if (change(before, &at->value)) {
    // A read-modify-write continues the release sequence that it reads.
    if (release) {
      join(&at->clock, t.clock);
      ++t.clock[current_];
    }
    ++version_;
  }
  return before;
}

inline void Scheduler::fence() {
  point();
  drain(&threads_[current_]);
}

inline void Scheduler::lock(Location* mutex) {
  point();
  Thread& t = threads_[current_];
  while (mutex->value != 0) {
    t.state = State::kLocked;
    t.mutex = mutex;
    point();
    t.state = State::kReady;
  }
  mutex->value = 1;
  if (mutex->run == runs_) join(&t.clock, mutex->clock);
}

inline void Scheduler::unlock(Location* mutex) {
  Thread& t = threads_[current_];
  drain(&t);
  mutex->clock = t.clock;
  mutex->run = runs_;
  mutex->value = 0;
  ++t.clock[current_];
  // This does not wake pauses: changes made under the lock do so themselves.
}

// ---- Synchronisation primitives for code under the scheduler.

template <class T>
class Atomic {
 public:
  Atomic() = default;
  explicit Atomic(T value) { at_.value = pack(value); }

  T load(std::memory_order order = std::memory_order_seq_cst) const {
    Scheduler& s = Scheduler::get();
    return unpack(s.running() ? s.load(&at_, order) : at_.value);
  }
  void store(T value, std::memory_order order = std::memory_order_seq_cst) {
    Scheduler& s = Scheduler::get();
    if (s.running()) {
      s.store(&at_, pack(value), order);
    } else {
      at_.value = pack(value);
    }
  }
  T fetch_add(T more, std::memory_order order = std::memory_order_seq_cst) {
    return unpack(Scheduler::get().modify(&at_, order, [&](uint64_t seen, uint64_t* value) {
      *value = pack(static_cast<T>(unpack(seen) + more));
      return true;
    }));
  }
  bool compare_exchange_strong(T& expected, T desired, std::memory_order order = std::memory_order_seq_cst) {
    bool same = false;
    const uint64_t seen = Scheduler::get().modify(&at_, order, [&](uint64_t was, uint64_t* value) {
      same = was == pack(expected);
      if (same) *value = pack(desired);
      return same;
    });
    expected = unpack(seen);
    return same;
  }
  bool compare_exchange_weak(T& expected, T desired, std::memory_order order = std::memory_order_seq_cst) {
    return compare_exchange_strong(expected, desired, order);
  }

 private:
  static uint64_t pack(T value) { return static_cast<uint64_t>(value); }
  static T unpack(uint64_t value) { return static_cast<T>(value); }
  mutable Location at_;
};

class Mutex {
 public:
  void lock() { Scheduler::get().lock(&at_); }
  void unlock() { Scheduler::get().unlock(&at_); }

 private:
  Location at_;
};

// Plain memory: an access must be ordered after all conflicting ones.
template <class T>
class Cell {
 public:
  T read() const {
    Scheduler& s = Scheduler::get();
    if (!s.running()) return value_;
    begin(s);
    const Clock& now = s.clock();
    if (written_by_ >= 0 && written_at_ > now[written_by_]) s.fail("it reads what is being written");
    reads_[s.self()] = now[s.self()];
    return value_;
  }
  void write(T value) {
    Scheduler& s = Scheduler::get();
    if (s.running()) {
      begin(s);
      const Clock& now = s.clock();
      if (written_by_ >= 0 && written_at_ > now[written_by_]) s.fail("it writes what is being written");
      for (int i = 0; i < kMaxThreads; ++i)
        if (reads_[i] > now[i]) s.fail("it writes what is being read");
      written_by_ = s.self();
      written_at_ = now[s.self()];
    }
    value_ = value;
  }

 private:
  // Accesses before a run precede all accesses of the run.
  void begin(const Scheduler& s) const {
    if (run_ == s.runs()) return;
    run_ = s.runs();
    written_by_ = -1;
    reads_ = {};
  }

  T value_{};
  mutable uint64_t run_ = 0;
  mutable int written_by_ = -1;
  uint32_t written_at_ = 0;
  mutable Clock reads_{};
};

}  // namespace fuzz
