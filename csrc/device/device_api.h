// What host code asks of a device library (libfluxion_cuda.so, libfluxion_sim.so): a table of C functions, so
// that libfluxion.so needs neither at link time.
//
// Every function returns 0, or an error whose sentence `error` gives (of the calling thread). Work is
// asynchronous, in the order of its stream. Host memory that a kernel reads must be pinned; its address is
// the device's.
#pragma once

#include <cstdint>

namespace fluxion {

inline constexpr int32_t kDeviceApiVersion = 3;

// One (request, group) whose tiles a device attends to.
struct DeviceTask {
  const void* q;         // [G][D], KV dtype; pinned or device memory, behind the q of the task before
  const char* tiles;     // the KV head's region of the host pool: tile i is at tiles + i * bytes of a tile
  int32_t first, count;  // its entries of the batch's lists
};

// Attention of several tasks. Everything pointed to is pinned or device memory and stays as it is until the
// batch is done.
struct DeviceBatch {
  const DeviceTask* tasks;  // [tasks_count]
  int32_t tasks_count;
  int32_t longest;        // the largest count of a task
  int32_t entries;        // of the lists, all together
  const int32_t* tiles;   // [entries]: >= 0: a tile of the task's region; < 0: slot -1 - x of the hot tiles
  const uint16_t* masks;  // [entries][G]: bit t: the head has token t; nullptr: every token of every tile
  const char* hot;        // device memory: hot tiles, slot after slot; nullptr: there are none
  int32_t group, head_dim;
  int32_t element;  // bytes of a number: 2 (bfloat16) or 4 (float32)
  float scale;
  float* o;         // [tasks_count][G][D]
  float* lse;       // [tasks_count][G], natural log; of nothing 0 and -inf
  char* workspace;  // device memory, of workspace_bytes()
  // Of plan_bytes(), pinned: FlashInfer attends. All tiles are in device memory then, and nothing is masked.
  // nullptr: the device library's own kernels do.
  int32_t* plan;
};

// Tiles on their way from the host pool to hot slots.
struct DeviceCopy {
  const char* const* from;  // [count]: tiles in pinned memory
  const int32_t* to;        // [count]: slots
  int32_t count;
  int64_t tile_bytes;
  char* hot;
};

struct DeviceApi {
  int32_t version;  // kDeviceApiVersion

  // Of a higher priority than the model's streams: streams of one priority share a few queues of the device,
  // and whatever stands behind a `take` in its queue waits for the host, too.
  int (*stream_create)(void** stream);
  int (*stream_destroy)(void* stream);
  int (*stream_synchronize)(void* stream);
  // Whether the device still works on the stream or has done all of it: an error if it is lost. Waits for
  // nothing, and gives the device nothing to do.
  int (*stream_query)(void* stream);

  int (*device_allocate)(int64_t bytes, void** memory);
  int (*device_free)(void* memory);
  int (*pinned_allocate)(int64_t bytes, void** memory);
  int (*pinned_free)(void* memory);
  // Memory that exists already, a multiple of 4096 bytes from a multiple of 4096.
  int (*pinned_register)(void* memory, int64_t bytes);
  int (*pinned_unregister)(void* memory);

  int64_t (*workspace_bytes)(int32_t tasks, int32_t longest, int32_t group, int32_t head_dim);
  // What FlashInfer's plan of a batch takes; 0: it does not serve such groups, or is not there.
  int64_t (*plan_bytes)(int32_t tasks, int32_t entries, int32_t group, int32_t head_dim, int32_t element);
  int (*attend)(void* stream, const DeviceBatch* batch);
  int (*copy_tiles)(void* stream, const DeviceCopy* copy);
  // *word = value, seen by the host once all that stands before it in the stream is done and visible.
  int (*signal)(void* stream, uint32_t* word, uint32_t value);

  const char* (*error)();
};

}  // namespace fluxion
