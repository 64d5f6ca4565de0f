// The predictor's C ABI. Argument checks live here.
#include <tvm/ffi/optional.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/objects.h"
#include "predictor/network.h"

namespace fluxion {
namespace {

class PredictorObj : public ffi::Object {
 public:
  explicit PredictorObj(std::unique_ptr<Predictor> p) : predictor(std::move(p)) {}
  std::unique_ptr<Predictor> predictor;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fluxion.Predictor", PredictorObj, ffi::Object);
};
class PredictorRef : public ffi::ObjectRef {
 public:
  explicit PredictorRef(ffi::ObjectPtr<PredictorObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(PredictorRef, ffi::ObjectRef, PredictorObj);
};

// A contiguous host tensor of this dtype and shape (-1: any).
void expect(const TensorView& t, const char* name, DLDataType dtype, std::initializer_list<int64_t> shape) {
  bool fits = t.ndim() == static_cast<int32_t>(shape.size());
  std::string given, wanted;
  int axis = 0;
  for (int64_t size : shape) {
    fits = fits && (size < 0 || t.size(axis) == size);
    wanted += (axis++ ? ", " : "") + (size < 0 ? std::string("any") : std::to_string(size));
  }
  for (int32_t i = 0; i < t.ndim(); ++i) given += (i ? ", " : "") + std::to_string(t.size(i));
  const int device = t.device().device_type;
  if (fits && same(t.dtype(), dtype) && (device == kDLCPU || device == kDLCUDAHost) &&
      (t.numel() == 0 || t.IsContiguous()))
    return;
  Raise("ValueError") << name << " is a " << dtype_text(t.dtype()) << " tensor of shape [" << given
                      << "] and must be a contiguous tensor in host memory of " << dtype_text(dtype)
                      << " and shape [" << wanted << "].";
}

PredictorRef predictor_create(ffi::String isa, TensorView widths, TensorView mean, TensorView std,
                              TensorView parameters) {
  expect(widths, "widths", kInt32, {-1});
  const int32_t* w = data<int32_t>(widths);
  const int64_t features = widths.size(0) > 0 ? w[0] : 0;
  expect(mean, "mean", kFloat32, {features});
  expect(std, "std", kFloat32, {features});
  expect(parameters, "parameters", kFloat32, {-1});
  return guarded([&] {
    return PredictorRef(ffi::make_object<PredictorObj>(std::make_unique<Predictor>(
        std::string(isa), std::vector<int>(w, w + widths.size(0)), data<float>(mean), data<float>(std),
        data<float>(parameters), parameters.size(0))));
  });
}

ffi::String predictor_isa(PredictorRef ref) { return ffi::String(ref->predictor->isa()); }

void predictor_forward(PredictorRef ref, TensorView x, TensorView out, ffi::Optional<Workers> workers) {
  expect(x, "x", kFloat32, {-1, ref->predictor->features()});
  expect(out, "out", kFloat32, {x.size(0), kPredictions});
  ref->predictor->forward(data<float>(x), x.size(0), data<float>(out),
                          workers.has_value() ? workers.value()->pool.get() : nullptr);
}

// Checks the inputs and outputs of a plan. Returns the heads of a request.
int64_t check_plan(TensorView middle, int64_t kv_heads, int64_t blocks, TensorView blk, TensorView budget,
                   TensorView value) {
  constexpr int64_t kAll = 16 + 32 + 64 + 128;
  if (blocks == 0 || (blocks & ~kAll) != 0) Raise("ValueError") << "blocks must be among 16, 32, 64 and 128.";
  expect(middle, "middle", kInt32, {-1});
  const int64_t B = middle.size(0);
  expect(budget, "budget", kFloat32, {B, -1});
  const int64_t heads = budget.size(1);
  if (kv_heads < 1 || heads % kv_heads != 0 || heads / kv_heads > kMaxGroup || heads < kv_heads) {
    Raise("ValueError") << "budget has " << heads << " heads and kv_heads is " << kv_heads << "; 1 to "
                        << kMaxGroup << " heads must share each KV head.";
  }
  expect(blk, "blk", kInt32, {B, kv_heads});
  expect(value, "value", kFloat32, {B, kv_heads});
  return heads;
}

void predictor_plan(TensorView pred, TensorView middle, int64_t kv_heads, double threshold,
                    TensorView margins, int64_t blocks, TensorView blk, TensorView budget, TensorView value) {
  const int64_t heads = check_plan(middle, kv_heads, blocks, blk, budget, value), B = middle.size(0);
  expect(pred, "pred", kFloat32, {B * heads, kPredictions});
  expect(margins, "margins", kFloat32, {heads, 4});
  plan_groups(data<float>(pred), data<int32_t>(middle), B, static_cast<int>(kv_heads),
              static_cast<int>(heads / kv_heads), static_cast<float>(threshold), data<float>(margins),
              static_cast<int>(blocks), data<int32_t>(blk), data<float>(budget), data<float>(value));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(predictor_create, predictor_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(predictor_isa, predictor_isa);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(predictor_forward, predictor_forward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(predictor_plan, predictor_plan);

}  // namespace
}  // namespace fluxion
