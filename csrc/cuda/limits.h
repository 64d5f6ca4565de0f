// What the kernels serve.
#pragma once

namespace fluxion::device {

inline constexpr int kPage = 16;
inline constexpr int kMaxGroup = 16;
inline constexpr int kMaxHeadDim = 256;  // a multiple of 16 from 32

}  // namespace fluxion::device
