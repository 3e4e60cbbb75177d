// The schedule's factor at the ends and in the middle of each course.
#include <gtest/gtest.h>

#include "plugins/schedule/factor.h"

namespace strata::schedule {
namespace {

constexpr double kRounding = 1e-15;  // a few operations in double

TEST(Schedule, WarmupRisesLinearlyToThePeak) {
  for (const char* kind : {"cosine", "linear", "constant", "inverse_square_root"}) {
    const Course course{.kind = kind, .warmup = 4, .final = 0.1};
    EXPECT_EQ(factor(course, 1, 100), 0.25) << kind;
    EXPECT_EQ(factor(course, 3, 100), 0.75) << kind;
    EXPECT_EQ(factor(course, 4, 100), 1) << kind;
  }
}

TEST(Schedule, CosineEndsAtItsFinalFactor) {
  const Course course{.kind = "cosine", .warmup = 20, .final = 0.2};
  EXPECT_NEAR(factor(course, 70, 120), 0.6, kRounding);  // half way: the mean of 1 and 0.2
  EXPECT_NEAR(factor(course, 45, 120), 0.2 + 0.8 * (1 + std::sqrt(0.5)) / 2, kRounding);
  EXPECT_NEAR(factor(course, 120, 120), 0.2, kRounding);
  EXPECT_NEAR(factor(course, 500, 120), 0.2, kRounding);  // stays there
}

TEST(Schedule, LinearEndsAtItsFinalFactor) {
  const Course course{.kind = "linear", .warmup = 0, .final = 0};
  EXPECT_NEAR(factor(course, 1, 10), 0.9, kRounding);
  EXPECT_NEAR(factor(course, 5, 10), 0.5, kRounding);
  EXPECT_EQ(factor(course, 10, 10), 0);
}

TEST(Schedule, ConstantStays) {
  EXPECT_EQ(factor({.kind = "constant"}, 1, 10), 1);
  EXPECT_EQ(factor({.kind = "constant"}, 10, 10), 1);
}

TEST(Schedule, InverseSquareRootFallsFromTheWarmup) {
  const Course course{.kind = "inverse_square_root", .warmup = 25};
  EXPECT_EQ(factor(course, 25, 1000), 1);
  EXPECT_EQ(factor(course, 100, 1000), 0.5);
  EXPECT_EQ(factor({.kind = "inverse_square_root"}, 16, 1000), 0.25);
}

TEST(Schedule, ARunNoLongerThanItsWarmupIsDefined) {
  EXPECT_EQ(factor({.kind = "cosine", .warmup = 10}, 5, 5), 0.5);
  EXPECT_EQ(factor({.kind = "cosine", .warmup = 5}, 5, 5), 1);
}

}  // namespace
}  // namespace strata::schedule
