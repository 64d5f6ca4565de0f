// Scores the blocks of a middle. The engine selects by these scores; least budgets are measured with them.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "runtime/pool.h"

namespace fluxion {

// A range of blocks of a non-empty middle. Blocks are aligned to absolute positions; the first and the last
// are cut where the middle ends.
struct Blocks {
  int level;
  int first_page, end_page;  // logical pages of the middle
  int first, count;          // blocks: number of the first, counted from position 0

  Blocks(int blk, int sink_pages, int window_page)
      : level(std::countr_zero(static_cast<unsigned>(blk / kPage))),
        first_page(sink_pages),
        end_page(window_page),
        first(sink_pages >> level),
        count(((window_page - 1) >> level) - first + 1) {}

  // Logical pages [from, to) of block i; last(i) is its last page without the cut.
  int from(int i) const { return std::max((first + i) << level, first_page); }
  int to(int i) const { return std::min((first + i + 1) << level, end_page); }
  int last(int i) const { return ((first + i + 1) << level) - 1; }
  int tokens() const { return (end_page - first_page) * kPage; }

  // Blocks [begin, end) of this range, as a range of their own.
  Blocks part(int begin, int end) const {
    Blocks some = *this;
    some.first_page = std::max((first + begin) << level, first_page);
    some.end_page = std::min((first + end) << level, end_page);
    some.first = first + begin;
    some.count = end - begin;
    return some;
  }
};

class BlockScorer {
 public:
  // Reserves room for a middle of this many pages. May throw std::bad_alloc, and then has the old room.
  void resize(int pages, int group, int64_t entry_bytes);

  // Scores every block for every head of the group: scores[g * stride + i], see KernelTable::score. pages:
  // physical page of every logical page. Returns the bytes of metadata read. A block without an entry (cut,
  // or overwritten in a collision) is scored from its pages, bit-identically.
  int64_t score(const HostPool& pool, int layer, int head, const Blocks& blocks, const int32_t* pages,
                const char* q, int group, float spread, float* scores, int64_t stride);

  // Has the canary check the entries that `score` has just read for these blocks. Throws CorruptMemory.
  void check(const HostPool& pool, int layer, int head, const Blocks& blocks, const int32_t* pages) const;

 private:
  static constexpr int kMergeBatch = 32;

  // Fills index_ and without_ for a level above 0. Returns how many blocks have no entry.
  int find_entries(const int32_t* tags, const Blocks& blocks, const int32_t* pages);

  std::vector<int32_t> index_;       // [pages]
  std::vector<int32_t> without_;     // [pages]: blocks without an entry
  int without_count_ = 0;            // valid elements of without_
  std::vector<char> merged_;         // [kMergeBatch] entries merged from pages
  std::vector<float> merged_score_;  // [G][kMergeBatch]
};

}  // namespace fluxion
