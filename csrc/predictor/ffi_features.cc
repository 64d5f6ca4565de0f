// The C ABI of the features kernel. Argument checks live here.
#include <cstdint>
#include <string>

#include "ffi/tensor.h"
#include "kernels/feature_index.h"
#include "kernels/table.h"

namespace fluxion {
namespace {

// isa: "" for the best one.
void features(ffi::String isa, TensorView q, TensorView parts, TensorView rows, TensorView seq_lens,
              TensorView anchor, TensorView anchor_q, TensorView mean_k, int64_t layer, int64_t first_head,
              int64_t sinks, int64_t window, double scale, TensorView out) {
  const DType dtype = same(q.dtype(), kBFloat16) ? DType::kBF16 : DType::kF32;
  const DLDataType kv = dtype == DType::kBF16 ? kBFloat16 : kFloat32;
  expect(q, "q", kv, {-1, -1, -1}, 2);
  const int64_t B = q.size(0), Hq = q.size(1), D = q.size(2);
  expect(mean_k, "mean_k", kFloat32, {-1, -1, D}, 3);
  const int64_t R = mean_k.size(0), Hk = mean_k.size(1);
  if (D < 16 || D > kMaxHeadDim || D % 16 != 0 || Hk < 1 || Hq % Hk != 0) {
    Raise("ValueError") << "q has " << Hq << " heads of " << D << " numbers and mean_k has " << Hk
                        << "; the first must be a multiple of the third, and the second one of 16 up to "
                        << kMaxHeadDim << ".";
  }
  expect(parts, "parts", kFloat32, {B, Hq, kParts}, 3);
  expect(rows, "rows", kInt32, {B}, 1);
  expect(seq_lens, "seq_lens", kInt32, {B}, 1);
  for (int64_t b = 0; b < B; ++b) {
    const int32_t row = data<int32_t>(rows)[b], length = data<int32_t>(seq_lens)[b];
    if (row < 0 || row >= R || length < 1) {
      Raise("ValueError") << "Request " << b << " has the row " << row << " and " << length
                          << " tokens; rows are 0 to " << R - 1 << ", and a request has at least 1 token.";
    }
  }
  expect(anchor, "anchor", kFloat32, {R, Hq, kAnchorFeatures}, 3);
  expect(anchor_q, "anchor_q", kv, {R, Hq, D}, 3);
  expect(out, "out", kFloat32, {B, Hq, kFeatures}, 3);
  for (int64_t tokens : {sinks, window}) {
    if (tokens < 0 || tokens % kPage != 0 || tokens > INT32_MAX) {
      Raise("ValueError") << "sinks is " << sinks << " and window is " << window
                          << "; both must be multiples of 16.";
    }
  }
  const KernelTable* table = guarded([&] {
    return isa.size() == 0 ? best_kernel_table(dtype) : kernel_table(std::string(isa).c_str(), dtype);
  });
  if (table == nullptr) Raise("ValueError") << "There are no kernels for the ISA \"" << isa << "\" here.";
  const auto small = [](int64_t n) { return static_cast<int>(n); };
  table->features({small(B), small(Hq), small(Hk), small(D), small(layer), small(first_head), small(sinks),
                   small(window), static_cast<float>(scale), data<char>(q),
                   q.stride(0) * (dtype == DType::kBF16 ? 2 : 4), data<float>(parts), data<int32_t>(rows),
                   data<int32_t>(seq_lens), data<float>(anchor), data<char>(anchor_q), data<float>(mean_k),
                   data<float>(out)});
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(features, fluxion::features);
