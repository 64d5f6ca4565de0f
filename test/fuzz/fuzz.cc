// The schedule fuzzer: runs passes over a mailbox, each followed by a clean one, in the requested number of
// interleavings. Prints one line, or the first failure; then it exits with 1.
//
//   protocol_fuzz [--random N] [--exhaustive N] [--deviations D] [--seed S] [--threads T]
//
// random: number of runs with random choices. exhaustive: maximum number of runs with at most D deviations
// from the ordinary schedule. In that one every thread runs until it blocks, every store is visible at once,
// and no fault happens.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "scenario.h"
#include "scheduler.h"

namespace fuzz {
namespace {

struct Simulated {
  template <class T>
  using Atomic = fuzz::Atomic<T>;
  template <class T>
  using Cell = fuzz::Cell<T>;
  using Mutex = fuzz::Mutex;
  struct Patience {
    bool spent() { return Scheduler::get().spent(); }
    void pause() { Scheduler::get().pause(); }
  };
  static void fence() { Scheduler::get().fence(); }
  static void pause() { Scheduler::get().pause(); }
  static int choose(int n) { return Scheduler::get().choose(n); }
  static bool seldom() { return Scheduler::get().seldom(); }
  static void fault() { Scheduler::get().fault(); }
  static void check(bool holds, const char* sentence) { Scheduler::get().check(holds, sentence); }
};

class Random final : public Chooser {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {
    for (int i = 0; i < 4; ++i) draw();
    // Some runs switch at every point, some rarely; some make most stores visible at once.
    constexpr uint32_t kStay[] = {0, 128, 200, 240};
    stay_ = kStay[draw() % 4];
  }
  int choose(int n) override {
    const uint64_t x = draw();
    if ((x & 255) < stay_) return 0;
    return static_cast<int>((x >> 16) % static_cast<uint64_t>(n));
  }
  bool seldom() override { return (draw() & 15) == 0; }
  uint64_t draw() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ >> 8;
  }

 private:
  uint64_t state_;
  uint64_t stay_;
};

// All runs with at most `deviations` choices other than 0, one after another.
class Exhaustive final : public Chooser {
 public:
  explicit Exhaustive(int deviations) : deviations_(deviations) {}
  int choose(int n) override {
    const size_t at = depth_++;
    if (at == path_.size()) path_.push_back({0, n});
    path_[at].of = n;
    return path_[at].taken;
  }
  bool seldom() override { return choose(2) == 1; }
  // Advances to the next run; false if there is none.
  bool next() {
    path_.resize(depth_);
    depth_ = 0;
    int used = 0;
    for (const Choice& choice : path_) used += choice.taken != 0;
    for (; !path_.empty(); path_.pop_back()) {
      Choice& last = path_.back();
      used -= last.taken != 0;
      if (last.taken + 1 < last.of && used < deviations_) {
        ++last.taken;
        return true;
      }
    }
    return false;
  }

