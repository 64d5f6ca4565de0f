#pragma once

#include "kernels/rows.h"
#include "kernels/table.h"
#include "kernels/throttle.h"

// Linear layers of few rows: weights are read once, as they lie in memory, and multiplied with all rows.
namespace fluxion::FLUXION_ISA {
namespace {

// Rows of x that are multiplied together, padded with zeros to a power of two. Arithmetic bounds them: a line
// of weights in bfloat16 takes an instruction a row. Zen 5 does two of them a cycle, and eight rows take 4.5
// cycles a line from the second nearest cache, where memory delivers a line to a core every 6 to 10.
inline constexpr int kLinearRows = 8;
// Outputs whose sums are kept at a time: a multiple of 2, 3 and 4.
inline constexpr int kLinearOutputs = 192;
// Bytes of kLinearRows rows of x that are multiplied at a time: the nearest cache has room for them and for
// the weights that are on their way.
inline constexpr int kLinearBytes = 32 << 10;
// How far ahead weights are fetched of each of the stretches that are read side by side.
inline constexpr int kLinearAhead = 2 << 10;

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

// What kSide stretches of weights, each of `steps` rows one after another, are multiplied with in one go: a
// block of the inputs of a row of every stretch. Unit u is block u / steps of row u % steps.
template <class T, int kX, int kSide>
class LinearUnits {
 public:
  LinearUnits(const LinearArgs& args, const typename Dot<T>::Query* x, const T* weights, int steps,
              const T* next, int next_steps)
      : x_(x),
        weights_(weights),
        next_(next ? next : weights),
        stride_(args.stride),
        in_(args.in),
        steps_(steps),
        next_steps_(next ? next_steps : steps) {
    constexpr int kMost = kLinearBytes / (kLinearRows * static_cast<int>(sizeof(typename Dot<T>::Query)));
    blocks_ = (in_ + kMost - 1) / kMost;
    block_ = padded((in_ + blocks_ - 1) / blocks_);
    blocks_ = (in_ + block_ - 1) / block_;
  }

  // sums[m * kLinearOutputs + s * steps + i]: row m of x times row i of stretch s; sums starts with zeros.
  void run(float* sums) const {
    const auto part = [&]<int kGap>(int first, int end) {
      for (int u = first; u < end; ++u) multiply<kGap>(u, sums);
    };
    const int lines = kSide * smaller(block_, in_) * static_cast<int>(sizeof(T)) / kLine;
    throttled<kSide == 1 ? 1 : 4>(blocks_ * steps_, lines > 0 ? lines : 1, part);
  }

 private:
  static constexpr int kPair = 2 * kLanes;
  static constexpr int kCount = kSide * kX;

  const T* at(int unit, int side) const {
    const int first = unit / steps_ * block_;
    return weights_ + (static_cast<int64_t>(side) * steps_ + unit % steps_) * stride_ + first;
  }

  template <int kGap>
  void multiply(int unit, float* sums) const {
    const int begin = unit / steps_ * block_, size = smaller(in_ - begin, block_);
    const int whole = size / kPair * kPair,
              ahead = smaller(kLinearAhead / static_cast<int>(sizeof(T)), whole);
    const auto* x = x_ + static_cast<int64_t>(begin) * kX;
    const T *rows[kSide], *then[kSide];
    const bool last = unit + 1 == blocks_ * steps_;
    for (int s = 0; s < kSide; ++s) {
      rows[s] = at(unit, s);
      then[s] = last ? next_ + static_cast<int64_t>(s) * next_steps_ * stride_ : at(unit + 1, s);
    }
    Vec total[kCount];
#pragma GCC unroll 32
    for (int i = 0; i < kCount; ++i) total[i] = set1(0.0f);
    Spaced spaced;
    const T* fetched[kSide];
    for (int s = 0; s < kSide; ++s) fetched[s] = rows[s] + ahead;
    add_pairs<kGap>(x, rows, fetched, 0, whole - ahead, &spaced, total);
    for (int s = 0; s < kSide; ++s) fetched[s] = then[s] - (whole - ahead);
    add_pairs<kGap>(x, rows, fetched, whole - ahead, whole, &spaced, total);
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

  template <int kGap>
  static void add_pairs(const typename Dot<T>::Query* x, const T* const* rows, const T* const* fetched,
                        int first, int end, Spaced* spaced, Vec (&total)[kCount]) {
    constexpr int kBytes = kPair * static_cast<int>(sizeof(T));
    for (int k = first; k < end; k += kPair) {
      if (kBytes >= kLine || k * static_cast<int>(sizeof(T)) % kLine == 0) {
#pragma GCC unroll 4
        for (int s = 0; s < kSide; ++s) {
          for (int b = 0; b < kBytes; b += kLine)
            prefetch(spaced->next<kGap>(reinterpret_cast<const char*>(fetched[s] + k) + b));
        }
      }
      add_pair(x + static_cast<int64_t>(k) * kX, rows, k, total);
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
  const T *weights_, *next_;
  int64_t stride_;
  int in_, steps_, next_steps_, block_, blocks_;
};

// A group of up to kX rows of x and up to kLinearOutputs outputs.
template <class T, int kX>
void linear_group(const LinearArgs& args, int group, int64_t first, int count, int64_t next, int next_count,
                  T* out) {
  // Sums, weights and one more fit into the registers.
  constexpr int kSide = kRegisters >= 32 ? (kX <= 4 ? 4 : 3) : kX <= 2 ? 4 : kX <= 4 ? 2 : 1;
  const auto* x = static_cast<const typename Dot<T>::Query*>(args.x);
  x += static_cast<int64_t>(group) * padded(args.in);
  const T* weights = static_cast<const T*>(args.weights);
  const auto row = [&](int64_t i) { return weights + i * args.stride; };
  float sums[kX * kLinearOutputs];
  for (int i = 0; i < kX * kLinearOutputs; i += kLanes) store(sums + i, set1(0.0f));
  const int steps = count / kSide, rest = count - steps * kSide;
  const bool more = next_count >= kSide;
  if (rest > 0) {
    LinearUnits<T, kX, 1>(args, x, row(first + steps * kSide), rest, nullptr, 0).run(sums + steps * kSide);
  }
  if (steps > 0) {
    LinearUnits<T, kX, kSide>(args, x, row(first), steps, more ? row(next) : nullptr, next_count / kSide)
        .run(sums);
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
  for (int begin = 0; begin < count; begin += kLinearOutputs) {
    const int size = smaller(count - begin, kLinearOutputs);
    const bool last = begin + size == count;
    for (int group = 0; group < args.rows; group += kLinearRows) {
      // Rows of x after the first group find the weights in a cache.
      const bool final = group + kLinearRows >= args.rows;
      const int64_t then = !final ? first + begin : last ? next : first + begin + size;
      const int then_count =
          !final ? size : smaller(last ? next_count : count - begin - size, kLinearOutputs);
      const auto run = [&](auto one) {
        one(args, group, first + begin, size, then, then_count, static_cast<T*>(out) + begin);
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
