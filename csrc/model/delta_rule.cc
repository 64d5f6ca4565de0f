#include "model/delta_rule.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "model/hand_out.h"

namespace fluxion {
namespace {

// Channels, and rows of a state, that a worker takes at a time. This many rows of 128 keys fit in the L1
// cache.
constexpr int kChannels = 128;
constexpr int kStateRows = 32;
// Rows of a pass whose vectors are in the scratch memory at once.
constexpr int64_t kBlock = 256;

constexpr int parts(int all, int size) { return (all + size - 1) / size; }

// Gates of one row. Softplus is the identity from 20 on, as in SGLang.
void gates(const DeltaRuleLayer& layer, int64_t row, int head, DeltaToken* token) {
  const float a = layer.a[row * layer.heads + head], b = layer.b[row * layer.heads + head];
  if (layer.a_log == nullptr) {
    token->decay = std::exp(a);
    token->strength = b;
    return;
  }
  const float x = a + layer.dt_bias[head], softplus = x <= 20.0f ? std::log1p(std::exp(x)) : x;
  token->decay = std::exp(-std::exp(layer.a_log[head]) * softplus);
  token->strength = 1.0f / (1.0f + std::exp(-b));
}

// The tokens of rows [begin, end) of a pass, in scratch memory.
class Block {
 public:
  Block(const KernelTable& kernels, DType dtype, const DeltaRuleLayer& layer, DeltaRuleScratch* scratch)
      : kernels_(kernels),
        layer_(layer),
        key_bytes_(static_cast<int64_t>(layer.keys) * element_bytes(dtype)),
        value_bytes_(static_cast<int64_t>(layer.values) * element_bytes(dtype)),
        size_(std::min(kBlock, layer.at.rows())),
        tokens_(scratch->tokens) {
    const int64_t floats = 2 * size_ * layer.key_heads * layer.keys;
    if (scratch->memory.bytes() < floats * int64_t{sizeof(float)})
      scratch->memory = HostMemory(floats * int64_t{sizeof(float)});
    vectors_ = reinterpret_cast<float*>(scratch->memory.data());
    tokens_.resize(static_cast<size_t>(size_ * layer.heads));
  }

  void take(WorkerPool& workers, int64_t begin, int64_t end) {
    begin_ = begin;
    end_ = end;
    hand_out(workers, end - begin, [this](int64_t i, int) { prepare(i); });
    int64_t first = 0, last = 0;
    const StatefulRows& at = layer_.at;
    while (first < at.requests && at.first(first + 1) <= begin) ++first;
    for (last = first; last < at.requests && at.first(last) < end;) ++last;
    const int blocks = parts(layer_.values, kStateRows);
    hand_out(workers, (last - first) * layer_.heads * blocks, [&](int64_t i, int) {
      const int64_t request = first + i / (int64_t{layer_.heads} * blocks);
      const auto rest = static_cast<int>(i % (int64_t{layer_.heads} * blocks));
      compute(request, rest / blocks, rest % blocks * kStateRows);
    });
  }

 private:
  float* vector(int64_t i, int head, bool query) const {
    return vectors_ + ((i * layer_.key_heads + head) * 2 + (query ? 1 : 0)) * layer_.keys;
  }

  void prepare(int64_t i) {
    const int64_t row = begin_ + i;
    const float scale = 1.0f / std::sqrt(static_cast<float>(layer_.keys));
    for (int h = 0; h < layer_.key_heads; ++h) {
      kernels_.unit_vector(layer_.k[row] + h * key_bytes_, layer_.keys, 1.0f, vector(i, h, false));
      kernels_.unit_vector(layer_.q[row] + h * key_bytes_, layer_.keys, scale, vector(i, h, true));
    }
    const int group = layer_.heads / layer_.key_heads;
    for (int h = 0; h < layer_.heads; ++h) {
      DeltaToken& token = tokens_[static_cast<size_t>(h * size_ + i)];
      token = {vector(i, h / group, false),      vector(i, h / group, true),        0, 0,
               layer_.v[row] + h * value_bytes_, layer_.out[row] + h * value_bytes_};
      gates(layer_, row, h, &token);
    }
  }

