#pragma once

#include <cstdint>

#include "kernels/api.h"

namespace fluxion {

// Tokens of one page.
inline constexpr int kPage = 16;
inline constexpr int kMinHeadDim = 32;
inline constexpr int kMaxHeadDim = 256;  // head_dim is a multiple of 16
inline constexpr int kMaxGroup = 16;     // query heads that share a KV head
inline constexpr int kMaxHeads = 64;     // query heads that one call may attend or score for
inline constexpr int kVectorHeads = 4;   // up to this many heads, memory is the limit for every ISA

inline constexpr int kExtendRows = 256;  // queries, times heads, of a call of `extend`
inline constexpr int kExtendKeys = 64;   // tokens that it takes at a time

inline constexpr int kDensePanel = 16;  // outputs of a dense layer whose weights lie together
inline constexpr int kLinearPad = 32;   // `linear` pads inputs to a multiple of this

// How keys and values are stored. The KV dtype is that of everything else: queries, outputs, metadata,
// windows. With kInt8 it is bfloat16.
//
// kInt8: 8-bit integers, and a scale for every key and every value. A tile has integers in the order of
// multiplication: keys [D / 2][16 tokens][2 elements], values [16 / 4][D][4 tokens], int8; then the scales,
// keys [16] and values [16], bfloat16. An element stands for its integer times the scale of its row. `attend`
// for few heads multiplies with exactly that; other readers of tiles round it to bfloat16. A scale is NaN if
// an element of the row is not finite.
enum class DType : int { kF32 = 0, kBF16 = 1, kInt8 = 2 };

inline constexpr DType kv_dtype(DType stored) { return stored == DType::kInt8 ? DType::kBF16 : stored; }
inline constexpr int element_bytes(DType stored) { return stored == DType::kF32 ? 4 : 2; }  // KV dtype
inline constexpr int64_t kMaxTileBytes = 2 * kPage * kMaxHeadDim * 4;
inline constexpr int kInt8Values = 4;  // values whose integers lie together
// Index of the integer of element d of row `row`, one of the 2 * kPage keys and values of a kInt8 tile.
inline constexpr int int8_at(int row, int d, int D) {
  return row < kPage ? d / 2 * 2 * kPage + 2 * row + d % 2
                     : (row - row % kInt8Values) * D + kInt8Values * d + row % kInt8Values;
}
inline constexpr int kScaleBytes = 2 * kPage * 2;  // scales of a kInt8 tile
// Bytes of a key or a value of D elements, as it is stored.
inline constexpr int64_t stored_bytes(DType stored, int D) {
  return stored == DType::kInt8 ? D + 2 : int64_t{D} * element_bytes(stored);
}
// Bytes of a page's sketch (KernelTable::write_sketch), whole cache lines.
inline constexpr int64_t sketch_bytes(int D) { return (kPage * (int64_t{D} / 2 + 2) + 63) / 64 * 64; }
// Bytes at its beginning, which skim_sketches reads.
inline constexpr int64_t skimmed_bytes(int D) { return kPage * (int64_t{D} / 4 + 2); }

// Arguments of `features`, for B = batch requests. The rows of the three anchor tensors belong to requests:
// request b has row rows[b].
struct FeatureArgs {
  int batch, q_heads, kv_heads, head_dim;
  int layer, first_head;    // of the model; first_head: number of head 0, above 0 under tensor parallelism
  int sinks, window;        // tokens, multiples of 16
  float scale;              // multiplies q.k
  const void* q;            // [B][Hq][D] KV dtype, the last two contiguous
  int64_t q_stride;         // bytes
  const float* parts;       // [B][Hq][kParts] (feature_index.h)
  const int32_t* rows;      // [B]
  const int32_t* seq_lens;  // [B], at least 1
  const float* anchor;      // [R][Hq][kAnchorFeatures]
  const void* anchor_q;     // [R][Hq][D] KV dtype
  const float* mean_k;      // [R][Hk][D]
  float* out;               // [B][Hq][kFeatures]
};

// Turns a score q.k into a logit: times the factor, and with a cap, cap * tanh(that / cap). It is monotonic,
// so a bound of a score gives a bound of its logit.
struct Scale {
  Scale(float times = 1, float limit = 0) : factor(times), cap(limit) {}
  float factor;
  float cap;  // of logits; 0: none
};

// No sliding window.
inline constexpr int kNoWindow = INT32_MAX;

// A block of queries of one KV head, and the tokens that they attend to, page by page.
struct ExtendArgs {
  const void* q;     // KV dtype: those of token t are [G][D] at q + t * q_stride
  int64_t q_stride;  // bytes
  int tokens, G, D;  // tokens * G: rows, at most kExtendRows
  Scale scale;
  const void* tiles;       // token i of the list is token i % 16 of
  const int32_t* pages;    //   tile pages[i / 16]
  int keys;                // listed tokens
  int first;               // query t attends to the tokens 0 .. min(first + t, keys - 1) of the list,
  int window = kNoWindow;  //   and of these to none before first + t - window + 1
  // Not nullptr: the tokens of the list from `root` on, at most 64, are nodes of a tree. Query t attends to
  // node i only if bit i of tree[t] is 1, never to a node after its own, and to the tokens before the tree in
  // its window. Its position is root plus its depth; no window is shorter than the tree is deep.
  const uint64_t* tree = nullptr;
  int root = 0;
};

inline constexpr int kQuantisedPanel = 16;  // outputs whose quantised weights lie together
inline constexpr int kQuantisedBlock = 32;  // inputs of such weights that a kernel multiplies at once

// Weights as integers of 4 bits (0 to 15) or 8 bits (-128 to 127). A group of `group` inputs of an output
// shares a scale and, if the format has minima, a minimum, both float16. A weight is
//
//   scale * integer + minimum   with minima
//   scale * (integer - 8)       without minima, 4 bits
//   scale * integer             without minima, 8 bits
//
// A group has a multiple of kQuantisedBlock inputs. With 8 bits and without minima it may have half a block.
//
// A panel has kQuantisedPanel outputs; outputs that the last panel lacks are zeros. It is a stream of heads
// and blocks. A head has the scales [groups][outputs], then the minima [groups][outputs], of the blocks that
// follow it: of one group with minima, of two without. So each head and each block is whole cache lines. A
// block has kQuantisedBlock inputs of all outputs:
//
//   8 bits: [8][output][2][2]; [j][o][e][n] is the integer of input 4 j + 2 n + e
//   4 bits: [4][output][2][4]; [j][o][e][n] is the integer of input 8 j + 2 n + e, n = 0 in the lowest bits
//           of a word
struct QuantisedFormat {
  int bits, group;
  bool minima;
};

// Groups of a head.
inline constexpr int per_head(QuantisedFormat format) { return format.minima ? 1 : 2; }

inline constexpr int64_t panel_bytes(QuantisedFormat format, int64_t in) {
  const int64_t groups = (in + format.group - 1) / format.group, each = per_head(format);
  const int64_t heads = (groups + each - 1) / each;
  return in * kQuantisedPanel * format.bits / 8 +
         heads * each * kQuantisedPanel * 2 * (format.minima ? 2 : 1);
}

// Arguments of `linear`, in the KV dtype.
struct LinearArgs {
  const void* x;           // as `pack_linear` wrote it
  int rows, in;            // at least 1
  const void* weights;     // [outputs][in], or panels
  int64_t stride;          // elements from one row of weights to the next
  const void* bias;        // [outputs], or nullptr
  int64_t out_stride;      // elements from one row of outputs to the next
  int64_t near_bytes;      // of x that a core's L1 cache holds while weights pass through it
  QuantisedFormat format;  // of `linear_quantised`
};

// Linear layers with weights packed in panels of `outputs` rows, in the order of use. A panel takes the
// memory of its rows; inputs are a multiple of kLinearPad. If an instruction set or a dtype has no panels,
// outputs is 0 and the functions are null.
struct LinearPanels {
  int outputs;
  int x_bytes;  // of an element of x, as `pack_linear` writes it
  void (*pack)(const void* rows, int in, void* panel);
  void (*unpack)(const void* panel, int in, void* rows);
  // `linear` for panels, with the same bits. args.stride is not used; first and count are multiples of
  // `outputs`.
  void (*linear)(const LinearArgs& args, int64_t first, int count, void* out);
};

// The kernels of one instruction set for one stored DType. A tile is K[16][D] then V[16][D], contiguous
// (kInt8: see DType), and has 32 * stored_bytes(). Pointers need no alignment. No function allocates, locks
// or throws; callers check every size and id.
//
// The groups are by caller.

// Called by tasks that rank blocks or tokens by their keys.
struct BlockKernels {
  // Unscaled score of each block: q.k at the centre of its box of minima and maxima, plus `spread` in [0, 1]
  // times what the half widths add. 1 gives the upper bound of q.k, sum_d max(q_d * min_d, q_d * max_d)
  // (Quest's). The weights (1 +- spread) q_d / 2 are rounded to the KV dtype. q: KV dtype [G][D], G up to
  // kMaxHeads. entries: one head's metadata, KV dtype [.][2][D] = {min, max}; index[n]: entry ids. out[g *
  // out_stride + i]: float32. A score depends only on its head and entry.
  void (*score)(const void* q, int G, int D, const void* entries, const int32_t* index, int n, float spread,
                float* out, int64_t out_stride);

