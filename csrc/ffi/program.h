// Layers of a model in a row, as an object of the C ABI.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "ffi/objects.h"
#include "model/linear.h"

namespace fluxion {

// What computes layers: workers, kernels by DType, and memory that one layer at a time uses.
class LayersObj : public ffi::Object {
 public:
  LayersObj(std::shared_ptr<WorkerPool> w, const KernelTable* f32, const KernelTable* bf16)
      : workers(std::move(w)), tables{f32, bf16} {}
  std::shared_ptr<WorkerPool> workers;
  const KernelTable* tables[2];
  LinearScratch scratch;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fluxion.Layers", LayersObj, ffi::Object);

  const KernelTable& kernels(DType dtype) const { return *tables[static_cast<int>(dtype)]; }
};
class Layers : public ffi::ObjectRef {
 public:
  explicit Layers(ffi::ObjectPtr<LayersObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(Layers, ffi::ObjectRef, LayersObj);
};

// Steps in their order. The tensors of a step are the caller's to keep.
class ProgramObj : public ffi::Object {
 public:
  explicit ProgramObj(Layers of) : layers(std::move(of)) {}
  Layers layers;
  std::vector<std::function<void()>> steps;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fluxion.Program", ProgramObj, ffi::Object);
};
class Program : public ffi::ObjectRef {
 public:
  explicit Program(ffi::ObjectPtr<ProgramObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(Program, ffi::ObjectRef, ProgramObj);
};

}  // namespace fluxion
