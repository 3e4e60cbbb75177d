// Which token is drawn, and when generation ends; logits are given here.
#include "engine/runtime/generator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "strata/error.h"

namespace strata::generator_test {
namespace {

const std::vector<float> kLogits{std::log(0.05f), std::log(0.5f), std::log(0.15f), std::log(0.3f)};

std::map<int32_t, int> draws(const SamplingOptions& options) {
  std::map<int32_t, int> counts;
  for (uint64_t i = 0; i < 2000; ++i) ++counts[sample(kLogits, options, i)];
  return counts;
}

// 2000 draws: five standard deviations of a share are below 0.056.
void expect_shares(const SamplingOptions& options, const std::map<int32_t, double>& shares) {
  const std::map<int32_t, int> counts = draws(options);
  EXPECT_EQ(counts.size(), shares.size());
  for (const auto& [id, share] : shares) {
    ASSERT_TRUE(counts.contains(id)) << id;
    EXPECT_NEAR(counts.at(id) / 2000.0, share, 0.056) << id;
  }
}

TEST(Sample, FollowsTheOptions) {
  expect_shares({.temperature = 0}, {{1, 1}});
  expect_shares({.temperature = 1}, {{0, 0.05}, {1, 0.5}, {2, 0.15}, {3, 0.3}});
  expect_shares({.temperature = 1, .top_k = 2}, {{1, 0.625}, {3, 0.375}});
  expect_shares({.temperature = 1, .top_k = 9}, {{0, 0.05}, {1, 0.5}, {2, 0.15}, {3, 0.3}});
  expect_shares({.temperature = 1, .top_p = 0.6}, {{1, 0.625}, {3, 0.375}});  // the one that reaches it is in
  expect_shares({.temperature = 1, .top_p = 0}, {{1, 1}});
  expect_shares({.temperature = 1, .top_k = 3, .top_p = 0.9}, {{1, 10 / 19.0}, {3, 6 / 19.0}, {2, 3 / 19.0}});
  // Squares of the probabilities.
  expect_shares({.temperature = 0.5}, {{0, 0.0025 / 0.365}, {1, 0.25 / 0.365}, {2, 0.0225 / 0.365}, {3, 0.09 / 0.365}});
  EXPECT_EQ(draws({.temperature = 1, .seed = 3}), draws({.temperature = 1, .seed = 3}));
  EXPECT_NE(draws({.temperature = 1, .seed = 3}), draws({.temperature = 1, .seed = 4}));
}

// After token t comes t + 1, the last one after itself.
class Counting final : public NextLogits {
 public:
  int64_t vocabulary() const override { return 8; }
  void of(std::span<const std::vector<int32_t>> sequences, float* logits) override {
    for (const std::vector<int32_t>& sequence : sequences) {
      std::fill_n(logits, 8, 0.0f);
      logits[std::min(sequence.back() + 1, 7)] = 9;
      logits += 8;
    }
    ++calls;
  }
  int calls = 0;
};

using Told = std::vector<std::vector<int32_t>>;
Told told_of(Counting& model, const Told& prompts, const SamplingOptions& options) {
  Told told(prompts.size());
  generate(model, prompts, options, [&](size_t prompt, int32_t id) { told[prompt].push_back(id); });
  return told;
}

TEST(Generate, EndsEachPromptWhereItEnds) {
  Counting model;
  EXPECT_EQ(told_of(model, {{1, 2}, {5}, {}}, {.tokens = 3, .temperature = 0}),
            (Told{{3, 4, 5}, {6, 7, 7}, {1, 2, 3}}));
  EXPECT_EQ(model.calls, 3);
  EXPECT_EQ(told_of(model, {{1, 2}, {4}}, {.tokens = 9, .temperature = 0, .ends = {5}}), (Told{{3, 4}, {}}));
  EXPECT_EQ(model.calls, 6) << "it goes on until the last has ended";
}

TEST(Generate, RefusesTokensThatTheModelDoesNotKnow) {
  Counting model;
  try {
    told_of(model, {{1}, {8}}, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "the prompt holds token 8, but the model knows only ids below 8.");
  }
}

}  // namespace
}  // namespace strata::generator_test
