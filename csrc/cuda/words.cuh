// The device's access to a mailbox's words, for the operations of device/protocol.h.
#pragma once

#include "cuda/device.cuh"
#include "cuda/port.h"
#include "device/protocol.h"

namespace fluxion::device {

struct DeviceWords {
  const PortView& port;

  __device__ uint32_t load(MailboxWord word) const {
    return load_acquire(word == kLate ? &port.state->late : port.word(word));
  }
  __device__ void store(MailboxWord word, uint32_t value) {
    store_release(port.word(word), value);
    if (word != kLate) return;
    // A thread that gives up because of the copy must find the host's word written.
    fence();
    store_release(&port.state->late, value);
  }
  __device__ void fence() { __threadfence_system(); }
};

// The same for polling: a load orders nothing. A fence must come between the last poll and the reads that
// depend on it.
struct PollingWords : DeviceWords {
  __device__ uint32_t load(MailboxWord word) const {
    return load_relaxed(word == kLate ? &port.state->late : port.word(word));
  }
};

}  // namespace fluxion::device
