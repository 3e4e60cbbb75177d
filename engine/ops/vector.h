// Sixteen floats at a time, in the compiler's vector extension: inside a STRATA_SIMD function one such value is one
// AVX-512 register, two AVX2 or four SSE registers. Only what the kernels here need.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

#include "strata/simd.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // these values never cross a call that is not inlined

#define STRATA_INLINE_LAMBDA __attribute__((always_inline))

namespace strata::simd {

inline constexpr int kLanes = 16;
using F = float __attribute__((vector_size(64)));
using I = int32_t __attribute__((vector_size(64)));
using U = uint32_t __attribute__((vector_size(64)));

STRATA_INLINE F set(float value) { return F{} + value; }
STRATA_INLINE F load(const float* p) {
  F v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
STRATA_INLINE void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }
STRATA_INLINE F load(const float* p, int64_t count) {  // the first `count` < 16 lanes, zeros after
  F v{};
  std::memcpy(&v, p, size_t(count) * 4);
  return v;
}
STRATA_INLINE void store(float* p, F v, int64_t count) { std::memcpy(p, &v, size_t(count) * 4); }
// A NaN in the first argument stays one.
STRATA_INLINE F max(F a, F b) { return a < b ? b : a; }
STRATA_INLINE F min(F a, F b) { return b < a ? b : a; }

// Sum of the lanes, always in the same tree.
STRATA_INLINE float sum(F v) {
  float lane[16];
  std::memcpy(lane, &v, sizeof lane);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}
STRATA_INLINE float max(F v) {
  float lane[16];
  std::memcpy(lane, &v, sizeof lane);
  for (int i = 1; i < 16; ++i) lane[0] = lane[i] > lane[0] ? lane[i] : lane[0];
  return lane[0];
}

// e^x to about 1 ulp on [-87.3, 88.7]; outside it stays at the ends' values (no overflow to infinity, no denormals);
// NaN stays NaN.
// Cody and Waite's reduction by ln 2 in two parts, then Cephes' polynomial for expf.
STRATA_INLINE F exp(F x) {
  x = min(max(x, set(-87.3f)), set(88.3f));
  const F n = (x * 1.44269504089f + 12582912.0f) - 12582912.0f;  // adding 1.5·2^23 rounds to an integer
  const F r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  F p = set(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const I exponent = (__builtin_convertvector(n, I) + 127) << 23;
  F scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return p * scale;
}

STRATA_INLINE F sigmoid(F x) { return 1.0f / (1.0f + exp(-x)); }
// 2·sigmoid(2x) − 1; for small |x| the odd Taylor polynomial, where the difference would cancel.
STRATA_INLINE F tanh(F x) {
  const F wide = 2.0f * sigmoid(2.0f * x) - 1.0f;
  const F s = x * x;
  const F small = x * (1.0f + s * (-0.333333333f + s * (0.133333333f + s * (-0.0539682540f + s * 0.0218694885f))));
  return (s < 0.04f) ? small : wide;
}

// Applies f to n elements: y = f(x…). Tails go through zero-padded vectors.
template <class Function>
STRATA_INLINE void map(int64_t n, Function&& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, int64_t{kLanes});
  if (i < n) f(i, n - i);
}
STRATA_INLINE F get(const float* p, int64_t count) { return count == kLanes ? load(p) : load(p, count); }
STRATA_INLINE void put(float* p, F v, int64_t count) {
  if (count == kLanes)
    store(p, v);
  else
    store(p, v, count);
}

}  // namespace strata::simd
