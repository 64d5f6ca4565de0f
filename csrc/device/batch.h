// A batch of tasks on a device: its buffers, and what the host remembers of it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "device/device_api.h"
#include "engine/engine.h"

namespace fluxion {

class DeviceFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws DeviceFailure with the device's sentence unless status is 0.
void check_device(const DeviceApi& api, const char* what, int status);

// Device or pinned memory. Given back by its owner alone (free): what a device that hangs may still write to
// is never given back.
class DeviceMemory {
 public:
  enum Kind { kPinned, kDevice };
  DeviceMemory() = default;
  DeviceMemory(const DeviceApi& api, Kind kind, int64_t bytes);
  void free(const DeviceApi& api);
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  Kind kind_ = kPinned;
};

// Words that a device signals: `value` when what stands before it is done.
inline bool signalled(const uint32_t* word, uint32_t value) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE) == value;
}

struct BatchShape {
  int tasks;    // at most, of a batch
  int entries;  // of the lists of a batch
  int group, head_dim, element;
};

// Where a batch's tiles may be gathered to before they are read: slots of device memory behind the hot ones,
// each batch's own. So nobody writes to them while the batch is on its way, however late it is.
struct StageShape {
  int32_t first = 0;  // slot
  int32_t slots = 0;  // 0: no stage
  int64_t from = 0;   // bytes of tiles in host memory, in a batch, from which it is staged
};

// Everything that the device reads of a batch or writes lies in these buffers, its queries too; so a batch
// that is late can do no harm but to a buffer that waits for it. Only tiles are read where they are: what a
// late batch reads of pages that are another request's by then is never used.
class Batch {
 public:
  struct Claimed {
    int64_t claim;
    int64_t tokens;
    Reads reads;
  };

  // flash: FlashInfer may attend, where it can.
  void allocate(const DeviceApi& api, const BatchShape& shape, int64_t workspace_bytes, bool flash,
                const StageShape& stage = {});
  void free(const DeviceApi& api);

  // Empty again. number: what the device will signal, not 0 and not the last one.
  void clear(uint32_t number);
  bool has_room(int pages) const {
    return static_cast<int>(claims.size()) < shape_.tasks && entries + pages <= shape_.entries;
  }
  int64_t q_bytes() const { return int64_t{shape_.group} * shape_.head_dim * shape_.element; }
  // Where the next task's query and list go.
  char* next_q() { return q_ + static_cast<int64_t>(claims.size()) * q_bytes(); }
  int32_t* next_tiles() { return tiles_ + entries; }
  // Its masks, [pages][G]; nullptr: it reads every token. Before it is added.
  void mask(const uint16_t* masks, int pages);
  // The task whose query and list stand there. tiles: of its KV head.
  void add(int64_t claim, const Scale& scale, const Selection& chosen, const char* tiles);

  // Has as many of its tiles staged as the stage has slots for; submit() does that where it pays.
  void gather();
  // Launches it, and the signal behind it. hot: device memory, slot after slot; the stage's, too.
  void submit(const DeviceApi& api, void* stream, char* hot);
  bool done() const { return signalled(word_, number); }
  // Whether FlashInfer attends to it; known when it was submitted.
  bool flash() const { return plan_ != nullptr && in_host == 0 && !masked_; }

  const float* o(int task) const { return o_ + static_cast<int64_t>(task) * shape_.group * shape_.head_dim; }
  const float* lse(int task) const { return lse_ + static_cast<int64_t>(task) * shape_.group; }
  const int32_t* tiles() const { return tiles_; }

  std::vector<Claimed> claims;
  uint32_t number = 0;
  int64_t serial = 0;  // rises from batch to batch
  int entries = 0, longest = 0;
  int64_t bytes = 0;       // of tiles, hot ones included
  int in_host = 0;         // entries that are read in host memory; those of staged tiles are not
  int staged = 0;          // tiles that the stage was given
  bool submitted = false;  // and not taken back yet
  bool failed = false;     // its claims were failed: it is waited for, and no result of it is used
  int64_t since_ns = 0;    // of its submission
  int64_t looked_ns = 0;   // when the device was last asked about it

 private:
  int64_t tile_bytes() const { return int64_t{2} * kPage * shape_.head_dim * shape_.element; }

  BatchShape shape_{};
  DeviceMemory pinned_, workspace_;
  DeviceTask* tasks_ = nullptr;
  int32_t* tiles_ = nullptr;
  uint16_t* masks_ = nullptr;
  char* q_ = nullptr;
  float *o_ = nullptr, *lse_ = nullptr;
  int32_t* plan_ = nullptr;
  uint32_t* word_ = nullptr;
  StageShape stage_;
  // The tiles of the stage, [slots], and where each stands: open addressing, at most half full.
  const char** from_ = nullptr;
  int32_t* to_ = nullptr;
  std::vector<int32_t> places_;
  float scale_ = 0;
  bool masked_ = false;
};

// Tiles on their way to hot slots.
class CopyBatch {
 public:
  static constexpr int kTiles = 1024;  // bounds what a batch adds to the link's work: 8 MiB of bf16, D = 128

  void allocate(const DeviceApi& api);
  void free(const DeviceApi& api) { pinned_.free(api); }
  bool full() const { return static_cast<int>(slots.size()) == kTiles; }
  void add(const char* tile, int32_t slot);
  void submit(const DeviceApi& api, void* stream, int64_t tile_bytes, char* hot);
  bool done() const { return signalled(word_, number_); }

  std::vector<int32_t> slots;
  bool submitted = false;

 private:
  DeviceMemory pinned_;
  const char** from_ = nullptr;
  int32_t* to_ = nullptr;
  uint32_t* word_ = nullptr;
  uint32_t number_ = 0;
};

}  // namespace fluxion
