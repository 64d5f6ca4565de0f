#include "device/placement.h"

#include <algorithm>

namespace fluxion {

double device_share(const DeviceLoad& load, const Rates& rates, double hit_share) {
  // Of nothing, and at no rate, no time is finite: then the comparisons below say no.
  const auto seconds = [](double bytes, double rate) { return bytes > 0 ? bytes / rate : 0.0; };
  const double tiles = static_cast<double>(load.tile_bytes);
  const double metadata = static_cast<double>(load.metadata_bytes);
  const double hit = tiles * std::clamp(hit_share, 0.0, 1.0);
  const double read = seconds(tiles - hit, rates.link) + seconds(hit, rates.hot);
  const double device = std::max(read, seconds(metadata, rates.scan));
  const double cpu = seconds(tiles + metadata, rates.cpu);
  const double alone = seconds(tiles + metadata + static_cast<double>(load.cpu_bytes), rates.cpu);
  // T_gpu(f) = T_cpu(f): launch + f * device = alone - f * cpu.
  const double share = (alone - rates.launch_s) / (device + cpu);
  return share > 0 ? std::min(share, 1.0) : 0.0;  // 0 for NaN, too
}

int64_t least_bytes(const Rates& rates) {
  constexpr int64_t kMost = int64_t{1} << 62;
  const double bytes = rates.launch_s * rates.cpu;
  if (!(rates.link > 0) && !(rates.hot > 0)) return kMost;
  return bytes < static_cast<double>(kMost) ? static_cast<int64_t>(std::max(bytes, 0.0))
                                            : kMost;  // NaN: kMost
}

}  // namespace fluxion
