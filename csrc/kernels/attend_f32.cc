#include "kernels/attend_isa.h"

FLUXION_ATTEND(DType::kF32, float)
