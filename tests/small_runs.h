// A few steps of a small model on random tokens, and whether two such runs are the same to the bit.
#pragma once
#include <cstring>
#include <random>

#include "tests/harness.h"

namespace strata::test {

struct SmallRun {
  std::vector<double> losses;
  std::vector<std::vector<float>> parameters;
};

// `runner` takes 4 sequences of 16 tokens of a vocabulary of 64 a step.
inline SmallRun small_run(Runner& runner, int steps = 4) {
  std::mt19937 random(7);
  std::vector<int32_t> tokens(4 * 16), targets(tokens.size());
  SmallRun result;
  for (int step = 0; step < steps; ++step) {
    for (auto* list : {&tokens, &targets})
      for (int32_t& token : *list) token = int32_t(random() % 64);
    result.losses.push_back(runner.run_step(tokens.data(), targets.data()));
  }
  for (TensorId id : runner.built.program.with_role(Role::parameter))
    result.parameters.push_back(runner.values(runner.built.program[id].name));
  return result;
}

inline void expect_equal(const SmallRun& a, const SmallRun& b, const std::string& what) {
  EXPECT_EQ(a.losses, b.losses) << what;
  ASSERT_EQ(a.parameters.size(), b.parameters.size());
  for (size_t i = 0; i < a.parameters.size(); ++i)
    EXPECT_EQ(std::memcmp(a.parameters[i].data(), b.parameters[i].data(), a.parameters[i].size() * 4), 0)
        << what << ", parameter " << i;
}

}  // namespace strata::test