  // q.k of every token of the listed tiles, unscaled. q: KV dtype [G][D]; tiles and pages as for attend.
  // out[g * out_stride + i * 16 + t]: float32, token t of tile i.
  void (*score_tokens)(const void* q, int G, int D, const void* tiles, const int32_t* pages, int n,
                       float* out, int64_t out_stride);

  // The same for single tokens: token i is token tokens[i] % 16 of tile tokens[i] / 16. out[g * out_stride +
  // i].
  void (*score_rows)(const void* q, int G, int D, const void* tiles, const int32_t* tokens, int n, float* out,
                     int64_t out_stride);

  // heads[i] |= bit for the k largest of scores[n], 1 <= k <= n. Of equal scores the lower index is chosen;
  // -0 equals 0; NaN counts as -inf. The result is the same on every ISA. scratch: select_scratch_bytes(n)
  // bytes, 4-byte aligned.
  void (*select)(const float* scores, int n, int k, uint16_t bit, uint16_t* heads, void* scratch);

  // Log weight of the blocks if each of their tokens had the block's score: log sum tokens_i exp(logit of
  // scores[i]). mass[0]: blocks with heads[i] & bits; mass[1]: the others; -inf if there are none. n >= 1
  // blocks of `tokens` tokens, except the first (also if it is the only one) and the last. NaN counts as
  // -inf.
  void (*block_mass)(const float* scores, const uint16_t* heads, uint16_t bits, int n, Scale scale,
                     int tokens, int first_tokens, int last_tokens, float* mass);

