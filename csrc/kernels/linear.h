#pragma once

#include "kernels/rows.h"
#include "kernels/table.h"

// Linear layers of few rows: weights are read from memory once and multiplied with all rows.
namespace fluxion::FLUXION_ISA {
namespace {

// Rows of x that are multiplied together, padded with zeros to a power of two. Arithmetic limits their
// number: each row takes one instruction for a cache line of bfloat16 weights. Zen 4 executes one such
// instruction a cycle, and memory delivers a line to a core every 5 to 10 cycles.
inline constexpr int kLinearRows = 8;
// Outputs whose sums are kept at a time.
inline constexpr int kLinearOutputs = 48;
// Bytes of x that are multiplied at a time if x does not fit in the L1 cache.
inline constexpr int kLinearBytes = 16 << 10;
// How far ahead weights are prefetched.
inline constexpr int kLinearAhead = 4 << 10;

inline constexpr int across_of(int rows) { return rows > 4 ? 8 : rows > 2 ? 4 : rows; }
inline constexpr int padded(int in) { return (in + kLinearPad - 1) / kLinearPad * kLinearPad; }

// Packs a group of rows as [padded in / pair][rows, padded][pair]. Interleaved rows spread over the sets of a
// cache; rows that are a power of two apart would all lie in the same sets.
template <class T>
void pack_linear(const void* x, int64_t x_stride, int rows, int in, void* packed) {
  using Query = typename Dot<T>::Query;
  constexpr int kPair = 2 * kLanes;
  static_assert(kLinearPad % kPair == 0);
  const int size = padded(in);
  for (int first = 0; first < rows; first += kLinearRows) {
    const int count = smaller(rows - first, kLinearRows), across = across_of(count);
    Query* group = static_cast<Query*>(packed) + static_cast<int64_t>(first) * size;
    const T* row = static_cast<const T*>(x) + first * x_stride;
    for (int k = 0; k < size; k += kPair, group += across * kPair) {
      for (int r = 0; r < across; ++r) {
        const T* from = row + r * x_stride + k;
        if (r < count && k + kPair <= in) {
          Dot<T>::pack(from, kPair, group + r * kPair);
          continue;
        }
        T rest[kPair] = {};
        if (r < count && k < in) __builtin_memcpy(rest, from, (in - k) * sizeof(T));
        Dot<T>::pack(rest, kPair, group + r * kPair);
      }
    }
  }
}

// Whether this many rows of x stay in the L1 cache while weights pass through it, or need not: one or two
// rows come from the next cache as fast as they are used.
template <class T>
bool goes_straight(const LinearArgs& args, int rows) {
  return rows <= 2 ||
         static_cast<int64_t>(sizeof(typename Dot<T>::Query)) * rows * args.in <= args.near_bytes;
}

// Adds the products of a pair of inputs of kSide rows of weights, from element k of each on, with kX rows of
// x.
template <class T, int kX, int kSide>
inline void add_pair(const typename Dot<T>::Query* x, const T* const* rows, int k, Vec (&total)[kSide * kX]) {
  typename Dot<T>::Pair w[kSide];
#pragma GCC unroll 4
  for (int s = 0; s < kSide; ++s) w[s] = Dot<T>::row_pair(rows[s] + k);
#pragma GCC unroll 8
  for (int m = 0; m < kX; ++m) {
    const auto q = Dot<T>::query_pair(x + m * 2 * kLanes);
#pragma GCC unroll 4
    for (int s = 0; s < kSide; ++s) total[s * kX + m] = Dot<T>::add(total[s * kX + m], q, w[s]);
  }
}

// How many numbers `reduce_sums` writes for kCount sums.
template <int kCount>
inline constexpr int padded_sums = (kCount + kLanes - 1) / kLanes * kLanes;

// each[i]: the sum of the lanes of total[i].
template <int kCount>
inline void reduce_sums(const Vec* total, float* each) {
#pragma GCC unroll 32
  for (int i = 0; i < kCount; i += kLanes) {
    Vec rows[kLanes];
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) rows[j] = i + j < kCount ? total[i + j] : set1(0.0f);
    store(each + i, reduce_rows(rows));
  }
}

// Writes `count` outputs, from `first` on, of a group of up to kX rows. Each row has its sums in
// `sums[kLinearOutputs]`.
template <class T, int kX>
void store_sums(const LinearArgs& args, int group, int64_t first, int count, const float* sums, T* out) {
  const T* bias = static_cast<const T*>(args.bias);
  for (int m = 0; m < kX && group + m < args.rows; ++m) {
    const float* from = sums + m * kLinearOutputs;
    T* to = out + (group + m) * args.out_stride;
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      const Vec y = load(from + i);
      store_one(to + i, bias ? add(y, load_one(bias + first + i)) : y);
    }
    for (; i < count; ++i) round_to(bias ? from[i] + to_float(bias[first + i]) : from[i], to + i);
  }
}

