#include "kernels/attend_isa.h"

FLUXION_ATTEND(DType::kBF16, BF16)
