#include "predictor/network.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <stdexcept>

namespace fluxion {
namespace {

constexpr float kClip = 8;
// Rows that one worker takes at a time: what `dense` computes together, and some microseconds of work, so
// that two of them justify a second worker.
constexpr int kRowBlock = 8;

constexpr int kBlockSizes = 4;
constexpr int kFirstLog2 = 4;  // 16 tokens

const KernelTable* table_for(const std::string& isa) {
  if (isa.empty()) return best_kernel_table(DType::kF32);
  if (const KernelTable* table = kernel_table(isa.c_str(), DType::kF32)) return table;
  throw std::invalid_argument("isa " + isa + " cannot be run by this CPU; leave it empty for the best.");
}

void check_finite(const float* values, int64_t n, const char* what) {
  if (!std::all_of(values, values + n, [](float v) { return std::isfinite(v); })) {
    throw std::invalid_argument(std::string(what) +
                                " of the predictor holds a value that is not finite; train it again.");
  }
}

// The nearest bfloat16, ties to even.
uint16_t rounded(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  if ((nearest & 0x7f80) == 0x7f80) {
    throw std::invalid_argument("A weight of the predictor is too large for bfloat16; train it again.");
  }
  return static_cast<uint16_t>(nearest);
}

int panels_of(int outputs) { return (outputs + kDensePanel - 1) / kDensePanel; }

}  // namespace

Predictor::Predictor(const std::string& isa, const std::vector<int>& widths, const float* mean,
                     const float* std, const float* parameters, int64_t count)
    : kernels_(table_for(isa)) {
  if (widths.size() < 2 || widths.back() != kPredictions)
    throw std::invalid_argument("The last layer of the predictor must have 3 outputs.");
  int64_t wanted = 0;
  stride_ = 0;
  for (size_t l = 0; l < widths.size(); ++l) {
    if (widths[l] < 1 || widths[l] > 1 << 16)
      throw std::invalid_argument("A layer of the predictor is " + std::to_string(widths[l]) + " wide.");
    // Whole pairs of vectors, as `dense` requires.
    stride_ = std::max<int64_t>(stride_, (panels_of(widths[l]) + 1) / 2 * 2 * kDensePanel);
    if (l > 0) wanted += (static_cast<int64_t>(widths[l - 1]) + 1) * widths[l];
  }
  if (count != wanted) {
    throw std::invalid_argument("The predictor has " + std::to_string(count) +
                                " parameters, but its layers " + "need " + std::to_string(wanted) + ".");
  }
  features_ = widths.front();
  check_finite(mean, features_, "The mean");
  check_finite(std, features_, "The standard deviation");
  check_finite(parameters, count, "A layer");
  mean_.assign(mean, mean + features_);
  for (int f = 0; f < features_; ++f) {
    const float inverse = 1 / std[f];
    if (!(std[f] > 0) || !std::isfinite(inverse))
      throw std::invalid_argument("A standard deviation of the predictor is not positive; train it again.");
    inverse_std_.push_back(inverse);
  }
  for (size_t l = 1; l < widths.size(); ++l) {
    const int in = widths[l - 1], out = widths[l];
    Layer layer{in, panels_of(out), {}, {}};
    const int pairs = (in + 1) / 2;
    layer.weights.assign(static_cast<size_t>(layer.panels) * pairs * kDensePanel * 2, 0);
    layer.bias.assign(static_cast<size_t>(layer.panels) * kDensePanel, 0);
    for (int o = 0; o < out; ++o) {
      uint16_t* panel =
          layer.weights.data() + static_cast<int64_t>(o / kDensePanel) * pairs * kDensePanel * 2;
      for (int i = 0; i < in; ++i) {
        panel[(i / 2 * kDensePanel + o % kDensePanel) * 2 + i % 2] = rounded(*parameters++);
      }
    }
    std::copy_n(parameters, out, layer.bias.begin());
    parameters += out;
    layers_.push_back(std::move(layer));
  }
  scratch_.resize(2 * kRowBlock * stride_);
}

struct Predictor::Rows {
  Predictor* self;
  const float* x;
  int64_t count;
  float* out;
  std::atomic<int64_t> next;  // first row not taken yet
};

void Predictor::forward(const float* x, int64_t rows, float* out, WorkerPool* workers) {
  Rows all{this, x, rows, out, {0}};
  if (rows > kRowBlock && workers != nullptr && workers->size() > 1) {
    const size_t wanted = workers->size() * 2 * kRowBlock * stride_;
    if (scratch_.size() < wanted) scratch_.resize(wanted);
    const auto body = [](void* ctx, int worker) {
      Rows* rows = static_cast<Rows*>(ctx);
      rows->self->run(rows, worker);
    };
    if (workers->launch(body, &all)) return workers->join();
  }
  run(&all, 0);
}

void Predictor::run(Rows* rows, int worker) {
  float* now = scratch_.data() + worker * 2 * kRowBlock * stride_;
  for (int64_t first; (first = rows->next.fetch_add(kRowBlock, std::memory_order_relaxed)) < rows->count;) {
    const int n = static_cast<int>(std::min<int64_t>(kRowBlock, rows->count - first));
    run_block(rows->x + first * features_, n, rows->out + first * kPredictions, now,
              now + kRowBlock * stride_);
  }
}

void Predictor::run_block(const float* x, int rows, float* out, float* now, float* next) const {
  for (int r = 0; r < rows; ++r) {
    const float* row = x + r * features_;
    for (int f = 0; f < features_; ++f) {
      const float z = (row[f] - mean_[f]) * inverse_std_[f];
      now[r * stride_ + f] = z < -kClip ? -kClip : z > kClip ? kClip : z;  // NaN stays NaN
    }
  }
  for (const Layer& layer : layers_) {
    const bool last = &layer == &layers_.back();
    kernels_->dense(now, stride_, rows, layer.in, layer.weights.data(), layer.bias.data(), layer.panels,
                    !last, next, stride_);
    std::swap(now, next);
  }
  for (int r = 0; r < rows; ++r) std::copy_n(now + r * stride_, kPredictions, out + r * kPredictions);
}

void plan_groups(const float* pred, const int32_t* middle, int64_t B, int H, int G, float threshold,
                 const float* margins, int blocks, int32_t* blk, float* budget, float* value) {
  for (int64_t i = 0; i < B * H; ++i, budget += G) {
    const double tokens = middle[i / H];
    blk[i] = 0;
    value[i] = 0;
    std::fill_n(budget, G, 0.0f);
    if (!(tokens > 0)) continue;
    // Float32 budgets, sums in double: every sum here is exact, so that ties are the same on every machine
    // and in any order of the heads. V / (2 L) has its minimum where V has it.
    double best = 0;
    for (int j = kBlockSizes - 1; j >= 0; --j) {
      if ((blocks >> (kFirstLog2 + j) & 1) == 0) continue;
      const double size = 1 << (kFirstLog2 + j);
      const double least = std::min(1.0, size / tokens);
      float budgets[kMaxGroup] = {};
      double sum = 0;
      bool any = false;
      for (int g = 0; g < G; ++g) {
        const float* line = pred + (i * G + g) * kPredictions;
        if (line[2] > threshold) continue;
        any = true;
        double share = line[0] + static_cast<double>(line[1]) * (kFirstLog2 + j);
        share = (share < least ? least : share) * margins[(i % H * G + g) * kBlockSizes + j];
        budgets[g] = static_cast<float>(share < least ? least : share <= 1 ? share : 1.0);
        sum += budgets[g];
      }
      if (!any) break;
      const double cost = 1 / size + sum;
      if (blk[i] != 0 && !(cost < best)) continue;
      best = cost;
      blk[i] = 1 << (kFirstLog2 + j);
      value[i] = static_cast<float>(2 * tokens * cost);
      std::copy_n(budgets, G, budget);
    }
  }
}

}  // namespace fluxion
