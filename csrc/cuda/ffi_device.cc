// The C ABI: the library, its device, host memory, streams and graphs.
#include <string>
#include <utility>

#include "cuda/ffi_checks.h"

namespace fluxion::device {
namespace {

// Incremented whenever a function's signature changes; library.py compares it.
constexpr int64_t kAbiVersion = 6;

class GraphObj : public ffi::Object {
 public:
  explicit GraphObj(cudaGraphExec_t e) : exec(e) {}
  ~GraphObj() { cudaGraphExecDestroy(exec); }
  cudaGraphExec_t exec;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fluxion.Graph", GraphObj, ffi::Object);
};
class GraphRef : public ffi::ObjectRef {
 public:
  explicit GraphRef(ffi::ObjectPtr<GraphObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(GraphRef, ffi::ObjectRef, GraphObj);
};

int64_t device_abi() { return kAbiVersion; }

ffi::String device_info() {
  return guard([] {
    int device = 0, driver = 0, runtime = 0;
    cudaDeviceProp about{};
    size_t free = 0, total = 0;
    check(cudaGetDevice(&device), "looking for a device");
    check(cudaGetDeviceProperties(&about, device), "looking at the device");
    check(cudaMemGetInfo(&free, &total), "looking at the device's memory");
    check(cudaDriverGetVersion(&driver), "looking at the driver");
    check(cudaRuntimeGetVersion(&runtime), "looking at the runtime");
    std::string name;
    for (const char* c = about.name; *c != '\0'; ++c) {
      if (*c != '"' && *c != '\\') name += *c;
    }
    std::ostringstream out;
    out << "{\"backend\": \"" << (kSimulated ? "simulated" : "cuda") << "\", \"device\": " << device
        << ", \"name\": \"" << name << "\", \"multiprocessors\": " << about.multiProcessorCount
        << ", \"capability\": \"" << about.major << "." << about.minor << "\", \"memory_bytes\": " << total
        << ", \"free_bytes\": " << free << ", \"driver\": " << driver << ", \"runtime\": " << runtime << "}";
    return ffi::String(out.str());
  });
}

void device_select(int64_t device) {
  const int number = narrow(device, 0, 1 << 16, "device");
  guard([&] { select_device(number); });
}

// ---- host memory

void host_register(TensorView memory) {
  expect(memory, "memory", kBytes, {-1}, 1);
  char* at = data<char>(memory);
  if (memory.numel() == 0 || reinterpret_cast<uintptr_t>(at) % 4096 != 0 || memory.numel() % 4096 != 0) {
    Raise("ValueError") << "memory starts at " << static_cast<void*>(at) << " and has " << memory.numel()
                        << " bytes; both must be multiples of 4096.";
  }
  guard([&] {
    check(cudaHostRegister(at, static_cast<size_t>(memory.numel()),
                           cudaHostRegisterPortable | cudaHostRegisterMapped),
          "pinning host memory");
  });
}

void host_unregister(TensorView memory) {
  guard([&] { check(cudaHostUnregister(data<char>(memory)), "unpinning host memory"); });
}

struct PinnedMemory {
  void AllocData(DLTensor* t) {
    guard([&] {
      check(cudaHostAlloc(&t->data, static_cast<size_t>(t->shape[0]),
                          cudaHostAllocPortable | cudaHostAllocMapped),
            "the allocation of pinned memory");
    });
  }
  // The owner of the last view has no way to receive an error.
  void FreeData(DLTensor* t) {
    try {
      enter_device();
      check(cudaFreeHost(t->data), "freeing pinned memory");
    } catch (const Failure&) {
    }
  }
};

ffi::Tensor pinned_empty(int64_t bytes) {
  if (bytes < 1) Raise("ValueError") << "Pinned memory of " << bytes << " bytes cannot be.";
  return ffi::Tensor::FromNDAlloc(PinnedMemory{}, ffi::ShapeView(&bytes, 1), kBytes, DLDevice{kDLCPU, 0});
}

// ---- streams and graphs

int64_t stream_create() {
  return guard([] {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "the creation of a stream");
    return reinterpret_cast<int64_t>(stream);
  });
}

void stream_synchronize(int64_t stream) {
  guard([&] { check(cudaStreamSynchronize(stream_of(stream)), "waiting for a stream"); });
}

// Destroys the stream, whether or not its work failed.
void stream_destroy(int64_t stream) {
  guard([&] {
    const cudaError_t waited = cudaStreamSynchronize(stream_of(stream));
    check(cudaStreamDestroy(stream_of(stream)), "the end of a stream");
    check(waited, "waiting for a stream");
  });
}

void graph_begin(int64_t stream) {
  guard([&] {
    check(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal), "recording a graph");
  });
}

GraphRef graph_end(int64_t stream) {
  return guard([&] {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    check(cudaStreamEndCapture(stream_of(stream), &graph), "recording a graph");
    const cudaError_t error = cudaGraphInstantiate(&exec, graph, 0);
    cudaGraphDestroy(graph);
    check(error, "the instantiation of a graph");
    return GraphRef(ffi::make_object<GraphObj>(exec));
  });
}

void graph_launch(GraphRef graph, int64_t stream) {
  guard([&] { check(cudaGraphLaunch(graph->exec, stream_of(stream)), "the launch of a graph"); });
}

}  // namespace
}  // namespace fluxion::device

TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_abi, fluxion::device::device_abi);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_info, fluxion::device::device_info);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_select, fluxion::device::device_select);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(host_register, fluxion::device::host_register);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(host_unregister, fluxion::device::host_unregister);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pinned_empty, fluxion::device::pinned_empty);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(stream_create, fluxion::device::stream_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(stream_destroy, fluxion::device::stream_destroy);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(stream_synchronize, fluxion::device::stream_synchronize);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(graph_begin, fluxion::device::graph_begin);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(graph_end, fluxion::device::graph_end);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(graph_launch, fluxion::device::graph_launch);
