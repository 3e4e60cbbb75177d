// Digits of 32 bits in doubles (strata/exact_sum.h).
#include "strata/exact_sum.h"

#include <cmath>
#include <limits>

namespace strata {
namespace {

constexpr int kLowest = -320, kDigits = kExactSum - 1;
constexpr double kBase = 4294967296.0;

}  // namespace

void add_exactly(double* sum, double value) {
  if (value == 0) return;
  if (!std::isfinite(value)) {
    sum[kDigits] = std::numeric_limits<double>::quiet_NaN();
    return;
  }
  int exponent;
  std::frexp(value, &exponent);  // value < 2^exponent
  int k = (exponent - 1 - kLowest) / 32;
  if (k >= kDigits) k = kDigits - 1;
  for (; k >= 0 && value != 0; --k) {
    const double unit = std::ldexp(1.0, 32 * k + kLowest);
    const double part = std::floor(value / unit) * unit;  // powers of two: no rounding
    sum[k] += part;
    value -= part;
  }
}

void carry(double* sum) {
  for (int k = 0; k + 1 < kDigits; ++k) {
    const double unit = std::ldexp(1.0, 32 * k + kLowest);
    const double above = std::floor(sum[k] / (unit * kBase)) * (unit * kBase);
    sum[k] -= above;
    sum[k + 1] += above;
  }
}

double value_of_sum(const double* sum) {
  double digits[kExactSum];
  for (int k = 0; k < kExactSum; ++k) digits[k] = sum[k];
  carry(digits);
  double total = digits[kDigits];
  for (int k = kDigits; k-- > 0;) total += digits[k];
  return total;
}

}  // namespace strata
