// Fibers that act as the threads of a block.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "emulate/runtime.h"

namespace fluxion::emulate {

struct Fiber;

// The fibers of one stream: made on demand, reused by every block.
class Fibers {
 public:
  Fibers();
  ~Fibers();
  Fibers(const Fibers&) = delete;
  Fibers& operator=(const Fibers&) = delete;

  // Runs every block of a grid, one after another, in the calling thread.
  void run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& thread);

 private:
  void run_block(const std::function<void()>& thread, int threads);

  std::vector<std::unique_ptr<Fiber>> fibers_;
};

}  // namespace fluxion::emulate
