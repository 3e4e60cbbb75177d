// The 8-bit formats on CPU and GPU: a code for a number that is scaled already, and its value (codec_kernels.h).
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

#include "strata/simd.h"

namespace strata::gist {

STRATA_ANYWHERE uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

// A small float with kMantissa bits and exponent bias kBias; kLargest is the code of the largest finite value.
template <int kMantissa, int kBias, int kLargest>
struct Small {
  static constexpr int kShift = 23 - kMantissa;
  static STRATA_ANYWHERE uint32_t encode(float x) {
    const uint32_t u = bits_of(x), magnitude = u & 0x7FFFFFFF;
    const uint32_t rounded = magnitude + ((1u << (kShift - 1)) - 1) + ((magnitude >> kShift) & 1);
    const uint32_t normal = (rounded >> kShift) - (uint32_t(127 - kBias) << kMantissa);
    // Below the smallest normal number values are multiples of one step: adding 1.5·2^23 steps rounds to them.
    const float step = std::bit_cast<float>(uint32_t(127 + 1 - kBias - kMantissa) << 23);
    const float shifted = std::bit_cast<float>(magnitude) + 12582912.0f * step;
    const uint32_t subnormal = bits_of(shifted) - bits_of(12582912.0f * step);
    const uint32_t code = magnitude < (uint32_t(127 + 1 - kBias) << 23) ? subnormal : normal;
    return std::min<uint32_t>(code, kLargest) | (u >> 31 << 7);
  }
  static STRATA_ANYWHERE float decode(uint8_t code) {
    const uint32_t magnitude = code & 0x7F, sign = uint32_t(code >> 7) << 31;
    const float step = std::bit_cast<float>(uint32_t(127 + 1 - kBias - kMantissa) << 23);
    const uint32_t normal = (magnitude << kShift) + (uint32_t(127 - kBias) << 23);
    const uint32_t value = magnitude < (1u << kMantissa) ? bits_of(float(magnitude) * step) : normal;
    return std::bit_cast<float>(value | sign);
  }
  static STRATA_ANYWHERE float largest() { return decode(kLargest); }
};
using E4M3 = Small<3, 7, 0x7E>;
using E5M2 = Small<2, 15, 0x7B>;

struct Int8 {
  static STRATA_ANYWHERE uint32_t encode(float x) {
    const float rounded = (x + 12582912.0f) - 12582912.0f;
    return uint32_t(int32_t(rounded) + 128);
  }
  static STRATA_ANYWHERE float decode(uint8_t code) { return float(int32_t(code) - 128); }
  static STRATA_ANYWHERE float largest() { return 127; }
};

}  // namespace strata::gist
