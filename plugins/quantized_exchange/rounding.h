// How one number becomes a code of int8 or int4, on CPU and GPU alike: which random bits an element has, and which of
// two codes they make it. See codes.h for blocks and lists.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

#include "strata/simd.h"

namespace strata::quantized {

// All bits of the result depend on all of x: two multiplications between shifts ("lowbias32", Wellons,
// hash-prospector).
STRATA_ANYWHERE uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352D;
  x ^= x >> 15;
  x *= 0x846CA68B;
  return x ^ x >> 16;
}

// Two words of a list, by Philox; from them those of each block.
struct Keys {
  uint32_t first = 0, second = 0;
  STRATA_ANYWHERE Keys of_block(uint32_t block, uint32_t scale) const {
    return {mixed(mixed(first + block) ^ scale), mixed(mixed(second + block) ^ scale)};
  }
  // A word for elements l and l + half a block: 16 bits each, the lower ones for the first. Of keys of a block.
  STRATA_ANYWHERE uint32_t word(uint32_t l) const { return mixed(first + l * 0x9E3779B9) ^ second; }
};
inline constexpr uint32_t kToNearest = 0x8000;  // in place of random bits

// 0 to 2 · kLargest, of a number within kLargest (rounding may bring it a little beyond): of the two codes it lies
// between, the upper one for as large a part of the `random` below 2^16 as it is above the lower one. Any for NaN.
template <int kLargest>
STRATA_ANYWHERE uint32_t code_of(float scaled, uint32_t random) {
  // Bits of floats that are not negative are in the floats' order: so no comparison of floats is in the way of vectors.
  const auto bits = std::bit_cast<int32_t>((scaled + float(kLargest)) * 65536.0f);
  const int32_t within = std::min(std::max(bits, 0), std::bit_cast<int32_t>(kLargest * 131072.0f));
  return (uint32_t(int32_t(std::bit_cast<float>(within))) + random) >> 16;
}

}  // namespace strata::quantized
