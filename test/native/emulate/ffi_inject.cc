// The C ABI of failures on request, which only the simulated device has.
#include "emulate/runtime.h"
#include "ffi/tensor.h"

namespace fluxion::emulate {
namespace {

void inject_failure(ffi::String kind, int64_t after) {
  if (!inject(kind.c_str(), after)) {
    Raise("ValueError") << "There is no failure \"" << kind.c_str()
                        << "\"; choose memory, launch, lost or none.";
  }
}

}  // namespace
}  // namespace fluxion::emulate

TVM_FFI_DLL_EXPORT_TYPED_FUNC(inject, fluxion::emulate::inject_failure);
