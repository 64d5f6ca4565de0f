#pragma once

#include "kernels/rows.h"
#include "kernels/table.h"

// Linear layers of few rows: weights are read once, as they lie in memory, and multiplied with all rows.
namespace fluxion::FLUXION_ISA {
namespace {

// Rows of x that are multiplied together, padded with zeros to a power of two. Arithmetic bounds them: a line
// of weights in bfloat16 takes an instruction a row. Zen 4 does one of them a cycle, and memory delivers a
// line to a core every 5 to 10.
inline constexpr int kLinearRows = 8;
// Outputs whose sums are kept at a time: a multiple of 4.
inline constexpr int kLinearOutputs = 192;
// Bytes of a row of x that are multiplied at a time: kLinearRows of them leave half of the nearest cache to
// the weights. How many rows there are changes nothing, so that a row's sums do not depend on the others.
inline constexpr int kLinearBytes = 2 << 10;
// How far ahead weights come from the second nearest cache into the nearest.
inline constexpr int kLinearAhead = 384;

inline constexpr int across_of(int rows) { return rows > 4 ? 8 : rows > 2 ? 4 : rows; }
inline constexpr int padded(int in) { return (in + kLinearPad - 1) / kLinearPad * kLinearPad; }

// Of a group of rows [padded in / pair][rows, padded][pair], pair after pair: rows side by side lie in few
// sets of a cache, where rows that are a power of two apart would all lie in the same.
template <class T>
void pack_linear(const void* x, int64_t x_stride, int rows, int in, void* packed) {
  using Query = typename Dot<T>::Query;
  constexpr int kPair = 2 * kLanes;
  static_assert(kLinearPad % kPair == 0);
  const int size = padded(in);
  for (int first = 0; first < rows; first += kLinearRows) {
    const int count = smaller(rows - first, kLinearRows), across = across_of(count);
    Query* group = static_cast<Query*>(packed) + static_cast<int64_t>(first) * size;
    for (int r = 0; r < across; ++r) {
      const T* row = static_cast<const T*>(x) + (first + r) * x_stride;
      for (int k = 0; k < size; k += kPair) {
        T rest[kPair] = {};
        const T* from = row + k;
        if (r >= count || k + kPair > in) {
          if (r < count && k < in) __builtin_memcpy(rest, from, (in - k) * sizeof(T));
          from = rest;
        }
        Dot<T>::pack(from, kPair, group + (static_cast<int64_t>(k) * across + r * kPair));
      }
    }
  }
}

// Memory that is read from one end to the other into the second nearest cache.
class Upcoming {
 public:
  Upcoming() = default;
  Upcoming(const void* first, int64_t bytes) : next_(static_cast<const char*>(first)), end_(next_ + bytes) {}

  // The next so many bytes, to be fetched line after line; `instead`, which is in the cache, after the last.
  const char* take(int64_t bytes, const void* instead) {
    if (end_ - next_ < bytes) return static_cast<const char*>(instead);
    next_ += bytes;
    return next_ - bytes;
  }

 private:
  const char *next_ = nullptr, *end_ = nullptr;
};

// What kSide stretches of weights, each of `steps` rows one after another, are multiplied with in one go: a
// block of the inputs of a row of every stretch. Unit u is block u / steps of row u % steps: it finds the
// weights in the second nearest cache, however they jump, because what was multiplied before it has fetched
// them, as they lie in memory. A core has few lines under way that it asked for itself; its prefetcher, which
// has more, follows only what goes straight on.
template <class T, int kX, int kSide>
class LinearUnits {
 public:
  LinearUnits(const LinearArgs& args, const typename Dot<T>::Query* x, const T* weights, int steps)
      : x_(x), weights_(weights), stride_(args.stride), in_(args.in), steps_(steps) {
    constexpr int kMost = kLinearBytes / static_cast<int>(sizeof(typename Dot<T>::Query));
    blocks_ = (in_ + kMost - 1) / kMost;
    block_ = padded((in_ + blocks_ - 1) / blocks_);
    blocks_ = (in_ + block_ - 1) / block_;
  }

  // sums[m * kLinearOutputs + s * steps + i]: row m of x times row i of stretch s; sums starts with zeros.
  void run(Upcoming* upcoming, float* sums) const {
    for (int u = 0; u < blocks_ * steps_; ++u) multiply(u, upcoming, sums);
  }

 private:
  static constexpr int kPair = 2 * kLanes;
  static constexpr int kCount = kSide * kX;