  // sum[i] = keep * sum[i] + take * e^(scale * scores[i] - lse), the power at most 1, and 0 for a NaN. If
  // keep is 0, the old sum is not used. n >= 0.
  void (*add_weights)(const float* scores, int n, float scale, float lse, float keep, float take, float* sum);
  // Bit b of above[i] and equal[i]: whether codes[64 i + b] is above the limit, or equal to it. There are
  // `words` times 64 codes.
  void (*compare_codes)(const uint8_t* codes, int64_t words, uint8_t limit, uint64_t* above, uint64_t* equal);
};

// Called by tasks that choose tokens by sketches.
struct SketchKernels {
  // Writes the sketch of the keys of a tile: sketch_bytes(D). Keys are rotated (q.k of two rotated vectors is
  // q.k times a power of two). Element d has a four-bit code c, 0 to 15, which stands for (c - 7.5) times the
  // key's scale. The upper two bits of codes come first: [D / 16][16 tokens][4], one byte for elements d (its
  // lowest two bits), d + 4, d + 8 and d + 12. Then come the scales [16], bfloat16, then the lower two bits,
  // like the upper. A key that is not finite has NaN scores. Bit-identical on every ISA.
  void (*write_sketch)(const void* tile, int D, void* sketch);
  // Approximate q.k of every token of the listed pages, unscaled; q is rounded to 8 bits. q: KV dtype [G][D],
  // G up to kMaxGroup. The sketch of page i is sketches + pages[i] * sketch_bytes(D). out: see score_tokens.
  // Bit-identical on every ISA.
  void (*score_sketches)(const void* q, int G, int D, const void* sketches, const int32_t* pages, int n,
                         float* out, int64_t out_stride);
  // The largest of those scores on each page, estimated from the upper bits alone, which are all that is
  // read: about[g * out_stride + i] of page i. most[...] is higher by one and a half standard deviations of
  // what the lower bits add. NaN counts as -inf. Writes -inf up to the next multiple of 16 pages.
  // Bit-identical on every ISA.
  void (*skim_sketches)(const void* q, int G, int D, const void* sketches, const int32_t* pages, int n,
                        float* about, float* most, int64_t out_stride);