 private:
  struct Choice {
    int taken, of;
  };
  int deviations_;
  std::vector<Choice> path_;
  size_t depth_ = 0;
};

class Ordinary final : public Chooser {
 public:
  int choose(int) override { return 0; }
  bool seldom() override { return false; }
};

struct Counts {
  std::vector<uint64_t> traces;
  int64_t points = 0, faults = 0;
  std::string failure;
};

// Runs a pass with the given rules, then a clean one with another chooser. False: the run failed.
bool run(Chooser* chooser, Chooser* after, const Rules& rules, Counts* counts) {
  Scheduler& s = Scheduler::get();
  Scenario<Simulated> scenario;
  uint64_t trace = 0;
  for (const bool first : {true, false}) {
    Rules now = rules;
    if (!first) {
      scenario.reset_mailbox();
      now.faults = now.cancels = false;
      now.layers = 1;
    }
    s.rules(now.faults);
    const bool ran = s.run(first ? chooser : after, scenario.threads(now));
    counts->points += s.points();
    counts->faults += s.faults();
    counts->failure = ran ? scenario.check(s.faults() == 0) : s.failure();
    if (!counts->failure.empty()) {
      if (!first) counts->failure += ", after a reset";
      return false;
    }
    trace = trace * 0x9e3779b97f4a7c15ull + s.trace();
  }
  counts->traces.push_back(trace);
  return true;
}

Rules rules_of(uint64_t kind) {
  Rules rules;
  rules.layers = 2 + static_cast<int>(kind % 2);
  rules.tasks = 2 + static_cast<int>(kind / 2 % 4);
  rules.own = kind / 512 % 2 != 0;
  rules.copies = kind / 1024 % 2 != 0;
  rules.blocks = 1 + static_cast<int>(kind / 8 % 2);
  rules.parts = kind / 16 % 2 != 0;
  rules.faults = kind / 32 % 4 != 0;
  rules.cancels = rules.faults && kind / 128 % 4 == 0;
  return rules;
}
constexpr uint64_t kKinds = 2048;

struct Options {
  int64_t random = 0, exhaustive = 0;
  int deviations = 2, threads = 1;
  uint64_t seed = 1;
};

void random_runs(const Options& options, int thread, Counts* counts) {
  for (int64_t i = thread; i < options.random; i += options.threads) {
    Random chooser(options.seed * 1'000'000'007 + static_cast<uint64_t>(i));
    if (run(&chooser, &chooser, rules_of(chooser.draw() % kKinds), counts)) continue;
    counts->failure += " (random run " + std::to_string(i) + ")";
    return;
  }
}

void exhaustive_runs(const Options& options, int thread, Counts* counts) {
  // Small passes, with and without faults.
  std::vector<Rules> all;
  for (const bool faults : {false, true}) {
    for (int blocks = 1; blocks <= 2; ++blocks) {
      Rules rules;
      rules.layers = 2;
      rules.blocks = blocks;
      rules.faults = faults;
      all.push_back(rules);
    }
  }
  for (size_t kind = thread; kind < all.size(); kind += options.threads) {
    Exhaustive chooser(options.deviations);
    Ordinary ordinary;
    int64_t left = options.exhaustive / static_cast<int64_t>(all.size());
    do {
      if (run(&chooser, &ordinary, all[kind], counts)) continue;
      counts->failure += " (exhaustive, kind " + std::to_string(kind) + ")";
      return;
    } while (--left > 0 && chooser.next());
  }
}

int main_of(const Options& options) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<Counts> counts(options.threads);
  std::vector<std::thread> threads;
  for (int i = 0; i < options.threads; ++i) {
    threads.emplace_back([&, i] {
      if (options.exhaustive > 0) exhaustive_runs(options, i, &counts[i]);
      if (counts[i].failure.empty()) random_runs(options, i, &counts[i]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  Counts all;
  for (Counts& one : counts) {
    if (!one.failure.empty()) {
      std::printf("FAILED: %s\n", one.failure.c_str());
      return 1;
    }
    all.traces.insert(all.traces.end(), one.traces.begin(), one.traces.end());
    all.points += one.points;
    all.faults += one.faults;
  }
  const size_t runs = all.traces.size();
  std::sort(all.traces.begin(), all.traces.end());
  all.traces.erase(std::unique(all.traces.begin(), all.traces.end()), all.traces.end());
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("runs %zu distinct %zu points %lld faults %lld seconds %.1f\n", runs, all.traces.size(),
              static_cast<long long>(all.points), static_cast<long long>(all.faults), seconds);
  return 0;
}

}  // namespace
}  // namespace fuzz

int main(int argc, char** argv) {
  fuzz::Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const long long value = std::atoll(argv[i + 1]);
    if (name == "--random")
      options.random = value;
    else if (name == "--exhaustive")
      options.exhaustive = value;
    else if (name == "--deviations")
      options.deviations = static_cast<int>(value);
    else if (name == "--seed")
      options.seed = static_cast<uint64_t>(value);
    else if (name == "--threads")
      options.threads = static_cast<int>(std::clamp(value, 1ll, 256ll));
    else {
      std::fprintf(stderr, "There is no option %s.\n", name.c_str());
      return 2;
    }
  }
  return fuzz::main_of(options);
}
