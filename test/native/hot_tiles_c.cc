// csrc/device/hot_tiles.h, for Python tests.
#include "device/hot_tiles.h"

using fluxion::HotTiles;

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void* hot_create(int64_t tiles, int32_t slots, int32_t touches, int32_t horizon) {
  return new HotTiles({tiles, slots, touches, horizon});
}
EXPORT void hot_destroy(void* hot) { delete static_cast<HotTiles*>(hot); }
EXPORT int32_t hot_find(void* hot, int64_t tile, uint32_t writes, int64_t batch) {
  return static_cast<HotTiles*>(hot)->find(tile, writes, batch);
}
EXPORT int32_t hot_admit(void* hot, int64_t tile, uint32_t writes) {
  return static_cast<HotTiles*>(hot)->admit(tile, writes);
}
EXPORT void hot_filled(void* hot, int32_t slot) { static_cast<HotTiles*>(hot)->filled(slot); }
EXPORT void hot_ended(void* hot, int64_t batch) { static_cast<HotTiles*>(hot)->ended(batch); }
EXPORT void hot_tick(void* hot) { static_cast<HotTiles*>(hot)->tick(); }
EXPORT int32_t hot_used(void* hot) { return static_cast<HotTiles*>(hot)->used(); }
EXPORT int64_t hot_stat(void* hot, int32_t stat) { return static_cast<HotTiles*>(hot)->stats()[stat]; }