  // Replaces the scores of tokens by weights e^(logit - unit), at most 1. unit is the largest logit, or lse
  // if that is larger; the largest float instead of +inf, and 0 if neither is above -inf. NaN and -inf weigh
  // 0, capped or not; subnormal weights become 0. Returns the sum of the weights. n: a multiple of 16.
  float (*weigh)(float* scores, int n, Scale scale, float lse, float* unit);
  // bounds[j]: tokens of less weight than this weigh at most allowed[j] together. Found in a few steps; above
  // all weights if all are allowed; always above 0. allowed: `count` ascending numbers. n: a multiple of 16.
  // room: n + 64 floats.
  void (*light_bounds)(const float* weights, int n, const float* allowed, int count, float* room,
                       float* bounds);
  // masks[n / 16]: a bit for every token that weighs at least `bound`. n: a multiple of 16.
  void (*mark_heavy)(const float* weights, int n, float bound, uint16_t* masks);
  // o[g * D + d] = sum of weight times value over the tokens that masks[i] names in tile pages[i], for all i
  // below n. Token t weighs weights[g * stride + at[i] * 16 + t]. sums[g]: sum of the weights. For BF16
  // values, weights may be rounded to BF16. nullptr for Int8, whose rows are not read one by one.
  void (*add_values)(const float* weights, int64_t stride, const int32_t* at, int G, int D, const void* tiles,
                     const int32_t* pages, const uint16_t* masks, int n, float* o, float* sums);
};

// Attention of decode steps and of prompts.
struct AttendKernels {
  // Attention of G queries, up to kMaxHeads, over a list of tiles of one KV head.
  //
  // q: KV dtype [G][D]. Tile i of the list is tile pages[i].
  //
  // masks: [n][G], bit t = the head attends to token t of the page; nullptr = all. A token that no mask
  // names may hold anything, NaN included.
  //
  // ahead: pages and masks go on for this many tiles, which the caller may attend to next. They may be
  // prefetched, and are not used.
  //
  // o: float32 [G][D], normalised. lse: [G], natural log of sum exp(logit of q.k). A head that attends to
  // nothing gets o = 0 and lse = -inf. An ISA that multiplies bf16 may round the weights of the values: by at
  // most 2^-9 of each for more than kMaxGroup heads, by 2^-16 for more than kVectorHeads. lse uses unrounded
  // weights. With kInt8, elements of q may be rounded by 2^-16 of the largest one, and each weight times the
  // scale of its value by 1/510 of the largest such product of up to four pages.
  void (*attend)(const void* q, int G, int D, Scale scale, const void* tiles, const int32_t* pages,
                 const uint16_t* masks, int n, int ahead, float* o, float* lse);

  // attend, with the same bits, for tiles that are in a cache or have just been attended to.
  void (*attend_near)(const void* q, int G, int D, Scale scale, const void* tiles, const int32_t* pages,
                      const uint16_t* masks, int n, int ahead, float* o, float* lse);

  // attend, with the same bits, and page_lse[n][G]: the LSE of every page alone. A page lighter than e^-87 of
  // the heaviest token may get -inf.
  void (*attend_pages)(const void* q, int G, int D, Scale scale, const void* tiles, const int32_t* pages,
                       const uint16_t* masks, int n, int ahead, float* o, float* lse, float* page_lse);

  // Attention of many queries of a prompt to the tokens before them and to themselves. o: float32
  // [tokens][G][D], normalised; lse: [tokens][G]. A query that attends to nothing gets o = 0 and lse = -inf.
  // Tokens that no query attends to, up to the end of their tile, are not used. An ISA that multiplies bf16
  // rounds the weights of the values to bf16; lse then uses the rounded ones. scratch:
  // extend_scratch_bytes().
  void (*extend)(const ExtendArgs& args, void* scratch, float* o, float* lse);

  // lse[tokens][G][blocks]: the LSE of every query over each kExtendKeys tokens of the list; the last block
  // may be shorter. Every query sees all tokens: args.first is not used. Same scratch.
  void (*extend_blocks)(const ExtendArgs& args, void* scratch, float* lse);
};

// Called by the host pool, and by code that merges two partial attentions.
struct TileKernels {
  // Writes a key and a value, KV dtype [D] each, as token `offset` of a tile. Bit-identical on every ISA.
  void (*write_token)(const void* k, const void* v, int D, int offset, void* tile);
  // Reads a tile exactly: out, KV dtype: [16][D] keys, then values. Only its first `tokens` tokens; the other
  // places in `out` may be overwritten with anything.
  void (*read_tile)(const void* tile, int D, int tokens, void* out);
  // The same for token `offset` alone.
  void (*read_token)(const void* tile, int D, int offset, void* out);

