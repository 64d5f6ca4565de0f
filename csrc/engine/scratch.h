// A worker's scratch memory, which outlives the layers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/block_scores.h"
#include "engine/stage.h"
#include "engine/task.h"
#include "kernels/api.h"

namespace fluxion {

inline constexpr int kMaxChunks = 64;  // per stage; bounds the partial results

// Room for one kind of task alone: a class derived from this, which Scratch::own() makes.
struct OwnScratch {
  virtual ~OwnScratch() = default;
};

struct Scratch {
  // Sizes of the arrays. tokens: of a middle that is ranked token by token, 16 times its pages.
  struct Room {
    int pages, tokens, group, head_dim;
    int64_t entry_bytes;
  };

  Stage<Scratch> stage;          // of this worker's task
  std::vector<float> scores;     // [G][units]: of blocks, or of tokens
  std::vector<uint16_t> chosen;  // [units]: heads that chose a block or token
  std::vector<int32_t> blocks;   // [pages]: blocks that some head reads
  std::vector<int32_t> pages;    // [pages]
  std::vector<int32_t> tokens;   // [tokens]: of the pool's tiles
  std::vector<uint16_t> masks;   // [pages][G]
  std::vector<float> select;
  std::vector<float> part_o;    // [kMaxChunks - 1][heads][D]: attention of a stage's chunks but the first
  std::vector<float> part_lse;  // [kMaxChunks - 1][heads]
  BlockScorer scorer;
  bool looks_on = false;  // it shows what tasks read, and does none
  int64_t stats[kStatCount] = {};
  int64_t busy_ns = 0, helped_chunks = 0;

  int64_t stride(int group) const { return static_cast<int64_t>(scores.size()) / group; }

  // May throw std::bad_alloc, and then has room for the old sizes at least.
  void resize(const Room& room);
  // Makes room for the partial results of this many heads, which may be more than a group's.
  void reserve_parts(size_t heads, int head_dim) {
    part_o.resize(std::max(part_o.size(), (kMaxChunks - 1) * heads * head_dim));
    part_lse.resize(std::max(part_lse.size(), (kMaxChunks - 1) * heads));
  }

  // The room of type T, made by the first call. Only a thread that has the scratch alone may make that call.
  template <class T>
  T& own() {
    static const size_t index = next_index();
    if (own_.size() <= index) own_.resize(index + 1);
    if (!own_[index]) own_[index] = std::make_unique<T>();
    return static_cast<T&>(*own_[index]);
  }

 private:
  // One counter for all libraries.
  FLUXION_API static size_t next_index();

  std::vector<std::unique_ptr<OwnScratch>> own_;
};

}  // namespace fluxion
