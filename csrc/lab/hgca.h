// What HGCA remembers of requests (Deng et al., "HGCA: Hybrid GPU-CPU Attention", Algorithm 1): the attention
// of every query head to every resident token, and the tokens of the middle that it reads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/pool.h"

namespace fluxion {

struct HgcaConfig {
  int q_heads;
  int window;   // tokens, a multiple of 16
  int rows;     // of SGLang's request table
  float alpha;  // in [0, 1]: weight of the newest value in the moving average
  float beta;   // at least 0: a token is salient if its weight exceeds beta times the mean weight; 0: all are
};

// Queries of the last tokens of a request of `length` tokens, all of them in the pool.
struct HgcaQueries {
  const char* q;   // [count][Hq][D] KV dtype, the last two contiguous
  int64_t stride;  // bytes
  int count;       // 1 to kHgcaQueries, at most length
  int length;
};
inline constexpr int kHgcaQueries = 32;

// A layer of a decode step of B requests; the step's tokens are in the pool, and in the windows if there are
// any.
struct HgcaStep {
  int layer;
  int batch;
  const int32_t* rows;      // [B]
  const int32_t* seq_lens;  // [B], the step's token included
  const int32_t* table;     // [B][columns], physical page of every logical page
  int64_t table_stride;     // elements
  int64_t columns;
  const char* q;      // [B][Hq][D] KV dtype, the last two contiguous
  int64_t q_stride;   // bytes
  float scale;        // multiplies q.k
  WindowView window;  // absent: the residents are read from the pool
};

// State is kept by row. A row is *known* in a layer when its averages describe the residents of its first
// `length` tokens and its lists the middle of these. Tokens that a known row lists stay listed, in the order
// in which blocks left the window, until establish() evaluates the middle anew.
//
// Groups are independent and one worker computes each, so the numbers do not depend on the workers or on the
// batch. One thread at a time.
class Hgca {
 public:
  // Throws std::invalid_argument for a geometry that does not fit the pool.
  Hgca(std::shared_ptr<HostPool> pool, const HgcaConfig& config);

  // Makes a row known in a layer from its last queries (lines 8 and 19 to 22). The average of a resident is
  // over the queries that see it, of its weight among the residents that they see. A token of the middle is
  // salient if its average weight exceeds beta / its tokens; these weights are over the middle alone. Throws
  // std::invalid_argument before anything is changed.
  void establish(int layer, int row, const HgcaQueries& queries, const int32_t* pages, int64_t page_count,
                 float scale);
  // Brings the rows of a step up to date (lines 8 to 14, 23 and 24). Lists the tokens that left the window
  // since the row's last step and whose average exceeds beta / the tokens resident then. Then the weights of
  // this step's query over the residents enter the averages; a token's average begins with its first weight.
  // A row that is not known, or that missed some residents, is established from the step's own query. A
  // request that cannot be read lists nothing. Returns how many pages the groups of the step list together.
  int64_t step(const HgcaStep& step);
  // The lists of the last step, in the layout of ListedTokens: listed() + 1 offsets, pages and masks of
  // listed_pages(). Valid until a row is established or released.
  int64_t listed() const { return static_cast<int64_t>(listed_.size()); }
  int64_t listed_pages() const;
  void lists(int64_t* offsets, int32_t* pages, uint16_t* masks) const;

  // The averages of a known row's residents, in the order of their positions: out [Hq][tokens]. Returns the
  // number of tokens; 0: not known.
  int averages(int layer, int row, float* out, int64_t room) const;
  void release(int row);
  // Memory of the rows.
  int64_t bytes() const;

  const HostPool& pool() const { return *pool_; }
  const HgcaConfig& config() const { return config_; }

 private:
  struct Contextual {             // the contextual set of a group
    std::vector<int32_t> pages;   // logical, ascending
    std::vector<uint16_t> masks;  // [pages][G]
  };
  struct Row {
    std::vector<int32_t> lengths;     // [layers]; 0: not known
    std::vector<float> averages;      // [layers][Hq][slots], where the windows have the tokens
    std::vector<Contextual> context;  // [layers][Hk]
  };
  struct Scratch {
    std::vector<int32_t> pages;  // [slot pages]
    std::vector<float> scores;   // [G][tokens]: of a piece of the middle, or of the residents
    std::vector<float> sums;     // [G][tokens]
    std::vector<double> lse;     // [kHgcaQueries][G]
  };
  struct Evaluation;

  int window_page(int n) const { return window_start_page(n, shape_.sink_pages, config_.window); }
  int resident_tokens(int n) const;
  int resident_pages(int n) const;
  int resident_page(int n, int i) const;
  int slot_page(int page) const;
  float* averages_of(Row* row, int layer, int head, int g) const;
  float log_mass(const float* scores, int n, float scale) const;
  template <class Body>
  void run(int items, int64_t bytes, const Body& body);
  Row* row_of(int row);
  void reserve(Row* row, int layer, int64_t pages);
  std::string check(int row, int length, const int32_t* pages, int64_t page_count) const;
  bool follows(int known, int n) const;
  void evaluate(const Evaluation& at, int head, Scratch* scratch) const;
  void evaluate_residents(const Evaluation& at, int head, Scratch* scratch) const;
  void evaluate_middle(const Evaluation& at, int head, Scratch* scratch) const;
  void add_page(Contextual* set, int page, const float* weights, int64_t stride, float threshold) const;
  void evict(Row* row, int layer, int head, int from, int to) const;
  void observe(const HgcaStep& step, int b, int head, int known, Scratch* scratch) const;

  std::shared_ptr<HostPool> pool_;
  HgcaConfig config_;
  const PoolShape shape_;
  const KernelTable& kernels_;
  const int group_, slots_;
  std::vector<std::unique_ptr<Row>> rows_;
  std::vector<Scratch> scratch_;  // one for each worker
  std::vector<uint16_t> ones_;
  // The last step.
  std::vector<const Contextual*> listed_;  // [B * Hk]; nullptr: the request cannot be read
};

}  // namespace fluxion