  // entry = {min[D], max[D]} over the 16 keys of a tile.
  void (*page_minmax)(const void* tile, int D, void* entry);

  // entry = elementwise {min, max} of entry and other.
  void (*merge_minmax)(void* entry, const void* other, int D);

  // Overwrites sums[2 * D + 8]: sum of k [D], sum of v [D], sum of |k|_2^1..4, sum of |v|_2^1..4 over the 16
  // tokens of a tile. Bit-identical on every ISA.
  void (*page_moments)(const void* tile, int D, double* sums);

  // Merges two partial attentions into out (KV dtype [D]) and returns the merged LSE. A side whose LSE is
  // -inf is not read; if both are, out = 0 and the result is -inf. o_b nullptr: zeros. If the KV dtype is
  // float32, out may be o_a.
  float (*merge_state)(const float* o_a, float lse_a, const float* o_b, float lse_b, int D, void* out);
};

// Called by the predictor: features, measurements, the network.
struct PredictorKernels {
  // The predictor's inputs for every head of a step: the part of the anchor query, copied, and the part of
  // this query (predictor/features.py has every formula). Bit-identical on every ISA.
  void (*features)(const FeatureArgs& args);

  // The weight of every token in an attention of known LSE, and the weighted sum of the values of every page.
  // scores: what score_tokens wrote for the same tiles. weights[g * stride + i * 16 + t] = exp(scale * score
  // - lse[g]), at most 1; out[g * out_stride + i * D + d] = sum over the tokens of tile i of weight * v.
  void (*page_values)(const float* scores, int64_t stride, int G, int D, float scale, const float* lse,
                      const void* tiles, const int32_t* pages, int n, float* weights, float* out,
                      int64_t out_stride);

  // sum += rows[0..n) - weight * target, [D] each; returns |sum|^2.
  float (*add_rows)(const float* rows, int n, float weight, const float* target, int D, float* sum);

  // sum += weight * (value - target), for the value of one token of a tile; returns |sum|^2.
  float (*add_value)(const void* tile, int token, float weight, const float* target, int D, float* sum);

  // y = x W^T + b, then max(0, .) with relu, for `rows` rows with stride x_stride and y_stride elements.
  // weights: bfloat16, two inputs side by side: output o of input i at [o / 16][i / 2][o % 16][i % 2], 0 for
  // a missing input; bias [panels * 16]. Writes panels * 16 outputs a row. A row's outputs do not depend on
  // the other rows; NaN stays NaN. An ISA that multiplies bf16 rounds x to it. x is overwritten; its rows
  // have room for a multiple of 32 floats.
  void (*dense)(float* x, int64_t x_stride, int rows, int in, const uint16_t* weights, const float* bias,
                int panels, bool relu, float* y, int64_t y_stride);
};

// One token of one value head, for `delta_rule`.
struct DeltaToken {
  const float *key, *query;  // [keys]
  float decay, strength;
  const void* value;  // [values]
  void* out;          // [values]
};

constexpr int kConvolutionTaps = 4;  // at most
constexpr int kDeltaPad = 16;        // of keys

// Called by the model's other layers.
struct ModelKernels {
  // Writes `rows` rows of x, x_stride elements apart, as `linear` takes them: linear_pack_bytes(rows, in)
  // bytes, 64-byte aligned.
  void (*pack_linear)(const void* x, int64_t x_stride, int rows, int in, void* packed);

  // y = x W^T + bias: outputs first..first + count - 1 of every row, to out[r * out_stride + i], i from 0.
  // Weights are read once for every eight rows; sums are float32 and rounded once. An output depends only on
  // its row and its weights.
  void (*linear)(const LinearArgs& args, int64_t first, int count, void* out);

  LinearPanels panels;

  // The same two where weights are quantised panels; in is a multiple of kQuantisedBlock, first one of
  // kQuantisedPanel, and so is count but for the last outputs. The kernel rounds x: in each block of
  // kQuantisedBlock inputs by at most 2^-16 of the largest one. If an input is not finite, the row's outputs
  // are NaN.
  void (*pack_quantised)(const void* x, int64_t x_stride, int rows, int in, void* packed);
  void (*linear_quantised)(const LinearArgs& args, int64_t first, int count, void* out);
  // The weights of a panel's first `count` outputs, rounded once; out: [count][in].
  void (*widen_panel)(const void* panel, QuantisedFormat format, int in, int count, void* out);

