#include "engine/block_scores.h"

#include <cstring>

namespace fluxion {

void BlockScorer::resize(int pages, int group, int64_t entry_bytes) {
  index_.resize(pages);
  without_.resize(pages);
  merged_.resize(kMergeBatch * entry_bytes);
  merged_score_.resize(kMergeBatch * group);
}

int BlockScorer::find_entries(const int32_t* tags, const Blocks& blocks, const int32_t* pages) {
  const int level = blocks.level;
  // Only the last block may end beyond the middle, which is then cut.
  const int whole = blocks.last(blocks.count - 1) < blocks.end_page ? blocks.count : blocks.count - 1;
  const int32_t* last = pages + blocks.last(0);
  int without = 0;
  for (int i = 0; i < whole; ++i) {
    const int32_t page = last[static_cast<int64_t>(i) << level];
    index_[i] = page >> level;
    without_[without] = i;
    without += tags[page >> level] != page;
  }
  for (int i = whole; i < blocks.count; ++i) {
    index_[i] = pages[blocks.from(i)] >> level;
    without_[without++] = i;
  }
  return without;
}

// Checks the entries of the blocks; for a block without an entry, those of its pages.
void BlockScorer::check(const HostPool& pool, int layer, int head, const Blocks& blocks,
                        const int32_t* pages) const {
  if (pool.canary() == nullptr) return;
  const Canary& canary = *pool.canary();
  const auto own = [&](int from, int to) {
    const int last = blocks.level == 0 ? blocks.from(from) : blocks.last(from);
    canary.read_entries(pool, layer, head, blocks.level, pages + last, int64_t{1} << blocks.level, to - from);
  };
  int from = 0;
  for (int next = 0; next < without_count_; ++next) {
    const int i = without_[next];
    if (i > from) own(from, i);
    canary.read_entries(pool, layer, head, 0, pages + blocks.from(i), 1, blocks.to(i) - blocks.from(i));
    from = i + 1;
  }
  if (blocks.count > from) own(from, blocks.count);
}

int64_t BlockScorer::score(const HostPool& pool, int layer, int head, const Blocks& blocks,
                           const int32_t* pages, const char* q, int group, float spread, float* scores,
                           int64_t stride) {
  const KernelTable& kernels = pool.kernels();
  const int D = pool.shape().head_dim, level = blocks.level;
  const int64_t entry_bytes = pool.shape().entry_bytes();
  const int32_t* index = level == 0 ? pages + blocks.from(0) : index_.data();
  const int without = level == 0 ? 0 : find_entries(pool.tags(layer, level), blocks, pages);
  without_count_ = without;
  // A block without an entry gets the score of another block here; the loop below overwrites it.
  kernels.score(q, group, D, pool.entries(layer, head, level), index, blocks.count, spread, scores, stride);
  int64_t bytes = (blocks.count - without) * entry_bytes;
  constexpr int32_t kIota[kMergeBatch] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                          16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
  for (int done = 0; done < without; done += kMergeBatch) {
    const int count = std::min(kMergeBatch, without - done);
    const int32_t* block = &without_[done];
    for (int m = 0; m < count; ++m) {
      const int first = blocks.from(block[m]), end = blocks.to(block[m]);
      char* entry = merged_.data() + m * entry_bytes;
      std::memcpy(entry, pool.entry(layer, head, 0, pages[first]), entry_bytes);
      for (int p = first + 1; p < end; ++p) {
        kernels.merge_minmax(entry, pool.entry(layer, head, 0, pages[p]), D);
      }
      bytes += (end - first) * entry_bytes;
    }
    kernels.score(q, group, D, merged_.data(), kIota, count, spread, merged_score_.data(), kMergeBatch);
    for (int g = 0; g < group; ++g) {
      for (int m = 0; m < count; ++m) scores[g * stride + block[m]] = merged_score_[g * kMergeBatch + m];
    }
  }
  return bytes;
}

}  // namespace fluxion