// Calls body<kX, kOnce>(first row) for every group of rows of x. kX: its padded rows. kOnce: whether it is
// the only group; if not, the next one finds the weights in a cache.
template <class Body>
void for_groups(const LinearArgs& args, Body body) {
  for (int group = 0; group < args.rows; group += kLinearRows) {
    const auto run = [&]<int kX>() {
      args.rows <= kLinearRows ? body.template operator()<kX, true>(group)
                               : body.template operator()<kX, false>(group);
    };
    switch (across_of(smaller(args.rows - group, kLinearRows))) {
      case 1:
        run.template operator()<1>();
        break;
      case 2:
        run.template operator()<2>();
        break;
      case 4:
        run.template operator()<4>();
        break;
      default:
        run.template operator()<8>();
    }
  }
}

// Multiplies `steps` times kSide rows of weights with a group of kX rows of x. If x stays in the L1 cache,
// weights are read in the order of memory, at the speed of a plain stream. If not, inputs are read one block
// after another, so that this block of x stays there.
//
// kOnce: this call reads the weights once, so they need not go through all caches.
template <class T, int kX, int kSide, bool kOnce>
class LinearUnits {
 public:
  LinearUnits(const LinearArgs& args, const typename Dot<T>::Query* x, const T* weights, int steps)
      : x_(x), weights_(weights), stride_(args.stride), in_(args.in), steps_(steps) {
    constexpr int kMost = kLinearBytes / (kX * static_cast<int>(sizeof(typename Dot<T>::Query)));
    blocks_ = goes_straight<T>(args, kX) ? 1 : (in_ + kMost - 1) / kMost;
    block_ = padded((in_ + blocks_ - 1) / blocks_);
    blocks_ = (in_ + block_ - 1) / block_;
  }

  // sums[m * kLinearOutputs + i]: row m of x times row i of the weights. Each lane adds in the order of the
  // inputs for any kX, kSide and blocks, so a row's sums do not depend on the other rows.
  void run(float* sums) const {
    Vec kept[kLinearOutputs * kX];  // of all blocks but the last
    const int units = blocks_ * steps_;
    // Gaps between rows that are far apart are not prefetched.
    const bool straight = blocks_ == 1 && stride_ <= in_ + in_ / 8;
    // Units of a block are prefetched as a whole: a loop that ends within one costs more than it gains.
    constexpr int kAhead = kLinearAhead / static_cast<int>(sizeof(T));
    const int skip = block_ < kAhead ? kAhead / block_ : 1;
    for (int u = 0; u < units; ++u) {
      const T* rows = begin_of(u);
      Fetch fetch{rows + kAhead, kLineElements, kSide};
      if (!straight) fetch = {begin_of(u + skip < units ? u + skip : u), stride_, 1};
      multiply(u, rows, fetch, kept, sums);
    }
  }

 private:
  static constexpr int kPair = 2 * kLanes;
  static constexpr int kCount = kSide * kX;
  static constexpr int kLineElements = kPair * sizeof(T) < kLine ? kLine / sizeof(T) : kPair;

  // Input k of row s of a unit prefetches from[s * apart + k * pace].
  struct Fetch {
    const T* from;
    int64_t apart;
    int pace;
  };

