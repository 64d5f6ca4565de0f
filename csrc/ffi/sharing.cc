// The C ABI of engine/sharing.h, for tests.
#include "engine/sharing.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <cstdint>

#include "ffi/objects.h"

namespace fluxion {
namespace {

// For each request: the number of its family, or -1, and the logical page where its shared part ends.
void families_of(TensorView table, TensorView ends, int64_t first, int64_t together, TensorView out) {
  expect(ends, "ends", kInt32, {-1}, 1);
  const int64_t B = ends.size(0);
  expect(table, "page_table", kInt32, {B, -1}, 1);
  expect(out, "out", kInt32, {B, 2}, 2);
  const int32_t* end = data<int32_t>(ends);
  for (int64_t b = 0; b < B; ++b) {
    if (end[b] < 0 || end[b] > table.size(1)) {
      Raise("ValueError") << "ends has " << end[b] << " for request " << b << ", whose row of the page table "
                          << "holds " << table.size(1) << " pages.";
    }
  }
  if (first < 0 || first > INT32_MAX || together < 1 || together > INT32_MAX) {
    Raise("ValueError") << "first is " << first << " and together is " << together
                        << "; they must be at least 0 and 1.";
  }
  guarded([&] {
    Families families;
    families.reserve(static_cast<int>(B));
    families.find(data<int32_t>(table), table.stride(0), static_cast<int>(first),
                  {end, static_cast<size_t>(B)}, static_cast<int>(together));
    int32_t* to = data<int32_t>(out);
    std::fill_n(to, 2 * B, -1);
    for (size_t f = 0; f < families.all().size(); ++f) {
      const Family& family = families.all()[f];
      for (const int32_t b : families.members(family)) {
        to[2 * b] = static_cast<int32_t>(f);
        to[2 * b + 1] = family.end_page;
      }
    }
  });
}

}  // namespace
}  // namespace fluxion

TVM_FFI_DLL_EXPORT_TYPED_FUNC(families, fluxion::families_of);
