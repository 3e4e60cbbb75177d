// Every byte has one place, files get what they are to get, and nothing is lost at the ends.
#include "memory/stripes.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>

#include "memory/nvme_store.h"
#include "tests/random_cases.h"

namespace strata::stripes_test {
namespace {

TEST(Stripes, OneFileIsOnePiece) {
  const Stripes one;
  EXPECT_EQ(one.files(), 1u);
  EXPECT_EQ(one.share(0), 1);
  const int64_t huge = int64_t{1} << 58;
  EXPECT_EQ(one.bytes_of(0, huge), huge);
  const Stripes::Run run = one.next(0, 12 * kNvmeAlignment, huge);
  EXPECT_EQ(run.offset, 12 * kNvmeAlignment);
  EXPECT_EQ(run.in_file, run.offset);
  EXPECT_EQ(run.bytes, huge - run.offset);
  EXPECT_EQ(one.next(0, huge, huge).bytes, 0);
}

TEST(Stripes, EveryByteHasOnePlace) {
  for (uint64_t seed = test::first_seed(), end = seed + uint64_t(test::cases(100)); seed < end; ++seed) {
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed));
    test::Random random(seed);
    std::vector<double> shares(1 + random() % 5);
    for (double& share : shares) share = std::pow(10.0, std::uniform_real_distribution<>(-3, 3)(random));
    const Stripes stripes(shares);
    const int64_t blocks =
        int64_t(random() % (4 * size_t(stripes.files() == 1 ? 1000 : stripes.round() / kNvmeAlignment)));
    const int64_t all = blocks * kNvmeAlignment;
    int64_t sum = 0;
    for (size_t f = 0; f < shares.size(); ++f) sum += stripes.bytes_of(f, all);
    EXPECT_EQ(sum, all);
    // A range in the middle, walked file by file: no block twice, none missing, and each at the place that counting the
    // file's blocks before it gives.
    const int64_t from = blocks ? int64_t(random() % size_t(blocks)) * kNvmeAlignment : 0;
    std::vector<int> seen(size_t((all - from) / kNvmeAlignment));
    for (size_t f = 0; f < shares.size(); ++f) {
      int64_t expected = stripes.bytes_of(f, from);
      for (int64_t at = from;;) {
        const Stripes::Run run = stripes.next(f, at, all);
        if (run.bytes == 0) break;
        ASSERT_GE(run.offset, at);
        ASSERT_LE(run.offset + run.bytes, all);
        ASSERT_EQ(run.in_file, expected);
        expected += run.bytes;
        at = run.offset + run.bytes;
        for (int64_t b = run.offset; b < at; b += kNvmeAlignment) ++seen[size_t((b - from) / kNvmeAlignment)];
      }
      EXPECT_EQ(expected, stripes.bytes_of(f, all));
    }
    for (int count : seen) ASSERT_EQ(count, 1);
    // Half a block of a round is what rounding may cost.
    const double total = std::accumulate(shares.begin(), shares.end(), 0.0);
    const double half = 0.5 * double(kNvmeAlignment) / double(Stripes::kPiece);
    for (size_t f = 0; f < shares.size(); ++f) EXPECT_NEAR(stripes.share(f), shares[f] / total, half);
  }
}

TEST(Stripes, WhatIsTooSlowForABlockGetsNone) {
  const Stripes stripes({1, 1e-6});
  EXPECT_EQ(stripes.share(0), 1);
  EXPECT_EQ(stripes.bytes_of(1, int64_t{1} << 40), 0);
  EXPECT_EQ(stripes.next(1, 0, int64_t{1} << 40).bytes, 0);
}

}  // namespace
}  // namespace strata::stripes_test