  // Unit u is block u / steps of the rows from (u % steps) * kSide on.
  const T* begin_of(int unit) const {
    return weights_ + unit / steps_ * block_ + static_cast<int64_t>(unit % steps_) * kSide * stride_;
  }

  void multiply(int unit, const T* first, const Fetch& fetch, Vec* kept, float* sums) const {
    const int block = unit / steps_, row = unit % steps_ * kSide, begin = block * block_,
              size = smaller(in_ - begin, block_), whole = size / kPair * kPair;
    const auto* x = x_ + static_cast<int64_t>(begin) * kX;
    const T* rows[kSide];
    for (int s = 0; s < kSide; ++s) rows[s] = first + s * stride_;
    Vec total[kCount];
    Vec* mine = kept + row * kX;
    if (block > 0) {
#pragma GCC unroll 32
      for (int i = 0; i < kCount; ++i) total[i] = mine[i];
    } else {
#pragma GCC unroll 32
      for (int i = 0; i < kCount; ++i) total[i] = set1(0.0f);
    }
    for (int k = 0; k < whole; k += kPair) {
      constexpr int kBytes = kPair * static_cast<int>(sizeof(T));
      if (kBytes >= kLine || k * static_cast<int>(sizeof(T)) % kLine == 0) {
#pragma GCC unroll 4
        for (int s = 0; s < kSide; ++s) {
          const auto* line = reinterpret_cast<const char*>(fetch.from + s * fetch.apart + k * fetch.pace);
          for (int b = 0; b < kBytes; b += kLine) kOnce ? prefetch_once(line + b) : prefetch(line + b);
        }
      }
      add_pair<T, kX, kSide>(x + static_cast<int64_t>(k) * kX, rows, k, total);
    }
    if (whole < size) {
      T rest[kSide][kPair] = {};
      const T* ends[kSide];
      for (int s = 0; s < kSide; ++s) {
        __builtin_memcpy(rest[s], rows[s] + whole, (size - whole) * sizeof(T));
        ends[s] = rest[s];
      }
      add_pair<T, kX, kSide>(x + static_cast<int64_t>(whole) * kX, ends, 0, total);
    }
    if (block + 1 < blocks_) {
#pragma GCC unroll 32
      for (int i = 0; i < kCount; ++i) mine[i] = total[i];
      return;
    }
    float each[padded_sums<kCount>];
    reduce_sums<kCount>(total, each);
#pragma GCC unroll 32
    for (int i = 0; i < kCount; ++i) sums[i % kX * kLinearOutputs + row + i / kX] = each[i];
  }

  const typename Dot<T>::Query* x_;
  const T* weights_;
  int64_t stride_;
  int in_, steps_, block_, blocks_;
};

// Multiplies a group of up to kX rows of x with up to kLinearOutputs outputs.
template <class T, int kX, bool kOnce>
void linear_group(const LinearArgs& args, int group, int64_t first, int count, T* out) {
  const auto* x = static_cast<const typename Dot<T>::Query*>(args.x);
  x += static_cast<int64_t>(group) * padded(args.in);
  const T* weights = static_cast<const T*>(args.weights) + first * args.stride;
  float sums[kX * kLinearOutputs];
  int done = 0;
  // Rows side by side halve the reads of x, but are no plain stream.
  if constexpr (kX == 8 ? kRegisters >= 32 : kX == 4) {
    if (kX == 8 || !goes_straight<T>(args, kX)) {
      if (count >= 2) LinearUnits<T, kX, 2, kOnce>(args, x, weights, count / 2).run(sums);
      done = count / 2 * 2;
    }
  }
  if (done < count)
    LinearUnits<T, kX, 1, kOnce>(args, x, weights + done * args.stride, count - done).run(sums + done);
  store_sums<T, kX>(args, group, first, count, sums, out);
}

template <class T>
void linear(const LinearArgs& args, int64_t first, int count, void* out) {
  for (int begin = 0; begin < count; begin += kLinearOutputs) {
    const int size = smaller(count - begin, kLinearOutputs);
    for_groups(args, [&]<int kX, bool kOnce>(int group) {
      linear_group<T, kX, kOnce>(args, group, first + begin, size, static_cast<T*>(out) + begin);
    });
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
