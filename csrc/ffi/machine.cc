// The C ABI: what this process may use of the machine.
#include <exception>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "ffi/tensor.h"
#include "kernels/table.h"
#include "runtime/topology.h"

namespace fluxion {
namespace {

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

// Includes the instruction sets that the CPU runs, and the one in use.
std::string topology_json(const Topology& t) {
  std::ostringstream out;
  out << "{\"cores\":";
  append_list(out, t.cores);
  out << ",\"numa\":[";
  for (size_t i = 0; i < t.numa.size(); ++i) {
    out << (i ? "," : "") << "{\"id\":" << t.numa[i].id << ",\"cores\":";
    append_list(out, t.numa[i].cores);
    out << "}";
  }
  out << "],\"last_cache_bytes_per_thread\":"
      << (t.cores.empty() ? 0 : last_cache_per_thread(t.cores.front()))
      << ",\"huge_pages\":" << quoted(t.huge_pages) << ",\"cgroup_version\":" << t.cgroup_version
      << ",\"cgroup_limit_bytes\":" << t.cgroup_limit << ",\"cgroup_available_bytes\":" << t.cgroup_available
      << ",\"cpu_quota\":" << t.cpu_quota << ",\"spin_us\":" << idle_spin_ns(t) / 1000
      << ",\"mem_total_bytes\":" << t.mem_total << ",\"mem_available_bytes\":" << t.mem_available
      << ",\"available_bytes\":" << t.available() << ",\"isas\":[";
  const char* names[16];
  const int count = available_isas(names, 16);
  for (int i = 0; i < count; ++i) out << (i ? "," : "") << quoted(names[i]);
  out << "],\"isa_of_cpu\":" << quoted(best_isa_of_cpu()) << ",\"isa\":";
  // A wrong FLUXION_ISA must not hide the rest of the report.
  try {
    out << quoted(best_kernel_table(DType::kBF16)->isa) << ",\"isa_error\":\"\"";
  } catch (const std::exception& e) {
    out << "\"\",\"isa_error\":" << quoted(e.what());
  }
  out << "}";
  return out.str();
}

std::vector<int> cores_of(const TensorView& t, const char* name) {
  expect(t, name, kInt32, {-1}, 1);
  return {data<int32_t>(t), data<int32_t>(t) + t.numel()};
}

// root "": this machine, and this process's cores.
Topology topology_of(const ffi::String& root, const TensorView& cores) {
  const std::vector<int> given = cores_of(cores, "cores");
  return root.empty() ? read_topology() : read_topology(std::string(root), given);
}

ffi::String topology(ffi::String root, TensorView cores) {
  return guarded([&] { return ffi::String(topology_json(topology_of(root, cores))); });
}

ffi::String interleaved(ffi::String root, TensorView cores, TensorView workers, int64_t touching) {
  return guarded([&] {
    std::string out;
    for (const NumaNode& node : nodes_to_interleave(topology_of(root, cores), cores_of(workers, "workers"),
                                                    static_cast<int>(touching))) {
      out += (out.empty() ? "" : ",") + std::to_string(node.id);
    }
    return ffi::String(out);
  });
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(topology_json, fluxion::topology);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nodes_to_interleave, fluxion::interleaved);
