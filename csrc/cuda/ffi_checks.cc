#include "cuda/ffi_checks.h"

namespace fluxion::device {

int narrow(int64_t value, int64_t least, int64_t most, const char* name) {
  if (value < least || value > most) {
    Raise("ValueError") << name << " is " << value << " and must be from " << least << " to " << most << ".";
  }
  return static_cast<int>(value);
}

int narrow_head_dim(int64_t head_dim) {
  narrow(head_dim, 32, kMaxHeadDim, "head_dim");
  if (head_dim % 16 != 0) Raise("ValueError") << "head_dim is " << head_dim << ", no multiple of 16.";
  return static_cast<int>(head_dim);
}

Placement placement_of(int64_t sinks, int64_t window) {
  if (sinks < 0 || sinks % kPage != 0 || window < kPage || window % kPage != 0 || sinks > 1 << 24 ||
      window > 1 << 24) {
    Raise("ValueError") << "sinks is " << sinks << " and window is " << window
                        << "; both must be multiples of 16, and window at least 16.";
  }
  return {static_cast<int32_t>(sinks), static_cast<int32_t>(window)};
}

void expect_aligned(const TensorView& t, const char* name, int64_t element, int strided) {
  bool fits = reinterpret_cast<uintptr_t>(data<char>(t)) % 16 == 0;
  for (int i = 0; i < strided && t.numel() > 0; ++i) fits = fits && t.stride(i) * element % 16 == 0;
  if (!fits) Raise("ValueError") << name << " does not start, with every token, at a multiple of 16 bytes.";
}

void expect_numbers(const TensorView& t, const char* name, DLDataType dtype,
                    std::initializer_list<int64_t> want, int dense) {
  expect_form(t, name, dtype, want, dense);
  if (t.device().device_type != kDeviceType) {
    Raise("ValueError") << name << " is not on the device; move it there.";
  }
}

void expect_device(const TensorView& t, const char* name, DLDataType dtype,
                   std::initializer_list<int64_t> want, int dense) {
  expect_numbers(t, name, dtype, want, dense);
  expect_aligned(t, name, dtype.bits / 8, t.ndim() - dense);
}

void expect_pinned(const TensorView& t, const char* name, DLDataType dtype,
                   std::initializer_list<int64_t> want, int dense) {
  expect(t, name, dtype, want, dense);
  if (t.numel() == 0) return;
  const char* first = data<char>(t);
  int64_t last = dtype.bits / 8 - 1;
  for (int i = 0; i < t.ndim(); ++i) last += (t.size(i) - 1) * t.stride(i) * (dtype.bits / 8);
  for (const char* at : {first, first + last}) {
    cudaPointerAttributes attributes{};
    guard([&] { check(cudaPointerGetAttributes(&attributes, at), "looking at host memory"); });
    if (attributes.type != cudaMemoryTypeHost) {
      Raise("ValueError") << name << " is host memory that is not pinned; register it with host_register.";
    }
  }
}

void expect_reachable(const TensorView& t, const char* name, DLDataType dtype,
                      std::initializer_list<int64_t> want, int dense) {
  if (t.device().device_type == kDeviceType) {
    expect_device(t, name, dtype, want, dense);
  } else {
    expect_pinned(t, name, dtype, want, dense);
  }
}

WindowTiles windows_of(const TensorView& t, int kv_heads, int head_dim, int element,
                       const Placement& placement) {
  expect_device(t, "windows", kv_type(element), {kv_heads, -1, 2, kPage, head_dim}, 4);
  if (t.size(1) % placement.slot_pages() != 0) {
    Raise("ValueError") << "windows has " << t.size(1) << " pages a head, which is no multiple of the "
                        << placement.slot_pages() << " pages of a row (sinks, window and one page).";
  }
  return {data<char>(t), t.stride(0) * element, static_cast<int>(t.size(1) / placement.slot_pages())};
}

}  // namespace fluxion::device
