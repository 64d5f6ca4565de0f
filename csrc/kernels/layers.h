#pragma once

#include "kernels/exp.h"
#include "kernels/table.h"

// Operations between the linear layers of a model, a row at a time. Every result is rounded where PyTorch,
// which computes step by step, rounds it.
namespace fluxion::FLUXION_ISA {
namespace {

// The lanes of x, rounded to T.
template <class T>
Vec rounded(Vec x) {
  if constexpr (sizeof(T) == sizeof(float)) return x;
  T held[kLanes];
  store_one(held, x);
  return load_one(held);
}

// Calls at(i, load, store) for every kLanes elements, then for the rest of a row. There, loads give zeros
// beyond the row, and stores skip them.
template <class T, class At>
void along(int size, const At& at) {
  const auto whole = [](const T* p) { return load_one(p); };
  const auto keep_all = [](T* p, Vec x) { store_one(p, x); };
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) at(i, whole, keep_all);
  if (i >= size) return;
  const unsigned left = static_cast<unsigned>(size - i) % kLanes;
  const auto some = [left](const T* p) {
    T padded[kLanes] = {};
    __builtin_memcpy(padded, p, left * sizeof(T));
    return load_one(padded);
  };
  const auto keep_some = [left](T* p, Vec x) {
    T padded[kLanes];
    store_one(padded, x);
    __builtin_memcpy(p, padded, left * sizeof(T));
  };
  at(i, some, keep_some);
}

template <class T>
void rms_norm(const void* x_row, const void* residual_row, const void* weights, int size, float epsilon,
              bool gemma, void* out_row, void* sum_row) {
  const T *x = static_cast<const T*>(x_row), *residual = static_cast<const T*>(residual_row);
  const T* weight = static_cast<const T*>(weights);
  T *out = static_cast<T*>(out_row), *sum = static_cast<T*>(sum_row);
  const auto total = [&](int i, auto get) {
    if (residual == nullptr) return get(x + i);
    const Vec y = add(get(x + i), get(residual + i));
    return gemma ? rounded<T>(y) : y;
  };
  Vec squares = set1(0.0f);
  along<T>(size, [&](int i, auto get, auto) {
    const Vec y = total(i, get);
    squares = fma(y, y, squares);
  });
  const float mean = reduce_add(squares) / static_cast<float>(size);
  const Vec factor = set1(1.0f / __builtin_sqrtf(mean + epsilon));
  along<T>(size, [&](int i, auto get, auto put) {
    const Vec y = total(i, get), w = get(weight + i);
    if (residual) put(sum + i, y);
    put(out + i, mul(mul(y, factor), gemma ? add(w, set1(1.0f)) : w));
  });
}

// x * sigmoid(z); z has the sign of x. The power in the sigmoid cannot overflow: e^-|z| / (1 + e^-|z|), or 1
// / (1 + e^-|z|).
inline Vec times_sigmoid(Vec x, Vec z) {
  const Vec power = exp_nonpositive(min(z, sub(set1(0.0f), z)));
  float one[kLanes], e[kLanes], at[kLanes];
  store(one, x);
  store(e, power);
  for (int j = 0; j < kLanes; ++j) {
    const float total = 1.0f + e[j];
    at[j] = one[j] < 0.0f ? one[j] * e[j] / total : one[j] / total;
  }
  return load(at);
}

// gate * sigmoid(of(gate)), rounded, * up; of(x) has the sign of x.
template <class T, class Of>
void gate_mul(const void* gates, const void* ups, int size, void* out_row, Of of) {
  const T *gate = static_cast<const T*>(gates), *up = static_cast<const T*>(ups);
  T* out = static_cast<T*>(out_row);
  along<T>(size, [&](int i, auto get, auto put) {
    const Vec x = get(gate + i);
    put(out + i, mul(rounded<T>(times_sigmoid(x, of(x))), get(up + i)));
  });
}

template <class T>
void silu_mul(const void* gate, const void* up, int size, void* out) {
  gate_mul<T>(gate, up, size, out, [](Vec x) { return x; });
}

// By tanh: x / 2 * (1 + tanh(u)) is x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
template <class T>
void gelu_mul(const void* gate, const void* up, int size, void* out) {
  gate_mul<T>(gate, up, size, out, [](Vec x) {
    constexpr float kTwice = 1.5957691216057308f;
    return mul(mul(x, set1(kTwice)), fma(mul(x, x), set1(0.044715f), set1(1.0f)));
  });
}

// a' = a cos - b sin, b' = b cos + a sin.
template <class T>
void turn(Vec a, Vec b, Vec cos, Vec sin, Vec* to_a, Vec* to_b) {
  *to_a = sub(rounded<T>(mul(a, cos)), rounded<T>(mul(b, sin)));
  *to_b = add(rounded<T>(mul(b, cos)), rounded<T>(mul(a, sin)));
}

template <class T>
void rope(const void* x_row, const void* cos_sin, int heads, int head_dim, int rotary, bool halves,
          void* out_row) {
  const T *row = static_cast<const T*>(x_row), *cos = static_cast<const T*>(cos_sin), *sin = cos + rotary / 2;
  T* to_row = static_cast<T*>(out_row);
  const int half = rotary / 2;
  for (int h = 0; h < heads; ++h) {
    const T* x = row + static_cast<int64_t>(h) * head_dim;
    T* out = to_row + static_cast<int64_t>(h) * head_dim;
    if (halves) {
      along<T>(half, [&](int i, auto get, auto put) {
        Vec a, b;
        turn<T>(get(x + i), get(x + half + i), get(cos + i), get(sin + i), &a, &b);
        put(out + i, a);
        put(out + half + i, b);
      });
    } else {
      for (int i = 0; i < half; ++i) {
        const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]), c = to_float(cos[i]),
                    s = to_float(sin[i]);
        T ac, bs, bc, as;
        round_to(a * c, &ac);
        round_to(b * s, &bs);
        round_to(b * c, &bc);
        round_to(a * s, &as);
        round_to(to_float(ac) - to_float(bs), out + 2 * i);
        round_to(to_float(bc) + to_float(as), out + 2 * i + 1);
      }
    }
    __builtin_memcpy(out + rotary, x + rotary, (head_dim - rotary) * sizeof(T));
  }
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
