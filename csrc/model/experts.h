// Mixtures of experts: layers where every row chooses a few of many small networks, over all workers.
#pragma once

#include <cstdint>
#include <vector>

#include "model/linear.h"
#include "model/rows.h"

namespace fluxion {

// Weights of all experts, `apart` bytes from one expert to the next: rows of the layer's dtype, or panels
// where the format has bits.
struct ExpertWeights {
  const char* at;
  int64_t apart;
  QuantisedFormat format;
};

// out = sum over the experts of a row of weight * (act(x gate^T) * (x up^T)) down^T. What a linear layer, act
// or a product makes is rounded to the dtype; the sum is float32, in the order of the experts' numbers, and
// rounded once.
struct ExpertsLayer {
  Rows x, out;  // of `hidden` elements
  int64_t rows;
  int hidden, inner, experts, chosen;
  const int32_t* ids;           // [rows][chosen], each one of the experts
  const float* weights;         // [rows][chosen]
  ExpertWeights gate_up, down;  // [2 inner][hidden], gates first; [hidden][inner]
  bool gelu;                    // act: GELU in its tanh form, or else SiLU
};

// Rows that chose one expert.
struct ChosenExpert {
  int64_t first;   // of its rows in ExpertsScratch::pairs
  int64_t x, act;  // where they lie packed, before the one product and before the other
  int expert, rows;
  int left;  // pieces of gate and up that are to be computed
};

// Memory for what the layers need while they run. It grows to the largest layer that has come.
struct ExpertsScratch {
  std::vector<ChosenExpert> active;  // those that a row chose, in the order of their numbers
  std::vector<int64_t> pairs;        // a row times `chosen`, plus a choice of that row; by expert
  std::vector<int64_t> ends;         // of an expert's pairs
  LinearScratch memory;
};

// A row's output depends on its row and its choices alone, to the bit. On the calling thread alone where the
// workers are busy or not worth waking.
void experts(WorkerPool& workers, const KernelTable& kernels, DType dtype, const ExpertsLayer& layer,
             ExpertsScratch* scratch);

}  // namespace fluxion
