// The engine as an object of the C ABI.
#pragma once

#include <memory>
#include <utility>

#include "engine/engine.h"
#include "ffi/objects.h"

namespace fluxion {

class EngineObj : public ffi::Object {
 public:
  explicit EngineObj(std::unique_ptr<Engine> e) : engine(std::move(e)) {}
  std::unique_ptr<Engine> engine;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fluxion.Engine", EngineObj, ffi::Object);
};
class EngineRef : public ffi::ObjectRef {
 public:
  explicit EngineRef(ffi::ObjectPtr<EngineObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(EngineRef, ffi::ObjectRef, EngineObj);
};

// Raises unless the plan is for the engine's step.
void check_plan(const Engine& engine, const LayerPlan& plan);

}  // namespace fluxion
