// The kernels, one by one, for tests and benchmarks. Every function names the ISA and checks its tensors.
#include <tvm/ffi/function.h>

#include <string>
#include <vector>

#include "kernels/table.h"
#include "probe/argument.h"

namespace fluxion {
namespace {

using namespace probe;

void k_score(const String& isa, TensorView q, TensorView entries, TensorView index, double spread,
             TensorView out) {
  const Argument queries{"q", q}, ids{"index", index};
  const DType dtype = queries.kv_dtype();
  const int D = queries.head_dim(), G = queries.group(kMaxHeads);
  queries.require(dl_dtype(dtype), {G, D});
  const int64_t N = Argument{"entries", entries}.require(dl_dtype(dtype), {-1, 2, D}).tensor.size(0);
  const int n = ids.ids(N);
  Argument{"out", out}.require(kFloat32, {G, n});
  table_of(isa, dtype)
      .score(q.data_ptr(), G, D, entries.data_ptr(), ids.data<int32_t>(), n, static_cast<float>(spread),
             static_cast<float*>(out.data_ptr()), n);
}

void k_score_tokens(const String& isa, TensorView q, TensorView tiles, TensorView pages, TensorView out) {
  const Argument queries{"q", q}, ids{"pages", pages};
  const DType dtype = queries.kv_dtype();
  const int G = queries.group(), D = queries.head_dim();
  queries.require(dl_dtype(dtype), {G, D});
  const Tiles held(tiles, dtype, D);
  const int n = ids.ids(held.count);
  Argument{"out", out}.require(kFloat32, {G, n, kPage});
  table_of(isa, held.stored)
      .score_tokens(q.data_ptr(), G, D, tiles.data_ptr(), ids.data<int32_t>(), n,
                    static_cast<float*>(out.data_ptr()), static_cast<int64_t>(n) * kPage);
}

void k_select(const String& isa, TensorView scores, int64_t k, int64_t bit, TensorView heads) {
  const Argument values{"scores", scores};
  values.require(kFloat32, {-1});
  const int n = values.count();
  Argument{"heads", heads}.require(kUInt16, {n});
  if (k < 1 || k > n) {
    TVM_FFI_THROW(ValueError) << "k is " << k << " of " << n
                              << " scores; pass a k from 1 to the number of scores.";
  }
  if (bit < 0 || bit > UINT16_MAX) {
    TVM_FFI_THROW(ValueError) << "bit is " << bit << ", which no mask of 16 heads holds; pass 0 to 65535.";
  }
  std::vector<uint32_t> scratch(select_scratch_bytes(n) / 4);
  table_of(isa, DType::kF32)
      .select(values.data<float>(), n, static_cast<int>(k), static_cast<uint16_t>(bit),
              static_cast<uint16_t*>(heads.data_ptr()), scratch.data());
}

void k_score_rows(const String& isa, TensorView q, TensorView tiles, TensorView tokens, TensorView out) {
  const Argument queries{"q", q}, ids{"tokens", tokens};
  const DType dtype = queries.kv_dtype();
  const int G = queries.group(), D = queries.head_dim();
  queries.require(dl_dtype(dtype), {G, D});
  const Tiles held(tiles, dtype, D);
  const int n = ids.ids(held.count * kPage);
  Argument{"out", out}.require(kFloat32, {G, n});
  table_of(isa, held.stored)
      .score_rows(q.data_ptr(), G, D, tiles.data_ptr(), ids.data<int32_t>(), n,
                  static_cast<float*>(out.data_ptr()), n);
}

void k_block_mass(const String& isa, TensorView scores, TensorView heads, int64_t bits, double scale,
                  double cap, int64_t tokens, int64_t first_tokens, int64_t last_tokens, TensorView mass) {
  const Argument values{"scores", scores};
  values.require(kFloat32, {-1});
  const int n = values.count();
  Argument{"heads", heads}.require(kUInt16, {n});
  Argument{"mass", mass}.require(kFloat32, {2});
  if (n < 1) TVM_FFI_THROW(ValueError) << "scores is empty; pass at least one.";
  if (bits < 0 || bits > UINT16_MAX) {
    TVM_FFI_THROW(ValueError) << "bits is " << bits << ", which no mask of 16 heads holds; pass 0 to 65535.";
  }
  for (int64_t count : {tokens, first_tokens, last_tokens}) {
    if (count < 1 || count > INT32_MAX) {
      TVM_FFI_THROW(ValueError) << "A block has " << count << " tokens; pass at least 1.";
    }
  }
  table_of(isa, DType::kF32)
      .block_mass(values.data<float>(), static_cast<uint16_t*>(heads.data_ptr()), static_cast<uint16_t>(bits),
                  n, {static_cast<float>(scale), static_cast<float>(cap)}, static_cast<int>(tokens),
                  static_cast<int>(first_tokens), static_cast<int>(last_tokens),
                  static_cast<float*>(mass.data_ptr()));
}

void k_add_weights(const String& isa, TensorView scores, double scale, double lse, double keep, double take,
                   TensorView sum) {
  const Argument values{"scores", scores};
  values.require(kFloat32, {-1});
  Argument{"sum", sum}.require(kFloat32, {scores.size(0)});
  table_of(isa, DType::kF32)
      .add_weights(values.data<float>(), values.count(), static_cast<float>(scale), static_cast<float>(lse),
                   static_cast<float>(keep), static_cast<float>(take), static_cast<float*>(sum.data_ptr()));
}

// above, equal: [words] int64, the bits of 64 codes each.
void k_compare_codes(const String& isa, TensorView codes, int64_t limit, TensorView above, TensorView equal) {
  const Argument found{"above", above};
  found.require(kInt64, {-1});
  Argument{"equal", equal}.require(kInt64, {found.count()});
  Argument{"codes", codes}.require(kUInt8, {64 * found.count()});
  table_of(isa, DType::kF32)
      .compare_codes(static_cast<uint8_t*>(codes.data_ptr()), found.count(), static_cast<uint8_t>(limit),
                     static_cast<uint64_t*>(above.data_ptr()), static_cast<uint64_t*>(equal.data_ptr()));
}

// k_attend, k_attend_near and k_attend_pages: only the last one has page_lse.
void attend_list(const String& isa, bool near, TensorView q, Scale scale, TensorView tiles, TensorView pages,
                 TensorView masks, TensorView o, TensorView lse, const TensorView* page_lse) {
  const Argument queries{"q", q}, ids{"pages", pages}, bits{"masks", masks};
  const DType dtype = queries.kv_dtype();
  const int G = queries.group(kMaxHeads), D = queries.head_dim();
  queries.require(dl_dtype(dtype), {G, D});
  const Tiles held(tiles, dtype, D);
  const int n = ids.ids(held.count);
  const bool all = masks.numel() == 0;
  if (!all) bits.require(kUInt16, {n, G});
  Argument{"o", o}.require(kFloat32, {G, D});
  Argument{"lse", lse}.require(kFloat32, {G});
  const KernelTable& kernels = table_of(isa, held.stored);
  const auto call = [&](auto attend, auto... more) {
    attend(q.data_ptr(), G, D, scale, tiles.data_ptr(), ids.data<int32_t>(),
           all ? nullptr : bits.data<uint16_t>(), n, 0, static_cast<float*>(o.data_ptr()),
           static_cast<float*>(lse.data_ptr()), more...);
  };
  if (page_lse == nullptr) return call(near ? kernels.attend_near : kernels.attend);
  Argument{"page_lse", *page_lse}.require(kFloat32, {n, G});
  call(kernels.attend_pages, static_cast<float*>(page_lse->data_ptr()));
}

void k_attend(const String& isa, TensorView q, double scale, TensorView tiles, TensorView pages,
              TensorView masks, TensorView o, TensorView lse) {
  attend_list(isa, false, q, static_cast<float>(scale), tiles, pages, masks, o, lse, nullptr);
}

void k_attend_near(const String& isa, TensorView q, double scale, TensorView tiles, TensorView pages,
                   TensorView masks, TensorView o, TensorView lse) {
  attend_list(isa, true, q, static_cast<float>(scale), tiles, pages, masks, o, lse, nullptr);
}

void k_attend_pages(const String& isa, TensorView q, double scale, TensorView tiles, TensorView pages,
                    TensorView masks, TensorView o, TensorView lse, TensorView page_lse) {
  attend_list(isa, false, q, static_cast<float>(scale), tiles, pages, masks, o, lse, &page_lse);
}

// k_attend_pages with capped logits.
void k_attend_capped(const String& isa, TensorView q, double scale, double cap, TensorView tiles,
                     TensorView pages, TensorView masks, TensorView o, TensorView lse, TensorView page_lse) {
  attend_list(isa, false, q, {static_cast<float>(scale), static_cast<float>(cap)}, tiles, pages, masks, o,
              lse, &page_lse);
}

// q [T, G, D]; first, window: see `extend` (kernels/table.h). Writes o and lse like `extend`, or without o
// [T, G, blocks] like `extend_blocks`.
void extend_list(const String& isa, TensorView q, Scale scale, TensorView tiles, TensorView pages,
                 int64_t keys, int64_t first, int64_t window, const TensorView* o, TensorView lse,
                 const TensorView* tree = nullptr, int64_t root = 0) {
  const Argument queries{"q", q}, ids{"pages", pages};
  const DType dtype = queries.kv_dtype();
  if (q.ndim() != 3 || q.size(0) * q.size(1) > kExtendRows) {
    TVM_FFI_THROW(ValueError) << "q must be [T, G, D] with at most " << kExtendRows << " rows T * G.";
  }
  const int T = static_cast<int>(q.size(0)), G = static_cast<int>(q.size(1)), D = static_cast<int>(q.size(2));
  queries.require(dl_dtype(dtype), {T, G, D}, true);
  const Tiles held(tiles, dtype, D);
  const int n = ids.ids(held.count);
  if (keys < 0 || keys > n * kPage || first < -(1 << 20) || first > (1 << 20) || window < 1 ||
      window > kNoWindow) {
    TVM_FFI_THROW(ValueError) << "keys is " << keys << ", first " << first << " and window " << window
                              << ", of " << n << " pages.";
  }
  const int64_t element = dtype == DType::kBF16 ? 2 : 4;
  ExtendArgs args{q.data_ptr(),
                  q.stride(0) * element,
                  T,
                  G,
                  D,
                  scale,
                  tiles.data_ptr(),
                  ids.data<int32_t>(),
                  static_cast<int>(keys),
                  static_cast<int>(first),
                  static_cast<int>(window)};
  if (tree != nullptr) {
    Argument{"tree", *tree}.require(kInt64, {T});
    args.tree = static_cast<const uint64_t*>(tree->data_ptr());
    args.root = static_cast<int>(root);
  }
  // NaN, because the kernel must not use what the scratch holds.
  std::vector<char> scratch(extend_scratch_bytes(T * G, D), static_cast<char>(0xff));
  const KernelTable& kernels = table_of(isa, held.stored);
  if (o == nullptr) {
    Argument{"lse", lse}.require(kFloat32, {T, G, (keys + kExtendKeys - 1) / kExtendKeys});
    kernels.extend_blocks(args, scratch.data(), static_cast<float*>(lse.data_ptr()));
  } else {
    Argument{"o", *o}.require(kFloat32, {T, G, D});
    Argument{"lse", lse}.require(kFloat32, {T, G});
    kernels.extend(args, scratch.data(), static_cast<float*>(o->data_ptr()),
                   static_cast<float*>(lse.data_ptr()));
  }
}

void k_extend(const String& isa, TensorView q, double scale, TensorView tiles, TensorView pages, int64_t keys,
              int64_t first, int64_t window, TensorView o, TensorView lse) {
  extend_list(isa, q, static_cast<float>(scale), tiles, pages, keys, first, window, &o, lse);
}

// tree: [T] int64, root: see `extend`. Logits are capped if cap is not 0.
void k_extend_tree(const String& isa, TensorView q, double scale, double cap, TensorView tiles,
                   TensorView pages, int64_t keys, int64_t first, int64_t window, TensorView tree,
                   int64_t root, TensorView o, TensorView lse) {
  extend_list(isa, q, {static_cast<float>(scale), static_cast<float>(cap)}, tiles, pages, keys, first, window,
              &o, lse, &tree, root);
}

void k_extend_blocks(const String& isa, TensorView q, double scale, TensorView tiles, TensorView pages,
                     int64_t keys, TensorView lse) {
  extend_list(isa, q, static_cast<float>(scale), tiles, pages, keys, 0, kNoWindow, nullptr, lse);
}

void k_page_minmax(const String& isa, TensorView tile, TensorView entry) {
  const Argument to{"entry", entry};
  const int D = to.head_dim();
  const DType stored = one_tile(tile, D);
  to.require(dl_dtype(kv_dtype(stored)), {2, D});
  table_of(isa, stored).page_minmax(tile.data_ptr(), D, entry.data_ptr());
}

void k_merge_minmax(const String& isa, TensorView entry, TensorView other) {
  const Argument into{"entry", entry};
  const DType dtype = into.kv_dtype();
  const int D = into.head_dim();
  into.require(dl_dtype(dtype), {2, D});
  Argument{"other", other}.require(dl_dtype(dtype), {2, D});
  table_of(isa, dtype).merge_minmax(entry.data_ptr(), other.data_ptr(), D);
}

void k_page_moments(const String& isa, TensorView tile, TensorView sums) {
  const int D = (Argument{"sums", sums}.require(kFloat64, {-1}).count() - 8) / 2;
  table_of(isa, one_tile(tile, D)).page_moments(tile.data_ptr(), D, static_cast<double*>(sums.data_ptr()));
}

// A key and a value [D] become token `offset` of a tile.
void k_write_token(const String& isa, TensorView k, TensorView v, int64_t offset, TensorView tile) {
  const Argument key{"k", k};
  const DType dtype = key.kv_dtype();
  const int D = key.head_dim();
  for (const TensorView* row : {&k, &v}) Argument{"k and v", *row}.require(dl_dtype(dtype), {D});
  if (offset < 0 || offset >= kPage) TVM_FFI_THROW(ValueError) << "offset is " << offset << " of 16 tokens.";
  const DType stored = one_tile(tile, D);
  if (kv_dtype(stored) != dtype) TVM_FFI_THROW(ValueError) << "Such a tile holds another dtype.";
  table_of(isa, stored).write_token(k.data_ptr(), v.data_ptr(), D, static_cast<int>(offset), tile.data_ptr());
}

// The first `tokens` tokens of a tile, or token -tokens - 1 alone: out [2, 16, D].
void k_read_tile(const String& isa, TensorView tile, int64_t tokens, TensorView out) {
  const Argument to{"out", out};
  const int D = to.head_dim();
  const DType stored = one_tile(tile, D);
  to.require(dl_dtype(kv_dtype(stored)), {2, kPage, D});
  if (tokens < -kPage || tokens > kPage) TVM_FFI_THROW(ValueError) << "tokens is " << tokens << " of 16.";
  const KernelTable& kernels = table_of(isa, stored);
  const int count = static_cast<int>(tokens);
  if (count < 0) return kernels.read_token(tile.data_ptr(), D, -count - 1, out.data_ptr());
  kernels.read_tile(tile.data_ptr(), D, count, out.data_ptr());
}

double k_merge_state(const String& isa, TensorView o_a, double lse_a, TensorView o_b, double lse_b,
                     TensorView out) {
  const Argument to{"out", out};
  const DType dtype = to.kv_dtype();
  const int D = to.head_dim();
  to.require(dl_dtype(dtype), {D});
  Argument{"o_a", o_a}.require(kFloat32, {D});
  Argument{"o_b", o_b}.require(kFloat32, {D});
  return table_of(isa, dtype)
      .merge_state(static_cast<const float*>(o_a.data_ptr()), static_cast<float>(lse_a),
                   static_cast<const float*>(o_b.data_ptr()), static_cast<float>(lse_b), D, out.data_ptr());
}

// isa "": the best one.
TVM_FFI_DLL_EXPORT_TYPED_FUNC(isas, [] { return String(isas()); });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(best_isa, [] {
  try {
    return String(best_kernel_table(DType::kF32)->isa);
  } catch (const std::exception& error) {
    TVM_FFI_THROW(RuntimeError) << error.what();
  }
});
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_score, k_score);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_score_tokens, k_score_tokens);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_select, k_select);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_score_rows, k_score_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_block_mass, k_block_mass);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_add_weights, k_add_weights);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_compare_codes, k_compare_codes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_attend, k_attend);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_attend_near, k_attend_near);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_attend_pages, k_attend_pages);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_extend, k_extend);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_extend_tree, k_extend_tree);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_attend_capped, k_attend_capped);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_extend_blocks, k_extend_blocks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_page_minmax, k_page_minmax);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_merge_minmax, k_merge_minmax);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_page_moments, k_page_moments);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_write_token, k_write_token);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_read_tile, k_read_tile);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_merge_state, k_merge_state);

}  // namespace
}  // namespace fluxion
