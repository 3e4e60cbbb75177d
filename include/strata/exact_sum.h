// Sums of non-negative numbers that do not depend on the order in which they are taken: fixed-point digits that are
// added exactly (after Kulisch). What ranks, chunks and threads each summed adds up to the same bits in every layout.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "strata/simd.h"

namespace strata {

// A sum is this many doubles. Digit k holds a multiple of 2^(32 k - 320) of less than 2^53 times that; digit
// kExactSum - 1 is NaN when something was not finite.
inline constexpr int kExactSum = 22;

// Adds a value below 2^350; what it has below 2^-320 is lost. At most 2^20 values between two calls of carry().
STRATA_ANYWHERE void add_exactly(double* sum, double value) {
  constexpr int kLowest = -320, kDigits = kExactSum - 1;
  if (value == 0) return;
  if (!(value - value == 0)) {  // infinite or NaN
    sum[kDigits] = value - value;
    return;
  }
  int exponent;
  frexp(value, &exponent);  // value < 2^exponent
  int k = (exponent - 1 - kLowest) / 32;
  if (k >= kDigits) k = kDigits - 1;
  for (; k >= 0 && value != 0; --k) {
    const double unit = ldexp(1.0, 32 * k + kLowest);
    const double part = floor(value / unit) * unit;  // powers of two: no rounding
    sum[k] += part;
    value -= part;
  }
}

// add_exactly for the usual case, a positive number far from the ends of the digits' range, by its bits. Not for GPU
// kernels.
inline void add_number(double* sum, double value) {
  if (!(value > 0x1p-200 && value < 0x1p200)) return add_exactly(sum, value);
  const auto power = [](int exponent) { return std::bit_cast<double>(uint64_t(1023 + exponent) << 52); };
  const int exponent = int(std::bit_cast<uint64_t>(value) >> 52) - 1023;
  for (int k = (exponent + 320) / 32; value != 0; --k) {
    const double part = double(int64_t(value * power(320 - 32 * k))) * power(32 * k - 320);
    sum[k] += part;
    value -= part;
  }
}

// Passes what is above 32 bits on to the next digit, so that 2^20 sums can be added digit by digit.
STRATA_ANYWHERE void carry(double* sum) {
  constexpr int kLowest = -320, kDigits = kExactSum - 1;
  constexpr double kBase = 4294967296.0;
  for (int k = 0; k + 1 < kDigits; ++k) {
    const double unit = ldexp(1.0, 32 * k + kLowest);
    const double above = floor(sum[k] / (unit * kBase)) * (unit * kBase);
    sum[k] -= above;
    sum[k + 1] += above;
  }
}

STRATA_ANYWHERE double value_of_sum(const double* sum) {
  constexpr int kDigits = kExactSum - 1;
  double digits[kExactSum];
  for (int k = 0; k < kExactSum; ++k) digits[k] = sum[k];
  carry(digits);
  double total = digits[kDigits];
  for (int k = kDigits; k-- > 0;) total += digits[k];
  return total;
}

}  // namespace strata
