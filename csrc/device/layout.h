// The mailbox: memory through which the device and the CPU exchange the work of a decode layer. Plain offsets
// and words, for every compiler that sees it.
//
// One arena of host memory, pinned and mapped if there is a GPU. A layer of a step has a sequence number,
// counted by the device from 1 and not reused before a reset. Its data lie in slot `sequence % 2`.
//
//   device, in stream order                      CPU
//   publish: q, k, v into the slot, then
//            published = sequence           ->   reads q, k, v: plans, appends, attends to the middle
//   resident attention; if the policy looks
//            at parts: parts into the slot,
//            then observed = sequence       ->   reads parts: plans
//   take:    waits for answered >= sequence <-   o, lse of the middle into the slot, then answered = sequence
//            merges o, lse with its own
//
// Sequence numbers are compared as (int32_t)(a - b), so they may wrap. Every word has its own cache line and
// one writer.
//
// Times. Publish records the device's clock when q, k and v are out. The first block of take records when it
// begins to wait and when it finds the answer; in between the device is idle. The host reads a layer's times
// after the next layer is published, or the stream is done, and before it answers that next layer. A take
// that gave up has no end time.
//
// Failure. A CPU that cannot compute a layer answers it with lse = -inf and failed = sequence. A device that
// waited too long sets late = sequence. From then on publish and resident write nothing and take does not
// wait. So the CPU, which may still be at the layer, has the slots to itself. `cancel`, set by the host,
// makes take give up in the same way. Both last until a reset, when neither side uses the mailbox.
#pragma once

#include <cstdint>

namespace fluxion {

inline constexpr int64_t kWordBytes = 128;
inline constexpr int kMailboxSlots = 2;

// Word w is at kWordBytes * w from the arena's start.
enum MailboxWord : int {
  kPublished,  // device
  kObserved,   // device
  kLate,       // device: 0, or the sequence number that was not answered in time
  kAnswered,   // host
  kFailed,     // host: 0, or the last sequence number that failed
  kCancel,     // host
  kBatch,      // device, at a step's start: its requests; further rows are a graph's padding
  kMailboxWords = 16
};

struct MailboxShape {
  int32_t max_requests;
  int32_t q_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t element;  // bytes of a number of q, k and v: 2 (bfloat16) or 4 (float32)
};

// Byte offsets from the arena's start.
struct MailboxSlot {
  int64_t q;      // [max_requests][q_heads][head_dim]
  int64_t k, v;   // [max_requests][kv_heads][head_dim]
  int64_t parts;  // [max_requests][q_heads][5] float32 (kernels/feature_index.h)
  int64_t o;      // [max_requests][q_heads][head_dim] float32
  int64_t lse;    // [max_requests][q_heads] float32, natural log
  int64_t layer;  // int32
  // uint64, nanoseconds of the device's clock.
  int64_t published_at;  // [1]
  int64_t taken_at;      // [2]: when take began to wait, and found the answer; 0: not yet
};

inline constexpr int kMailboxParts = 5;

constexpr int64_t mailbox_round(int64_t bytes) { return (bytes + 255) / 256 * 256; }

constexpr int64_t mailbox_slot_bytes(const MailboxShape& s) {
  const int64_t heads = int64_t{s.max_requests} * s.q_heads, groups = int64_t{s.max_requests} * s.kv_heads;
  return mailbox_round(heads * s.head_dim * s.element) + 2 * mailbox_round(groups * s.head_dim * s.element) +
         mailbox_round(heads * kMailboxParts * 4) + mailbox_round(heads * s.head_dim * 4) +
         mailbox_round(heads * 4) + 3 * 256;
}

constexpr int64_t mailbox_bytes(const MailboxShape& s) {
  return kMailboxWords * kWordBytes + kMailboxSlots * mailbox_slot_bytes(s);
}

constexpr MailboxSlot mailbox_slot(const MailboxShape& s, uint32_t sequence) {
  const int64_t heads = int64_t{s.max_requests} * s.q_heads, groups = int64_t{s.max_requests} * s.kv_heads;
  MailboxSlot at{};
  at.q = kMailboxWords * kWordBytes + sequence % kMailboxSlots * mailbox_slot_bytes(s);
  at.k = at.q + mailbox_round(heads * s.head_dim * s.element);
  at.v = at.k + mailbox_round(groups * s.head_dim * s.element);
  at.parts = at.v + mailbox_round(groups * s.head_dim * s.element);
  at.o = at.parts + mailbox_round(heads * kMailboxParts * 4);
  at.lse = at.o + mailbox_round(heads * s.head_dim * 4);
  at.layer = at.lse + mailbox_round(heads * 4);
  at.published_at = at.layer + 256;
  at.taken_at = at.published_at + 256;
  return at;
}

}  // namespace fluxion
