#include "runtime/topology.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <system_error>

namespace fluxion {
namespace {

namespace fs = std::filesystem;

std::string read_line(const fs::path& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

// "0-3,8,10-11" -> {0,1,2,3,8,10,11}
std::vector<int> parse_list(const std::string& text) {
  std::vector<int> out;
  std::stringstream in(text);
  std::string part;
  while (std::getline(in, part, ',')) {
    int first = 0, last = 0;
    const int fields = std::sscanf(part.c_str(), "%d-%d", &first, &last);
    if (fields < 1) continue;
    if (fields == 1) last = first;
    for (int i = first; i <= last; ++i) out.push_back(i);
  }
  return out;
}

// Cores that thread `tid` (0: the caller) may run on; none if they cannot be read.
std::vector<int> cores_of_thread(pid_t tid) {
  CoreSet set = CoreSet::of_thread(tid);
  std::vector<int> cores;
  for (int c = 0; c < CoreSet::kCores; ++c) {
    if (set.has(c)) cores.push_back(c);
  }
  return cores;
}

// Cores of all threads of the process: an OpenMP that binds each thread to one core also binds the caller.
std::vector<int> allowed_cores() {
  std::set<int> cores;
  std::error_code error;
  for (const fs::directory_entry& thread : fs::directory_iterator("/proc/self/task", error)) {
    for (int c : cores_of_thread(std::atoi(thread.path().filename().c_str()))) cores.insert(c);
  }
  if (cores.empty()) {
    for (int c : cores_of_thread(0)) cores.insert(c);
  }
  if (cores.empty()) return {0};
  return {cores.begin(), cores.end()};
}

// Position of a core among the hardware threads of its physical core.
int sibling_rank(const fs::path& root, int core) {
  const fs::path path =
      root / "sys/devices/system/cpu" / ("cpu" + std::to_string(core)) / "topology/thread_siblings_list";
  const std::vector<int> siblings = parse_list(read_line(path));
  const auto it = std::find(siblings.begin(), siblings.end(), core);
  return it == siblings.end() ? 0 : static_cast<int>(it - siblings.begin());
}

std::vector<NumaNode> numa_nodes(const fs::path& root, const std::vector<int>& cores) {
  std::vector<NumaNode> nodes;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(root / "sys/devices/system/node", error)) {
    int id = 0, used = 0;
    const std::string name = entry.path().filename();
    if (std::sscanf(name.c_str(), "node%d%n", &id, &used) != 1 || used != static_cast<int>(name.size()))
      continue;
    NumaNode node{id, {}};
    for (int c : parse_list(read_line(entry.path() / "cpulist"))) {
      if (std::find(cores.begin(), cores.end(), c) != cores.end()) node.cores.push_back(c);
    }
    nodes.push_back(node);
  }
  std::sort(nodes.begin(), nodes.end(), [](const NumaNode& a, const NumaNode& b) { return a.id < b.id; });
  if (nodes.empty()) nodes.push_back({0, cores});
  return nodes;
}

std::string huge_page_mode(const fs::path& root) {
  const std::string line = read_line(root / "sys/kernel/mm/transparent_hugepage/enabled");
  const size_t open = line.find('['), close = line.find(']');
  return open == std::string::npos || close == std::string::npos ? "unknown"
                                                                 : line.substr(open + 1, close - open - 1);
}

int64_t read_number(const fs::path& path) {
  std::ifstream in(path);
  int64_t value = -1;
  in >> value;  // "max" leaves the stream failed
  return in.fail() ? -1 : value;
}

int64_t keyed_number(const fs::path& path, const std::string& key) {
  std::ifstream in(path);
  std::string line;
  while (std::getline(in, line)) {
    std::stringstream fields(line);
    std::string name;
    int64_t value = 0;
    if (fields >> name >> value && name == key) return value;
  }
  return -1;
}

struct CgroupFiles {
  const char* limit;
  const char* throttle;  // above it the kernel delays allocations; nullptr: there is none
  const char* used;
  const char* droppable;
};

// A limit may sit on any ancestor: calls visit(folder) for the cgroup and each of its ancestors.
template <typename Visit>
void walk_cgroup(const fs::path& mount, fs::path relative, const Visit& visit) {
  for (;;) {
    const fs::path dir = relative == "/" || relative.empty() ? mount : mount / relative.relative_path();
    visit(dir);
    if (dir == mount) return;
    relative = relative.parent_path();
  }
}

// The available memory is the minimum over all levels.
void read_memory(const fs::path& mount, const fs::path& relative, const CgroupFiles& files, Topology* t) {
  walk_cgroup(mount, relative, [&](const fs::path& dir) {
    int64_t limit = read_number(dir / files.limit);
    const int64_t used = read_number(dir / files.used);
    const int64_t high = files.throttle == nullptr ? -1 : read_number(dir / files.throttle);
    if (high >= 0) limit = limit < 0 ? high : std::min(limit, high);
    if (limit >= 0 && limit < t->mem_total && used >= 0) {  // v1 writes a huge number for "no limit"
      const int64_t droppable = std::max<int64_t>(0, keyed_number(dir / "memory.stat", files.droppable));
      const int64_t left = std::max<int64_t>(0, limit - used + std::min(droppable, used));
      t->cgroup_limit = t->cgroup_limit < 0 ? limit : std::min(t->cgroup_limit, limit);
      t->cgroup_available = t->cgroup_available < 0 ? left : std::min(t->cgroup_available, left);
    }
  });
}

// "max 100000" or "150000 100000": microseconds of CPU time per period, and the period.
double quota_v2(const fs::path& dir) {
  std::ifstream in(dir / "cpu.max");
  double quota = 0, period = 0;
  return in >> quota >> period && period > 0 ? quota / period : -1;
}

double quota_v1(const fs::path& dir) {
  const int64_t quota = read_number(dir / "cpu.cfs_quota_us"),
                period = read_number(dir / "cpu.cfs_period_us");
  return quota > 0 && period > 0 ? static_cast<double>(quota) / static_cast<double>(period) : -1;
}

void read_quota(const fs::path& mount, const fs::path& relative, double (*quota)(const fs::path&),
                Topology* t) {
  walk_cgroup(mount, relative, [&](const fs::path& dir) {
    const double cores = quota(dir);
    if (cores > 0) t->cpu_quota = t->cpu_quota < 0 ? cores : std::min(t->cpu_quota, cores);
  });
}

void read_cgroups(const fs::path& root, Topology* t) {
  std::ifstream in(root / "proc/self/cgroup");
  std::string line, memory_v1, cpu_v1, v2;
  while (std::getline(in, line)) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") v2 = path;
    if (controllers.find(",memory,") != std::string::npos) memory_v1 = path;
    if (controllers.find(",cpu,") != std::string::npos) cpu_v1 = path;
  }
  const fs::path mounts = root / "sys/fs/cgroup";
  const bool has_v2 = !v2.empty() && fs::exists(mounts / "cgroup.controllers");
  if (!memory_v1.empty() && fs::exists(mounts / "memory")) {
    t->cgroup_version = 1;
    read_memory(mounts / "memory", memory_v1,
                {"memory.limit_in_bytes", nullptr, "memory.usage_in_bytes", "total_inactive_file"}, t);
  } else if (has_v2) {
    t->cgroup_version = 2;
    read_memory(mounts, v2, {"memory.max", "memory.high", "memory.current", "inactive_file"}, t);
  }
  if (!cpu_v1.empty() && fs::exists(mounts / "cpu")) {
    read_quota(mounts / "cpu", cpu_v1, quota_v1, t);
  } else if (has_v2) {
    read_quota(mounts, v2, quota_v2, t);
  }
}

}  // namespace

