#include "runtime/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace fluxion {
namespace {

constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1, which older headers do not have

std::string gib(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f GiB", static_cast<double>(bytes) / (1ll << 30));
  return text;
}

}  // namespace

HostMemory::HostMemory(int64_t bytes) : bytes_(bytes) {
  // Linux overcommits: without this check a pool that is too large would be killed while it is filled.
  const int64_t available = read_topology().available();
  if (bytes > available) {
    throw std::runtime_error("The host pool needs " + gib(bytes) + " and " + gib(available) +
                             " of memory are available; lower host_tokens or host_memory_gb.");
  }
  mapped_ = bytes + kHugePage;
  mapping_ =
      mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::runtime_error("The host pool's " + gib(bytes) + " could not be mapped (" +
                             std::strerror(errno) +
                             "); lower host_tokens or raise the process limit (ulimit -v).");
  }
  data_ = reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(mapping_), kHugePage));
  madvise(data_, bytes_, MADV_HUGEPAGE);  // a refusal costs speed only
}

HostMemory::~HostMemory() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
}

HostMemory::HostMemory(HostMemory&& other) noexcept { *this = std::move(other); }

HostMemory& HostMemory::operator=(HostMemory&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void touch_in_turn(const HostMemory& memory, const std::vector<NumaNode>& nodes) {
  constexpr size_t kThreads = 4;  // per node: about enough to fill its memory at full speed
  const auto count = static_cast<int64_t>(nodes.size());
  std::vector<std::jthread> threads;
  for (int64_t n = 0; n < count; ++n) {
    CoreSet cores;
    for (const int core : nodes[n].cores) cores.add(core);
    const auto share = static_cast<int64_t>(std::min(kThreads, nodes[n].cores.size()));
    for (int64_t i = 0; i < share; ++i) {
      threads.emplace_back(
          [&memory, cores, first = (i * count + n) * kHugePage, step = share * count * kHugePage]() mutable {
            cores.bind_caller();
            for (int64_t at = first; at < memory.bytes(); at += step)
              touch(memory.data() + at, memory.data() + std::min(at + kHugePage, memory.bytes()));
          });
    }
  }
}

void touch(char* first, char* last) {
  for (char* p = first; p < last; p += kSmallPage) {
    volatile char* byte = p;
    *byte = *byte;
  }
}

void into_huge_pages(char* first, char* last) {
  // Neighbours share the outermost huge pages. The kernel stops at the first memory that it may not move,
  // such as a thread's stack, so the outermost pages are separate requests.
  const int64_t begin = reinterpret_cast<int64_t>(first) / kHugePage * kHugePage;
  const int64_t end = round_up(reinterpret_cast<int64_t>(last), kHugePage);
  const int64_t inner = std::min(begin + kHugePage, end);
  const int64_t outer = std::max(end - kHugePage, inner);
  for (const auto& [from, to] : {std::pair(inner, outer), {begin, inner}, {outer, end}})
    if (from < to) madvise(reinterpret_cast<void*>(from), to - from, kCollapse);
}

}  // namespace fluxion
