#include "device/batch.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace fluxion {

namespace {

constexpr int64_t kLine = 256;

// Parts of one allocation, each from a multiple of kLine.
class Carver {
 public:
  template <typename T>
  int64_t part(int64_t count) {
    const int64_t at = bytes_;
    bytes_ += round_up(count * static_cast<int64_t>(sizeof(T)), kLine);
    return at;
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

}  // namespace

void check_device(const DeviceApi& api, const char* what, int status) {
  if (status == 0) return;
  const char* sentence = api.error();
  throw DeviceFailure(std::string("the device could not ") + what + " (" +
                      (sentence == nullptr ? "it did not say why" : sentence) + ")");
}

DeviceMemory::DeviceMemory(const DeviceApi& api, Kind kind, int64_t bytes) : kind_(kind) {
  void* memory = nullptr;
  check_device(api, ("allocate " + std::to_string(bytes) + " bytes").c_str(),
               kind == kPinned ? api.pinned_allocate(bytes, &memory) : api.device_allocate(bytes, &memory));
  data_ = static_cast<char*>(memory);
}

// What cannot be given back is lost with the device.
void DeviceMemory::free(const DeviceApi& api) {
  if (data_ == nullptr) return;
  static_cast<void>(kind_ == kPinned ? api.pinned_free(data_) : api.device_free(data_));
  data_ = nullptr;
}

void Batch::allocate(const DeviceApi& api, const BatchShape& shape, int64_t workspace_bytes, bool flash,
                     const StageShape& stage) {
  shape_ = shape;
  stage_ = stage;
  if (stage.slots > 0) places_.resize(std::bit_ceil(2 * static_cast<size_t>(stage.slots)));
  const int64_t states = int64_t{shape.tasks} * shape.group;
  const int64_t plan_bytes =
      flash ? api.plan_bytes(shape.tasks, shape.entries, shape.group, shape.head_dim, shape.element) : 0;
  Carver parts;
  const int64_t word = parts.part<uint32_t>(1), tasks = parts.part<DeviceTask>(shape.tasks),
                tiles = parts.part<int32_t>(shape.entries),
                masks = parts.part<uint16_t>(int64_t{shape.entries} * shape.group),
                q = parts.part<char>(shape.tasks * q_bytes()), o = parts.part<float>(states * shape.head_dim),
                lse = parts.part<float>(states), from = parts.part<const char*>(stage.slots),
                to = parts.part<int32_t>(stage.slots), plan = parts.part<char>(plan_bytes);
  pinned_ = DeviceMemory(api, DeviceMemory::kPinned, parts.bytes());
  char* at = pinned_.data();
  std::memset(at, 0, parts.bytes());
  word_ = reinterpret_cast<uint32_t*>(at + word);
  tasks_ = reinterpret_cast<DeviceTask*>(at + tasks);
  tiles_ = reinterpret_cast<int32_t*>(at + tiles);
  masks_ = reinterpret_cast<uint16_t*>(at + masks);
  q_ = at + q;
  o_ = reinterpret_cast<float*>(at + o);
  lse_ = reinterpret_cast<float*>(at + lse);
  from_ = reinterpret_cast<const char**>(at + from);
  to_ = reinterpret_cast<int32_t*>(at + to);
  plan_ = plan_bytes > 0 ? reinterpret_cast<int32_t*>(at + plan) : nullptr;
  for (int32_t s = 0; s < stage.slots; ++s) to_[s] = stage.first + s;
  if (workspace_bytes > 0) workspace_ = DeviceMemory(api, DeviceMemory::kDevice, workspace_bytes);
  claims.reserve(shape.tasks);
}

void Batch::free(const DeviceApi& api) {
  pinned_.free(api);
  workspace_.free(api);
}

void Batch::clear(uint32_t next) {
  claims.clear();
  number = next;
  entries = longest = in_host = staged = 0;
  bytes = 0;
  submitted = failed = masked_ = false;
}

// The first task with masks makes those of the tasks before it, too.
void Batch::mask(const uint16_t* masks, int pages) {
  if (masks == nullptr && !masked_) return;
  const int64_t group = shape_.group;
  uint16_t* next = masks_ + entries * group;
  if (!masked_) std::fill(masks_, next, uint16_t{0xffff});
  masked_ = true;
  if (masks != nullptr) {
    std::copy_n(masks, pages * group, next);
  } else {
    std::fill_n(next, pages * group, uint16_t{0xffff});
  }
}

void Batch::add(int64_t claim, const Scale& scale, const Selection& chosen, const char* tiles) {
  const int count = chosen.count;
  tasks_[claims.size()] = {next_q(), tiles, entries, count};
  claims.push_back({claim, chosen.tokens, chosen.reads});
  scale_ = scale.factor;
  entries += count;
  longest = std::max(longest, count);
  in_host += static_cast<int>(
      std::count_if(tiles_ + entries - count, tiles_ + entries, [](int32_t tile) { return tile >= 0; }));
  bytes += chosen.reads.tile_bytes;
}

// Points the lists to the stage's slots, as far as they go: a tile that several tasks read is given one of
// them; further tiles are read where they are.
void Batch::gather() {
  if (stage_.slots == 0 || staged > 0) return;
  const uint64_t mask = places_.size() - 1;
  const int shift = 64 - std::countr_zero(places_.size());
  std::fill(places_.begin(), places_.end(), -1);
  for (size_t t = 0; t < claims.size(); ++t) {
    const DeviceTask& task = tasks_[t];
    for (int32_t* tile = tiles_ + task.first; tile != tiles_ + task.first + task.count; ++tile) {
      if (*tile < 0) continue;
      const char* from = task.tiles + *tile * tile_bytes();
      uint64_t at = (reinterpret_cast<uint64_t>(from) * 0x9e3779b97f4a7c15u) >> shift;
      while (places_[at] >= 0 && from_[places_[at]] != from) at = (at + 1) & mask;
      if (places_[at] < 0) {
        if (staged == stage_.slots) continue;
        from_[staged] = from;
        places_[at] = staged++;
      }
      *tile = -1 - to_[places_[at]];
      --in_host;
    }
  }
}

void Batch::submit(const DeviceApi& api, void* stream, char* hot) {
  if (std::min(in_host, stage_.slots) * tile_bytes() >= stage_.from) gather();
  const DeviceCopy copy{from_, to_, staged, tile_bytes(), hot};
  const DeviceBatch batch{
      .tasks = tasks_,
      .tasks_count = static_cast<int32_t>(claims.size()),
      .longest = longest,
      .entries = entries,
      .tiles = tiles_,
      .masks = masked_ ? masks_ : nullptr,
      .hot = hot,
      .group = shape_.group,
      .head_dim = shape_.head_dim,
      .element = shape_.element,
      .scale = scale_,
      .o = o_,
      .lse = lse_,
      .workspace = workspace_.data(),
      .plan = flash() ? plan_ : nullptr,
  };
  submitted = true;
  since_ns = looked_ns = now_ns();
  if (staged > 0) check_device(api, "gather the tiles of a batch", api.copy_tiles(stream, &copy));
  check_device(api, "take a batch of attention", api.attend(stream, &batch));
  check_device(api, "signal the end of a batch", api.signal(stream, word_, number));
}

void CopyBatch::allocate(const DeviceApi& api) {
  Carver parts;
  const int64_t word = parts.part<uint32_t>(1), from = parts.part<const char*>(kTiles),
                to = parts.part<int32_t>(kTiles);
  pinned_ = DeviceMemory(api, DeviceMemory::kPinned, parts.bytes());
  std::memset(pinned_.data(), 0, parts.bytes());
  word_ = reinterpret_cast<uint32_t*>(pinned_.data() + word);
  from_ = reinterpret_cast<const char**>(pinned_.data() + from);
  to_ = reinterpret_cast<int32_t*>(pinned_.data() + to);
  slots.reserve(kTiles);
}

void CopyBatch::add(const char* tile, int32_t slot) {
  from_[slots.size()] = tile;
  to_[slots.size()] = slot;
  slots.push_back(slot);
}

void CopyBatch::submit(const DeviceApi& api, void* stream, int64_t tile_bytes, char* hot) {
  const DeviceCopy copy{from_, to_, static_cast<int32_t>(slots.size()), tile_bytes, hot};
  submitted = true;
  ++number_;
  check_device(api, "copy tiles to its memory", api.copy_tiles(stream, &copy));
  check_device(api, "signal the end of a copy", api.signal(stream, word_, number_));
}

}  // namespace fluxion
