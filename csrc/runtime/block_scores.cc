#include "runtime/block_scores.h"

#include <cstring>

namespace fluxion {

void BlockScorer::resize(int pages, int group, int64_t entry_bytes) {
  index_.resize(pages);
  merged_.resize(kMergeBatch * entry_bytes);
  merged_block_.resize(kMergeBatch);
  merged_score_.resize(kMergeBatch * group);
}

int64_t BlockScorer::score(const HostPool& pool, int layer, int head, const Blocks& blocks,
                           const int32_t* pages, const char* q, int group, float* scores, int64_t stride) {
  const KernelTable& kernels = pool.kernels();
  const int D = pool.shape().head_dim, level = blocks.level;
  const int64_t entry_bytes = pool.shape().entry_bytes();
  const int32_t* tags = level == 0 ? nullptr : pool.tags(layer, level);
  int merged = 0;
  // Blocks without an entry of their own get one here, and their scores in batches.
  constexpr int32_t kIota[kMergeBatch] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                          16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
  const auto score_merged = [&] {
    kernels.score(q, group, D, merged_.data(), kIota, merged, pool.spread(), merged_score_.data(),
                  kMergeBatch);
    for (int g = 0; g < group; ++g) {
      for (int m = 0; m < merged; ++m)
        scores[g * stride + merged_block_[m]] = merged_score_[g * kMergeBatch + m];
    }
    merged = 0;
  };
  const auto has_entry = [&](int last) {
    if (last >= blocks.end_page) return false;
    return level == 0 || tags[pages[last] >> level] == pages[last];
  };
  int entries = 0;
  for (int i = 0; i < blocks.count; ++i) {
    const int last = blocks.last(i);
    index_[i] = has_entry(last) ? pages[last] >> level : -1;
    entries += index_[i] >= 0;
  }
  int64_t bytes = entries * entry_bytes;
  const char* own = pool.entries(layer, head, level);
  // Runs of blocks that have an entry, and the others merged in between.
  for (int i = 0; i < blocks.count;) {
    if (index_[i] >= 0) {
      int run = i;
      while (run < blocks.count && index_[run] >= 0) ++run;
      kernels.score(q, group, D, own, &index_[i], run - i, pool.spread(), scores + i, stride);
      i = run;
      continue;
    }
    const int first = blocks.from(i), end = blocks.to(i);
    char* entry = merged_.data() + merged * entry_bytes;
    std::memcpy(entry, pool.entry(layer, head, 0, pages[first]), entry_bytes);
    for (int p = first + 1; p < end; ++p) {
      kernels.merge_minmax(entry, pool.entry(layer, head, 0, pages[p]), D);
    }
    bytes += (end - first) * entry_bytes;
    merged_block_[merged++] = i++;
    if (merged == kMergeBatch) score_merged();
  }
  if (merged > 0) score_merged();
  return bytes;
}

}  // namespace fluxion
