#include "engine/sharing.h"

#include <algorithm>
#include <cstring>

namespace fluxion {

void Families::reserve(int requests) {
  members_.reserve(requests);
  length_.resize(std::max<size_t>(length_.size(), requests));
  families_.reserve(requests);
}

void Families::find(const int32_t* table, int64_t stride, int first, std::span<const int32_t> ends,
                    int together) {
  table_ = table;
  stride_ = stride;
  first_ = first;
  ends_ = ends;
  together_ = together;
  families_.clear();
  members_.clear();
  for (size_t b = 0; b < ends.size(); ++b) {
    if (ends[b] - first >= kLeastSharedPages) members_.push_back(static_cast<int32_t>(b));
  }
  divide(0, static_cast<int>(members_.size()), first, /*measured=*/false);
}

// The first logical page from `from` on where a and b differ, or where the shorter middle ends.
int Families::agree(int a, int b, int from) const {
  constexpr int kStep = 256;  // pages compared at once: long prefixes dominate the time
  const int32_t *x = table_ + a * stride_, *y = table_ + b * stride_;
  const int end = std::min(ends_[a], ends_[b]);
  while (from + kStep <= end && std::memcmp(x + from, y + from, kStep * sizeof(int32_t)) == 0) from += kStep;
  while (from < end && x[from] == y[from]) ++from;
  return from;
}

// Finds families among members_[begin, end), which agree on [first_, agreed). Returns the page reads they
// save. measured: length_ already holds how far each agrees with the first one. Pages are compared again only
// where a branch gets a new first request.
int64_t Families::divide(int begin, int end, int agreed, bool measured) {
  const int n = end - begin;
  if (n < 2) return 0;
  const auto members = std::span(members_).subspan(begin, n);
  int all = ends_[members[0]];
  int64_t pages = all - first_;
  for (const int32_t b : members.subspan(1)) {
    if (!measured) length_[b] = agree(members[0], b, agreed);
    all = std::min(all, length_[b]);
    pages += ends_[b] - first_;
  }
  const int shared = all - first_;
  int64_t saved = 0;
  if (shared >= kLeastSharedPages) {
    saved = static_cast<int64_t>(n - (n + together_ - 1) / together_) * shared;
    if (static_cast<double>(saved) < kLeastGain * static_cast<double>(pages)) saved = 0;
  }
  // Branches differ in the next page; requests that end here form one branch.
  const auto next = [&](int32_t b) { return ends_[b] == all ? -1 : table_[b * stride_ + all]; };
  const int32_t leader = members[0];
  std::sort(members.begin(), members.end(), [&](int32_t a, int32_t b) {
    const int32_t x = next(a), y = next(b);
    return x != y ? x < y : a < b;
  });
  const size_t before = families_.size();
  int64_t apart = 0;
  for (int i = begin, to; i < end; i = to) {
    for (to = i + 1; to < end && next(members_[to]) == next(members_[i]);) ++to;
    if (to - i == n) break;  // all end here
    apart += divide(i, to, all, members_[i] == leader);
  }
  if (saved == 0 || saved < apart) return apart;
  families_.resize(before);
  families_.push_back({begin, n, all});
  std::sort(members.begin(), members.end());
  return saved;
}

}  // namespace fluxion
