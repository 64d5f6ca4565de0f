#include "model/experts.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#include "model/hand_out.h"

namespace fluxion {
namespace {

// Most rows that a block computes together. This bounds the scratch memory. The next block reads the weights
// again, which takes little time beside its arithmetic.
constexpr int kRows = 512;
// Bytes of weights that a worker takes at a time, at most and at least; and pieces a worker.
constexpr int64_t kPieceBytes = 384 << 10;
constexpr int64_t kLeastBytes = 24 << 10;
constexpr int kPiecesOfWorker = 8;
// Bytes of sums, few enough to stay in a cache while the weights of all experts pass through it.
constexpr int64_t kSumBytes = 128 << 10;

constexpr int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

float to_float(float x) { return x; }
float to_float(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

void round_to(float x, float* to) { *to = x; }
// To bfloat16, ties to even. NaN stays NaN.
void round_to(float x, uint16_t* to) {
  const auto bits = std::bit_cast<uint32_t>(x);
  *to = static_cast<uint16_t>(x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// gpt-oss, of a gate and an up that are not clamped yet.
float clamped_swiglu(float gate, float up, float alpha, float limit) {
  gate = std::min(gate, limit);
  return gate / (1 + std::exp(-alpha * gate)) * (std::clamp(up, -limit, limit) + 1);
}

// `all` outputs, cut into pieces of `size`, whole panels.
struct Pieces {
  int all, size;

  Pieces(int outputs, int64_t wanted, int64_t most)
      : all(outputs),
        size(static_cast<int>(std::min<int64_t>(
            std::max<int64_t>(std::min(wanted, most) / kQuantisedPanel, 1) * kQuantisedPanel, outputs))) {}
  int64_t count() const { return (all + size - 1) / size; }
  int first(int64_t piece) const { return static_cast<int>(piece * size); }
  int outputs(int64_t piece) const { return std::min(size, all - first(piece)); }
};

// At most kRows rows of a layer. T: float, or uint16_t for bfloat16.
template <class T>
class Block {
 public:
  Block(WorkerPool& workers, const KernelTable& kernels, const ExpertsLayer& layer, ExpertsScratch* scratch)
      : workers_(workers),
        kernels_(kernels),
        layer_(layer),
        scratch_(*scratch),
        active_(scratch->active),
        near_(near_bytes()),
        gate_up_(pieces_of_gate_up()),
        down_(pieces_of_down()) {}

  void run() {
    sort();
    place();
    hand_out(workers_, alone() ? 1 : size(),
             [this](int64_t i, int worker) { pack_rows(active_[i], worker); });
    hand_out(workers_, size() * gate_up_.count(), [this](int64_t i, int worker) {
      gate_and_up(active_[i / gate_up_.count()], i % gate_up_.count(), worker);
    });
    hand_out(workers_, down_.count(), [this](int64_t i, int worker) { down(i, worker); });
  }

 private:
  int64_t size() const { return static_cast<int64_t>(active_.size()); }
  // Whether all chosen experts have the same input: one row, which chose none of them twice.
  bool alone() const { return layer_.rows == 1 && layer_.chosen == size() && size() > 0; }
  int64_t row_of(int64_t at) const { return scratch_.pairs[at] / layer_.chosen; }

  int64_t row_bytes(const ExpertWeights& weights, int in) const {
    return weights.format.bits > 0 ? panel_bytes(weights.format, in) / kQuantisedPanel
                                   : int64_t{in} * static_cast<int64_t>(sizeof(T));
  }
  int64_t shares() const { return int64_t{workers_.size()} * kPiecesOfWorker; }

  Pieces pieces_of_gate_up() const {
    const int64_t row = 2 * row_bytes(layer_.gate_up, layer_.hidden);
    const int64_t each = std::min<int64_t>(layer_.experts, layer_.rows * layer_.chosen) * layer_.inner * row;
    return {layer_.inner, std::clamp(each / shares(), kLeastBytes, kPieceBytes) / row, layer_.inner};
  }
  Pieces pieces_of_down() const {
    const int64_t row = row_bytes(layer_.down, layer_.inner);
    const int64_t wanted = std::clamp(layer_.hidden / shares() * row, kLeastBytes, kPieceBytes) / row;
    return {layer_.hidden, wanted, kSumBytes / 4 / layer_.rows};
  }

  // Sorts the pairs of row and choice by expert: a counting sort, which keeps the order of rows and choices.
  void sort() {
    const int64_t count = layer_.rows * layer_.chosen;
    auto& [active, pairs, ends, memory] = scratch_;
    ends.assign(layer_.experts, 0);
    for (int64_t i = 0; i < count; ++i) ++ends[layer_.ids[i]];
    active.clear();
    int64_t first = 0;
    for (int e = 0; e < layer_.experts; ++e) {
      if (ends[e] > 0)
        active.push_back({first, 0, 0, e, static_cast<int>(ends[e]), static_cast<int>(gate_up_.count())});
      first += std::exchange(ends[e], first);
    }
    pairs.resize(count);
    for (int64_t i = 0; i < count; ++i) pairs[ends[layer_.ids[i]]++] = i;
  }

  // Lays out the scratch memory.
  void place() {
    int64_t bytes = 0, most = 0;
    for (ChosenExpert& e : active_) {
      e.x = bytes;
      if (!alone() || &e == &active_.back()) bytes += aligned(linear_pack_bytes(e.rows, layer_.hidden));
    }
    for (ChosenExpert& e : active_) {
      e.act = bytes;
      bytes += aligned(linear_pack_bytes(e.rows, layer_.inner));
      most = std::max<int64_t>(most, e.rows);
    }
    const int64_t element = sizeof(T), acts = bytes;
    bytes += aligned(layer_.rows * layer_.chosen * layer_.inner * element);
    sum_bytes_ = aligned(layer_.rows * down_.size * 4);
    room_bytes_ = std::max({most * layer_.hidden * element, 2 * most * gate_up_.size * element,
                            sum_bytes_ + most * down_.size * element});
    room_bytes_ = aligned(room_bytes_);
    memory_ = static_cast<char*>(scratch_.memory.reserve(bytes + workers_.size() * room_bytes_));
    acts_ = reinterpret_cast<T*>(memory_ + acts);
    rooms_ = memory_ + bytes;
  }

  char* room(int worker) const { return rooms_ + worker * room_bytes_; }

  void pack(const ExpertWeights& weights, const void* x, int64_t stride, int rows, int in, int64_t to) const {
    const auto pack = weights.format.bits > 0 ? kernels_.pack_quantised : kernels_.pack_linear;
    pack(x, stride, rows, in, memory_ + to);
  }

  void multiply(const ExpertWeights& weights, const ChosenExpert& e, int64_t x, int in, int64_t first,
                int count, T* out) const {
    const LinearArgs args{
        memory_ + x, e.rows,        in, weights.at + e.expert * weights.apart, in, nullptr, count,
        near_,       weights.format};
    (weights.format.bits > 0 ? kernels_.linear_quantised : kernels_.linear)(args, first, count, out);
    if (weights.bias == nullptr) return;
    const float* bias = weights.bias + int64_t{e.expert} * weights.outputs + first;
    for (int i = 0; i < e.rows; ++i) {
      for (int j = 0; j < count; ++j) round_to(to_float(out[i * count + j]) + bias[j], out + i * count + j);
    }
  }

  void pack_rows(const ChosenExpert& e, int worker) const {
    const int64_t bytes = layer_.hidden * static_cast<int64_t>(sizeof(T));
    const char* x = layer_.x[row_of(e.first)];
    if (e.rows > 1) {
      for (int i = 0; i < e.rows; ++i)
        std::memcpy(room(worker) + i * bytes, layer_.x[row_of(e.first + i)], bytes);
      x = room(worker);
    }
    pack(layer_.gate_up, x, layer_.hidden, e.rows, layer_.hidden, e.x);
  }

  // Computes a piece of act(gate) * up of an expert. The worker that ends last packs the input of down.
  void gate_and_up(ChosenExpert& e, int64_t piece, int worker) const {
    const int first = gate_up_.first(piece), count = gate_up_.outputs(piece);
    T* gates = reinterpret_cast<T*>(room(worker));
    T* acts = acts_ + e.first * layer_.inner;
    if (layer_.limit > 0) {
      multiply(layer_.gate_up, e, e.x, layer_.hidden, 2 * int64_t{first}, 2 * count, gates);
      for (int64_t i = 0; i < e.rows; ++i) {
        const T* both = gates + 2 * i * count;
        for (int j = 0; j < count; ++j) {
          round_to(
              clamped_swiglu(to_float(both[2 * j]), to_float(both[2 * j + 1]), layer_.alpha, layer_.limit),
              acts + i * layer_.inner + first + j);
        }
      }
    } else {
      T* ups = gates + int64_t{e.rows} * count;
      multiply(layer_.gate_up, e, e.x, layer_.hidden, first, count, gates);
      multiply(layer_.gate_up, e, e.x, layer_.hidden, int64_t{layer_.inner} + first, count, ups);
      const auto act = layer_.gelu ? kernels_.gelu_mul : kernels_.silu_mul;
      for (int64_t i = 0; i < e.rows; ++i)
        act(gates + i * count, ups + i * count, count, acts + i * layer_.inner + first);
    }
    if (std::atomic_ref(e.left).fetch_sub(1, std::memory_order_acq_rel) == 1)
      pack(layer_.down, acts, layer_.inner, e.rows, layer_.inner, e.act);
  }

  // Computes a piece of the outputs, of all rows.
  void down(int64_t piece, int worker) const {
    const int first = down_.first(piece), count = down_.outputs(piece);
    float* sums = reinterpret_cast<float*>(room(worker));
    T* each = reinterpret_cast<T*>(room(worker) + sum_bytes_);
    std::fill_n(sums, layer_.rows * count, 0.0f);
    for (const ChosenExpert& e : active_) {
      multiply(layer_.down, e, e.act, layer_.inner, first, count, each);
      for (int64_t i = 0; i < e.rows; ++i) {
        const int64_t pair = scratch_.pairs[e.first + i];
        const float weight = layer_.weights[pair];
        float* sum = sums + pair / layer_.chosen * count;
        for (int j = 0; j < count; ++j) sum[j] += weight * to_float(each[i * count + j]);
      }
    }
    for (int64_t row = 0; row < layer_.rows; ++row) {
      T* out = reinterpret_cast<T*>(layer_.out[row]) + first;
      for (int j = 0; j < count; ++j) round_to(sums[row * count + j], out + j);
    }
  }

  WorkerPool& workers_;
  const KernelTable& kernels_;
  const ExpertsLayer& layer_;
  ExpertsScratch& scratch_;
  std::vector<ChosenExpert>& active_;
  const int64_t near_;
  const Pieces gate_up_, down_;
  // Packed inputs; then act(gate) * up, [pairs][inner]; then a room for each worker.
  char *memory_ = nullptr, *rooms_ = nullptr;
  T* acts_ = nullptr;
  int64_t sum_bytes_ = 0, room_bytes_ = 0;
};

}  // namespace

void experts(WorkerPool& workers, const KernelTable& kernels, DType dtype, const ExpertsLayer& layer,
             ExpertsScratch* scratch) {
  for (int64_t first = 0; first < layer.rows; first += kRows) {
    ExpertsLayer block = layer;
    block.rows = std::min<int64_t>(kRows, layer.rows - first);
    block.x.at = layer.x[first];
    block.out.at = layer.out[first];
    block.ids += first * layer.chosen;
    block.weights += first * layer.chosen;
    if (dtype == DType::kBF16)
      Block<uint16_t>(workers, kernels, block, scratch).run();
    else
      Block<float>(workers, kernels, block, scratch).run();
  }
}

}  // namespace fluxion
