// Conversions to and from 16 bits against arithmetic on their definitions.
#include "strata/convert.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace strata::convert_test {
namespace {

// By definition: sign, exponent, fraction.
double value_of(DType dtype, uint16_t bits) {
  const int fraction_bits = dtype == DType::bf16 ? 7 : 10, bias = dtype == DType::bf16 ? 127 : 15;
  const int exponent = (bits & 0x7FFF) >> fraction_bits, fraction = bits & ((1 << fraction_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == (1 << (15 - fraction_bits)) - 1)
    return fraction ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  return sign * std::ldexp(exponent ? 1 + std::ldexp(fraction, -fraction_bits) : std::ldexp(fraction, -fraction_bits),
                           std::max(exponent, 1) - bias);
}

uint16_t rounded(DType dtype, float value) {
  uint16_t bits;
  from_f32(dtype, &value, &bits, 1);
  return bits;
}

TEST(Convert, EveryNumberOf16BitsIsExactBothWays) {
  for (const DType dtype : {DType::bf16, DType::f16})
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const auto half = uint16_t(bits);
      float wide;
      to_f32(dtype, &half, &wide, 1);
      const double want = value_of(dtype, half);
      if (std::isnan(want)) {
        EXPECT_TRUE(std::isnan(wide));
        EXPECT_TRUE(std::isnan(value_of(dtype, rounded(dtype, wide))));
        continue;
      }
      ASSERT_EQ(double(wide), want) << name_of(dtype) << " " << bits;
      ASSERT_EQ(rounded(dtype, wide), half) << name_of(dtype) << " " << bits;
    }
}

// Between neighbours a and b: to the nearer one, the middle to the even one; beyond the largest to infinity.
TEST(Convert, RoundsToNearestEven) {
  for (const DType dtype : {DType::bf16, DType::f16})
    for (uint32_t bits = 0; bits < (dtype == DType::bf16 ? 0x7F80u : 0x7C00u); ++bits) {
      const double a = value_of(dtype, uint16_t(bits));
      double b = value_of(dtype, uint16_t(bits + 1));
      if (std::isinf(b)) b = 2 * a - value_of(dtype, uint16_t(bits - 1));
      const float middle = float((a + b) / 2);
      if (double(middle) != (a + b) / 2) continue;  // bf16's denormals: f32 has no number there
      ASSERT_EQ(rounded(dtype, middle), bits % 2 ? bits + 1 : bits) << name_of(dtype) << " " << bits;
      ASSERT_EQ(rounded(dtype, std::nextafter(middle, 0.0f)), bits) << name_of(dtype) << " " << bits;
      ASSERT_EQ(rounded(dtype, std::nextafter(middle, std::numeric_limits<float>::infinity())), bits + 1)
          << name_of(dtype) << " " << bits;
      ASSERT_EQ(rounded(dtype, -middle), (bits % 2 ? bits + 1 : bits) | 0x8000);
    }
  EXPECT_EQ(rounded(DType::f16, 1e30f), 0x7C00);
  EXPECT_EQ(rounded(DType::f16, -std::numeric_limits<float>::infinity()), 0xFC00);
}

// The mean over many draws is the number itself; a number that needs no rounding stays; any split gives the same.
TEST(Convert, StochasticRoundingIsUnbiased) {
  constexpr int64_t kCount = 100000;
  for (const float x : {1.001f, -3.3e-5f, 1e20f, 1.0f, 0.0f}) {
    const std::vector<float> from(kCount, x);
    std::vector<uint16_t> to(kCount), parts(kCount);
    to_bf16_stochastically(from.data(), to.data(), kCount, 1, 2, 5);
    for (int64_t i = 0; i < kCount; i += 777)
      to_bf16_stochastically(from.data() + i, parts.data() + i, std::min<int64_t>(777, kCount - i), 1, 2, 5 + i);
    EXPECT_EQ(to, parts);
    double sum = 0;
    for (uint16_t bits : to) sum += value_of(DType::bf16, bits);
    // The standard deviation of a draw is at most half a unit (2^-7), of the mean 2^-8/√kCount: five of them.
    EXPECT_NEAR(sum / kCount, double(x), 5 * 0x1p-8 / std::sqrt(double(kCount)) * std::abs(double(x)));
  }
  const float special[] = {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()};
  uint16_t bits[2];
  to_bf16_stochastically(special, bits, 2, 1, 2, 0);
  EXPECT_EQ(bits[0], 0x7F80);
  EXPECT_TRUE(std::isnan(value_of(DType::bf16, bits[1])));
}

}  // namespace
}  // namespace strata::convert_test