  // Rows of the state of one head of a request, for its tokens in the block.
  void compute(int64_t request, int head, int first) const {
    const int rows = std::min(kStateRows, layer_.values - first);
    const int64_t start = layer_.at.first(request), slot = layer_.at.slots[request];
    int64_t token = std::max(start, begin_);
    const int64_t end = std::min(layer_.at.first(request + 1), end_);
    if (slot < 0) {
      const int64_t bytes = value_bytes_ / layer_.values;
      for (; token < end; ++token)
        std::memset(layer_.out[token] + head * value_bytes_ + first * bytes, 0,
                    static_cast<size_t>(rows * bytes));
      return;
    }
    const int64_t size = int64_t{layer_.values} * layer_.keys;
    float* state = layer_.states + slot * layer_.slot_stride + head * size;
    const auto take_until = [&](int64_t stop) {
      const DeltaToken* tokens = tokens_.data() + head * size_ + (token - begin_);
      kernels_.delta_rule(tokens, stop - token, layer_.keys, first, rows, state);
      token = stop;
    };
    const int64_t number = layer_.snapshots != nullptr ? layer_.snapshot_at[request] : -1;
    if (number >= 0 && start + number >= token && start + number < end) {
      take_until(start + number);
      const int64_t at = int64_t{first} * layer_.keys;
      std::memcpy(layer_.snapshots + (request * layer_.heads + head) * size + at, state + at,
                  static_cast<size_t>(rows) * layer_.keys * sizeof(float));
    }
    take_until(end);
  }

  const KernelTable& kernels_;
  const DeltaRuleLayer& layer_;
  const int64_t key_bytes_, value_bytes_, size_;
  std::vector<DeltaToken>& tokens_;
  float* vectors_;
  int64_t begin_ = 0, end_ = 0;
};

}  // namespace

void convolve(WorkerPool& workers, const KernelTable& kernels, DType dtype, const ConvolutionLayer& layer) {
  const int64_t element = element_bytes(dtype);
  const int blocks = parts(layer.channels, kChannels);
  hand_out(workers, layer.at.requests * blocks, [&](int64_t item, int) {
    const int64_t request = item / blocks, row = layer.at.first(request), slot = layer.at.slots[request];
    const int64_t tokens = layer.at.first(request + 1) - row;
    const auto first = static_cast<int>(item % blocks) * kChannels;
    const int channels = std::min(kChannels, layer.channels - first);
    if (slot < 0) {
      for (int64_t t = row; t < row + tokens; ++t)
        std::memset(layer.out[t] + first * element, 0, static_cast<size_t>(channels * element));
      return;
    }
    char* state = layer.states[slot] + first * (layer.taps - 1) * element;
    if (layer.goes_on != nullptr && !layer.goes_on[request])
      std::memset(state, 0, static_cast<size_t>(channels * (layer.taps - 1) * element));
    const auto at = [&](const void* p, int64_t elements) {
      return static_cast<const char*>(p) + elements * element;
    };
    kernels.convolve(layer.x[row] + first * element, layer.x.stride / element, tokens, channels, layer.taps,
                     at(layer.weights, int64_t{first} * layer.taps),
                     layer.bias != nullptr ? at(layer.bias, first) : nullptr, state,
                     layer.out[row] + first * element, layer.out.stride / element);
  });
}

void delta_rule(WorkerPool& workers, const KernelTable& kernels, DType dtype, const DeltaRuleLayer& layer,
                DeltaRuleScratch* scratch) {
  Block block(kernels, dtype, layer, scratch);
  for (int64_t begin = 0; begin < layer.at.rows(); begin += kBlock)
    block.take(workers, begin, std::min(begin + kBlock, layer.at.rows()));
}

}  // namespace fluxion
