// Sums of non-negative numbers that do not depend on the order in which they are taken: fixed-point digits that are
// added exactly (after Kulisch). What ranks, chunks and threads each summed adds up to the same bits in every layout.
#pragma once
#include <cstdint>

namespace strata {

// A sum is this many doubles. Digit k holds a multiple of 2^(32 k - 320) of less than 2^53 times that; digit
// kExactSum - 1 is NaN when something was not finite.
inline constexpr int kExactSum = 22;

// Adds a value below 2^350; what it has below 2^-320 is lost. At most 2^20 values between two calls of carry().
void add_exactly(double* sum, double value);
// Passes what is above 32 bits on to the next digit, so that 2^20 sums can be added digit by digit.
void carry(double* sum);
double value_of_sum(const double* sum);

}  // namespace strata
