#include "engine/scratch.h"

#include <atomic>

#include "kernels/table.h"

namespace fluxion {

void Scratch::resize(const Room& room) {
  const size_t most = room.pages, units = std::max<size_t>(most, room.tokens);
  scores.resize(units * room.group);
  chosen.resize(units);
  added.resize(room.guarded ? most : 0);
  blocks.resize(most);
  pages.resize(most);
  tokens.resize(room.tokens);
  masks.resize(most * room.group);
  reserve_parts(room.group, room.head_dim);
  select.resize(select_scratch_bytes(static_cast<int>(units)) / sizeof(float) + 1);
  scorer.resize(static_cast<int>(most), kMaxHeads, room.entry_bytes);
}

size_t Scratch::next_index() {
  static std::atomic<size_t> count{0};
  return count.fetch_add(1);
}

}  // namespace fluxion
