// Which requests of a step begin with the same pages, and how much of them is worth reading together.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fluxion {

// Fewer pages than this are not worth the two partial attentions that a request of a family has to merge.
inline constexpr int kLeastSharedPages = 16;
// What is read once instead of often must be this share of what the family's middles hold in all: a family is
// one piece of work, and its other pages are read one request after the other.
inline constexpr double kLeastGain = 1.0 / 16;

// Requests whose page tables agree on the logical pages [first page of a middle, end_page), in the middle of
// every one of them.
struct Family {
  int begin, count;  // of Families::members()
  int end_page;
};

// Prefixes nest (a system prompt that all have, a document that some have), but a request is in one family at
// most. Of all ways to divide the requests, find() takes the one that saves most page reads, at every
// branching either the one family of all below it or the best of its branches. The result depends on the
// arguments alone.
class Families {
 public:
  // Room for this many requests. May throw std::bad_alloc, and then has the old room.
  void reserve(int requests);
  void clear() { families_.clear(); }

  // Middles are the logical pages [first, ends[b]) of the requests b; table: row b, with this stride, has
  // their physical ids. ends[b] <= first: a request without a middle, in no family. together: how many
  // requests can be read at once, at least 1; of n of them, ceil(n / together) read what they share.
  void find(const int32_t* table, int64_t stride, int first, std::span<const int32_t> ends, int together);

  std::span<const Family> all() const { return families_; }
  // Requests in ascending order.
  std::span<const int32_t> members(const Family& family) const {
    return {members_.data() + family.begin, static_cast<size_t>(family.count)};
  }

 private:
  int64_t divide(int begin, int end, int agreed, bool measured);
  int agree(int a, int b, int from) const;

  const int32_t* table_ = nullptr;
  int64_t stride_ = 0;
  int first_ = 0, together_ = 1;
  std::span<const int32_t> ends_;

  // Those of a branch lie together, in ascending order.
  std::vector<int32_t> members_;
  std::vector<int32_t> length_;  // [requests]: logical page up to which it agrees with its branch's first one
  std::vector<Family> families_;
};

}  // namespace fluxion
