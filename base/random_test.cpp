// Philox against its published known answers, and normal values: their moments, and that no split changes them.
#include "strata/random.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace strata::random_test {
namespace {

// kat_vectors of Random123 (Salmon et al.), philox4x32 with 10 rounds.
TEST(Philox, KnownAnswers) {
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(philox({0, 0, 0, 0}, 0, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, 0xffffffff, 0xffffffff),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, BlocksStreamsAndSeedsDiffer) {
  EXPECT_NE(random_block(1, 2, 3), random_block(1, 2, 4));
  EXPECT_NE(random_block(1, 2, 3), random_block(1, 3, 3));
  EXPECT_NE(random_block(1, 2, 3), random_block(2, 2, 3));
  EXPECT_NE(random_block(1, 2, 3), random_block(1, 2, 3 + (uint64_t{1} << 32)));
  EXPECT_NE(random_block(1, 2, 3), random_block(1, 2 + (uint64_t{1} << 32), 3));
}

TEST(FillNormal, SplitsDoNotChangeValues) {
  constexpr int64_t kCount = 1003;
  std::vector<float> whole(kCount), parts(kCount);
  fill_normal(whole.data(), 0, kCount, 1, 5, stream_of("weight"));
  for (int64_t at = 0, size = 1; at < kCount; at += size, size = size % 13 + 1)
    fill_normal(parts.data() + at, at, std::min(size, kCount - at), 1, 5, stream_of("weight"));
  EXPECT_EQ(whole, parts);
}

TEST(FillNormal, IsNormal) {
  constexpr int64_t kCount = 1 << 20;
  std::vector<float> values(kCount);
  fill_normal(values.data(), 0, kCount, 2, 7, 11);
  double sum = 0, squares = 0, fourth = 0, neighbours = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    const double z = values[i] / 2;
    sum += z;
    squares += z * z;
    fourth += z * z * z * z;
    neighbours += i > 0 ? z * values[i - 1] / 2 : 0;
  }
  // Five standard deviations of each estimate over n values: 1/√n, √(2/n), √(96/n), 1/√n.
  const double root = std::sqrt(double(kCount));
  EXPECT_NEAR(sum / kCount, 0, 5 / root);
  EXPECT_NEAR(squares / kCount, 1, 5 * std::sqrt(2.0) / root);
  EXPECT_NEAR(fourth / kCount, 3, 5 * std::sqrt(96.0) / root);
  EXPECT_NEAR(neighbours / kCount, 0, 5 / root);
}

}  // namespace
}  // namespace strata::random_test
