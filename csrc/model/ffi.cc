// The C ABI of model layers. Argument checks live here.
#include <tvm/ffi/optional.h>

#include <memory>
#include <string>
#include <utility>

#include "ffi/objects.h"
#include "model/linear.h"

namespace fluxion {
namespace {

// What computes layers: workers, an instruction set, and memory that one layer at a time uses.
class LayersObj : public ffi::Object {
 public:
  LayersObj(std::shared_ptr<WorkerPool> w, std::string i) : workers(std::move(w)), isa(std::move(i)) {}
  std::shared_ptr<WorkerPool> workers;
  std::string isa;
  LinearScratch scratch;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fluxion.Layers", LayersObj, ffi::Object);

  const KernelTable& kernels(DType dtype) const {
    return isa.empty() ? *best_kernel_table(dtype) : *kernel_table(isa.c_str(), dtype);
  }
};
class Layers : public ffi::ObjectRef {
 public:
  explicit Layers(ffi::ObjectPtr<LayersObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(Layers, ffi::ObjectRef, LayersObj);
};

Layers layers_create(Workers workers, ffi::String isa) {
  if (!isa.empty() && kernel_table(isa.c_str(), DType::kF32) == nullptr) {
    Raise("ValueError") << "This CPU cannot run the instruction set \"" << isa.c_str()
                        << "\"; choose one of topology()[\"isas\"].";
  }
  return guarded([&] {
    best_kernel_table(DType::kF32);  // throws where FLUXION_ISA names what cannot be run
    return Layers(ffi::make_object<LayersObj>(workers->pool, std::string(isa)));
  });
}

// float32 or bfloat16, as x has it.
DType dtype_of(const TensorView& x) {
  if (same(x.dtype(), kBFloat16)) return DType::kBF16;
  if (same(x.dtype(), kFloat32)) return DType::kF32;
  Raise("ValueError") << "x has the dtype " << ffi::DLDataTypeToString(x.dtype())
                      << "; the kernels serve bfloat16 and float32.";
  TVM_FFI_UNREACHABLE();
}

void layers_linear(Layers layers, TensorView x, TensorView weights, ffi::Optional<TensorView> bias, TensorView out) {
  const DType dtype = dtype_of(x);
  const DLDataType type = dtype == DType::kBF16 ? kBFloat16 : kFloat32;
  expect(x, "x", type, {-1, -1}, 1);
  expect(weights, "weights", type, {-1, x.size(1)}, 1);
  expect(out, "out", type, {x.size(0), weights.size(0)}, 1);
  if (bias.has_value()) expect(bias.value(), "bias", type, {weights.size(0)}, 1);
  for (const TensorView* t : {&x, &weights, &out}) {
    if (t->size(0) > INT32_MAX / 2 || t->size(1) > INT32_MAX / 2)
      Raise("ValueError") << "A layer is larger than the kernels count; use torch for it.";
  }
  LinearLayer layer;
  layer.x = data<char>(x);
  layer.x_stride = x.stride(0);
  layer.rows = static_cast<int>(x.size(0));
  layer.in = static_cast<int>(x.size(1));
  layer.outputs = static_cast<int>(weights.size(0));
  layer.weights = data<char>(weights);
  layer.stride = weights.stride(0);
  layer.bias = bias.has_value() ? data<char>(bias.value()) : nullptr;
  layer.out = data<char>(out);
  layer.out_stride = out.stride(0);
  if (layer.in < 1) Raise("ValueError") << "x has no columns; a layer multiplies at least one.";
  guarded([&] { linear(*layers->workers, layers->kernels(dtype), dtype, layer, &layers->scratch); });
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(layers_create, fluxion::layers_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layers_linear, fluxion::layers_linear);
