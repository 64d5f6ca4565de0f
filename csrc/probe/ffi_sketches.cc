// The kernels of sketches, one by one, for tests and benchmarks, as in ffi_kernels.cc.
#include <tvm/ffi/function.h>

#include <vector>

#include "kernels/table.h"
#include "probe/argument.h"

namespace fluxion {
namespace {

using namespace probe;

// out: [sketch_bytes] uint8.
void k_write_sketch(const String& isa, TensorView tile, int64_t D, TensorView out) {
  if (D < kMinHeadDim || D > kMaxHeadDim || D % 16 != 0) TVM_FFI_THROW(ValueError) << "D is " << D << ".";
  const int dim = static_cast<int>(D);
  Argument{"out", out}.require(kUInt8, {sketch_bytes(dim)});
  table_of(isa, one_tile(tile, dim)).write_sketch(tile.data_ptr(), dim, out.data_ptr());
}

// Queries [G, D], sketches [P, sketch_bytes] uint8 and pages [n] below P.
struct Asked {
  DType dtype;
  int D, G, n;
  const int32_t* pages;

  Asked(const TensorView& q, const TensorView& sketches, const TensorView& ids) {
    const Argument query{"q", q}, listed{"pages", ids};
    dtype = query.kv_dtype();
    D = query.head_dim();
    G = query.group();
    query.require(dl_dtype(dtype), {G, D});
    Argument{"sketches", sketches}.require(kUInt8, {-1, sketch_bytes(D)});
    n = listed.ids(sketches.size(0));
    pages = listed.data<int32_t>();
  }
};

// out: [G, 16 n].
void k_score_sketches(const String& isa, TensorView q, TensorView sketches, TensorView pages,
                      TensorView out) {
  const Asked of(q, sketches, pages);
  Argument{"out", out}.require(kFloat32, {of.G, int64_t{of.n} * kPage}, true);
  table_of(isa, of.dtype)
      .score_sketches(q.data_ptr(), of.G, of.D, sketches.data_ptr(), of.pages, of.n,
                      static_cast<float*>(out.data_ptr()), out.stride(0));
}

// about, most: [G, 16 ceil(n / 16)].
void k_skim_sketches(const String& isa, TensorView q, TensorView sketches, TensorView pages, TensorView about,
                     TensorView most) {
  const Asked of(q, sketches, pages);
  const int64_t stride = (int64_t{of.n} + kPage - 1) / kPage * kPage;
  Argument{"about", about}.require(kFloat32, {of.G, stride});
  Argument{"most", most}.require(kFloat32, {of.G, stride});
  table_of(isa, of.dtype)
      .skim_sketches(q.data_ptr(), of.G, of.D, sketches.data_ptr(), of.pages, of.n,
                     static_cast<float*>(about.data_ptr()), static_cast<float*>(most.data_ptr()), stride);
}

// Weights [16 n], or scores that become weights.
Argument sixteens(const TensorView& tensor) {
  const Argument values{"weights", tensor};
  values.require(kFloat32, {-1});
  if (values.count() % kPage != 0) TVM_FFI_THROW(ValueError) << values.count() << " are not pages of 16.";
  return values;
}

// unit: [1]. Returns the sum.
double k_weigh(const String& isa, TensorView scores, double scale, double cap, double lse, TensorView unit) {
  const Argument values = sixteens(scores), out{"unit", unit};
  out.require(kFloat32, {1});
  const Scale factor{static_cast<float>(scale), static_cast<float>(cap)};
  return table_of(isa, DType::kF32)
      .weigh(values.data<float>(), values.count(), factor, static_cast<float>(lse), out.data<float>());
}

// allowed, bounds: [m].
void k_light_bounds(const String& isa, TensorView weights, TensorView allowed, TensorView bounds) {
  const Argument values = sixteens(weights), most{"allowed", allowed}, out{"bounds", bounds};
  most.require(kFloat32, {-1});
  out.require(kFloat32, {int64_t{most.count()}});
  std::vector<float> room(values.count() + 64);
  table_of(isa, DType::kF32)
      .light_bounds(values.data<float>(), values.count(), most.data<float>(), most.count(), room.data(),
                    out.data<float>());
}

// masks: [n] uint16.
void k_mark_heavy(const String& isa, TensorView weights, double bound, TensorView masks) {
  const Argument values = sixteens(weights), out{"masks", masks};
  out.require(kUInt16, {int64_t{values.count()} / kPage});
  table_of(isa, DType::kF32)
      .mark_heavy(values.data<float>(), values.count(), static_cast<float>(bound), out.data<uint16_t>());
}

// weights: [G, m], pages of 16. at: [n] below m / 16. tiles: [P, 2, 16, D]. pages: [n] below P. masks: [n].
// o: [G, D]. sums: [G].
void k_add_values(const String& isa, TensorView weights, TensorView at, TensorView tiles, TensorView pages,
                  TensorView masks, TensorView o, TensorView sums) {
  const Argument stored{"tiles", tiles}, ids{"pages", pages}, from{"at", at}, to{"o", o},
      names{"masks", masks}, w{"weights", weights};
  const DType dtype = stored.kv_dtype();
  const int D = to.head_dim(), G = to.group();
  stored.require(dl_dtype(dtype), {-1, 2, kPage, D});
  to.require(kFloat32, {G, D});
  w.require(kFloat32, {G, -1}, true);
  Argument{"sums", sums}.require(kFloat32, {G});
  const int n = ids.ids(tiles.size(0));
  names.require(kUInt16, {n});
  if (from.ids(weights.size(1) / kPage) != n) TVM_FFI_THROW(ValueError) << "at and pages differ in length.";
  table_of(isa, dtype)
      .add_values(w.data<float>(), weights.stride(0), from.data<int32_t>(), G, D, tiles.data_ptr(),
                  ids.data<int32_t>(), names.data<uint16_t>(), n, to.data<float>(),
                  static_cast<float*>(sums.data_ptr()));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_write_sketch, k_write_sketch);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_score_sketches, k_score_sketches);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_skim_sketches, k_skim_sketches);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_weigh, k_weigh);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_light_bounds, k_light_bounds);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_mark_heavy, k_mark_heavy);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(k_add_values, k_add_values);

}  // namespace
}  // namespace fluxion