  // Operations between linear layers, on one row each. Rows may not overlap.
  //
  // sum = x + residual, out = sum / sqrt(mean of squares of sum + epsilon) * weight, [size] each, from the
  // sum before it is rounded. residual nullptr: x alone, and sum is not written. gemma: from the rounded sum,
  // times weight + 1.
  void (*rms_norm)(const void* x, const void* residual, const void* weight, int size, float epsilon,
                   bool gemma, void* out, void* sum);
  // out = gate * sigmoid(gate), rounded, * up, [size] each; gelu_mul: GELU, by its tanh form.
  void (*silu_mul)(const void* gate, const void* up, int size, void* out);
  void (*gelu_mul)(const void* gate, const void* up, int size, void* out);
  // Rotates pairs of elements of every head [heads][head_dim] by angles. cos_sin has their cosines [rotary /
  // 2], then the sines; products are rounded, too. Element i goes with i + rotary / 2 (halves), or 2i with 2i
  // + 1. Elements from `rotary` on are copied.
  void (*rope)(const void* x, const void* cos_sin, int heads, int head_dim, int rotary, bool halves,
               void* out);

  // out = x / sqrt(sum of squares of x + 1e-6) * factor, [size], a multiple of kDeltaPad.
  void (*unit_vector)(const void* x, int size, float factor, float* out);
  // Applies the gated delta rule ("Gated Delta Networks", Yang et al., 2025, Eq. 10) for `count` tokens in
  // order. state: [values][keys] of one head; the call computes rows first..first + rows - 1. keys is a
  // multiple of kDeltaPad.
  //   state = decay * state; state += strength * (value - state key) key^T; out = state query
  void (*delta_rule)(const DeltaToken* tokens, int64_t count, int keys, int first, int rows, float* state);
  // A causal convolution of every channel, and SiLU, rounded once. x, out: [tokens][channels], with strides
  // between rows in elements; weights [channels][taps], bias [channels] or nullptr. state [channels][taps -
  // 1]: the inputs before the first token, oldest first; updated to those before the next token.
  void (*convolve)(const void* x, int64_t x_stride, int64_t tokens, int channels, int taps,
                   const void* weights, const void* bias, void* state, void* out, int64_t out_stride);
};

struct KernelTable : BlockKernels, SketchKernels, AttendKernels, TileKernels, PredictorKernels, ModelKernels {
  const char* isa;

  // If not 0: for head dimensions that are multiples of this and more than kVectorHeads heads, `attend`
  // multiplies all heads with a tile at once. Heads that want other tokens than the rest, or none, then cost
  // little.
  int matrix_depth;

  // Reads a list of pieces and returns the sum of their 32-bit words, modulo 2^32: the same on every ISA.
  // Piece i has piece_bytes, a multiple of 64, at base + pieces[i] * piece_bytes; pieces nullptr: 0, 1, 2,
  // ... streams: 1, 2 or 4 pieces are read side by side, each fetched `ahead` lines of 64 bytes before its
  // use (0: left to the hardware).
  uint32_t (*read)(const void* base, const int32_t* pieces, int64_t piece_bytes, int64_t n, int streams,
                   int64_t ahead);
};

// The table of an ISA ("scalar", "avx2", "avx512", "avx512bf16", "amx"), or nullptr when the library was
// built without it or the CPU or operating system lacks it.
FLUXION_API const KernelTable* kernel_table(const char* isa, DType dtype);

// The best table this CPU can run, or the one FLUXION_ISA names. Throws std::runtime_error for a name that
// cannot be run.
FLUXION_API const KernelTable* best_kernel_table(DType dtype);

// The best ISA that this CPU could run, whether or not the library has it.
const char* best_isa_of_cpu();

// Writes at most max names that the CPU can run and the library has, best last; returns how many there are.
FLUXION_API int available_isas(const char** names, int max);

FLUXION_API int64_t select_scratch_bytes(int n);
// For blocks of `rows` rows (`tokens` * G) and this head dimension.
FLUXION_API int64_t extend_scratch_bytes(int rows, int D);
FLUXION_API int64_t linear_pack_bytes(int rows, int in);

}  // namespace fluxion
