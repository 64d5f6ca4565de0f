// The head predictor (Fluxion, section 5.2), and the choice of block size and budgets from its predictions
// (section 5.3, Eq. 3).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/table.h"
#include "runtime/worker_pool.h"

namespace fluxion {

// For one query head: least budget of single tokens, its growth with log2(block size), streaming logit.
inline constexpr int kPredictions = 3;

// A multilayer perceptron: features standardised and clipped to +-8, ReLU between the layers. Weights are
// rounded to bfloat16, and so are the inputs of layers if the ISA multiplies bfloat16; sums are float32. One
// thread at a time uses an object, because it holds the workers' scratch.
class Predictor {
 public:
  // widths: features, hidden layers, kPredictions. mean, std: [features]. parameters: of each layer in turn
  // the weight [out][in] and the bias [out], `count` floats in all; copied. isa: "" for the best. Throws
  // std::invalid_argument for sizes that do not fit, values that are not finite or weights too large
  // for bfloat16, or a std that is not positive.
  Predictor(const std::string& isa, const std::vector<int>& widths, const float* mean, const float* std,
            const float* parameters, int64_t count);

  // x [rows][features] to out [rows][kPredictions]. A row's result does not depend on its worker. A NaN among
  // a row's features makes its predictions NaN. Runs on the calling thread alone if workers is nullptr, busy,
  // or not worth waking. Allocates only for a pool with more workers than any before.
  void forward(const float* x, int64_t rows, float* out, WorkerPool* workers);

  int features() const { return features_; }
  const char* isa() const { return kernels_->isa; }

 private:
  struct Layer {
    int in;
    int panels;
    std::vector<uint16_t> weights;  // as KernelTable::dense takes them
    std::vector<float> bias;
  };

  struct Rows;  // of one forward()
  void run(Rows* rows, int worker);
  void run_block(const float* x, int rows, float* out, float* now, float* next) const;

  const KernelTable* kernels_;
  int features_;
  std::vector<float> mean_, inverse_std_;
  std::vector<Layer> layers_;
  int64_t stride_;              // floats of a scratch row
  std::vector<float> scratch_;  // [workers][2]: activations of a block of rows, before and after a layer
};

// Block size, budgets and priority of every group from the predictions, by Eq. 3: the block size of 16, 32,
// 64, 128 with the least V(blk) = 2 L / blk + 2 L sum_h bgt_h(blk); the larger of equal ones.
//
// pred [B][H * G][kPredictions]; middle [B]: tokens L of each request's middle. A head whose logit is above
// the threshold is a streaming head: budget 0. For the others bgt_h(blk) = bgt0 + k log2(blk), at least one
// block, times the head's margin for that size (margins [H * G][4], above 0), again at least one block and at
// most 1; NaN becomes 1. blocks: sum of the block sizes to choose from, at least one. A group of streaming
// heads only, or without a middle, gets blk 0, budgets 0 and value 0.
//
// blk, value: [B][H]; budget: [B][H * G]. value = V of the chosen block size.
void plan_groups(const float* pred, const int32_t* middle, int64_t B, int H, int G, float threshold,
                 const float* margins, int blocks, int32_t* blk, float* budget, float* value);

}  // namespace fluxion
