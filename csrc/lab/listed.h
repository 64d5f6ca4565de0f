// Tasks that read a list of tokens instead of ranking the middle's blocks: Listed of fluxion_lab/kinds.py.
#pragma once

#include "engine/task_kind.h"

namespace fluxion {

class ListedTokens : public TaskKind {
 public:
  static constexpr int kBlk = -1;  // blk of its groups

  // Group b * H + h has the pages [offsets[b * H + h], offsets[b * H + h + 1]).
  struct Lists {
    const int64_t* offsets;  // [groups + 1]
    int64_t groups;
    const int32_t* pages;   // [count]: logical pages of the request, ascending, in its middle
    const uint16_t* masks;  // [count][G]: bit t = the head has token t of the page
    int64_t count;
    int group;  // G
    // What the CPU's tasks chose, written by the time the layer is finished; nullptr: not recorded. With it
    // every head with a part of the middle is scored, even if it leaves nothing out.
    uint16_t* chosen = nullptr;  // [count][G]: tokens attended to
    float* scores = nullptr;     // [count][G][16]: q.k of what such heads list
    // Attention to merge into that of the lists, [B][Hq][D] and [B][Hq]; nullptr: none.
    const float* given_o = nullptr;
    const float* given_lse = nullptr;
    int64_t q_heads = 0, head_dim = 0;  // of what is given
  };

  // memory keeps the arrays of the lists alive.
  ListedTokens(const Lists& lists, std::shared_ptr<const void> memory)
      : all_(lists), memory_(std::move(memory)) {}

  void check_shape(const LayerPlan& plan) const override;
  bool takes(const Layer& layer, const Task& task) const override { return layer.blk(task) == kBlk; }
  std::string wrong(const Layer& layer, const Task& task) const override;
  int64_t bytes(const Layer& layer, const Task& task) const override;
  int ranked_tokens(const Layer& layer, const Task& task) const override;
  Selection select(const Layer& layer, const Task& task, Scratch* scratch) const override;
  Selection run(const Layer& layer, const Task& task, Scratch* scratch, float* o, float* lse) const override;

 private:
  int64_t begin(const Layer& layer, const Task& task) const { return all_.offsets[layer.index(task)]; }
  int count(const Layer& layer, const Task& task) const;
  bool given(const Layer& layer, const Task& task) const;
  int rank(const Layer& layer, const Task& task, const Wanted& wanted, Scratch* scratch) const;
  int score_listed(const Layer& layer, const Task& task, unsigned heads, Scratch* scratch) const;
  void keep_best(const Layer& layer, const uint16_t* listed, int count, int g, int scored, bool alone,
                 int best, Scratch* scratch) const;

  const Lists all_;
  const std::shared_ptr<const void> memory_;
};

}  // namespace fluxion
