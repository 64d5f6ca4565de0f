// What this process may use of the machine: cores, NUMA nodes, memory.
#pragma once

#include <sched.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace fluxion {

// A set of cores of any size that Linux supports: cpu_set_t stops at 1024.
class CoreSet {
 public:
  CoreSet() = default;
  explicit CoreSet(int core) { add(core); }
  void add(int core) { CPU_SET_S(core, sizeof(words_), get()); }
  // Cores that a thread (0: the caller) may run on; empty if they cannot be read.
  static CoreSet of_thread(pid_t tid) {
    CoreSet set;
    if (sched_getaffinity(tid, sizeof(set.words_), set.get()) != 0) set = {};
    return set;
  }
  void bind_caller() { sched_setaffinity(0, sizeof(words_), get()); }
  bool has(int core) { return CPU_ISSET_S(core, sizeof(words_), get()); }

  cpu_set_t* get() { return reinterpret_cast<cpu_set_t*>(words_); }
  static constexpr int kCores = 65536;
  static constexpr size_t kBytes = kCores / 8;

 private:
  unsigned long words_[kBytes / sizeof(unsigned long)] = {};
};

struct NumaNode {
  int id;
  std::vector<int> cores;  // those of Topology::cores that belong to it
};

struct Topology {
  // Cores of sched_getaffinity. The first hardware threads of all physical cores come before any second ones,
  // so a prefix of the list is the best choice of that many cores.
  std::vector<int> cores;
  std::vector<NumaNode> numa;
  std::string huge_pages;     // "always", "madvise", "never" or "unknown"
  int cgroup_version = 0;     // 0: no memory controller was found
  int64_t cgroup_limit = -1;  // bytes; -1: unlimited. The tightest of the cgroup and its ancestors
  int64_t cgroup_available =
      -1;                 // bytes left under that limit, page cache that can be dropped counted as free
  double cpu_quota = -1;  // cores' worth of time; -1: unlimited. The least of the cgroup and its ancestors
  int64_t mem_total = 0;
  int64_t mem_available = 0;  // MemAvailable of /proc/meminfo

  // Bytes this process can still allocate without being killed.
  int64_t available() const;
};

Topology read_topology();
// The topology of a machine with /sys and /proc below `root`, for a process that may use these cores.
Topology read_topology(const std::filesystem::path& root, std::vector<int> cores);

// Bytes of a core's last cache per hardware thread that shares it; 0: unknown.
int64_t last_cache_per_thread(int core);

// Nanoseconds that an idle worker spins before it sleeps: `wanted`, unless FLUXION_SPIN_US says otherwise. 0
// under a quota of CPU time, because spinning takes time from computing.
inline constexpr int64_t kIdleSpinNs = 30'000;
int64_t idle_spin_ns(const Topology& topology, int64_t wanted = kIdleSpinNs);

// The NUMA nodes of `cores` to spread memory over in turn, if threads on the first `touching` of these cores
// (dealt round) would touch it on fewer nodes. Empty if they touch it on all nodes, or there is one node.
std::vector<NumaNode> nodes_to_interleave(const Topology& topology, const std::vector<int>& cores,
                                          int touching);

}  // namespace fluxion
