// Division of csrc/device/costs.h, for Python tests.
#include "device/costs.h"

using fluxion::Division;
using fluxion::Rates;

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void* division_create(double cpu, double link, double hot, double launch_s) {
  return new Division(Rates{cpu, link, hot, launch_s, 0, 0}, link);
}
EXPORT void division_destroy(void* division) { delete static_cast<Division*>(division); }
EXPORT void division_open(void* division, int64_t now, int64_t tiles, int64_t metadata, int64_t cpu_bytes) {
  static_cast<Division*>(division)->open(now, {0, 0, 1, tiles, metadata, cpu_bytes});
}
EXPORT int32_t division_asks(void* division, int64_t now, int64_t bytes) {
  return static_cast<Division*>(division)->device_is_sooner(now, bytes);
}
EXPORT void division_chosen(void* division, int64_t bytes, int64_t guess) {
  static_cast<Division*>(division)->chosen(bytes, guess);
}
EXPORT void division_given(void* division, int64_t now, int64_t bytes) {
  static_cast<Division*>(division)->given(now, bytes);
}
EXPORT void division_given_alone(void* division, int64_t now, int64_t bytes) {
  static_cast<Division*>(division)->given(now, bytes, /*alone=*/true);
}
EXPORT void division_taken_back(void* division, int64_t now, int64_t bytes) {
  static_cast<Division*>(division)->taken_back(now, bytes, /*alone=*/false);
}
EXPORT void division_returned(void* division, int64_t now, int64_t bytes) {
  static_cast<Division*>(division)->returned(now, bytes);
}
EXPORT void division_expect(void* division, double hit_share) {
  static_cast<Division*>(division)->expect(hit_share);
}
EXPORT void division_close(void* division, int64_t now) { static_cast<Division*>(division)->close(now); }
