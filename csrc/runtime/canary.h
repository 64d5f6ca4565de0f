// Checksums of what was written to the host pool, to verify what is read.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/host_memory.h"
#include "runtime/pool_shape.h"

namespace fluxion {

class HostPool;

// One checksum for each token (its key and value), metadata entry and sketch; none for moments and tags. Each
// is written together with its data, so a partly filled page is checked as far as it goes. A checksum also
// depends on the place, so data of another place does not match. Every change within 8 bytes changes the sum;
// other changes go unnoticed once in 2^64.
class Canary {
 public:
  // share: of the reads that are checked, in (0, 1]. Throws as HostMemory does.
  Canary(const PoolShape& shape, double share);

  // Called by the writer, with what it wrote: token `offset` of a tile that has at least that token.
  void wrote_token(int layer, int head, int page, int offset, const char* tile) const;
  // Forgets all tokens of a page that another writer fills: they count as never written.
  void forget_tokens(int layer, int head, int page) const;
  // page: the last page of the entry's block.
  void wrote_entry(int layer, int head, int level, int page, const char* entry) const;
  void wrote_sketch(int layer, int head, int page, const char* sketch) const;

  // Called after a read, while caches have the data; checks `share` of it. Any thread. Throws CorruptMemory;
  // then the result of the read is invalid. tokens: how many were read, 16 of every page but the last.
  void read_tiles(const HostPool& pool, int layer, int head, const int32_t* pages, int64_t tokens) const;
  // tokens: page * 16 + place.
  void read_tokens(const HostPool& pool, int layer, int head, const int32_t* tokens, int64_t count) const;
  // Entries of the blocks that end with pages[i * stride].
  void read_entries(const HostPool& pool, int layer, int head, int level, const int32_t* pages,
                    int64_t stride, int64_t count) const;
  // Checks whole sketches, even if only a part was read.
  void read_sketches(const HostPool& pool, int layer, int head, const int32_t* pages, int64_t count) const;

  // Checks every token, entry and sketch that was ever written, while nothing writes. Adds their number to
  // *checked, and returns sentences about the first `most` mismatches.
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
  int64_t entry_sums_[5] = {};    // per layer and head: begin of each level, and the total
  uint64_t* tokens_ = nullptr;    // [layers][heads][pages][16]; 0: never written
  uint64_t* entries_ = nullptr;   // [layers][heads] of [level][entries]
  uint64_t* sketches_ = nullptr;  // [layers][heads][pages], of a pool that has them
  mutable std::atomic<int64_t> checks_{0}, mismatches_{0};
};

}  // namespace fluxion
