// Products of a few rows beside sums in double, with any team the same bits.
#include "engine/ops/thin_product.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace strata::thin_product_test {
namespace {

TEST(ThinProduct, IsTheProductForAnyTeam) {
  for (uint32_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto pick = [&](std::initializer_list<int64_t> values) {
      return *(values.begin() + random() % values.size());
    };
    const int64_t m = 1 + random() % kThinRows, n = pick({1, 3, 4, 17, 50, 131}), k = pick({1, 15, 16, 33, 200});
    const float beta = seed % 2 ? 1.0f : 0.0f;
    std::normal_distribution<float> normal;
    std::vector<float> a(size_t(m * k)), b(size_t(n * k)), before(size_t(m * n) + 1);
    for (auto* list : {&a, &b, &before})
      for (float& value : *list) value = normal(random);
    if (beta == 0) before[0] = NAN;  // not read
    std::vector<float> first;
    for (int team : {1, 2, 3}) {
      Threads threads(team);
      std::vector<float> c = before;
      thin_product(threads, m, n, k, a.data(), b.data(), beta, c.data());
      EXPECT_EQ(c.back(), before.back()) << "nothing behind the matrix";
      if (first.empty()) first = c;
      EXPECT_EQ(c, first) << team << " threads";
    }
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        double want = beta != 0 ? double(before[size_t(i * n + j)]) : 0;
        for (int64_t l = 0; l < k; ++l) want += double(a[size_t(i * k + l)]) * double(b[size_t(j * k + l)]);
        // Sums of 200 terms of size 1 in f32.
        ASSERT_NEAR(first[size_t(i * n + j)], want, 2e-5) << m << " " << n << " " << k << " at " << i << ", " << j;
      }
  }
}

}  // namespace
}  // namespace strata::thin_product_test
