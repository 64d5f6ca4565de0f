#pragma once

#include "kernels/linear.h"

// Linear layers whose weights lie in the order of use. If x does not fit in the L1 cache, weights in rows are
// read a block of inputs of one row after another, which is no plain stream. Packed weights remain one, and
// three of their rows share each read of x.
namespace fluxion::FLUXION_ISA {
namespace {

// Outputs whose weights are packed together. A panel takes the memory of its rows.
inline constexpr int kPanel = 24;
static_assert(kPanel <= kLinearOutputs);
// Rows of weights that are multiplied together: with eight rows of x their sums fill the registers.
inline constexpr int kPanelSide = 3;
static_assert(kPanel % kPanelSide == 0);
// Inputs that are multiplied at a time: this part of eight rows of x stays in the L1 cache.
template <class T>
inline constexpr int kPanelInputs =
    kLinearBytes / (kLinearRows * static_cast<int>(sizeof(typename Dot<T>::Query)));
// How far ahead weights are prefetched: one stream of a core, which memory may give 35 GB/s.
inline constexpr int kPanelAhead = 8 << 10;
// Whether this ISA packs weights: it has the registers, and multiplies a line of them at a time.
template <class T>
inline constexpr bool kPacks = kRegisters >= 32 && 2 * kLanes * sizeof(T) == kLine;

// The layout of a panel, [block of inputs][kPanelSide rows][line of inputs][row]: calls move(element of
// [kPanel][in], element of the panel) for every line of it, in the order of the panel.
template <class T, class Move>
void each_line(int in, Move move) {
  constexpr int kPair = 2 * kLanes;
  int64_t at = 0;
  for (int begin = 0; begin < in; begin += kPanelInputs<T>) {
    const int end = smaller(begin + kPanelInputs<T>, in);
    for (int row = 0; row < kPanel; row += kPanelSide) {
      for (int k = begin; k < end; k += kPair)
        for (int s = row; s < row + kPanelSide; ++s, at += kPair) move(static_cast<int64_t>(s) * in + k, at);
    }
  }
}

template <class T>
void pack_panel(const void* rows, int in, void* panel) {
  each_line<T>(in, [&](int64_t row, int64_t at) {
    __builtin_memcpy(static_cast<T*>(panel) + at, static_cast<const T*>(rows) + row, kLine);
  });
}

template <class T>
void unpack_panel(const void* panel, int in, void* rows) {
  each_line<T>(in, [&](int64_t row, int64_t at) {
    __builtin_memcpy(static_cast<T*>(rows) + row, static_cast<const T*>(panel) + at, kLine);
  });
}

// Multiplies `size` inputs of kPanelSide rows of a panel with a group of kX rows of x. The products are added
// to the sums over earlier inputs. kOnce: see LinearUnits.
template <class T, int kX, bool kOnce>
void add_block(const typename Dot<T>::Query* x, const T* weights, int size, bool first, Vec* kept) {
  constexpr int kPair = 2 * kLanes, kCount = kPanelSide * kX;
  Vec total[kCount];
#pragma GCC unroll 32
  for (int i = 0; i < kCount; ++i) total[i] = first ? set1(0.0f) : kept[i];
  for (int k = 0; k < size; k += kPair) {
    const T* rows[kPanelSide];
#pragma GCC unroll 4
    for (int s = 0; s < kPanelSide; ++s, weights += kPair) {
      rows[s] = weights;
      const char* ahead = reinterpret_cast<const char*>(weights) + kPanelAhead;
      kOnce ? prefetch_once(ahead) : prefetch(ahead);
    }
    add_pair<T, kX, kPanelSide>(x + static_cast<int64_t>(k) * kX, rows, 0, total);
  }
#pragma GCC unroll 32
  for (int i = 0; i < kCount; ++i) kept[i] = total[i];
}

// Multiplies a panel with a group of up to kX rows of x.
template <class T, int kX, bool kOnce>
void panel_group(const LinearArgs& args, int group, int64_t first, T* out) {
  Vec kept[kPanel * kX];
  const auto* x = static_cast<const typename Dot<T>::Query*>(args.x) + static_cast<int64_t>(group) * args.in;
  const T* weights = static_cast<const T*>(args.weights) + first * args.in;
  for (int begin = 0; begin < args.in; begin += kPanelInputs<T>) {
    const int size = smaller(args.in - begin, kPanelInputs<T>);
    for (int row = 0; row < kPanel; row += kPanelSide, weights += kPanelSide * size)
      add_block<T, kX, kOnce>(x, weights, size, begin == 0, kept + row * kX);
    x += static_cast<int64_t>(size) * kX;
  }
  float each[padded_sums<kX * kPanelSide>], sums[kX * kLinearOutputs];
  for (int row = 0; row < kPanel; row += kPanelSide) {
    reduce_sums<kX * kPanelSide>(kept + row * kX, each);
    for (int i = 0; i < kX * kPanelSide; ++i) sums[i % kX * kLinearOutputs + row + i / kX] = each[i];
  }
  store_sums<T, kX>(args, group, first, kPanel, sums, out);
}

// A group of rows of x stays in a cache while all panels pass. The panels, few in a call, stay for the next
// group.
template <class T>
void linear_panels(const LinearArgs& args, int64_t first, int count, void* out) {
  for_groups(args, [&]<int kX, bool kOnce>(int group) {
    for (int begin = 0; begin < count; begin += kPanel)
      panel_group<T, kX, kOnce>(args, group, first + begin, static_cast<T*>(out) + begin);
  });
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
