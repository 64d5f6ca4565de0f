#include "device/costs.h"

#include <algorithm>

namespace fluxion {

namespace {

constexpr int64_t kMost = int64_t{1} << 62;

// At most kMost; of what is no number, that.
int64_t whole_bytes(double bytes) {
  return bytes < static_cast<double>(kMost) ? static_cast<int64_t>(std::max(bytes, 0.0)) : kMost;
}

// A gather takes a launch more, whatever was measured.
double stage_launch(const Rates& rates) { return std::max(rates.stage_s, rates.launch_s); }

// link, launch_s: of the way in which tiles in host memory are read.
double share_of(const ForeignLoad& load, const Rates& rates, double hit_share, double link, double launch_s) {
  // Of nothing, and at no rate, no time is finite: then the comparisons below say no.
  const auto seconds = [](double bytes, double rate) { return bytes > 0 ? bytes / rate : 0.0; };
  const double tiles = static_cast<double>(load.tile_bytes);
  const double metadata = static_cast<double>(load.metadata_bytes);
  const double hit = tiles * std::clamp(hit_share, 0.0, 1.0);
  const double read = seconds(tiles - hit, link) + seconds(hit, rates.hot);
  const double rank = seconds(metadata, rates.scan), device = std::max(read, rank);
  // Nothing is read while the first task is ranked, and nothing is ranked while the last one is read.
  const double apart = load.tasks > 0 ? std::min(read, rank) / load.tasks : 0.0;
  const double cpu = seconds(tiles + metadata, rates.cpu);
  const double alone = seconds(tiles + metadata + static_cast<double>(load.cpu_bytes), rates.cpu);
  // T_gpu(f) = T_cpu(f): launch + apart + f * device = alone - f * cpu.
  const double share = (alone - launch_s - apart) / (device + cpu);
  return share > 0 ? std::min(share, 1.0) : 0.0;  // 0 for NaN, too
}

}  // namespace

double device_share(const ForeignLoad& load, const Rates& rates, double hit_share) {
  const double in_place = share_of(load, rates, hit_share, rates.link, rates.launch_s);
  if (!(rates.stage > 0)) return in_place;
  return std::max(in_place, share_of(load, rates, hit_share, rates.stage, stage_launch(rates)));
}

int64_t least_bytes(const Rates& rates) {
  if (!(rates.link > 0) && !(rates.hot > 0)) return kMost;
  return whole_bytes(rates.launch_s * rates.cpu);
}

int64_t stage_from(const Rates& rates) {
  if (!(rates.stage > rates.link)) return kMost;
  // launch_s + n / link = stage_launch + n / stage
  return whole_bytes((stage_launch(rates) - rates.launch_s) / (1 / rates.link - 1 / rates.stage));
}

}  // namespace fluxion
