// A sequence of model layers, as an object of the C ABI.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "ffi/objects.h"

namespace fluxion {

// Steps in order. The caller keeps their tensors alive.
class ProgramObj : public ffi::Object {
 public:
  explicit ProgramObj(ffi::ObjectRef of) : layers(std::move(of)) {}
  ffi::ObjectRef layers;  // computes the model's layers (model/ffi.cc)
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
