#include "probe/probe.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <vector>

namespace fluxion {
namespace {

// Calls item(worker, task) once for every task, `runs` times over.
template <typename Item>
void repeat(WorkerPool& workers, int tasks, const ProbeRuns& runs, const Item& item) {
  struct Run {
    const Item& item;
    int tasks;
    alignas(64) std::atomic<int> next{0};
  } run{item, tasks};
  const auto body = [](void* arg, int worker) {
    auto* r = static_cast<Run*>(arg);
    for (int i; (i = r->next.fetch_add(1, std::memory_order_relaxed)) < r->tasks;) r->item(worker, i);
  };
  for (int i = 0; i < runs.count; ++i) {
    run.next.store(0, std::memory_order_relaxed);
    const auto start = std::chrono::steady_clock::now();
    if (!workers.launch(body, &run)) {
      throw std::runtime_error("The workers run a layer; finish it before anything is timed on them.");
    }
    workers.join();
    const auto took = std::chrono::steady_clock::now() - start;
    runs.ns[i] = std::chrono::duration_cast<std::chrono::nanoseconds>(took).count();
  }
}

int64_t largest(const ProbeTasks& tasks) {
  int64_t size = 0;
  for (int i = 0; i < tasks.count; ++i) size = std::max(size, tasks.size(i));
  return size;
}

}  // namespace

uint32_t probe(WorkerPool& workers, const KernelTable& kernels, const ProbeTasks& tasks,
               const ReadProbe& what, const ProbeRuns& runs) {
  std::vector<uint32_t> sums(tasks.count);
  repeat(workers, tasks.count, runs, [&](int, int i) {
    const int64_t first = tasks.first[i];
    const char* base = what.pieces ? what.base : what.base + first * what.piece_bytes;
    sums[i] = kernels.read(base, what.pieces ? what.pieces + first : nullptr, what.piece_bytes, tasks.size(i),
                           what.streams, what.ahead);
  });
  uint32_t total = 0;
  for (uint32_t sum : sums) total += sum;
  return total;
}

void probe(WorkerPool& workers, const KernelTable& kernels, int64_t element, const ProbeTasks& tasks,
           const AttendProbe& what, const ProbeRuns& runs) {
  const int64_t rows = what.G, size = rows * what.D;
  repeat(workers, tasks.count, runs, [&](int, int i) {
    const int64_t first = tasks.first[i];
    kernels.attend(what.q + i * size * element, what.G, what.D, what.scale, what.tiles, what.pages + first,
                   what.masks ? what.masks + first * rows : nullptr, static_cast<int>(tasks.size(i)), 0,
                   what.o + i * size, what.lse + i * rows);
  });
}

void probe(WorkerPool& workers, const KernelTable& kernels, int64_t element, const ProbeTasks& tasks,
           const ScoreProbe& what, const ProbeRuns& runs) {
  const int64_t rows = what.G, size = rows * what.D, own = rows * largest(tasks);
  std::vector<float> scratch(what.out ? 0 : own * workers.size());
  repeat(workers, tasks.count, runs, [&](int worker, int i) {
    const int64_t first = tasks.first[i];
    kernels.score(what.q + i * size * element, what.G, what.D, what.entries, what.index + first,
                  static_cast<int>(tasks.size(i)), what.spread,
                  what.out ? what.out + rows * first : scratch.data() + worker * own, tasks.size(i));
  });
}

void probe(WorkerPool& workers, const KernelTable& kernels, const ProbeTasks& tasks, const SelectProbe& what,
           const ProbeRuns& runs) {
  const int64_t words = select_scratch_bytes(static_cast<int>(largest(tasks))) / 4;
  std::vector<uint32_t> scratch(words * workers.size());
  repeat(workers, tasks.count, runs, [&](int worker, int i) {
    const int64_t first = tasks.first[i], n = tasks.size(i);
    uint16_t* heads = what.heads + first;
    std::fill_n(heads, n, uint16_t{0});
    for (int g = 0; g < what.G && n > 0; ++g) {
      kernels.select(what.scores + what.G * first + g * n, static_cast<int>(n), what.k[i],
                     static_cast<uint16_t>(1u << g), heads, scratch.data() + worker * words);
    }
  });
}

}  // namespace fluxion
