// Plans and their kinds of tasks, as objects of the C ABI.
#pragma once

#include <tvm/ffi/optional.h>

#include <memory>
#include <utility>
#include <vector>

#include "engine/task_kind.h"
#include "ffi/tensor.h"

namespace fluxion {

class TaskKindObj : public ffi::Object {
 public:
  explicit TaskKindObj(std::shared_ptr<const TaskKind> k) : kind(std::move(k)) {}
  std::shared_ptr<const TaskKind> kind;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fluxion.TaskKind", TaskKindObj, ffi::Object);
};
class TaskKindRef : public ffi::ObjectRef {
 public:
  explicit TaskKindRef(ffi::ObjectPtr<TaskKindObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(TaskKindRef, ffi::ObjectRef, TaskKindObj);
};

class PlanObj : public ffi::Object {
 public:
  explicit PlanObj(std::shared_ptr<const LayerPlan> p) : plan(std::move(p)) {}
  std::shared_ptr<const LayerPlan> plan;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fluxion.Plan", PlanObj, ffi::Object);
};
class PlanRef : public ffi::ObjectRef {
 public:
  explicit PlanRef(ffi::ObjectPtr<PlanObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(PlanRef, ffi::ObjectRef, PlanObj);
};

// Keeps tensors alive for an object that points into them.
inline std::shared_ptr<const void> keep(std::vector<ffi::Tensor> tensors) {
  return std::make_shared<std::vector<ffi::Tensor>>(std::move(tensors));
}

template <class Kind, class... Args>
TaskKindRef make_kind(Args&&... args) {
  return TaskKindRef(ffi::make_object<TaskKindObj>(std::make_shared<Kind>(std::forward<Args>(args)...)));
}

}  // namespace fluxion
