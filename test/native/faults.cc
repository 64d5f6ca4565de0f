// Deliberate failures: workers that throw, and a kind of task that does.
#include <sys/mman.h>

#include <atomic>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "ffi/plan.h"
#include "runtime/host_memory.h"
#include "runtime/sums.h"
#include "runtime/topology.h"
#include "runtime/worker_pool.h"

namespace fluxion {

// Stand-ins for the base class's methods, which faults do not use: this library has its own vtable.
void TaskKind::reserve(int, int, Scratch*) const {}
Selection TaskKind::run(const Layer&, const Task&, Scratch*, float*, float*) const { return {}; }

namespace {

constexpr int kBlk = 2;  // of the groups that the kind takes

[[noreturn]] void fail(const std::string& what) {
  if (what == "memory") throw std::bad_alloc();
  if (what == "number") throw 7;
  throw std::runtime_error("This was to happen.");
}

// Its tasks throw: themselves, or in the last of the chunks that other workers help with.
class Failing : public TaskKind {
 public:
  Failing(std::string what, int chunks) : what_(std::move(what)), chunks_(chunks) {}

  void check_shape(const LayerPlan&) const override {}
  bool takes(const Layer& layer, const Task& task) const override { return layer.blk(task) == kBlk; }
  std::string wrong(const Layer&, const Task&) const override { return ""; }
  int64_t bytes(const Layer&, const Task&) const override { return 1 << 20; }
  int ranked_tokens(const Layer&, const Task&) const override { return 0; }
  void reserve(int, int, Scratch*) const override {}
  Selection select(const Layer&, const Task&, Scratch*) const override { return {}; }
  Selection run(const Layer&, const Task&, Scratch* scratch, float*, float*) const override {
    if (chunks_ == 0) fail(what_);
    scratch->stage.run(chunks_, scratch, [&](int chunk, Scratch*) {
      // Long enough for other workers to take some of the chunks.
      for (const int64_t end = now_ns() + 200'000; now_ns() < end;) cpu_pause();
      if (chunk == chunks_ - 1) fail(what_);
    });
    return {};
  }

 private:
  std::string what_;
  int chunks_;
};

TaskKindRef failing_kind(ffi::String what, int64_t chunks) {
  return make_kind<Failing>(std::string(what), static_cast<int>(chunks));
}

// Tries every way to use a pool of `threads` workers, of which `thrower` throws (-1: none). Returns how often
// the caller got the exception. Each way is tried once more without an exception and must then do all the
// work.
int64_t failing_workers(int64_t threads, int64_t thrower) {
  WorkerPool pool(static_cast<int>(threads), {});
  struct Job {
    int64_t thrower, threads;
    std::atomic<int> inside{0}, items{0};
  };
  int64_t caught = 0;
  const auto attempt = [&](const auto& use) {
    for (const int64_t who : {thrower, int64_t{-1}}) {
      Job job{who, threads};
      try {
        use(&job);
      } catch (const std::runtime_error&) {
        ++caught;
      }
      if (job.inside.load() != 0) throw std::logic_error("A worker was inside after the caller had gone on.");
      if (who == -1 && job.items.load() < threads) throw std::logic_error("Something was left undone.");
    }
  };
  // All workers enter, so that the thrower is among them.
  const auto all = [](void* ctx, int worker) {
    Job* job = static_cast<Job*>(ctx);
    ++job->inside;
    if (worker == job->thrower) {
      --job->inside;
      throw std::runtime_error("This was to happen.");
    }
    ++job->items;
    --job->inside;
  };
  attempt([&](Job* job) { pool.each(all, job); });
  attempt([&](Job* job) {
    const auto wait = [](void* ctx, int worker) {
      Job* j = static_cast<Job*>(ctx);
      ++j->items;
      wait_until([&] { return j->items.load() >= j->threads; });
      if (worker == j->thrower) throw std::runtime_error("This was to happen.");
    };
    if (!pool.launch(wait, job)) throw std::logic_error("The pool was left busy.");
    pool.join();
  });
  attempt([&](Job* job) {
    const auto item = [](void* ctx, int i) {
      Job* j = static_cast<Job*>(ctx);
      ++j->items;
      if (i == j->thrower) throw std::runtime_error("This was to happen.");
    };
    pool.parallel_for(static_cast<int>(threads), item, job);
  });
  return caught;
}

// Resident bytes of a mapping after threads of `nodes` nodes, which all have this one core, touched it in
// turn.
int64_t touched_in_turn(int64_t bytes, int64_t nodes, int64_t core) {
  const HostMemory memory(bytes);
  std::vector<NumaNode> all;
  for (int n = 0; n < nodes; ++n) all.push_back({n, {static_cast<int>(core)}});
  touch_in_turn(memory, all);
  std::vector<unsigned char> there(bytes / kSmallPage);
  if (mincore(memory.data(), bytes, there.data()) != 0) return -1;
  int64_t count = 0;
  for (const unsigned char page : there) count += page & 1;
  return count * kSmallPage;
}

// Differences between the plain C++ sum and the one of this CPU, for tokens of `bytes` bytes.
int64_t sums_that_differ(int64_t bytes, int64_t times) {
  uint64_t word = 1;
  std::vector<char> data(bytes + 8);
  int64_t differ = 0;
  for (int64_t i = 0; i < times; ++i) {
    for (char& at : data) at = static_cast<char>((word = mix(word, i)) >> 32);
    Sums plain(word, add_words), best(word);
    for (int part = 0; part < 2; ++part) {
      plain.add(data.data() + i % 8, bytes);
      best.add(data.data() + i % 8, bytes);
    }
    if (plain.take() != best.take()) ++differ;
  }
  return differ;
}

// Bytes of a token in which a changed bit leaves the plain sum unchanged.
int64_t bytes_without_a_say(int64_t bytes) {
  std::vector<char> data(bytes, 'a');
  const auto sum = [&] {
    Sums sums(0, add_words);
    sums.add(data.data(), bytes);
    return sums.take();
  };
  const uint64_t whole = sum();
  int64_t found = 0;
  for (int64_t i = 0; i < bytes; ++i) {
    data[i] ^= static_cast<char>(1 << i % 8);
    if (sum() == whole) ++found;
    data[i] ^= static_cast<char>(1 << i % 8);
  }
  return found;
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sums_that_differ, fluxion::sums_that_differ);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bytes_without_a_say, fluxion::bytes_without_a_say);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(touched_in_turn, fluxion::touched_in_turn);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(failing_kind, fluxion::failing_kind);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(failing_workers, fluxion::failing_workers);
