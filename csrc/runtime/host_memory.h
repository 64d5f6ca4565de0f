// One anonymous mapping that prefers huge pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/api.h"
#include "runtime/topology.h"

namespace fluxion {

inline constexpr int64_t kSmallPage = 4096;
inline constexpr int64_t kHugePage = 2 << 20;

inline constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Zero-filled and untouched (the first writer decides the NUMA node). The start is aligned to 2 MiB.
class FLUXION_API HostMemory {
 public:
  HostMemory() = default;
  // Throws std::runtime_error with the number of bytes that fit, if the machine has too little memory left.
  explicit HostMemory(int64_t bytes);
  ~HostMemory();
  HostMemory(HostMemory&& other) noexcept;
  HostMemory& operator=(HostMemory&& other) noexcept;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void* mapping_ = nullptr;
  int64_t mapped_ = 0;
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Threads on every node touch huge pages in turn, so that all nodes hold equally many. For untouched memory.
// nodes: at least one, each with a core that this process may use.
void touch_in_turn(const HostMemory& memory, const std::vector<NumaNode>& nodes);

// Makes the kernel allocate [first, last) from the calling thread's NUMA node. Keeps the contents.
FLUXION_API void touch(char* first, char* last);

// Asks the kernel to move [first, last) into huge pages in place. What it cannot move stays in small pages,
// which costs speed only.
void into_huge_pages(char* first, char* last);

}  // namespace fluxion
