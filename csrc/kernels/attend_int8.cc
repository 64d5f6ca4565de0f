#include "kernels/attend_isa.h"

FLUXION_ATTEND(DType::kInt8, Int8)
