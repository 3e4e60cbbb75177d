// Local SGD and DiLoCo: each rank's steps beside NumPy programs of the papers, what they compose with, what crosses and
// when, and what checkpoints in the middle hold.
#include "tests/apart_runs.h"
#include "tests/resumed_runs.h"

namespace strata::local_sgd_test {
namespace {

using test::expect_near, test::kParallel, test::run_apart, test::run_losses, test::zero_stage;

std::string config(int ranks, const std::string& plugins, int micro_batch = 1, const std::string& mesh = "") {
  return test::exchange_config(32, 4, ranks, plugins, micro_batch, mesh);
}
std::string local(int every, const std::string& more = "") {
  return "[plugins.local_sgd]\nevery = " + std::to_string(every) + "\n" + more;
}
const std::string kGroups = "axis = \"replicate\"\n", kTwoGroups = "replicate = 2\n",
                  kClip = "[plugins.clip]\nmax_norm = 0.1\n";

TEST(LocalSgd, StepsAreThoseOfThePapers) {
  using namespace apart::recorded;
  test::expect_recorded(local(3), kDiLoCo);
  test::expect_recorded(local(3, "outer = \"average\"\n"), kLocalSgd);
  test::expect_recorded(local(3, "overlap = true\nkeep = 0.25\n"), kStreaming);
}

// ZeRO within each of three groups that train apart.
TEST(LocalSgd, StepsOfGroupsAreThoseOfThePapers) {
  using namespace apart::recorded;
  for (int stage : {1, 2}) test::expect_recorded(zero_stage(stage) + local(3), kDiLoCo, 2);
}

// What ranks of a group divide among them changes only the order of sums.
TEST(LocalSgd, LossesDoNotDependOnWhatElseIsEnabled) {
  test::TemporaryFolder folder;
  const std::string half = "[plugins.mixed_precision]\ndtype = \"bf16\"\n",
                    nvme = "[plugins.offload]\nminimum = 0\ndirectory = \"" + folder.path() +
                           "\"\noptimizer = \"nvme\"\ngradients = \"host\"\nparameters = \"host\"\n";
  const auto groups = [&](const std::string& with) {
    return run_losses(4, config(4, with + local(3, kGroups) + kClip, 1, kTwoGroups), 8);
  };
  const auto expected = groups(kParallel);
  EXPECT_NE(expected, run_losses(4, config(4, kParallel + kClip, 1, kTwoGroups), 8));
  EXPECT_LT(expected.back(), expected.front() - 0.05) << "it learns";
  for (const std::string& with : {zero_stage(1), zero_stage(2), zero_stage(3), kParallel + nvme,
                                  zero_stage(3) + nvme + "[plugins.recompute]\n"}) {
    SCOPED_TRACE(with);
    expect_near(groups(with), expected, 1e-5);
  }
  expect_near(groups(zero_stage(1) + half), expected, 2e-2);
  // Groups of one rank, and of two that share the work.
  const auto alone = run_losses(2, config(2, local(3) + kClip, 2), 8);
  expect_near(alone, expected, 1e-5);
  expect_near(run_losses(4, config(2, local(3) + kClip + "[plugins.tensor_parallel]\n", 2, "tensor = 2\n"), 8), alone,
              1e-5);
  EXPECT_EQ(run_losses(2, config(2, kParallel + local(3) + kClip, 2), 8), alone) << "nothing is left to sum";
}

// Between outer updates nothing but losses crosses; in one, every parameter once.
TEST(LocalSgd, BytesOnTheWireFollowTheFormula) {
  std::mutex mutex;
  double sent = 0, parameters = 0;
  run_losses(2, config(2, local(3)), 7, [&](test::Runner& runner, World& world, int step) {
    if (step != 6) return;
    const std::lock_guard lock(mutex);
    for (const auto& [axis, group] : runner.groups)
      if (axis != "loop") sent += double(group->bytes_sent());
    if (world.rank() != 0) return;
    ASSERT_EQ(runner.plans.phases.programs(), 2u);
    for (size_t p = 0; p < 2; ++p) {
      const Program& program = runner.plans.programs[p].program();
      double crossing = 0;
      for (const Op& op : program.ops)
        for (TensorId id : op.inputs)
          if (op.kind->exchange && id) crossing += double(program[id].bytes());
      if (p == 0)
        for (TensorId id : program.with_role(Role::parameter)) parameters += double(program[id].bytes());
      EXPECT_EQ(crossing, p == 0 ? 0 : parameters);
    }
  });
  EXPECT_EQ(sent / 2, 2 * parameters / 2 * 2);  // 2 (n − 1) / n, in each of two outer updates
}

// Each part once in six steps, behind a step that it does not wait for.
TEST(LocalSgd, PartsCrossOneAfterTheOther) {
  run_losses(2, config(2, local(6, "parts = 3\noverlap = true\n")), 1,
             [](test::Runner& runner, World& world, int step) {
               if (step < 0 || world.rank() != 0) return;
               std::map<std::string, int> crossed;  // by parameter
               double bytes = 0, most = 0, parameters = 0;
               for (TensorId id : runner.built.program.with_role(Role::parameter))
                 parameters += double(runner.built.program[id].bytes());
               for (int64_t at = 7; at < 13; ++at) {
                 const Program& program = runner.plans.programs[runner.plans.of_step(at)].program();
                 double of_step = 0;
                 size_t exchange = 0, attention = program.ops.size();
                 for (size_t i = 0; i < program.ops.size(); ++i) {
                   if (program.ops[i].kind->name == "attention") attention = std::min(attention, i);
                   if (!program.ops[i].kind->exchange) continue;
                   exchange = i;
                   for (TensorId id : program.ops[i].inputs)
                     of_step += double(program[id].bytes()), ++crossed[program[id].name];
                 }
                 EXPECT_EQ(of_step > 0, at % 2 == 1) << at;  // taken in steps 2, 4, 6
                 EXPECT_LT(exchange, attention) << at;
                 bytes += of_step, most = std::max(most, of_step);
               }
               EXPECT_EQ(bytes, parameters);
               EXPECT_LT(most, 0.6 * parameters);
               for (const auto& [name, times] : crossed) EXPECT_EQ(times, 1) << name;
             });
  const auto losses = run_losses(2, config(2, local(6, "parts = 3\noverlap = true\n")), 14);
  EXPECT_LT(losses.back(), losses.front() - 0.05) << "it learns";
}

TEST(LocalSgd, ChangesCrossInTheFormsOfGradients) {
  const auto full = run_losses(2, config(2, local(3)), 8);
  for (const std::string form :
       {"[plugins.quantized_exchange]\n", "[plugins.powersgd]\nrank = 2\nminimum_ratio = 1.0\n",
        "[plugins.onebit]\nminimum = 100\n"}) {
    SCOPED_TRACE(form);
    const auto losses = run_losses(2, config(2, local(3) + form), 8);
    EXPECT_NE(losses, full);
    for (size_t i = 0; i < 4; ++i)
      EXPECT_NEAR(losses[i], full[i], i < 3 ? 1e-12 : 0.2) << "step " << i;  // until an outer update nothing crosses
    EXPECT_LT(losses.back(), losses.front() - 0.05) << "it learns";
  }
}

TEST(LocalSgd, OnOneRankItDoesNothing) {
  EXPECT_EQ(run_losses(1, config(1, local(3)), 5), run_losses(1, config(1, ""), 5));
  const test::TemporaryFolder folder;
  const PlannedProgram planned =
      Session(test::write_file(folder / "config.toml", config(1, local(3))), {}).plan(Goal::train);
  ASSERT_EQ(planned.built.notes.size(), 1u);
  EXPECT_EQ(planned.built.notes[0],
            "plugin \"local_sgd\": it does nothing here: axis \"data\" of the mesh has one rank.");
}

bool is_parameter(const std::string& name) { return name.ends_with(".weight") || name.ends_with(".bias"); }

// Saved one step behind an outer update.
TEST(LocalSgd, CheckpointsHoldWhatEachRankHas) {
  test::TemporaryFolder folder;
  const auto text = [](int ranks) { return config(ranks, local(3)); };
  const auto saved = run_apart(2, text(2), 4, "", folder / "two");
  const auto same = run_apart(2, text(2), 0, folder / "two", "");
  EXPECT_EQ(same.values, saved.values);
  EXPECT_TRUE(same.loaded.begun_anew.empty() && same.loaded.begun_together.empty());
  // Others go on with what the ranks had together, and the first rank's moments.
  const auto four = run_apart(4, text(4), 0, folder / "two", "");
  const auto plain = run_apart(1, config(1, ""), 0, folder / "two", "");
  const auto from_model = run_apart(2, text(2), 0, folder / "two", "", false);
  EXPECT_TRUE(plain.loaded.begun_together.empty() && from_model.loaded.begun_together.empty());
  size_t parameters = 0;
  for (const auto& [name, values] : saved.values[0]) {
    const bool own = is_parameter(name);
    const std::string outer = name + ".local_sgd.outer";
    parameters += own;
    if (own) {
      EXPECT_NE(values, saved.values[1].at(name)) << name;
      EXPECT_NE(values, saved.values[0].at(outer)) << name;
      EXPECT_EQ(saved.values[1].at(outer), saved.values[0].at(outer)) << name;
      EXPECT_EQ(plain.values[0].at(name), saved.values[0].at(outer)) << name;
      for (const auto& of_rank : from_model.values) {
        EXPECT_EQ(of_rank.at(name), saved.values[0].at(outer)) << name;
        EXPECT_EQ(of_rank.at(outer), saved.values[0].at(outer)) << name;
      }
    }
    for (const auto& of_rank : four.values) EXPECT_EQ(of_rank.at(name), saved.values[0].at(own ? outer : name)) << name;
  }
  EXPECT_EQ(four.loaded.begun_together.size(), 3 * parameters);  // and two moments of each
  EXPECT_TRUE(four.loaded.begun_anew.empty());
}

TEST(LocalSgd, GoesOnFromRunsWithoutIt) {
  test::TemporaryFolder folder;
  const auto plain = run_apart(2, config(2, kParallel), 2, "", folder / "plain");
  const auto apart = run_apart(2, config(2, local(3)), 0, folder / "plain", "");
  EXPECT_FALSE(apart.loaded.begun_together.empty());
  for (const auto& [name, values] : plain.values[0])
    for (const auto& of_rank : apart.values) {
      EXPECT_EQ(of_rank.at(name), values) << name;
      if (is_parameter(name)) {
        EXPECT_EQ(of_rank.at(name + ".local_sgd.outer"), values) << name;
      }
    }
}

using LocalSgdRuns = test::ResumedRuns;
TEST_F(LocalSgdRuns, Resume) { expect_resumes(config(2, local(3), 2), 2, 5, 4); }
TEST_F(LocalSgdRuns, ResumeOfParts) { expect_resumes(config(2, local(4, "parts = 2\noverlap = true\n"), 2), 2, 7, 6); }
TEST_F(LocalSgdRuns, ResumeWithWhatFormsRemember) {
  expect_resumes(config(2, local(2) + "[plugins.powersgd]\nrank = 2\nminimum_ratio = 1.0\n", 2), 2, 5, 3);
}
TEST_F(LocalSgdRuns, ResumeOfGroups) {
  expect_resumes(
      config(4, zero_stage(2) + local(3, kGroups) + "[plugins.mixed_precision]\ndtype = \"bf16\"\n", 1, kTwoGroups), 4,
      5, 2, {"run.save_behind=true"});
}

TEST(LocalSgd, WhatCannotBeIsRefused) {
  const auto expect = [](const std::string& text, const std::string& message) {
    const std::string found = test::usage_error_of(text);
    EXPECT_NE(found.find(message), std::string::npos) << found;
  };
  expect("[run]\nreproducible = true\n" + config(2, local(3)),
         "cannot work with run.reproducible, because ranks that train apart");
  expect(config(2, local(0)), "every");
  expect(config(2, local(3, "outer = \"average\"\nmomentum = 0.5\n")), "of outer = \"nesterov\" alone");
  expect(config(2, local(3, "keep = 0.25\n")), "without overlap an outer update leaves nothing to keep");
  expect(config(2, local(3, "parts = 4\n")), "every = 3 steps are too few for parts = 4");
  expect(config(2, local(30, "parts = 10\noverlap = true\n")), "more than 16");
  expect(config(2, zero_stage(2) + local(3)),
         "plugin \"zero\" divides what is summed over axis \"shard\", but plugin \"local_sgd\" lets its ranks train "
         "apart");
  expect(config(2, local(3) + "[plugins.mixed_precision]\ndtype = \"fp16\"\n"), "train without loss scaling");
  expect(config(2, local(3) + "[plugins.gossip]\n"), "each has ranks train apart in its own way");
  expect(config(4, local(3, kGroups), 1, kTwoGroups), "no enabled plugin sums gradients over them");
}

}  // namespace
}  // namespace strata::local_sgd_test
