#include "runtime/topology.h"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <system_error>

#include "kernels/table.h"

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

// Cores that thread `tid` (0: the caller) may run on; none when it cannot be asked.
std::vector<int> cores_of_thread(pid_t tid) {
  CoreSet set = CoreSet::of_thread(tid);
  std::vector<int> cores;
  for (int c = 0; c < CoreSet::kCores; ++c) {
    if (set.has(c)) cores.push_back(c);
  }
  return cores;
}

// Of the whole process: whoever binds OpenMP threads to cores, one each, binds the calling thread with them.
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
int sibling_rank(int core) {
  const fs::path path =
      "/sys/devices/system/cpu/cpu" + std::to_string(core) + "/topology/thread_siblings_list";
  const std::vector<int> siblings = parse_list(read_line(path));
  const auto it = std::find(siblings.begin(), siblings.end(), core);
  return it == siblings.end() ? 0 : static_cast<int>(it - siblings.begin());
}

std::vector<NumaNode> numa_nodes(const std::vector<int>& cores) {
  std::vector<NumaNode> nodes;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/sys/devices/system/node", error)) {
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

std::string huge_page_mode() {
  const std::string line = read_line("/sys/kernel/mm/transparent_hugepage/enabled");
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
  const char* used;
  const char* droppable;
};

// A limit may sit on any ancestor; what is left is the least of what is left at every level.
void walk_cgroup(const fs::path& mount, fs::path relative, const CgroupFiles& files, Topology* t) {
  for (;;) {
    const fs::path dir = relative == "/" || relative.empty() ? mount : mount / relative.relative_path();
    const int64_t limit = read_number(dir / files.limit), used = read_number(dir / files.used);
    if (limit >= 0 && limit < t->mem_total && used >= 0) {  // v1 writes a huge number for "no limit"
      const int64_t droppable = std::max<int64_t>(0, keyed_number(dir / "memory.stat", files.droppable));
      const int64_t left = std::max<int64_t>(0, limit - used + std::min(droppable, used));
      t->cgroup_limit = t->cgroup_limit < 0 ? limit : std::min(t->cgroup_limit, limit);
      t->cgroup_available = t->cgroup_available < 0 ? left : std::min(t->cgroup_available, left);
    }
    if (dir == mount) return;
    relative = relative.parent_path();
  }
}

void read_cgroup(Topology* t) {
  std::ifstream in("/proc/self/cgroup");
  std::string line, path_v1, path_v2;
  while (std::getline(in, line)) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    if (controllers == ",,") path_v2 = line.substr(second + 1);
    if (controllers.find(",memory,") != std::string::npos) path_v1 = line.substr(second + 1);
  }
  if (!path_v1.empty() && fs::exists("/sys/fs/cgroup/memory")) {
    t->cgroup_version = 1;
    walk_cgroup("/sys/fs/cgroup/memory", path_v1,
                {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"}, t);
  } else if (!path_v2.empty() && fs::exists("/sys/fs/cgroup/cgroup.controllers")) {
    t->cgroup_version = 2;
    walk_cgroup("/sys/fs/cgroup", path_v2, {"memory.max", "memory.current", "inactive_file"}, t);
  }
}

void append_list(std::ostringstream& out, const std::vector<int>& values) {
  out << "[";
  for (size_t i = 0; i < values.size(); ++i) out << (i ? "," : "") << values[i];
  out << "]";
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c < ' ' && c >= 0 ? ' ' : c;
  }
  return out + "\"";
}

}  // namespace

int64_t Topology::available() const {
  return cgroup_available < 0 ? mem_available : std::min(mem_available, cgroup_available);
}

Topology read_topology() {
  Topology t;
  t.cores = allowed_cores();
  std::stable_sort(t.cores.begin(), t.cores.end(),
                   [](int a, int b) { return sibling_rank(a) < sibling_rank(b); });
  t.numa = numa_nodes(t.cores);
  t.huge_pages = huge_page_mode();
  t.mem_total = keyed_number("/proc/meminfo", "MemTotal:") * 1024;
  t.mem_available = keyed_number("/proc/meminfo", "MemAvailable:") * 1024;
  read_cgroup(&t);
  return t;
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

std::string topology_json() {
  const Topology t = read_topology();
  std::ostringstream out;
  out << "{\"cores\":";
  append_list(out, t.cores);
  out << ",\"numa\":[";
  for (size_t i = 0; i < t.numa.size(); ++i) {
    out << (i ? "," : "") << "{\"id\":" << t.numa[i].id << ",\"cores\":";
    append_list(out, t.numa[i].cores);
    out << "}";
  }
  out << "],\"last_cache_bytes_per_thread\":" << last_cache_per_thread(t.cores.front())
      << ",\"huge_pages\":" << quoted(t.huge_pages) << ",\"cgroup_version\":" << t.cgroup_version
      << ",\"cgroup_limit_bytes\":" << t.cgroup_limit << ",\"cgroup_available_bytes\":" << t.cgroup_available
      << ",\"mem_total_bytes\":" << t.mem_total << ",\"mem_available_bytes\":" << t.mem_available
      << ",\"available_bytes\":" << t.available() << ",\"isas\":[";
  const char* names[16];
  const int count = available_isas(names, 16);
  for (int i = 0; i < count; ++i) out << (i ? "," : "") << quoted(names[i]);
  out << "],\"isa\":";
  // A wrong FLUXION_ISA must not hide the rest of the report.
  try {
    out << quoted(best_kernel_table(DType::kBF16)->isa) << ",\"isa_error\":\"\"";
  } catch (const std::exception& e) {
    out << "\"\",\"isa_error\":" << quoted(e.what());
  }
  out << "}";
  return out.str();
}

}  // namespace fluxion
