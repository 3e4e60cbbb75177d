// AdamW's kernel against its reference in double, and the reference against the formula written out.
#include "plugins/adamw/adamw_kernel.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "plugins/adamw/adamw_kernel.cpp"  // a plugin's code is not in the engine's library

namespace strata::adamw {
namespace {

struct State {
  std::vector<float> p, g, m, v;
};

State random_state(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  State s;
  for (int64_t i = 0; i < count; ++i) {
    s.p.push_back(normal(random));
    s.g.push_back(normal(random));
    s.m.push_back(0.1f * normal(random));
    s.v.push_back(std::abs(normal(random)));
  }
  return s;
}

TEST(AdamW, KernelAgreesWithReferenceInDouble) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  for (int threads : {1, 2, 3}) {
    Threads team(threads);
    for (int64_t count : {1, 7, 15, 16, 17, 31, 33, 1000, 4096, 4097, 20011}) {
      State s = random_state(count, seed + unsigned(count));
      std::vector<double> p(s.p.begin(), s.p.end()), g(s.g.begin(), s.g.end());
      std::vector<double> m(s.m.begin(), s.m.end()), v(s.v.begin(), s.v.end());
      const Settings settings{.learning_rate = 1e-2, .weight_decay = 0.1, .gradient_scale = 0.37};
      reference_update(p.data(), g.data(), m.data(), v.data(), count, settings, 5);
      update(team, s.p.data(), s.g.data(), s.m.data(), s.v.data(), count, factors<float>(settings, 5));
      for (int64_t i = 0; i < count; ++i) {
        // A handful of roundings of 2^-24 each, relative to the largest term of each sum (all at most 5 here).
        ASSERT_NEAR(s.m[i], m[i], 4 * 6e-8 * 5) << i;
        ASSERT_NEAR(s.v[i], v[i], 4 * 6e-8 * (1 + v[i])) << i;
        ASSERT_NEAR(s.p[i], p[i], 4 * 6e-8 * (5 + std::abs(p[i]))) << i;
      }
    }
  }
}

// Two steps by hand: with one element every term is easy to follow.
TEST(AdamW, FirstStepsFollowTheFormula) {
  const Settings settings{.beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .learning_rate = 0.1, .weight_decay = 0.1};
  double p = 1, m = 0, v = 0, g = 0.5;
  reference_update(&p, &g, &m, &v, 1, settings, 1);
  // At step 1 the corrected moments are g and g², so the step is lr·sign(g) whatever the size of g; epsilon
  // changes it by 2e-9.
  EXPECT_NEAR(p, 1 * (1 - 0.01) - 0.1, 1e-8);
  g = -0.25;
  reference_update(&p, &g, &m, &v, 1, settings, 2);
  const double m2 = 0.9 * 0.05 + 0.1 * -0.25, v2 = 0.95 * 0.0125 + 0.05 * 0.0625;
  EXPECT_NEAR(p, 0.89 * 0.99 - 0.1 * (m2 / (1 - 0.81)) / (std::sqrt(v2 / (1 - 0.9025)) + 1e-8), 1e-8);
}

TEST(AdamW, SameBitsForAnyNumberOfThreads) {
  const Settings settings;
  State one = random_state(50001, 1), three = one;
  Threads team1(1), team3(3);
  update(team1, one.p.data(), one.g.data(), one.m.data(), one.v.data(), 50001, factors<float>(settings, 3));
  update(team3, three.p.data(), three.g.data(), three.m.data(), three.v.data(), 50001, factors<float>(settings, 3));
  EXPECT_EQ(one.p, three.p);
  EXPECT_EQ(one.m, three.m);
  EXPECT_EQ(one.v, three.v);
}

}  // namespace
}  // namespace strata::adamw
