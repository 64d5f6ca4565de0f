#include "device/costs.h"

#include <algorithm>

namespace fluxion {

namespace {

constexpr int64_t kMost = int64_t{1} << 62;
constexpr double kNews = 1.0 / 16;  // weight of a layer in what is learned from layers
constexpr double kTrust = 4;        // how far the CPU's rate may move from the one that was measured

// At most kMost; of what is no number, that.
int64_t whole_bytes(double bytes) {
  return bytes < static_cast<double>(kMost) ? static_cast<int64_t>(std::max(bytes, 0.0)) : kMost;
}

// At no rate, no time is finite: then comparisons say no.
double seconds(double bytes, double rate) { return bytes > 0 ? bytes / rate : 0.0; }

// A gather takes a launch more, whatever was measured.
double stage_launch(const Rates& rates) { return std::max(rates.stage_s, rates.launch_s); }

// link, launch_s: of the way in which tiles in host memory are read.
double share_of(const ReadableLoad& load, const Rates& rates, double hit_share, double link,
                double launch_s) {
  const double tiles = static_cast<double>(load.tile_bytes);
  const double hit = tiles * std::clamp(hit_share, 0.0, 1.0);
  const double device = seconds(tiles - hit, link) + seconds(hit, rates.hot);
  const double cpu = seconds(tiles, rates.cpu);
  const double alone = seconds(static_cast<double>(load.bytes()), rates.cpu);
  // T_gpu(f) = T_cpu(f): launch + f * device = alone - f * cpu.
  const double share = (alone - launch_s) / (device + cpu);
  return share > 0 ? std::min(share, 1.0) : 0.0;  // 0 for NaN, too
}

}  // namespace

double device_share(const ReadableLoad& load, const Rates& rates, double hit_share) {
  if (load.tile_bytes == 0) return 0;
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

void Division::open(int64_t now, const ReadableLoad& load) {
  load_ = load;
  opened_ns_ = now;
  given_ = chosen_ = guessed_ = 0;
}

double Division::device_seconds(int64_t bytes) const {
  const double all = static_cast<double>(bytes), hit = all * hit_share_;
  return seconds(all - hit, missed_) + seconds(hit, rates_.hot);
}

double Division::device_end(int64_t now, int64_t bytes) const {
  const double start = std::max(static_cast<double>(now) + rates_.launch_s * 1e9, busy_until_ns_);
  return start + device_seconds(bytes) * 1e9;
}

bool Division::device_is_sooner(int64_t now, int64_t bytes) const {
  const double all = static_cast<double>(load_.cpu_bytes + load_.metadata_bytes) +
                     actual_ * static_cast<double>(load_.tile_bytes);
  const double left = all - static_cast<double>(given_ + bytes);
  // Not before this worker could have done it with all others' help.
  const double cpu = std::max(static_cast<double>(opened_ns_) + left / cpu_ * 1e9,
                              static_cast<double>(now) + static_cast<double>(bytes) / cpu_ * 1e9);
  return device_end(now, bytes) <= cpu;
}

void Division::chosen(int64_t bytes, int64_t guess) {
  chosen_ += bytes;
  guessed_ += guess;
}

void Division::given(int64_t now, int64_t bytes, bool alone) {
  if (!alone) given_ += bytes;
  owed_ += bytes;
  busy_until_ns_ = device_end(now, bytes);
}

void Division::taken_back(int64_t now, int64_t bytes, bool alone) {
  if (!alone) given_ -= bytes;
  returned(now, bytes);
}

void Division::expect(double hit_share) { hit_share_ = std::clamp(hit_share, 0.0, 1.0); }

void Division::returned(int64_t now, int64_t bytes) {
  owed_ -= bytes;
  busy_until_ns_ = static_cast<double>(now) + device_seconds(owed_) * 1e9;
}

void Division::close(int64_t now) {
  if (guessed_ > 0)
    actual_ += kNews * (static_cast<double>(chosen_) / static_cast<double>(guessed_) - actual_);
  const double took = static_cast<double>(now - opened_ns_) * 1e-9;
  const int64_t read = load_.cpu_bytes + load_.metadata_bytes + chosen_ - given_;
  if (read <= 0 || !(took > 0)) return;
  cpu_ += kNews * (static_cast<double>(read) / took - cpu_);
  cpu_ = std::clamp(cpu_, rates_.cpu / kTrust, rates_.cpu * kTrust);
}

}  // namespace fluxion
