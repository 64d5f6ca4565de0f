// An allocator for LD_PRELOAD that fails for libfluxion.so on request. Other libraries are not affected.
#include <link.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<uintptr_t> first{0}, last{0};  // range of the library's code
std::atomic<long> left{0};                 // its allocations until one fails; 0: none fails
std::atomic<long> seen{0};

int find(dl_phdr_info* info, size_t, void*) {
  if (std::strstr(info->dlpi_name, "libfluxion.so") == nullptr) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD || !(segment.p_flags & PF_X)) continue;
    first = info->dlpi_addr + segment.p_vaddr;
    last = first + segment.p_memsz;
  }
  return 1;
}

void* allocate(size_t size, size_t align, void* caller) {
  const auto from = reinterpret_cast<uintptr_t>(caller);
  if (from >= first.load(std::memory_order_relaxed) && from < last.load(std::memory_order_relaxed)) {
    ++seen;
    long now = left.load();
    while (now > 0 && !left.compare_exchange_weak(now, now - 1)) {
    }
    if (now == 1) throw std::bad_alloc();
  }
  void* at = align == 0 ? std::malloc(size ? size : 1)
                        : std::aligned_alloc(align, (size + align - 1) / align * align);
  if (at == nullptr) throw std::bad_alloc();
  return at;
}

}  // namespace

// Makes only the n-th allocation of libfluxion.so from now on fail; 0: none. Returns the number of its
// allocations since the last call.
extern "C" [[gnu::visibility("default")]] long hostile_arm(long n) {
  if (first == 0) dl_iterate_phdr(find, nullptr);
  left = n;
  return seen.exchange(0);
}

#define CALLER __builtin_return_address(0)
[[gnu::visibility("default")]] void* operator new(size_t n) { return allocate(n, 0, CALLER); }
[[gnu::visibility("default")]] void* operator new[](size_t n) { return allocate(n, 0, CALLER); }
[[gnu::visibility("default")]] void* operator new(size_t n, std::align_val_t a) {
  return allocate(n, static_cast<size_t>(a), CALLER);
}
[[gnu::visibility("default")]] void* operator new[](size_t n, std::align_val_t a) {
  return allocate(n, static_cast<size_t>(a), CALLER);
}
[[gnu::visibility("default")]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::visibility("default")]] void operator delete[](void* p) noexcept { std::free(p); }
[[gnu::visibility("default")]] void operator delete(void* p, size_t) noexcept { std::free(p); }
[[gnu::visibility("default")]] void operator delete[](void* p, size_t) noexcept { std::free(p); }
[[gnu::visibility("default")]] void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::visibility("default")]] void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::visibility("default")]] void operator delete(void* p, size_t, std::align_val_t) noexcept {
  std::free(p);
}
[[gnu::visibility("default")]] void operator delete[](void* p, size_t, std::align_val_t) noexcept {
  std::free(p);
}
