#pragma once

#include "kernels/layers.h"
#include "kernels/table.h"

// Layers that keep a state in place of keys and values: the gated delta rule and the convolution before it.
namespace fluxion::FLUXION_ISA {
namespace {

template <class T>
void unit_vector(const void* x_row, int size, float factor, float* out) {
  const T* x = static_cast<const T*>(x_row);
  Vec squares = set1(0.0f);
  for (int i = 0; i < size; i += kLanes) {
    const Vec y = load_one(x + i);
    squares = fma(y, y, squares);
  }
  const Vec by = set1(factor / __builtin_sqrtf(reduce_add(squares) + 1e-6f));
  for (int i = 0; i < size; i += kLanes) store(out + i, mul(load_one(x + i), by));
}

// Rows of the state that share each load of a key and a query.
inline constexpr int kDeltaRows = 4;

// kRows rows of the state take one token.
template <int kRows, class T>
inline void delta_step(const DeltaToken& t, int keys, float key_query, float* state, const T* v, T* out) {
  Vec by_key[kRows], by_query[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) by_key[r] = by_query[r] = set1(0.0f);
  for (int i = 0; i < keys; i += kLanes) {
    const Vec k = load(t.key + i), q = load(t.query + i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec s = load(state + static_cast<int64_t>(r) * keys + i);
      by_key[r] = fma(s, k, by_key[r]);
      by_query[r] = fma(s, q, by_query[r]);
    }
  }
  Vec change[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const float held = t.decay * reduce_add(by_key[r]);
    const float d = t.strength * (to_float(v[r]) - held);
    change[r] = set1(d);
    round_to(t.decay * reduce_add(by_query[r]) + d * key_query, out + r);
  }
  const Vec decay = set1(t.decay);
  for (int i = 0; i < keys; i += kLanes) {
    const Vec k = load(t.key + i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      float* s = state + static_cast<int64_t>(r) * keys + i;
      store(s, fma(change[r], k, mul(load(s), decay)));
    }
  }
}

template <class T>
void delta_rule(const DeltaToken* tokens, int64_t count, int keys, int first, int rows, float* states) {
  float* state = states + static_cast<int64_t>(first) * keys;
  for (int64_t i = 0; i < count; ++i) {
    const DeltaToken& t = tokens[i];
    Vec both = set1(0.0f);
    for (int j = 0; j < keys; j += kLanes) both = fma(load(t.key + j), load(t.query + j), both);
    const float key_query = reduce_add(both);
    const T* v = static_cast<const T*>(t.value) + first;
    T* out = static_cast<T*>(t.out) + first;
    int r = 0;
    for (; r + kDeltaRows <= rows; r += kDeltaRows)
      delta_step<kDeltaRows>(t, keys, key_query, state + static_cast<int64_t>(r) * keys, v + r, out + r);
    for (; r < rows; ++r)
      delta_step<1>(t, keys, key_query, state + static_cast<int64_t>(r) * keys, v + r, out + r);
  }
}

template <class T>
void convolve(const void* x_rows, int64_t x_stride, int64_t tokens, int channels, int taps,
              const void* weights, const void* biases, void* states, void* out_rows, int64_t out_stride) {
  const T *x = static_cast<const T*>(x_rows), *weight = static_cast<const T*>(weights);
  const T* bias = static_cast<const T*>(biases);
  T *state = static_cast<T*>(states), *out = static_cast<T*>(out_rows);
  const int held = taps - 1;
  for (int c = 0; c < channels; c += kLanes) {
    const int width = channels - c < kLanes ? channels - c : kLanes;
    // By tap, for these channels: the weights, and the inputs that the next token's output depends on.
    T w[kConvolutionTaps][kLanes] = {}, past[kConvolutionTaps][kLanes] = {}, b[kLanes] = {};
    for (int l = 0; l < width; ++l) {
      for (int j = 0; j < taps; ++j) w[j][l] = weight[static_cast<int64_t>(c + l) * taps + j];
      for (int j = 0; j < held; ++j) past[j][l] = state[static_cast<int64_t>(c + l) * held + j];
      if (bias != nullptr) b[l] = bias[c + l];
    }
    for (int64_t t = 0; t < tokens; ++t) {
      T* now = past[held];
      __builtin_memcpy(now, x + t * x_stride + c, static_cast<unsigned>(width) * sizeof(T));
      Vec sum = load_one(b);
      for (int j = 0; j < taps; ++j) sum = fma(load_one(w[j]), load_one(past[j]), sum);
      T made[kLanes];
      store_one(made, times_sigmoid(sum, sum));
      __builtin_memcpy(out + t * out_stride + c, made, static_cast<unsigned>(width) * sizeof(T));
      __builtin_memmove(past[0], past[1], static_cast<unsigned>(held) * sizeof(past[0]));
    }
    for (int l = 0; l < width; ++l)
      for (int j = 0; j < held; ++j) state[static_cast<int64_t>(c + l) * held + j] = past[j][l];
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
