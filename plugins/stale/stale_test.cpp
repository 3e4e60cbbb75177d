// Stale gradients: each update is of the sum of an earlier step's gradients and no other, exchanges begin before
// anything that they could wait for, runs do not depend on what else is enabled, and go on exactly after a resume.
#include <cmath>
#include <mutex>

#include "tests/exchange_runs.h"
#include "tests/resumed_runs.h"

namespace strata::stale_test {
namespace {

using test::expect_near, test::kParallel, test::run_losses, test::zero_stage;
using Values = std::vector<float>;

std::string config(int ranks, const std::string& plugins, int micro_batch = 4, const std::string& mesh = "") {
  return test::exchange_config(60, 3, ranks, plugins, micro_batch, mesh);
}
std::string stale(int steps) { return "[plugins.stale]\nsteps = " + std::to_string(steps) + "\n"; }

// Keeps what each rank gives and gets readable after the step.
class Probe final : public Plugin {
 public:
  void gradients(GradientStage& stage) override {
    Program& program = stage.build().program();
    for (const Op& op : program.ops) {
      if (op.kind->name == "stale_keep") program[op.inputs[0]].step_output = true;
      if (op.kind->exchange)
        for (TensorId id : op.outputs) program[id].step_output = true;
    }
  }
};

// Of two ranks a sum is exact, so what an update is of has the bits of the sum that it should be; at first it is 0.
TEST(Stale, AnUpdateIsOfTheSumOfAnEarlierStep) {
  for (const std::string& wanting : {kParallel, zero_stage(1)})
    for (int steps : {1, 3}) {
      SCOPED_TRACE(wanting + std::to_string(steps));
      Probe probe;
      std::mutex mutex;
      std::map<std::pair<int, std::string>, Values> given, got;  // by step and parameter
      run_losses(
          2, config(2, wanting + stale(steps)), 6,
          [&](test::Runner& runner, World&, int step) {
            if (step < 0) return;
            const std::lock_guard lock(mutex);
            const Program& program = runner.built.program;
            std::map<int32_t, std::string> parameter;  // by what was taken
            for (const Op& op : program.ops) {
              if (op.kind->name == "stale_take") {
                const std::string name = program[op.inputs[0]].name.text();
                parameter[op.outputs[0].value] = name.substr(0, name.find(".stale."));
              } else if (op.kind->name == "stale_keep" && !program[op.inputs[0]].persistent) {
                const std::string name = program[op.outputs[0]].name.text();
                Values& sum = given[{step, name.substr(0, name.find(".stale."))}];
                const Values own = runner.values(op.inputs[0]);
                sum.resize(own.size());
                for (size_t i = 0; i < own.size(); ++i) sum[i] += own[i];
              } else if (op.kind->exchange && !op.inputs.empty() && parameter.contains(op.inputs[0].value)) {
                for (size_t i = 0; i < op.inputs.size(); ++i) {
                  Values& whole = got[{step, parameter[op.inputs[i].value]}];
                  if (wanting == kParallel)
                    whole = runner.values(op.outputs[i]);
                  else
                    test::put_together(program[op.outputs[i]], runner.values(op.outputs[i]), whole);
                }
              }
            }
          },
          &probe);
      ASSERT_FALSE(got.empty());
      for (const auto& [at, sum] : got)
        EXPECT_EQ(sum, at.first < steps ? Values(sum.size()) : (given[{at.first - steps, at.second}]))
            << at.second << " in step " << at.first;
    }
}

// The exchanges are the first ops of the step, so that all of it hides them.
TEST(Stale, ExchangesWaitForNothingOfTheStep) {
  run_local(2, [&](World& world) {
    test::Runner runner(config(2, kParallel + stale(1), 2), {}, Goal::train, {}, &world);
    const auto& ops = runner.built.program.ops;
    size_t last_exchange = 0, first_attention = ops.size();
    for (size_t i = 0; i < ops.size(); ++i) {
      if (ops[i].kind->name == "all_reduce") last_exchange = i;
      if (ops[i].kind->name == "attention") first_attention = std::min(first_attention, i);
    }
    EXPECT_GT(last_exchange, 0u);
    EXPECT_LT(last_exchange, first_attention);
  });
}

// One microbatch a step, so ZeRO 2 and 3 delay by steps as well. Only the order of sums differs.
TEST(Stale, LossesDoNotDependOnWhatElseIsEnabled) {
  test::TemporaryFolder folder;
  const std::string clip = "[plugins.clip]\nmax_norm = 0.1\n", half = "[plugins.mixed_precision]\ndtype = ",
                    nvme = "[plugins.offload]\nminimum = 0\ndirectory = \"" + folder.path() +
                           "\"\noptimizer = \"nvme\"\ngradients = \"host\"\nparameters = \"host\"\n";
  const auto expected = run_losses(2, config(2, kParallel + stale(1) + clip), 8);
  EXPECT_NE(expected, run_losses(2, config(2, kParallel + clip), 8));
  EXPECT_LT(expected.back(), expected.front() - 0.05) << "it learns";
  for (const std::string& with : {zero_stage(1), zero_stage(2), zero_stage(3), kParallel + nvme,
                                  zero_stage(3) + nvme + "[plugins.recompute]\n"}) {
    SCOPED_TRACE(with);
    expect_near(run_losses(2, config(2, with + stale(1) + clip), 8), expected, 1e-5);
  }
  expect_near(run_losses(2, config(2, zero_stage(1) + stale(1) + clip, 2), 8), expected, 1e-5);
  expect_near(run_losses(4, config(4, zero_stage(1) + stale(1) + clip, 1, "replicate = 2\n"), 8), expected, 1e-5);
  expect_near(
      run_losses(6, config(2, kParallel + stale(1) + clip + "[plugins.tensor_parallel]\n", 4, "tensor = 3\n"), 8),
      expected, 1e-5);
  expect_near(run_losses(2, config(2, kParallel + stale(1) + clip + half + "\"bf16\"\n"), 8), expected, 2e-2);
  expect_near(run_losses(2, config(2, zero_stage(1) + stale(1) + clip + half + "\"fp16\"\nloss_scale = 256.0\n"), 8),
              expected, 2e-2);
}

// A step that overflows leaves what is kept as it was.
TEST(Stale, SkippedStepsKeepNothing) {
  const std::string text =
      config(2, kParallel + stale(1) + "[plugins.mixed_precision]\ndtype = \"fp16\"\nloss_scale = 33554432.0\n");
  int skipped = 0, made = 0;
  std::map<std::string, Values> before;
  run_losses(2, text, 6, [&](test::Runner& runner, World& world, int step) {
    if (step < 0 || world.rank() != 0) return;
    bool changed = false;
    for (const Tensor& tensor : runner.storage->persistent_tensors()) {
      if (tensor.name.text().find(".stale.") == std::string::npos) continue;
      const Values now = runner.values(tensor.name);
      for (float value : now) ASSERT_TRUE(std::isfinite(value)) << tensor.name;
      changed |= !before[tensor.name].empty() && before[tensor.name] != now;
      before[tensor.name] = now;
    }
    ++(changed ? made : skipped);
  });
  EXPECT_GT(skipped, 0);
  EXPECT_GT(made, 0);
}

using StaleRuns = test::ResumedRuns;
TEST_F(StaleRuns, ResumeOnceAStep) { expect_resumes(config(2, kParallel + stale(2), 2), 2, 3, 2); }
TEST_F(StaleRuns, ResumeOfEachMicrobatch) { expect_resumes(config(2, zero_stage(2) + stale(1), 2), 2, 3, 2); }

TEST(Stale, WhatCannotBeIsRefused) {
  const auto expect = [](const std::string& text, const std::string& message) {
    const std::string found = test::usage_error_of(text);
    EXPECT_NE(found.find(message), std::string::npos) << found;
  };
  expect("[run]\nreproducible = true\n" + config(2, kParallel + stale(1)),
         "cannot work with run.reproducible, because");
  expect(config(2, kParallel + stale(0)), "steps");
  expect(config(2, kParallel + stale(17)), "at most 16");
  expect(config(2, kParallel + stale(1) + "[plugins.powersgd]\n"), "form");
}

}  // namespace
}  // namespace strata::stale_test
