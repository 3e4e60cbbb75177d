// The 256 codes of a moment and the values they stand for, on CPU and GPU; the map is described in adamw8bit_kernel.h.
#pragma once
#include <cstdint>

#include "strata/simd.h"

namespace strata::adamw8bit {

// The value of a code: the middle of its cell. `first`: cells in the smallest decade, 1 of the signed map, 2 of the
// other.
STRATA_ANYWHERE float code_value(int code, int first, bool has_sign) {
  const bool negative = has_sign && code > 128;
  const int number = has_sign ? code % 128 : code;
  if (code == (has_sign ? 128 : 255)) return 1;
  if (number == 0) return 0;
  double low = 1e-7;
  int cells = first, before = 1;
  for (; number >= before + cells; cells *= 2) before += cells, low *= 10;
  const double powers[] = {1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1};
  int decade = 0;
  for (int c = first; c < cells; c *= 2) ++decade;
  low = powers[decade];  // ten times ten times … would round
  const float value = float(low + 9 * low / cells * (number - before + 0.5));
  return negative ? -value : value;
}

// 1 + the number of the cell that x in (0, 1) falls into, counted from the smallest decade's first; found by comparing
// with the decades' borders, so that it vectorizes.
template <int kFirst>
STRATA_ANYWHERE int32_t cell_of(float x) {
  float low = 1e-7f, per_unit = kFirst / 9e-7f;
  int32_t before = 0, cells = kFirst;
  constexpr float borders[] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f};
  constexpr float densities[] = {kFirst * 2 / 9e-6f,  kFirst * 4 / 9e-5f,  kFirst * 8 / 9e-4f,
                                 kFirst * 16 / 9e-3f, kFirst * 32 / 9e-2f, kFirst * 64 / 9e-1f};
  for (int d = 0; d < 6; ++d) {
    const bool above = x >= borders[d];
    low = above ? borders[d] : low;
    per_unit = above ? densities[d] : per_unit;
    before = above ? kFirst * ((2 << d) - 1) : before;
    cells = above ? kFirst * (2 << d) : cells;
  }
  int32_t cell = int32_t((x - low) * per_unit);
  cell = cell < 0 ? 0 : cell;
  cell = cell >= cells ? cells - 1 : cell;
  return 1 + before + cell;
}

// Half the smallest value, and halfway between the largest cell's middle and 1.
inline constexpr float kSignedLeast = 2.75e-7f, kSignedMost = (1 + (1 - 0.9f / 128)) / 2;
inline constexpr float kUnsignedLeast = 1.625e-7f, kUnsignedMost = (1 + (1 - 0.9f / 256)) / 2;

STRATA_ANYWHERE uint8_t signed_code(float x) {
  const float size = x < 0 ? -x : x;
  int32_t code = cell_of<1>(size) + (x < 0 ? 128 : 0);
  code = size < kSignedLeast ? 0 : code;
  code = x > kSignedMost ? 128 : code;
  return uint8_t(code);
}
STRATA_ANYWHERE uint8_t unsigned_code(float x, bool nonzero) {
  int32_t code = cell_of<2>(x);
  code = x < kUnsignedLeast ? int32_t(nonzero && x > 0) : code;
  code = x > kUnsignedMost ? 255 : code;
  return uint8_t(code);
}

// 1 / scale, or 0 for a block of zeros or of numbers too small to have one.
STRATA_ANYWHERE float reciprocal(float scale) {
  const float factor = scale > 0 ? 1 / scale : 0;
  return factor <= 3.4e38f ? factor : 0;
}

}  // namespace strata::adamw8bit
