// 8-bit AdamW: the maps against the published construction, bounds of quantization, agreement with AdamW in fp32.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "plugins/adamw8bit/adamw8bit_kernel.cpp"  // a plugin's code is not in the engine's library
#include "tests/harness.h"

namespace strata::adamw8bit {
namespace {

// The construction of the paper's reference code, written down apart: for exponent i of 7, linspace(0.1, 1) in 2^i (or
// twice as many) intervals, their means times 10^(i-6), then 0 and 1.
std::vector<double> published(bool has_sign) {
  std::vector<double> values{0, 1};
  for (int i = 0; i < 7; ++i) {
    const int intervals = has_sign ? 1 << i : 2 << i;
    for (int k = 0; k < intervals; ++k) {
      const double low = 0.1 + 0.9 * k / intervals, high = 0.1 + 0.9 * (k + 1) / intervals;
      const double mean = (low + high) / 2 * std::pow(10.0, i - 6);
      values.push_back(mean);
      if (has_sign) values.push_back(-mean);
    }
  }
  std::sort(values.begin(), values.end());
  return values;
}

TEST(AdamW8Bit, MapsAreThePublishedOnes) {
  for (bool has_sign : {true, false}) {
    Map map = has_sign ? signed_map() : unsigned_map();
    EXPECT_EQ(map[0], 0.0f);
    std::sort(map.begin(), map.end());
    const std::vector<double> expected = published(has_sign);
    ASSERT_EQ(expected.size(), map.size());
    for (size_t i = 0; i < map.size(); ++i) EXPECT_NEAR(map[i], expected[i], 1e-6 * std::abs(expected[i])) << i;
  }
}

// Codes give back the values of the map, and no number is farther from its value than the width of its cell.
TEST(AdamW8Bit, CodesAreRight) {
  for (int code = 0; code < 256; ++code) {
    EXPECT_EQ(encode_signed(signed_map()[size_t(code)]), code);
    EXPECT_EQ(encode_unsigned(unsigned_map()[size_t(code)], false), code);
  }
  std::mt19937 random(5);
  std::uniform_real_distribution<float> exponent(-7, 0);
  for (int i = 0; i < 100000; ++i) {
    const float x = std::pow(10.0f, exponent(random));
    const double decade = std::pow(10.0, std::floor(std::log10(double(x))));  // x is in [decade, 10 decade)
    const int index = int(std::lround(std::log10(decade))) + 7;
    for (bool has_sign : {true, false}) {
      const double cell = 9 * decade / (has_sign ? 1 << index : 2 << index);
      const float value = has_sign ? signed_map()[encode_signed(x)] : unsigned_map()[encode_unsigned(x, true)];
      ASSERT_LE(std::abs(value - x), 0.5 * cell * 1.0001 + 1e-12) << x;
      if (has_sign && x < 0.99f) {
        ASSERT_EQ(signed_map()[encode_signed(-x)], -value) << x;
      }
    }
  }
  EXPECT_EQ(encode_unsigned(1e-30f, true), 1);
  EXPECT_EQ(encode_unsigned(0.0f, true), 0);
  EXPECT_EQ(encode_signed(1e-30f), 0);
}

// One step from zero states takes moments in full precision: the same parameters as AdamW to rounding.
TEST(AdamW8Bit, FirstStepIsAdamW) {
  for (int64_t n : {1, 255, 256, 257, 100003}) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> p(static_cast<size_t>(n)), g(p.size());
    for (float& x : p) x = normal(random);
    for (float& x : g) x = normal(random);
    std::vector<std::vector<float>> results;
    for (int count : {1, 2}) {
      Threads team(count);
      std::vector<float> q = p, m_scale(size_t(blocks(n))), v_scale(m_scale.size());
      std::vector<uint8_t> m(p.size()), v(p.size());
      update(team, q.data(), g.data(), m.data(), m_scale.data(), v.data(), v_scale.data(), 1, n, {}, 1);
      for (int64_t i = 0; i < n; ++i) {
        const double first = 0.1 * g[size_t(i)], second = 0.05 * double(g[size_t(i)]) * g[size_t(i)];
        const double want =
            p[size_t(i)] * (1 - 3e-4 * 0.1) - 3e-4 / 0.1 * first / (std::sqrt(second) / std::sqrt(0.05) + 1e-8);
        ASSERT_NEAR(q[size_t(i)], want, 1e-6 * (1 + std::abs(want)));
        ASSERT_NEAR(signed_map()[m[size_t(i)]] * m_scale[size_t(i / kBlock)], first,
                    0.051 * m_scale[size_t(i / kBlock)]);
      }
      results.push_back(q);
    }
    EXPECT_EQ(results[0], results[1]);  // whatever the number of threads
  }
}

// Whoever holds which elements: the largest moments of a block are taken over its parts, so bits are those of one.
TEST(AdamW8Bit, PartsHaveTheBitsOfTheWhole) {
  const int64_t whole = 1000;
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  struct Values {
    std::vector<float> p, m_scale, v_scale;
    std::vector<uint8_t> m, v;
  };
  Values one{std::vector<float>(whole), std::vector<float>(size_t(blocks(whole))),
             std::vector<float>(size_t(blocks(whole))), std::vector<uint8_t>(whole), std::vector<uint8_t>(whole)};
  for (float& x : one.p) x = normal(random);
  Values parts = one;
  Threads team(1);
  for (int step = 1; step <= 3; ++step) {
    std::vector<float> g(whole);
    for (float& x : g) x = normal(random);
    update(team, one.p.data(), g.data(), one.m.data(), one.m_scale.data(), one.v.data(), one.v_scale.data(), 1, whole,
           {}, step);
    const std::vector<int64_t> cuts{0, 333, 667, whole};  // 256 and 768 lie within parts
    const size_t n = size_t(blocks(whole));
    std::vector<float> most(2 * n);
    for (size_t r = 0; r + 1 < cuts.size(); ++r) {
      std::vector<float> of_part(2 * n);
      largest_of_part(g.data() + cuts[r], parts.m.data() + cuts[r], parts.m_scale.data(), parts.v.data() + cuts[r],
                      parts.v_scale.data(), cuts[r], cuts[r + 1] - cuts[r], whole, {}, step, of_part.data(),
                      of_part.data() + n);
      for (size_t i = 0; i < most.size(); ++i) most[i] = std::max(most[i], of_part[i]);
    }
    const Values before = parts;
    for (size_t r = 0; r + 1 < cuts.size(); ++r) {
      parts.m_scale = before.m_scale, parts.v_scale = before.v_scale;  // each rank's own
      update_part(parts.p.data() + cuts[r], g.data() + cuts[r], parts.m.data() + cuts[r], parts.m_scale.data(),
                  parts.v.data() + cuts[r], parts.v_scale.data(), most.data(), most.data() + n, cuts[r],
                  cuts[r + 1] - cuts[r], whole, {}, step);
    }
    EXPECT_EQ(parts.p, one.p);
    EXPECT_EQ(parts.m, one.m);
    EXPECT_EQ(parts.v, one.v);
    EXPECT_EQ(parts.m_scale, one.m_scale);
    EXPECT_EQ(parts.v_scale, one.v_scale);
  }
}

std::vector<double> losses(const std::string& optimizer, int64_t* state_bytes) {
  test::Runner runner(
      "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 64\nheads = 4\nvocabulary = 64\ncontext = 16\n"
      "[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = 4\nmicro_batch = 4\n" +
      optimizer);
  *state_bytes = 0;
  for (TensorId id : runner.built.program.with_role(Role::optimizer_state))
    *state_bytes += runner.built.program[id].bytes();
  std::mt19937 random(3);
  std::vector<int32_t> tokens(64);
  for (int32_t& token : tokens) token = int32_t(random() % 64);
  const std::vector<int32_t> targets(tokens.rbegin(), tokens.rend());
  std::vector<double> result;
  for (int step = 0; step < 60; ++step) result.push_back(runner.run_step(tokens.data(), targets.data()));
  return result;
}

// The loss falls as with fp32 moments, within 3% of its start, on a quarter of the memory.
TEST(AdamW8Bit, LearnsAsAdamWDoes) {
  int64_t full = 0, small = 0;
  const auto expected = losses("[plugins.adamw]\nlearning_rate = 3e-3\n", &full);
  const auto actual = losses("[plugins.adamw8bit]\nlearning_rate = 3e-3\n", &small);
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 0.03 * expected[0]) << i;
  EXPECT_LT(expected.back(), 0.5 * expected.front());
  EXPECT_LT(double(small), 0.27 * double(full));
}

}  // namespace
}  // namespace strata::adamw8bit
