#pragma once

namespace fluxion::FLUXION_ISA {
namespace {

// e^x for x <= 0 within 2 ulp: x = n ln 2 + r, then the Cephes polynomial of degree 7 in r. 0 below -87,
// where e^x nears the end of the normal floats; NaN stays NaN.
inline Vec exp_nonpositive(Vec x) {
  const Vec limit = set1(-87.0f);
  const Vec clamped = max(limit, x);
  const Vec shift = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec t = fma(clamped, set1(1.44269504088896341f), shift);
  const Vec n = sub(t, shift);
  Vec r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec y = set1(1.9875691500e-4f);
  y = fma(y, r, set1(1.3981999507e-3f));
  y = fma(y, r, set1(8.3334519073e-3f));
  y = fma(y, r, set1(4.1665795894e-2f));
  y = fma(y, r, set1(1.6666665459e-1f));
  y = fma(y, r, set1(5.0000001201e-1f));
  y = add(fma(y, mul(r, r), r), set1(1.0f));
  return zero_below(x, limit, mul(y, exp2_of_rounded(t)));
}

// e^x for x <= 0, as exact as weights rounded to T need.
template <class T>
inline Vec exponential(Vec x) {
#ifdef FLUXION_EXP_FOR_BF16
  if constexpr (sizeof(T) <= sizeof(BF16)) return exp_for_bf16(x);
#endif
  return exp_nonpositive(x);
}

}  // namespace
}  // namespace fluxion::FLUXION_ISA
