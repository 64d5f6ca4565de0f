// Runs the fuzzer's scenario on real threads for some time: a thread sanitizer may find what a scheduler of
// fibers cannot. Prints one line; exits with 1 if a pass failed.
//
//   protocol_stress [SECONDS] [SEED]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "runtime/worker_pool.h"
#include "scenario.h"

namespace fuzz {
namespace {

uint64_t& state() {
  static thread_local uint64_t x = 1;
  return x;
}

uint64_t draw() {
  uint64_t& x = state();
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return x >> 8;
}

std::atomic<int> faults{0};
bool impatient = false;

struct Real {
  template <class T>
  using Atomic = std::atomic<T>;
  template <class T>
  class Cell {
   public:
    T read() const { return value_; }
    void write(T value) { value_ = value; }

   private:
    T value_{};
  };
  using Mutex = std::mutex;
  class Patience {
   public:
    bool spent() {
      if (!impatient || ++looks_ < kLooks || draw() % 256 != 0) return false;
      faults.fetch_add(1);
      return true;
    }
    void pause() { Real::pause(); }

   private:
    static constexpr int kLooks = 200;
    int looks_ = 0;
  };
  static void fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
  static void pause() {
    cpu_pause();
    if (draw() % 8 == 0) sched_yield();
  }
  static int choose(int n) { return static_cast<int>(draw() % static_cast<uint64_t>(n)); }
  static bool seldom() { return draw() % 8 == 0; }
  static void fault() { faults.fetch_add(1); }
  static void check(bool holds, const char* sentence) {
    if (holds) return;
    std::printf("FAILED: %s\n", sentence);
    std::fflush(stdout);
    std::_Exit(1);
  }
};

int main_of(double seconds, uint64_t seed) {
  using SteadyClock = std::chrono::steady_clock;
  const auto end = SteadyClock::now() + std::chrono::duration<double>(seconds);
  state() = seed * 0x9e3779b97f4a7c15ull + 1;
  int64_t passes = 0, faulty = 0;
  Scenario<Real> scenario;
  while (SteadyClock::now() < end) {
    Rules rules;
    rules.layers = kMaxLayers;
    rules.tasks = 1 + static_cast<int>(draw() % kMaxTasks);
    rules.own = draw() % 2 == 0;
    rules.copies = draw() % 2 == 0;
    rules.blocks = 1 + static_cast<int>(draw() % 2);
    rules.parts = draw() % 2 == 0;
    rules.faults = draw() % 2 == 0;
    rules.cancels = rules.faults && draw() % 4 == 0;
    impatient = rules.faults;
    faults = 0;
    std::vector<std::thread> threads;
    for (auto& body : scenario.threads(rules)) {
      threads.emplace_back([body = std::move(body), seed = draw()] {
        state() = seed | 1;
        body();
      });
    }
    for (std::thread& thread : threads) thread.join();
    const std::string wrong = scenario.check(faults == 0);
    Real::check(wrong.empty(), wrong.c_str());
    scenario.reset_mailbox();
    ++passes;
    faulty += faults > 0;
  }
  std::printf("passes %lld faulty %lld\n", static_cast<long long>(passes), static_cast<long long>(faulty));
  return 0;
}

}  // namespace
}  // namespace fuzz

int main(int argc, char** argv) {
  return fuzz::main_of(argc > 1 ? std::atof(argv[1]) : 5, argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
}
