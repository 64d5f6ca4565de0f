// Included once by each attend_*.cc. A full specialisation is an ordinary function: its symbol is not weak.
#pragma once

// clang-format off
#include FLUXION_ISA_HEADER
#include "simd/dot.h"
#include "simd/mix.h"
#include "simd/words.h"
// clang-format on
#include "kernels/attend.h"
#include "kernels/attend_entry.h"

#define FLUXION_ATTEND(stored, T)                                                                        \
  namespace fluxion::FLUXION_ISA {                                                                       \
  template <>                                                                                            \
  void attend<stored>(const void* q, int G, int D, Scale scale, const void* tiles, const int32_t* pages, \
                      const uint16_t* masks, int n, int ahead, float* o, float* lse) {                   \
    attend_listed<T>(q, G, D, scale, tiles, pages, masks, n, ahead, false, o, lse, nullptr);             \
  }                                                                                                      \
  template <>                                                                                            \
  void attend_near<stored>(const void* q, int G, int D, Scale scale, const void* tiles,                  \
                           const int32_t* pages, const uint16_t* masks, int n, int ahead, float* o,      \
                           float* lse) {                                                                 \
    attend_listed<T>(q, G, D, scale, tiles, pages, masks, n, ahead, true, o, lse, nullptr);              \
  }                                                                                                      \
  template <>                                                                                            \
  void attend_pages<stored>(const void* q, int G, int D, Scale scale, const void* tiles,                 \
                            const int32_t* pages, const uint16_t* masks, int n, int ahead, float* o,     \
                            float* lse, float* page_lse) {                                               \
    attend_listed<T>(q, G, D, scale, tiles, pages, masks, n, ahead, false, o, lse, page_lse);            \
  }                                                                                                      \
  }
