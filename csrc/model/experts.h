// Mixtures of experts (MoE): layers in which a router has chosen a few of many small networks for each row.
// All workers compute them.
#pragma once

#include <cstdint>
#include <vector>

#include "model/linear.h"
#include "model/rows.h"

namespace fluxion {

// One weight matrix of all experts, `apart` bytes from one expert to the next. format.bits is 0: rows of the
// layer's dtype; else panels (QuantisedFormat). bias: [experts][outputs], or null.
struct ExpertWeights {
  const char* at;
  int64_t apart;
  QuantisedFormat format;
  const float* bias;
  int outputs;
};

// out = sum over the experts of a row of weight * (act(x gate^T) * (x up^T)) down^T. The results of linear
// layers, of act and of its product with up are rounded to the dtype. The sum is float32, in the order of the
// experts' numbers, and is rounded once.
//
// With a limit above 0 (gpt-oss) the rows of gate_up alternate between gate and up, and the input of down is
// gate sigmoid(alpha gate) (up + 1), gate at most the limit and up between -limit and limit.
struct ExpertsLayer {
  Rows x, out;  // of `hidden` elements
  int64_t rows;
  int hidden, inner, experts, chosen;
  const int32_t* ids;           // [rows][chosen], each one of the experts
  const float* weights;         // [rows][chosen]
  ExpertWeights gate_up, down;  // [2 inner][hidden], gates first; [hidden][inner]
  bool gelu;                    // act is GELU in its tanh form, else SiLU
  float alpha, limit;
};

// Rows that chose one expert.
struct ChosenExpert {
  int64_t first;   // the place of its first row in ExpertsScratch::pairs
  int64_t x, act;  // offsets in the scratch memory: its packed inputs of gate and up, and those of down
  int expert, rows;
  int left;  // pieces of gate and up that no worker has computed yet
};

// Memory of the layers while they run. It grows to what the largest layer needed so far.
struct ExpertsScratch {
  std::vector<ChosenExpert> active;  // experts that any row chose, in the order of their numbers
  std::vector<int64_t> pairs;        // row * chosen + index of the choice, sorted by expert
  std::vector<int64_t> ends;         // by expert: where its pairs end
  LinearScratch memory;
};

// A row's output depends on that row and its choices alone, to the bit. If the workers are busy or the layer
// is small, the calling thread computes alone.
void experts(WorkerPool& workers, const KernelTable& kernels, DType dtype, const ExpertsLayer& layer,
             ExpertsScratch* scratch);

}  // namespace fluxion
