#pragma once

#include "kernels/int8.h"
#include "kernels/linear.h"

// Linear layers whose weights are integers of 8 or 4 bits, in panels (kernels/table.h, QuantisedFormat). The
// kernel rounds x to integers of 16 bits, with a scale for every kQuantisedBlock inputs; the error is at most
// 2^-16 of the largest of these. The sums of a block are exact. A lane has an output, so no kernel adds
// across lanes.
//
// Each ISA header defines:
//
//   add_words_at(sum, a, x)  add_words of a and the two words at x, which go to every lane
//   nibbles<kFrom>(x)      four bits of every word of 16 bits, bit kFrom first
//   low_bytes(x)           the lower byte of every word, sign-extended; high_bytes(x): the upper byte
//   halves_at(p)           kLanes float16 as floats
namespace fluxion::FLUXION_ISA {
namespace {

inline constexpr int kPairs = kQuantisedBlock / 2;           // of inputs of a block
inline constexpr int kPanelVecs = kQuantisedPanel / kLanes;  // vectors with the outputs of a panel
static_assert(kQuantisedPanel % kLanes == 0 && kLinearOutputs % kQuantisedPanel == 0);
static_assert(int64_t{kQuantisedBlock} * 128 * kQueryMost <= INT32_MAX);
// How far ahead weights are prefetched.
inline constexpr int kQuantisedAhead = 4 << 10;

// Bytes of a packed row of x: its integers, the scales of its blocks, and the sums of its blocks.
inline constexpr int64_t quantised_row_bytes(int in) {
  return int64_t{in} * 2 + static_cast<int64_t>(in / kQuantisedBlock) * 8;
}

inline uint32_t largest_bits(const float* x, int n) {
  uint32_t largest = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(x[i]) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest >> 16 | (largest > 0x7f800000);  // the bits of a bfloat16, rounded down; NaN stays NaN
}

// Rounds a block of x to integers `out`. *scale: what the integer 1 stands for, or NaN if an element is not
// finite. *sum: the sum of the rounded elements.
template <class T>
void pack_words(const T* x, int16_t* out, float* scale, float* sum) {
  float most = 0.0f;
  const bool finite = largest_bits(x, kQuantisedBlock) < kNotFinite;
  for (int i = 0; i < kQuantisedBlock; ++i) {
    const float size = __builtin_fabsf(to_float(x[i]));
    most = size > most ? size : most;
  }
  const float inverse = finite && most > 1e-30f ? static_cast<float>(kQueryMost) / most : 0.0f;
  int32_t total = 0;
  for (int i = 0; i < kQuantisedBlock; ++i) {
    out[i] = finite ? static_cast<int16_t>(nearest_integer(to_float(x[i]) * inverse)) : int16_t{0};
    total += out[i];
  }
  *scale = finite ? most / static_cast<float>(kQueryMost) : float_of(0x7fc00000);
  *sum = *scale * static_cast<float>(total);
}

// Packs rows in groups of kLinearRows, padded as pack_linear pads them. A group of rows is integers
// [blocks][rows][kQuantisedBlock], then scales [blocks][rows], then sums [blocks][rows].
template <class T>
void pack_quantised(const void* x, int64_t x_stride, int rows, int in, void* packed) {
  const int blocks = in / kQuantisedBlock;
  for (int first = 0; first < rows; first += kLinearRows) {
    const int count = smaller(rows - first, kLinearRows), across = across_of(count);
    char* to = static_cast<char*>(packed) + first * quantised_row_bytes(in);
    auto* words = reinterpret_cast<int16_t*>(to);
    auto* scales = reinterpret_cast<float*>(to + int64_t{across} * in * 2);
    float* sums = scales + int64_t{across} * blocks;
    for (int b = 0; b < blocks; ++b) {
      for (int r = 0; r < across; ++r, words += kQuantisedBlock, ++scales, ++sums) {
        const T* from = static_cast<const T*>(x) + (first + r) * x_stride + int64_t{b} * kQuantisedBlock;
        if (r < count) {
          pack_words(from, words, scales, sums);
        } else {
          *scales = *sums = 0.0f;
          for (int i = 0; i < kQuantisedBlock; ++i) words[i] = 0;
        }
      }
    }
  }
}

// The integers of kLanes outputs in a block. Each lane of words[i] has two inputs of its output.
template <int kBits>
inline void words_of(const char* block, Vec (&words)[kPairs]) {
  constexpr int kEach = 16 / kBits;  // integers of a word
#pragma GCC unroll 8
  for (int j = 0; j < kPairs / kEach; ++j) {
    const Vec line = load(reinterpret_cast<const float*>(block + j * kQuantisedPanel * 4));
    if constexpr (kBits == 4) {
      words[4 * j] = nibbles<0>(line);
      words[4 * j + 1] = nibbles<4>(line);
      words[4 * j + 2] = nibbles<8>(line);
      words[4 * j + 3] = nibbles<12>(line);
    } else {
      words[2 * j] = low_bytes(line);
      words[2 * j + 1] = high_bytes(line);
    }
  }
}

// Walks through a panel, block by block, and says where the block and its scales lie. kHalf: a group has half
// a block.
template <int kBits, bool kHalf>
class PanelStream {
 public:
  PanelStream(const char* panel, QuantisedFormat format)
      : next_(panel),
        blocks_of_group_(kHalf ? 1 : format.group / kQuantisedBlock),
        per_head_(per_head(format)) {
    head_bytes_ = per_head_ * kQuantisedPanel * 2 * (1 + format.minima);
  }

