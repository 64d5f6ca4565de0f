// The device side of a mailbox: the step in device memory, and the progress of a stream's kernels.
#pragma once

#include <cstdint>

#include "cuda/failure.h"
#include "cuda/limits.h"
#include "device/layout.h"

namespace fluxion::device {

// Which positions of a request are resident, in tokens, and where their pages lie in its row of the windows
// (kv/placement.py).
struct Placement {
  int32_t sinks, window;

  __host__ __device__ int sink_pages() const { return sinks / kPage; }
  __host__ __device__ int ring_pages() const { return window / kPage + 1; }
  __host__ __device__ int slot_pages() const { return sink_pages() + ring_pages(); }
  __host__ __device__ int slot(int page) const {
    return page < sink_pages() ? page : sink_pages() + (page - sink_pages()) % ring_pages();
  }
  // The first page behind the sinks that is resident of a request of n tokens.
  __host__ __device__ int first_local(int n) const {
    const int aged = n > window ? (n - window) / kPage : 0;
    return aged > sink_pages() ? aged : sink_pages();
  }
};

// In device memory. Only kernels of the port's stream write it.
struct PortState {
  uint32_t sequence;   // of the last publish
  uint32_t late;       // value of the word kLate: reading the word itself would cross the link
  uint32_t published;  // blocks of the running publish that are done
  uint32_t observed;   // groups of the running resident or observe whose parts are written
  int32_t batch;       // requests of the step
  // Last result of the block that polls the host's words: look_of(sequence, taken).
  uint32_t looked;
};

// What kernels know of a port; passed by value.
struct PortView {
  PortState* state;
  int32_t* rows;      // [max_requests]
  int32_t* lengths;   // [max_requests]
  uint32_t* arrived;  // [max_requests * kv_heads]: blocks of a group's resident attention that are done
  float* partial;     // [max_requests * kv_heads][chunks][G][D], then [..][G]: their results
  float* partial_lse;
  char* arena;
  MailboxShape shape;
  Placement placement;
  uint64_t timeout_ns;

  __host__ __device__ int group() const { return shape.q_heads / shape.kv_heads; }
  // Resident attention is cut into chunks of 4 pages: those of the sinks, then those of the window.
  __host__ __device__ int sink_chunks() const { return (placement.sink_pages() + 3) / 4; }
  __host__ __device__ int chunks() const { return sink_chunks() + (placement.ring_pages() + 3) / 4; }
  __host__ __device__ uint32_t* word(MailboxWord w) const {
    return reinterpret_cast<uint32_t*>(arena + kWordBytes * w);
  }
};

class Port {
 public:
  // arena: pinned, of mailbox_bytes(shape).
  Port(char* arena, const MailboxShape& shape, const Placement& placement, uint64_t timeout_ns);
  ~Port();
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;

  const PortView& view() const { return view_; }
  // Copies the step's requests, with rows below bound_rows(); they take effect in stream order. Waits only if
  // the device is kRing steps behind.
  void step(cudaStream_t stream, const int32_t* rows, const int32_t* lengths, int batch);
  void reset(cudaStream_t stream);

  // Requests of the last step.
  int batch() const { return batch_; }

  // The fewest rows of windows in this port's kernel launches. INT32_MAX: none yet.
  int bound_rows() const { return bound_rows_; }
  void bind_rows(int rows) { bound_rows_ = rows < bound_rows_ ? rows : bound_rows_; }

 private:
  static constexpr int kRing = 4;

  PortView view_{};
  char* memory_ = nullptr;
  int32_t* staged_ = nullptr;  // pinned: kRing times [1 + 2 * max_requests]
  cudaEvent_t copied_[kRing] = {};
  bool used_[kRing] = {};
  int turn_ = 0;
  int batch_ = 0;
  int bound_rows_ = INT32_MAX;

  void release();
};

}  // namespace fluxion::device