  void multiply(int unit, Upcoming* upcoming, float* sums) const {
    const int begin = unit / steps_ * block_, size = smaller(in_ - begin, block_),
              whole = size / kPair * kPair;
    const auto* x = x_ + static_cast<int64_t>(begin) * kX;
    const T* rows[kSide];
    for (int s = 0; s < kSide; ++s)
      rows[s] = weights_ + (static_cast<int64_t>(s) * steps_ + unit % steps_) * stride_ + begin;
    const char* then = upcoming->take(static_cast<int64_t>(whole) * kSide * sizeof(T), rows[0]);
    Vec total[kCount];
#pragma GCC unroll 32
    for (int i = 0; i < kCount; ++i) total[i] = set1(0.0f);
    for (int k = 0; k < whole; k += kPair) {
      constexpr int kBytes = kPair * static_cast<int>(sizeof(T));
      if (kBytes >= kLine || k * static_cast<int>(sizeof(T)) % kLine == 0) {
#pragma GCC unroll 4
        for (int s = 0; s < kSide; ++s) {
          for (int b = 0; b < kBytes; b += kLine, then += kLine) {
            prefetch_near(then);
            prefetch(reinterpret_cast<const char*>(rows[s] + k) + b + kLinearAhead);
          }
        }
      }
      add_pair(x + static_cast<int64_t>(k) * kX, rows, k, total);
    }
    if (whole < size) {
      T rest[kSide][kPair] = {};
      const T* ends[kSide];
      for (int s = 0; s < kSide; ++s) {
        __builtin_memcpy(rest[s], rows[s] + whole, (size - whole) * sizeof(T));
        ends[s] = rest[s];
      }
      add_pair(x + static_cast<int64_t>(whole) * kX, ends, 0, total);
    }
    float each[(kCount + kLanes - 1) / kLanes * kLanes];
    reduce(total, each);
    float* to = sums + unit % steps_;
#pragma GCC unroll 32
    for (int i = 0; i < kCount; ++i) to[i % kX * kLinearOutputs + i / kX * steps_] += each[i];
  }

  static void add_pair(const typename Dot<T>::Query* x, const T* const* rows, int k, Vec (&total)[kCount]) {
    typename Dot<T>::Pair w[kSide];
#pragma GCC unroll 4
    for (int s = 0; s < kSide; ++s) w[s] = Dot<T>::row_pair(rows[s] + k);
#pragma GCC unroll 8
    for (int m = 0; m < kX; ++m) {
      const auto q = Dot<T>::query_pair(x + m * kPair);
#pragma GCC unroll 4
      for (int s = 0; s < kSide; ++s) total[s * kX + m] = Dot<T>::add(total[s * kX + m], q, w[s]);
    }
  }

  // The same order of additions whatever kX and kSide are.
  static void reduce(const Vec (&total)[kCount], float* each) {
#pragma GCC unroll 32
    for (int i = 0; i < kCount; i += kLanes) {
      Vec rows[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) rows[j] = i + j < kCount ? total[i + j] : set1(0.0f);
      store(each + i, reduce_rows(rows));
    }
  }

  const typename Dot<T>::Query* x_;
  const T* weights_;
  int64_t stride_;
  int in_, steps_, block_, blocks_;
};

// A group of up to kX rows of x and up to kLinearOutputs outputs.
template <class T, int kX>
void linear_group(const LinearArgs& args, int group, int64_t first, int count, Upcoming* upcoming, T* out) {
  // Sums, weights and one more fit into the registers. Of 8 x 3 sums, too; but GCC 12 then keeps a weight on
  // the stack, which costs a third of the rate.
  constexpr int kSide = kRegisters >= 32 ? (kX <= 4 ? 4 : 2) : kX <= 2 ? 4 : kX <= 4 ? 2 : 1;
  const auto* x = static_cast<const typename Dot<T>::Query*>(args.x);
  x += static_cast<int64_t>(group) * padded(args.in);
  const T* weights = static_cast<const T*>(args.weights) + first * args.stride;
  float sums[kX * kLinearOutputs];
  for (int i = 0; i < kX * kLinearOutputs; i += kLanes) store(sums + i, set1(0.0f));
  const int steps = count / kSide, rest = count - steps * kSide;
  if (steps > 0) LinearUnits<T, kX, kSide>(args, x, weights, steps).run(upcoming, sums);
  if (rest > 0) {
    const T* last = weights + static_cast<int64_t>(steps) * kSide * args.stride;
    LinearUnits<T, kX, 1>(args, x, last, rest).run(upcoming, sums + steps * kSide);
  }
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

template <class T>
void linear(const LinearArgs& args, int64_t first, int count, int64_t next, int next_count, void* out) {
  // Rows that lie far apart are left to the hardware.
  const bool dense = args.stride <= args.in + args.in / 8;
  const auto weights_from = [&](int64_t row, int rows) {
    if (!dense || rows < 1) return Upcoming();
    return Upcoming(static_cast<const T*>(args.weights) + row * args.stride,
                    rows * args.stride * static_cast<int64_t>(sizeof(T)));
  };
  for (int begin = 0; begin < count; begin += kLinearOutputs) {
    const int size = smaller(count - begin, kLinearOutputs), more = count - begin - size;
    Upcoming upcoming = more > 0 ? weights_from(first + begin + size, smaller(more, kLinearOutputs))
                                 : weights_from(next, next_count);
    // Rows of x after the first group find all weights in a cache.
    for (int group = 0; group < args.rows; group += kLinearRows) {
      const auto run = [&](auto one) {
        one(args, group, first + begin, size, &upcoming, static_cast<T*>(out) + begin);
      };
      switch (across_of(smaller(args.rows - group, kLinearRows))) {
        case 1:
          run(linear_group<T, 1>);
          break;
        case 2:
          run(linear_group<T, 2>);
          break;
        case 4:
          run(linear_group<T, 4>);
          break;
        default:
          run(linear_group<T, 8>);
      }
    }
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
