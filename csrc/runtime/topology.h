// What this process may use of the machine: cores, NUMA nodes, memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fluxion {

struct NumaNode {
  int id;
  std::vector<int> cores;  // those of Topology::cores that belong to it
};

struct Topology {
  // Cores of sched_getaffinity. The first hardware thread of every physical core comes before any second one,
  // so that a prefix of the list is the best choice of that many cores.
  std::vector<int> cores;
  std::vector<NumaNode> numa;
  std::string huge_pages;     // "always", "madvise", "never" or "unknown"
  int cgroup_version = 0;     // 0: no memory controller was found
  int64_t cgroup_limit = -1;  // bytes; -1: unlimited. The tightest of the cgroup and its ancestors
  int64_t cgroup_available =
      -1;  // bytes left under that limit, page cache that can be dropped counted as free
  int64_t mem_total = 0;
  int64_t mem_available = 0;  // MemAvailable of /proc/meminfo

  // Bytes this process can still allocate without being killed.
  int64_t available() const;
};

Topology read_topology();

// The same as a JSON object, with the instruction sets the CPU runs and the one in use.
std::string topology_json();

}  // namespace fluxion
