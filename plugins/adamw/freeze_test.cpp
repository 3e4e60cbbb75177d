// 1-bit Adam: adamw with a frozen second moment beside the form onebit, against a NumPy program of the paper, and what
// cannot be.
#include "plugins/adamw/onebit_adam_recorded.h"
#include "tests/apart_runs.h"
#include "tests/resumed_runs.h"

namespace strata::freeze_test {
namespace {

using test::kParallel, test::run_losses, test::zero_stage;

std::string config(int ranks, const std::string& options, const std::string& plugins, int micro_batch = 1) {
  std::string text = test::exchange_config(32, 4, ranks, plugins, micro_batch, "");
  return text.insert(text.find("learning_rate"), options + "\n");
}
const std::string kOneBit = "[plugins.onebit]\nminimum = 20\nstart = ";

TEST(OneBitAdam, StepsAreThoseOfThePaper) {
  using namespace adamw::recorded;
  std::string text = config(kRanks, "beta2 = 0.95\nepsilon = 1e-3\nfreeze = " + std::to_string(kFreeze),
                            kParallel + kOneBit + std::to_string(kFreeze) + "\n");
  const auto put = [&](const std::string& before, const std::string& after) {
    text.replace(text.find(before), before.size(), after);
  };
  put("global_batch = 8", "global_batch = 3");
  put("learning_rate = 1e-3", "learning_rate = 1e-2");
  run_local(
      kRanks,
      [&](World& world) {
        test::MadeUpGradients gradients("data");
        test::Runner runner(text, {{"made_up", &gradients}}, Goal::train, {}, &world);
        const std::vector<int32_t> tokens(128, 3);
        for (int step = 0; step < kSteps; ++step) {
          runner.run_step(tokens.data(), tokens.data());
          const std::vector<float> x = runner.values(gradients.name), m = runner.values(gradients.name + ".adamw.m");
          for (size_t i = 0; i < kElements; ++i) {
            EXPECT_NEAR(x[i], kExpected[step][0][i], 1e-5) << "step " << step + 1 << ", element " << i;
            EXPECT_NEAR(m[i], kExpected[step][1][i], 1e-5) << "step " << step + 1 << ", element " << i;
          }
        }
      },
      60);
}

// Uncompressed, the exchanged moment is Adam's own: only the second moment differs, and it is that of the step before.
TEST(OneBitAdam, WithoutAFormOnlyTheSecondMomentIsFrozen) {
  const auto run = [](const std::string& options, int ranks) {
    std::map<std::string, std::vector<float>> moments;
    std::mutex mutex;
    run_losses(ranks, config(ranks, options, kParallel, 2), 4, [&](test::Runner& runner, World& world, int step) {
      if (step != 3 || world.rank() > 0) return;
      const std::lock_guard lock(mutex);
      for (const Tensor& tensor : runner.storage->persistent_tensors())
        if (tensor.name.text().find(".adamw.") != std::string::npos) moments[tensor.name] = runner.values(tensor.name);
    });
    return moments;
  };
  const auto plain = run("", 2), frozen = run("freeze = 3", 2), alone = run("freeze = 3", 1);
  for (const auto& [name, values] : plain)
    for (size_t i = 0; i < values.size(); ++i)
      if (name.ends_with(".m")) {
        ASSERT_NEAR(frozen.at(name)[i], values[i], 1e-6 + 1e-4 * std::abs(values[i])) << name;
        ASSERT_NEAR(alone.at(name)[i], values[i], 1e-6 + 1e-4 * std::abs(values[i])) << name;
      } else if (values[i] > 1e-12f) {
        ASSERT_NE(frozen.at(name)[i], values[i]) << name;
      }
}

TEST(OneBitAdam, LearnsBesideOtherForms) {
  const std::string clip = "[plugins.clip]\nmax_norm = 1.0\n";
  const auto plain = run_losses(2, config(2, "", kParallel + clip, 2), 12);
  for (const std::string& form : {kOneBit + "6\n", std::string("[plugins.powersgd]\nrank = 2\nminimum_ratio = 1.0\n"),
                                  std::string("[plugins.recompute]\n")}) {
    SCOPED_TRACE(form);
    const auto losses = run_losses(2, config(2, "freeze = 6", kParallel + form + clip, 2), 12);
    EXPECT_NEAR(losses.back(), plain.back(), 0.1 * plain.back());
    EXPECT_LT(losses.back(), losses[6]) << "it learns when frozen";
  }
}

using OneBitAdamRuns = test::ResumedRuns;
TEST_F(OneBitAdamRuns, Resume) { expect_resumes(config(2, "freeze = 2", kParallel + kOneBit + "2\n", 2), 2, 4, 3); }

TEST(OneBitAdam, WhatCannotBeIsRefused) {
  const auto expect = [](const std::string& text, const std::string& message) {
    const std::string found = test::usage_error_of(text);
    EXPECT_NE(found.find(message), std::string::npos) << found;
  };
  const std::string half = "[plugins.mixed_precision]\ndtype = ";
  expect(config(2, "freeze = 2", zero_stage(1)), "sum whole gradients (data_parallel)");
  expect(config(2, "freeze = 2", kParallel + half + "\"fp16\"\n"), "train in bf16 or f32");
  expect(config(2, "freeze = 2", kParallel + half + "\"bf16\"\ngradients = \"bf16\"\n"), "with gradients in f32");
  expect(config(2, "freeze = -1", kParallel), "freeze");
}

}  // namespace
}  // namespace strata::freeze_test
