// Lists of chosen tiles without a copy on the device. A device that ranks blocks (cuda/near.h) writes them,
// and the CPU attends to these tiles. Plain offsets, for every compiler that sees them.
//
// Pinned memory beside a mailbox, with the same rules. The lists of a layer lie in slot `sequence % 2`. The
// device writes them before it publishes the layer, and the CPU reads them until it answers.
#pragma once

#include <cstdint>

namespace fluxion {

struct FarShape {
  int32_t max_requests, kv_heads;
  int32_t max_pages;  // of a request
};

// Byte offsets from the arena's start. The list of request b and KV head h is number b * kv_heads + h.
struct FarLists {
  int64_t counts;  // [lists] int32: number of pages
  int64_t pages;   // [lists][max_pages] int32: physical pages
  int64_t heads;   // [lists][max_pages] uint16: the group's heads that read the page
};

constexpr int64_t far_lists(const FarShape& s) { return int64_t{s.max_requests} * s.kv_heads; }

constexpr int64_t far_slot_bytes(const FarShape& s) {
  return (far_lists(s) * 4 + far_lists(s) * s.max_pages * 6 + 255) / 256 * 256;
}

constexpr int64_t far_bytes(const FarShape& s) { return 2 * far_slot_bytes(s); }

constexpr FarLists far_slot(const FarShape& s, uint32_t sequence) {
  FarLists at{};
  at.counts = sequence % 2 * far_slot_bytes(s);
  at.pages = at.counts + far_lists(s) * 4;
  at.heads = at.pages + far_lists(s) * s.max_pages * 4;
  return at;
}

}  // namespace fluxion
