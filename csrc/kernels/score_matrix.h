#pragma once

#include "kernels/matrix.h"

namespace fluxion::FLUXION_ISA {
namespace {

// Scores blocks by matrix products: 16 entries times the weights of up to 16 heads. Entries are read in the
// order of score.h, which suits memory, and copied to the input of the unit. The copy costs little, and
// entries may lie anywhere. A block of four entries of each list is copied while the block before it is
// multiplied. Four blocks are a group, whose scores are written meanwhile.
template <int kD>
class MatrixScores {
 public:
  // split: [heads][2 * head_dim], the weights of {min, max}; part: entries of one of the four lists.
  MatrixScores(const BF16* split, int heads, int head_dim, const BF16* entries, const int32_t* index, int n,
               int part, float* out, int64_t out_stride)
      : heads_(heads),
        size_(2 * head_dim),
        entries_(entries),
        index_(index),
        n_(n),
        part_(part),
        out_(out),
        out_stride_(out_stride),
        parties_((heads + kMatrixHeads - 1) / kMatrixHeads) {
    for (int p = 0; p < parties_; ++p) {
      const int first = p * kMatrixHeads;
      pack_heads(split + first * size(), smaller(heads - first, kMatrixHeads), size(), weights_[p][0][0]);
    }
  }

  void run() {
    const int blocks = (part_ + kMatrixRows - 1) / kMatrixRows * kGroup;
    find(0, rows_[0]);
    for (int block = 0; block < blocks; ++block) {
      find(block + 1, rows_[(block + 1) % 2]);
      if (block == 0) {
        advance<true, false>(block);
      } else {
        advance<true, true>(block);
      }
    }
    advance<false, true>(blocks);
    for (int i = 0; i < units(); ++i) write(i, blocks - kGroup);
  }

 private:
  static constexpr int kLists = 4, kSteps = 4, kGroup = 4;
  static constexpr int kMaxParties = kMaxHeads / kMatrixHeads;

  int size() const { return kD ? 2 * kD : size_; }
  int units() const { return kLists * ((heads_ + 3) / 4); }

  // Row p * kLists + s is entry kSteps * block + p of list s; past the end the last one stands in.
  void find(int block, const BF16** to) const {
    for (int p = 0; p < kSteps; ++p) {
      for (int s = 0; s < kLists; ++s) {
        const int at = s * part_ + smaller(block * kSteps + p, part_ - 1);
        *to++ = entries_ + index_[smaller(at, n_ - 1)] * static_cast<int64_t>(size());
      }
    }
  }

  // Copies a block, multiplies the one before it, and writes finished scores.
  template <bool kCopy, bool kMultiply>
  void advance(int block) {
    const int depth = size() / kMatrixDepth;
    const BF16 *const *from = rows_[block % 2], *const *next = rows_[(block + 1) % 2];
    BF16* to = copies_[block % 2];
    // The last product of a group is known when the first block of the next group has been copied.
    const bool writes = block > kGroup && block % kGroup == 1;
    int done = 0, times = 0;
    if constexpr (kMultiply) {
      zero_matrix<0>();
      zero_matrix<1>();
      zero_matrix<2>();
      zero_matrix<3>();
    }
    for (int p = 0; p < kSteps; ++p) {
      // Local copies, because the compiler would reload the arrays after every product, which may write them.
      const BF16 *now[kLists], *then[kLists];
#pragma GCC unroll 4
      for (int s = 0; s < kLists; ++s) {
        now[s] = from[p * kLists + s];
        then[s] = next[p * kLists + s];
      }
      for (int c = 0; c < depth; ++c, ++times) {
        const int d = c * kMatrixDepth;
        if constexpr (kCopy) {
#pragma GCC unroll 4
          for (int s = 0; s < kLists; ++s) {
            prefetch(then[s] + d);
            copy_line(now[s] + d, to + (s * kSteps + p) * size() + d);
          }
        }
        if constexpr (kMultiply) {
          if (times % 4 == 3) multiply(copies_[(block + 1) % 2], times / 4);
        }
        if (writes) {
          for (; done * kSteps * depth < (times + 1) * units(); ++done) write(done, block - 1 - kGroup);
        }
      }
    }
    if constexpr (kMultiply) {
      Matrix* products = products_[(block - 1) % kGroup];
      store_matrix<0>(products[0], kMatrixRowBytes);
      if (parties_ > 1) store_matrix<1>(products[1], kMatrixRowBytes);
      if (parties_ > 2) store_matrix<2>(products[2], kMatrixRowBytes);
      if (parties_ > 3) store_matrix<3>(products[3], kMatrixRowBytes);
    }
  }

  void multiply(const BF16* rows, int c) {
    load_matrix<4>(rows + c * kMatrixDepth, size() * static_cast<int64_t>(sizeof(BF16)));
    load_matrix<5>(weights_[0][c], kMatrixRowBytes);
    multiply_matrices<0, 4, 5>();
    if (parties_ == 1) return;
    load_matrix<6>(weights_[1][c], kMatrixRowBytes);
    multiply_matrices<1, 4, 6>();
    if (parties_ == 2) return;
    load_matrix<5>(weights_[2][c], kMatrixRowBytes);
    multiply_matrices<2, 4, 5>();
    if (parties_ == 3) return;
    load_matrix<6>(weights_[3][c], kMatrixRowBytes);
    multiply_matrices<3, 4, 6>();
  }

  // Writes the scores of 16 entries of one list for four heads, of the group that begins with `block`.
  void write(int unit, int block) {
    const int s = unit % kLists, head = unit / kLists * 4, i = block * kSteps;
    const int count = smaller(smaller(part_, n_ - s * part_) - i, kMatrixRows);
    const auto row = [&](int r) {
      return products_[r / kSteps][head / kMatrixHeads][s * kSteps + r % kSteps] + head % kMatrixHeads;
    };
    Vec columns[4];
    four_columns(row, columns);
    for (int j = 0; j < smaller(4, heads_ - head); ++j) {
      float* to = out_ + (head + j) * out_stride_ + s * static_cast<int64_t>(part_) + i;
      if (count == kMatrixRows) {
        store(to, columns[j]);
      } else if (count > 0) {
        float last[kLanes];
        store(last, columns[j]);
        __builtin_memcpy(to, last, count * sizeof(float));
      }
    }
  }

  int heads_, size_;
  const BF16* entries_;
  const int32_t* index_;
  int n_, part_;
  float* out_;
  int64_t out_stride_;
  int parties_;
  MatrixUnit unit_;
  const BF16* rows_[2][kLists * kSteps];
  alignas(64) Matrix products_[kGroup][kMaxParties];
  alignas(64) BF16 copies_[2][kMatrixRows * 2 * kMaxHeadDim];
  alignas(64) Matrix weights_[kMaxParties][2 * kMaxHeadDim / kMatrixDepth];
};

}  // namespace
}  // namespace fluxion::FLUXION_ISA