  void advance() {
    if (left_ == 0) {
      head_ = next_;
      next_ += head_bytes_;
      left_ = kHalf ? 1 : per_head_ * blocks_of_group_;
    }
    block_ = next_;
    next_ += kBlockBytes;
    const bool second = per_head_ == 2 && !kHalf && left_ <= blocks_of_group_;
    scales_ = head_ + (second ? kQuantisedPanel * 2 : 0);
    --left_;
  }
  const char* block() const { return block_; }
  // The scales of kLanes outputs from `output` on. half is 1 for the second half of a block.
  Vec scales(int output, int half = 0) const {
    return halves_at(scales_ + (half * kQuantisedPanel + output) * 2);
  }
  Vec minima(int output) const { return halves_at(scales_ + (per_head_ * kQuantisedPanel + output) * 2); }

  static constexpr int kBlockBytes = kQuantisedBlock * kQuantisedPanel * kBits / 8;

 private:
  const char *next_, *head_ = nullptr, *block_ = nullptr, *scales_ = nullptr;
  int blocks_of_group_, per_head_, head_bytes_, left_ = 0;
};

// Writes sums[m * kLinearOutputs + i], row m of kX rows of x times output i of a panel. An output adds its
// blocks in their order, so its bits do not depend on kX.
template <int kX, bool kOnce, int kBits, bool kMinima, bool kHalf>
void multiply_panel(const char* packed, const char* panel, QuantisedFormat format, int in, float* sums) {
  const int blocks = in / kQuantisedBlock;
  const auto* x = reinterpret_cast<const int16_t*>(packed);
  const auto* x_scales = reinterpret_cast<const float*>(packed + int64_t{kX} * in * 2);
  const float* x_sums = x_scales + int64_t{kX} * blocks;
  Vec total[kPanelVecs * kX];
#pragma GCC unroll 128
  for (int i = 0; i < kPanelVecs * kX; ++i) total[i] = set1(0.0f);
  PanelStream<kBits, kHalf> stream(panel, format);
  for (int b = 0; b < blocks; ++b, x += kX * kQuantisedBlock, x_scales += kX, x_sums += kX) {
    stream.advance();
    const char* block = stream.block();
    for (int i = 0; i < stream.kBlockBytes; i += kLine)
      kOnce ? prefetch_once(block + i + kQuantisedAhead) : prefetch(block + i + kQuantisedAhead);
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVecs; ++v) {
      Vec words[kPairs];
      words_of<kBits>(block + v * kLanes * 4, words);
      const Vec unit = stream.scales(v * kLanes);
      const Vec second = kHalf ? stream.scales(v * kLanes, 1) : unit;
      const Vec least = kMinima ? stream.minima(v * kLanes) : unit;
#pragma GCC unroll 8
      for (int m = 0; m < kX; ++m) {
        Vec sum[2] = {set1(0.0f), set1(0.0f)};
#pragma GCC unroll 16
        for (int k = 0; k < kPairs; ++k) {
          Vec& to = sum[kHalf && k >= kPairs / 2];
          to = add_words_at(to, words[k], x + m * kQuantisedBlock + 2 * k);
        }
        const Vec x_scale = set1(x_scales[m]);
        Vec& all = total[v * kX + m];
        if constexpr (kBits == 4 && !kMinima)
          all = fma(fma(floats_of(sum[0]), x_scale, set1(-8.0f * x_sums[m])), unit, all);
        else
          all = fma(floats_of(sum[0]), mul(unit, x_scale), all);
        if constexpr (kHalf) all = fma(floats_of(sum[1]), mul(second, x_scale), all);
        if constexpr (kMinima) all = fma(least, set1(x_sums[m]), all);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kX; ++m)
#pragma GCC unroll 16
    for (int v = 0; v < kPanelVecs; ++v) store(sums + m * kLinearOutputs + v * kLanes, total[v * kX + m]);
}

// Calls body<kBits, kMinima, kHalf>() for a format.
template <class Body>
inline void for_format(QuantisedFormat format, Body body) {
  if (format.bits == 4)
    format.minima ? body.template operator()<4, true, false>() : body.template operator()<4, false, false>();
  else if (format.group < kQuantisedBlock)
    body.template operator()<8, false, true>();
  else
    format.minima ? body.template operator()<8, true, false>() : body.template operator()<8, false, false>();
}

template <class T>
void linear_quantised(const LinearArgs& args, int64_t first, int count, void* out) {
  const int64_t bytes = panel_bytes(args.format, args.in);
  const char* panels = static_cast<const char*>(args.weights) + first / kQuantisedPanel * bytes;
  for_format(args.format, [&]<int kBits, bool kMinima, bool kHalf>() {
    for (int begin = 0; begin < count; begin += kLinearOutputs) {
      const int size = smaller(count - begin, kLinearOutputs);
      for_groups(args, [&]<int kX, bool kOnce>(int group) {
        const char* packed = static_cast<const char*>(args.x) + group * quantised_row_bytes(args.in);
        float sums[kX * kLinearOutputs];
        for (int i = 0; i < size; i += kQuantisedPanel)
          multiply_panel<kX, kOnce, kBits, kMinima, kHalf>(
              packed, panels + (begin + i) / kQuantisedPanel * bytes, args.format, args.in, sums + i);
        store_sums<T, kX>(args, group, first + begin, size, sums, static_cast<T*>(out) + begin);
      });
    }
  });
}

// Writes the weights of a panel's first `count` outputs, [count][in]. Each is rounded once.
template <class T>
void widen_panel(const void* panel, QuantisedFormat format, int in, int count, void* out) {
  for_format(format, [&]<int kBits, bool kMinima, bool kHalf>() {
    PanelStream<kBits, kHalf> stream(static_cast<const char*>(panel), format);
    constexpr int16_t kFirst[] = {1, 0}, kSecond[] = {0, 1};  // pick one of two words
    const Vec take[] = {for_all_lanes(kFirst), for_all_lanes(kSecond)};
    const Vec zero = set1(kBits == 4 && !kMinima ? -8.0f : 0.0f);
    for (int b = 0; b < in / kQuantisedBlock; ++b) {
      stream.advance();
      float columns[kQuantisedBlock][kQuantisedPanel];
      for (int v = 0; v < kPanelVecs; ++v) {
        Vec words[kPairs];
        words_of<kBits>(stream.block() + v * kLanes * 4, words);
        const Vec scales[] = {stream.scales(v * kLanes), stream.scales(v * kLanes, kHalf)};
        const Vec least = kMinima ? stream.minima(v * kLanes) : set1(0.0f);
#pragma GCC unroll 32
        for (int i = 0; i < kQuantisedBlock; ++i) {
          const Vec integers = add(floats_of(add_words(set1(0.0f), words[i / 2], take[i % 2])), zero);
          store(columns[i] + v * kLanes, fma(integers, scales[i >= kQuantisedBlock / 2], least));
        }
      }
      T* to = static_cast<T*>(out) + b * kQuantisedBlock;
      for (int o = 0; o < count; ++o, to += in) {
        float row[kQuantisedBlock];
#pragma GCC unroll 32
        for (int i = 0; i < kQuantisedBlock; ++i) row[i] = columns[i][o];
        for (int i = 0; i < kQuantisedBlock; i += kLanes) store_one(to + i, load(row + i));
      }
    }
  });
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
