#include "device/timing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "device/batch.h"

namespace fluxion {

namespace {

// What a timing holds of the device; gives it back unless the device hangs.
struct Held {
  const DeviceApi& api;
  void* stream = nullptr;
  Batch batch{};
  DeviceMemory hot{};
  bool hangs = false;

  ~Held() {
    if (hangs) return;
    batch.free(api);
    hot.free(api);
    if (stream != nullptr) static_cast<void>(api.stream_destroy(stream));
  }
};

void fill_hot(Held* held, const TimedBatch& what, int64_t tile_bytes, int64_t count) {
  const DeviceApi& api = held->api;
  held->hot = DeviceMemory(api, DeviceMemory::kDevice, count * tile_bytes);
  CopyBatch copy;
  copy.allocate(api);
  for (int64_t i = 0; i < count; i += CopyBatch::kTiles) {
    copy.slots.clear();
    for (int64_t t = i; t < std::min(i + CopyBatch::kTiles, count); ++t)
      copy.add(what.tiles + t * tile_bytes, static_cast<int32_t>(t));
    copy.submit(api, held->stream, tile_bytes, held->hot.data());
    check_device(api, "finish a copy", api.stream_synchronize(held->stream));
  }
  copy.free(api);
}

}  // namespace

void time_attend(const DeviceApi& api, const TimedBatch& what, int runs, int64_t* ns) {
  const int64_t each = int64_t{what.tasks} * what.pages;
  const int64_t tile_bytes = int64_t{2} * kPage * what.head_dim * what.element;
  const int64_t q_bytes = int64_t{what.group} * what.head_dim * what.element;
  const BatchShape shape{what.tasks, static_cast<int>(each), what.group, what.head_dim, what.element};
  Held held{api};
  check_device(api, "make a stream", api.stream_create(&held.stream));
  StageShape stage;
  if (what.where == Where::kStaged) stage.slots = static_cast<int32_t>(each);
  held.batch.allocate(api, shape, api.workspace_bytes(what.tasks, what.pages, what.group, what.head_dim),
                      what.flash, stage);
  if (what.where == Where::kHot) fill_hot(&held, what, tile_bytes, each);
  if (stage.slots > 0) held.hot = DeviceMemory(api, DeviceMemory::kDevice, each * tile_bytes);
  int64_t next = 0;
  for (int run = 0; run < runs; ++run) {
    Batch& batch = held.batch;
    batch.clear(static_cast<uint32_t>(run) + 1);
    for (int t = 0; t < what.tasks; ++t) {
      std::memcpy(batch.next_q(), what.q + t * q_bytes, q_bytes);
      for (int p = 0; p < what.pages; ++p) {
        batch.next_tiles()[p] =
            static_cast<int32_t>(what.where == Where::kHot ? -1 - (t * int64_t{what.pages} + p) : next);
        next = next + 1 == what.available ? 0 : next + 1;
      }
      Selection chosen;
      chosen.count = what.pages;
      batch.add(0, {1.0f / std::sqrt(static_cast<float>(what.head_dim))}, chosen, what.tiles);
    }
    const int64_t start = now_ns();
    held.hangs = true;
    batch.submit(api, held.stream, held.hot.data());
    while (!batch.done()) {
      if (static_cast<double>(now_ns() - start) > what.timeout_s * 1e9)
        throw DeviceFailure("the device did not finish a batch of attention within " +
                            std::to_string(static_cast<int>(what.timeout_s)) + " s");
      cpu_pause();
    }
    ns[run] = now_ns() - start;
    held.hangs = false;
  }
}

}  // namespace fluxion
