// Finds requests of a step that begin with the same pages, and decides which to read together.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fluxion {

// A family shares at least this many pages; fewer do not pay for merging two partial attentions per request.
inline constexpr int kLeastSharedPages = 16;
// Sharing must save at least this share of the pages in a family's middles. A family is one piece of work, so
// its other pages are read one request after the other.
inline constexpr double kLeastGain = 1.0 / 16;

// Requests whose page tables agree on the logical pages [first page of a middle, end_page). These pages are
// in the middle of every member.
struct Family {
  int begin, count;  // of Families::members()
  int end_page;
};

// Prefixes nest (a system prompt that all share, a document that some share), but a request is in at most one
// family. find() divides the requests so that most page reads are saved. At every branching it takes one
// family of all requests below, or the best division of the branches. The result depends only on the
// arguments.
class Families {
 public:
  // Room for this many requests. May throw std::bad_alloc, and then has the old room.
  void reserve(int requests);
  void clear() { families_.clear(); }

  // Finds the families. The middle of request b is the logical pages [first, ends[b]); row b of the table,
  // with this stride, has their physical ids. ends[b] <= first: no middle, no family. together: how many
  // requests one read serves, at least 1; n requests read shared pages ceil(n / together) times.
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

  // Members of a branch are contiguous, in ascending order.
  std::vector<int32_t> members_;
  std::vector<int32_t> length_;  // [requests]: logical page up to which it agrees with its branch's first
  std::vector<Family> families_;
};

}  // namespace fluxion
