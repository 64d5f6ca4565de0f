// The attention kernels of KernelTable. They dominate compile time, so each stored type has a file of its
// own, attend_*.cc. The files of an instruction set share only these declarations.
#pragma once

#include "kernels/table.h"

namespace fluxion::FLUXION_ISA {

template <DType kStored>
void attend(const void* q, int G, int D, Scale scale, const void* tiles, const int32_t* pages,
            const uint16_t* masks, int n, int ahead, float* o, float* lse);
template <DType kStored>
void attend_near(const void* q, int G, int D, Scale scale, const void* tiles, const int32_t* pages,
                 const uint16_t* masks, int n, int ahead, float* o, float* lse);
template <DType kStored>
void attend_pages(const void* q, int G, int D, Scale scale, const void* tiles, const int32_t* pages,
                  const uint16_t* masks, int n, int ahead, float* o, float* lse, float* page_lse);

}  // namespace fluxion::FLUXION_ISA