int64_t Topology::available() const {
  return cgroup_available < 0 ? mem_available : std::min(mem_available, cgroup_available);
}

Topology read_topology() { return read_topology("/", allowed_cores()); }

Topology read_topology(const fs::path& root, std::vector<int> cores) {
  Topology t;
  t.cores = std::move(cores);
  std::stable_sort(t.cores.begin(), t.cores.end(),
                   [&](int a, int b) { return sibling_rank(root, a) < sibling_rank(root, b); });
  t.numa = numa_nodes(root, t.cores);
  t.huge_pages = huge_page_mode(root);
  t.mem_total = keyed_number(root / "proc/meminfo", "MemTotal:") * 1024;
  t.mem_available = keyed_number(root / "proc/meminfo", "MemAvailable:") * 1024;
  read_cgroups(root, &t);
  return t;
}

int64_t idle_spin_ns(const Topology& topology, int64_t wanted) {
  if (const char* text = std::getenv("FLUXION_SPIN_US")) return std::max(0ll, std::atoll(text)) * 1000;
  return topology.cpu_quota > 0 ? 0 : wanted;
}

std::vector<NumaNode> nodes_to_interleave(const Topology& topology, const std::vector<int>& cores,
                                          int touching) {
  std::vector<NumaNode> nodes;
  bool all_touched = true;
  const auto first = cores.begin(), last = cores.end();
  for (const NumaNode& node : topology.numa) {
    NumaNode part{node.id, {}};
    bool touched = false;
    for (int core : node.cores) {
      const auto at = std::find(first, last, core);
      if (at == last) continue;
      part.cores.push_back(core);
      touched |= at - first < touching;
    }
    if (part.cores.empty()) continue;
    all_touched &= touched;
    nodes.push_back(std::move(part));
  }
  if (all_touched || nodes.size() < 2) nodes.clear();
  return nodes;
}

int64_t last_cache_per_thread(int core) {
  const fs::path caches = "/sys/devices/system/cpu/cpu" + std::to_string(core) + "/cache";
  int64_t last = 0, share = 0;
  std::error_code error;
  for (const fs::directory_entry& cache : fs::directory_iterator(caches, error)) {
    const int64_t level = read_number(cache.path() / "level");
    const int64_t kib = read_number(cache.path() / "size");  // "32768K"
    const int64_t threads = std::ssize(parse_list(read_line(cache.path() / "shared_cpu_list")));
    if (level <= last || kib <= 0 || threads <= 0 || read_line(cache.path() / "type") == "Instruction")
      continue;
    last = level;
    share = kib * 1024 / threads;
  }
  return share;
}

}  // namespace fluxion
