// Gossip: each rank's steps beside a NumPy program of the paper, what it composes with, what crosses and when, and what
// checkpoints hold.
#include "tests/apart_runs.h"
#include "tests/resumed_runs.h"

namespace strata::gossip_test {
namespace {

using test::expect_near, test::kParallel, test::run_apart, test::run_losses, test::zero_stage;

std::string config(int ranks, const std::string& plugins, int micro_batch = 1, const std::string& mesh = "") {
  return test::exchange_config(32, 4, ranks, plugins, micro_batch, mesh);
}
const std::string kGossip = "[plugins.gossip]\n", kGroups = "axis = \"replicate\"\n", kTwoGroups = "replicate = 2\n",
                  kClip = "[plugins.clip]\nmax_norm = 0.1\n";

TEST(Gossip, StepsAreThoseOfThePaper) {
  using namespace apart::recorded;
  test::expect_recorded(kGossip, apart::recorded::kGossip);
  test::expect_recorded(zero_stage(1) + kGossip, apart::recorded::kGossip, 2);
}

TEST(Gossip, LossesDoNotDependOnWhatElseIsEnabled) {
  test::TemporaryFolder folder;
  const std::string nvme = "[plugins.offload]\nminimum = 0\ndirectory = \"" + folder.path() +
                           "\"\noptimizer = \"nvme\"\ngradients = \"host\"\nparameters = \"host\"\n";
  const auto groups = [&](const std::string& with) {
    return run_losses(4, config(4, with + kGossip + kGroups + kClip, 1, kTwoGroups), 6);
  };
  const auto expected = groups(kParallel);
  EXPECT_LT(expected.back(), expected.front() - 0.05) << "it learns";
  for (const std::string& with : {zero_stage(2), zero_stage(3), kParallel + nvme}) {
    SCOPED_TRACE(with);
    expect_near(groups(with), expected, 1e-5);
  }
  expect_near(groups(zero_stage(1) + "[plugins.mixed_precision]\ndtype = \"bf16\"\n"), expected, 2e-2);
  expect_near(run_losses(4, config(2, kGossip + kClip + "[plugins.tensor_parallel]\n", 2, "tensor = 2\n"), 6),
              run_losses(2, config(2, kGossip + kClip, 2), 6), 1e-5);
}

// Each neighbour gets all parameters once; the exchange waits for nothing of the step.
TEST(Gossip, ParametersCrossBehindTheStep) {
  for (const int ranks : {2, 4}) {
    std::mutex mutex;
    double sent = 0, parameters = 0;
    run_losses(ranks, config(ranks, kGossip + "every = 2\nbucket = 20000\n"), 3,
               [&](test::Runner& runner, World& world, int step) {
                 if (step != 2) return;
                 const std::lock_guard lock(mutex);
                 for (const auto& [axis, group] : runner.groups)
                   if (axis != "loop") sent += double(group->bytes_sent());
                 if (world.rank() != 0) return;
                 for (TensorId id : runner.built.program.with_role(Role::parameter))
                   parameters += double(runner.built.program[id].bytes());
                 const std::vector<Op>& ops = runner.plans.programs[1].program().ops;
                 size_t last_exchange = 0, first_attention = ops.size();
                 for (size_t i = 0; i < ops.size(); ++i) {
                   if (ops[i].kind->name == "shift") last_exchange = i;
                   if (ops[i].kind->name == "attention") first_attention = std::min(first_attention, i);
                 }
                 EXPECT_GT(last_exchange, 0u);
                 EXPECT_LT(last_exchange, first_attention);
               });
    EXPECT_EQ(sent, ranks * (ranks > 2 ? 2 : 1) * parameters) << ranks;  // in one step of three
  }
}

TEST(Gossip, CheckpointsHoldWhatEachRankHas) {
  test::TemporaryFolder folder;
  const auto two = run_apart(2, config(2, kGossip), 3, "", folder / "two");
  EXPECT_EQ(run_apart(2, config(2, kGossip), 0, folder / "two", "").values, two.values);
  EXPECT_NE(two.values[0], two.values[1]);
  const auto four = run_apart(4, config(4, kGossip), 0, folder / "two", "");
  for (const auto& of_rank : four.values) EXPECT_EQ(of_rank, two.values[0]) << "the first rank's";
  EXPECT_EQ(run_apart(1, config(1, ""), 0, folder / "two", "").values[0], two.values[0]);
  EXPECT_FALSE(four.loaded.begun_together.empty());
}

using GossipRuns = test::ResumedRuns;
TEST_F(GossipRuns, Resume) { expect_resumes(config(2, kGossip, 2), 2, 3, 2); }

TEST(Gossip, WhatCannotBeIsRefused) {
  const auto expect = [](const std::string& text, const std::string& message) {
    const std::string found = test::usage_error_of(text);
    EXPECT_NE(found.find(message), std::string::npos) << found;
  };
  expect("[run]\nreproducible = true\n" + config(2, kGossip),
         "cannot work with run.reproducible, because ranks that train apart");
  expect(config(2, kGossip + "every = 0\n"), "every");
  expect(config(2, zero_stage(2) + kGossip), "lets its ranks train apart");
}

}  // namespace
}  // namespace strata::gossip_test
