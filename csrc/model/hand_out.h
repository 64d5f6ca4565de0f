// Splits work into more pieces than there are workers.
#pragma once

#include <atomic>
#include <cstdint>

#include "runtime/worker_pool.h"

namespace fluxion {

// Calls work(item, worker) for every item below count. A worker that is free takes the next item.
template <class Work>
void hand_out(WorkerPool& workers, int64_t count, const Work& work) {
  struct Items {
    const Work& work;
    int64_t count;
    alignas(64) std::atomic<int64_t> next{0};

    void run(int worker) {
      for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < count;
           i = next.fetch_add(1, std::memory_order_relaxed))
        work(i, worker);
    }
  } items{work, count};
  const auto body = [](void* ctx, int worker) { static_cast<Items*>(ctx)->run(worker); };
  if (count > 1 && workers.size() > 1 && workers.launch(body, &items)) return workers.join();
  items.run(0);
}

}  // namespace fluxion
