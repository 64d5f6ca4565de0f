// Sums of what was written to the host pool, to know whether it is what is read.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/host_memory.h"
#include "runtime/pool_shape.h"

namespace fluxion {

class HostPool;

// A sum a token, of its key and value, one a metadata entry and one a sketch; none of moments and tags. Each
// is written with what it is of, so a page that is still being filled is checked as far as it goes. A sum
// also depends on where its subject belongs: what another place has is not taken for it. Every change within
// 8 bytes changes the sum; other changes go unnoticed once in 2^64.
class Canary {
 public:
  // share: of the reads that are checked, in (0, 1]. Throws as HostMemory does.
  Canary(const PoolShape& shape, double share);

  // What is written, by its writer: token `offset` of a tile that has at least that.
  void wrote_token(int layer, int head, int page, int offset, const char* tile) const;
  // All tokens of a page, which somebody else writes: as if nobody had.
  void forget_tokens(int layer, int head, int page) const;
  // page: the last of the entry's block.
  void wrote_entry(int layer, int head, int level, int page, const char* entry) const;
  void wrote_sketch(int layer, int head, int page, const char* sketch) const;

  // What has just been read, so that caches have it; its share is checked. Any thread. Throws CorruptMemory:
  // what was made of it is no result. Of tiles the first `tokens` tokens, 16 of every page but the last.
  void read_tiles(const HostPool& pool, int layer, int head, const int32_t* pages, int64_t tokens) const;
  // tokens: page * 16 + place.
  void read_tokens(const HostPool& pool, int layer, int head, const int32_t* tokens, int64_t count) const;
  // Of the blocks that end with pages[i * stride].
  void read_entries(const HostPool& pool, int layer, int head, int level, const int32_t* pages,
                    int64_t stride, int64_t count) const;
  // All of a sketch, of which some may have been read.
  void read_sketches(const HostPool& pool, int layer, int head, const int32_t* pages, int64_t count) const;

  // Every token, entry and sketch that was ever written, while nobody writes: adds how many there are to
  // *checked, and returns sentences about the first `most` that are not what was written.
  std::vector<std::string> sweep(const HostPool& pool, int64_t most, int64_t* checked) const;

  int64_t checks() const { return checks_.load(std::memory_order_relaxed); }
  int64_t mismatches() const { return mismatches_.load(std::memory_order_relaxed); }

 private:
  template <typename Fetch, typename Check>
  void sample(int64_t reads, const Fetch& fetch, const Check& check) const;
  uint64_t sum_of(int layer, int head, int page, int offset, const char* tile) const;
  bool same_token(const HostPool& pool, int layer, int head, int page, int offset) const;
  bool same_entry(const HostPool& pool, int layer, int head, int level, int page) const;
  bool same_sketch(const HostPool& pool, int layer, int head, int page) const;
  void check_token(const HostPool& pool, int layer, int head, int page, int offset) const;
  uint64_t& token_sum(int layer, int head, int page, int offset) const;
  uint64_t& entry_sum(int layer, int head, int level, int page) const;
  uint64_t& sketch_sum(int layer, int head, int page) const;

  PoolShape shape_;
  double period_;
  HostMemory memory_;
  int64_t entry_sums_[5] = {};    // of a layer and head: where a level begins, and how many there are
  uint64_t* tokens_ = nullptr;    // [layers][heads][pages][16]; 0: never written
  uint64_t* entries_ = nullptr;   // [layers][heads] of [level][entries]
  uint64_t* sketches_ = nullptr;  // [layers][heads][pages], of a pool that has them
  mutable std::atomic<int64_t> checks_{0}, mismatches_{0};
};

}  // namespace fluxion
