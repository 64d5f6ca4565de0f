// LFPS: chooses tokens by past attention (Learn From the Past for Sparse Indexing, section 4.2). lab/lfps.py
// says what is from the paper and what was reconstructed.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "lab/score_table.h"
#include "runtime/pool.h"

namespace fluxion {

struct LfpsConfig {
  int q_heads;
  int rows;    // request rows
  int window;  // tokens, a multiple of 16
  double decay;
  double alpha_vertical, alpha_slash;
  double bypass;    // heads with a larger share on the first tokens are passed by
  bool expand;      // candidates' neighbours are candidates, too
  int renormalise;  // binary digits by which entries may outgrow their true values
};

// B requests of a step, whose tokens of the step are in the pool; Hq query heads in groups of G.
struct LfpsStep {
  int layer;
  int batch;
  const int32_t* rows;      // [B]
  const int32_t* seq_lens;  // [B], this step's token included
};

struct LfpsPlan {
  const char* q;         // [B][Hq][D] KV dtype, the last two contiguous
  int64_t q_stride;      // bytes
  const int32_t* table;  // physical page of every logical page, rows with a stride
  int64_t table_stride;
  int64_t columns;
  float scale;       // multiplies q.k
  double k;          // share of the middle that a head reads
  int64_t capacity;  // of pages and masks: at least B * Hk * pages of the longest middle

  int32_t* blk;      // [B][Hk]
  float* budget;     // [B][Hq]
  float* value;      // [B][Hk]
  int64_t* offsets;  // [B * Hk + 1]
  int32_t* pages;    // [capacity]
  uint16_t* masks;   // [capacity][G]
  float* given_o;    // [B][Hq][D]; written where given_lse is not -inf
  float* given_lse;  // [B][Hq]
};

// What the listed tasks chose from a plan's lists.
struct LfpsChoice {
  const int64_t* offsets;
  const int32_t* pages;
  const uint16_t* chosen;  // [n][G]: tokens attended to
  const float* scores;     // [n][G][16]: q.k of the chosen ones
  const float* given_lse;  // [B][Hq], of the plan: heads with a number were passed by
  const float* local_lse;  // [B][Hq]: LSE over the window
  float scale;
};

// Per layer and request row, every query head has two score tables: vertical by position, slash by the offset
// from the current token. Entries are stored divided by decay^steps, so that a step multiplies one number and
// touches only the chosen entries. Sums of powers are kept, so that thresholds cost nothing. The scan reads
// one byte an entry, its code, which decides nearly all comparisons. Memory: 10 bytes a head and token, for
// the longest a row has been since it was released.
//
// One thread at a time. Requests, and heads, do not depend on one another.
class Lfps {
 public:
  // Throws std::invalid_argument.
  Lfps(std::shared_ptr<HostPool> pool, const LfpsConfig& config);

  // Tables of a request of `length` tokens from the queries of its last m tokens [m][Hq][D], 1 <= m <=
  // length. All its tokens are in the pool.
  void begin(int layer, int row, int length, const int32_t* pages, int64_t page_count, const char* queries,
             int m, float scale);
  // The rows have begun. Returns how many pages are listed.
  int64_t plan(const LfpsStep& step, const LfpsPlan& plan);
  void update(const LfpsStep& step, const LfpsChoice& choice);
  void release(int row);
  bool begun(int layer, int row) const { return at(layer, row) != nullptr; }

  int64_t bytes() const;
  // Cumulative: heads planned, heads passed by, and tokens that the others had as candidates.
  std::array<int64_t, 3> counts() const { return {planned_, passed_, candidates_}; }
  // One head's true tables: vertical [n] by position, slash [n] by offset.
  void tables(int layer, int row, int head, float* vertical, float* slash, int n) const;
  int group() const { return group_; }
  const HostPool& pool() const { return *pool_; }
  const LfpsConfig& config() const { return config_; }

 private:
  struct Head {
    TableStatistics vertical, slash;
    double unit = 1;    // true entry = stored entry * unit
    double spread = 0;  // variance of the last prefilled query's scores over its squared norm
  };
  struct State {
    int capacity = 0;  // entries a table has, a multiple of 64
    int vertical_end, slash_end;
    std::vector<float> values;   // [Hq][2][capacity]
    std::vector<uint8_t> codes;  // [Hq][2][capacity]
    std::vector<Head> heads;
  };
  struct Scratch {
    std::vector<uint64_t> bits;          // sets of positions or offsets, with a word before and after each
    std::vector<float> scores, weights;  // [G][tokens], [tokens]
    std::vector<uint16_t> none;          // [tokens] zeros
    std::vector<int32_t> positions;      // [tokens]
    std::array<int64_t, 3> counts{};

    uint64_t* bitset(int i, int words) { return &bits[static_cast<size_t>(i) * (words + 2) + 1]; }
  };
  static constexpr int kWord = 64;  // tokens of a word of bits
  static constexpr int kPagesAWord = kWord / kPage;

  static int words_of(int tokens) { return (tokens + kWord - 1) / kWord; }
  int sinks() const { return pool_->shape().sink_pages * kPage; }
  const std::unique_ptr<State>& at(int layer, int row) const {
    return states_[static_cast<size_t>(layer) * config_.rows + row];
  }
  void reserve(State* state, int tokens) const;
  ScoreTable vertical(State* state, int head) const;
  ScoreTable slash(State* state, int head) const;
  void check(const LfpsStep& step) const;
  template <class Body>
  void for_groups(int count, const Body& body, bool wake = false);
  void begin_group(State* state, int layer, int kv_head, int length, const int32_t* pages,
                   const char* queries, int m, float scale, Scratch* scratch) const;
  int plan_group(const LfpsStep& step, const LfpsPlan& plan, int b, int h, int32_t* pages, uint16_t* masks,
                 Scratch* scratch) const;
  uint16_t pass_by(const LfpsStep& step, const LfpsPlan& plan, int b, int h) const;
  void candidates(State* state, int head, int n, uint64_t* chosen, Scratch* scratch) const;
  void update_group(const LfpsStep& step, const LfpsChoice& choice, int b, int h, Scratch* scratch) const;
  void renormalise(State* state, int head) const;

  std::shared_ptr<HostPool> pool_;
  LfpsConfig config_;
  int group_;
  float digits_;  // 2^-renormalise
  std::vector<std::unique_ptr<State>> states_;
  std::vector<Scratch> scratch_;  // one for each worker
  std::vector<int> counts_;       // pages that each group of a plan lists
  int64_t planned_ = 0, passed_ = 0, candidates_ = 0;
};

}  // namespace fluxion
