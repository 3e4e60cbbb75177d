// Hogwild: ranks really have one memory of parameters and see each other's updates within a step; runs learn; memory is
// planned and mapped once; checkpoints; what is refused. None of it depends on which rank is faster.
#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "engine/checkpoint/store.h"
#include "engine/planning/report.h"
#include "engine/runtime/trainer.h"
#include "strata/builder.h"
#include "tests/exchange_runs.h"
#include "tests/resumed_runs.h"

namespace strata::hogwild_test {
namespace {

using test::kParallel, test::run_losses, test::zero_stage;
using Values = std::vector<float>;

std::string config(int ranks, const std::string& plugins, int micro_batch = 1, const std::string& mesh = "") {
  return test::exchange_config(60, 3, ranks, plugins, micro_batch, mesh);
}
const std::string kHogwild = "[plugins.hogwild]\n", kClip = "[plugins.clip]\nmax_norm = 0.5\n",
                  kHalf = "[plugins.mixed_precision]\ndtype = \"bf16\"\n";

std::map<std::string, Values> parameters_of(const test::Runner& runner) {
  std::map<std::string, Values> all;
  for (TensorId id : runner.built.program.with_role(Role::parameter)) {
    const std::string name = runner.built.program[id].name;
    all[name] = runner.values(name);
  }
  return all;
}

// Both ranks have all their gradients before rank 0 updates anything, and rank 1 waits until rank 0 has updated all.
class Turns final : public Plugin {
 public:
  Turns() {
    static const bool once = [] {
      OpKind kind{.name = "test_turn", .summary = "x (…) -> x in place; waits for the other rank, or lets it go on"};
      kind.shape = [](const OpView& v) -> std::vector<TensorSpec> { return {{v.input(0).shape, v.input(0).dtype}}; };
      kind.kernels["cpu"] = {[](const Binding& b) -> Launch {
        return [rank = b.attributes().integer("coordinate"), waits = b.attributes().integer("waits") != 0] {
          (waits ? arrived_ : done_)[rank] = true;
          while (waits && !(rank == 0 ? arrived_[1] : done_[0])) std::this_thread::yield();
        };
      }};
      register_kind(std::move(kind));
      return true;
    }();
    (void)once;
    for (int rank : {0, 1}) arrived_[rank] = done_[rank] = false;
  }

  // Before the first update, and behind the last.
  void placement(ProgramStage& stage) override {
    std::vector<Op>& ops = stage.program.ops;
    const TensorId state = stage.program.with_role(Role::optimizer_state).front();
    const auto turn = [&](int64_t waits) {
      Op op = make_op("test_turn", {state}, {state}, {{"axis", "data"}, {"coordinate", int64_t{0}}, {"waits", waits}});
      op.step_part = StepPart::update;
      return op;
    };
    ops.push_back(turn(0));
    const auto first = std::find_if(ops.begin(), ops.end(), [](const Op& op) { return op.kind->name == "adamw"; });
    ASSERT_NE(first, ops.end());
    ops.insert(first, turn(1));
  }

 private:
  static inline std::atomic<bool> arrived_[2], done_[2];
};

// What one rank's optimizer does to parameters in its first step on its half of the sequences. Without weight decay it
// does not depend on what the parameters are by then.
std::map<std::string, Values> updates_of_half(const std::string& text, int half) {
  test::Runner runner(text);
  std::mt19937 random(7);  // as run_losses has it
  std::vector<int32_t> tokens(128), targets(tokens.size());
  for (auto* list : {&tokens, &targets})
    for (int32_t& token : *list) token = int32_t(random() % 61);
  std::map<std::string, Values> updates = parameters_of(runner);
  runner.run_step(tokens.data() + 64 * half, targets.data() + 64 * half);
  for (const auto& [name, values] : parameters_of(runner))
    for (size_t i = 0; i < values.size(); ++i) updates[name][i] = values[i] - updates[name][i];
  return updates;
}

// Rank 1 has read parameters, then rank 0 updates them, then rank 1 does: neither update is lost, though rank 1 has not
// begun another step. 1e-6: parameters near 1 are rounded twice.
TEST(Hogwild, UpdatesOfOthersAreSeenWithinAStep) {
  const std::string with = "weight_decay = 0.0\n" + kClip;  // all updates come after all gradients
  std::string half = config(1, with);
  half.replace(half.find("global_batch = 8"), 16, "global_batch = 4");
  const auto first = updates_of_half(half, 0), second = updates_of_half(half, 1);
  std::mutex mutex;
  std::map<std::string, Values> before, after[2];
  Turns turns;
  run_losses(
      2, config(2, with + kHogwild), 1,
      [&](test::Runner& runner, World& world, int step) {
        if (step < 0 && world.rank() == 0) before = parameters_of(runner);
        if (step == 0) after[world.rank()] = parameters_of(runner);
      },
      &turns);
  ASSERT_FALSE(before.empty());
  EXPECT_EQ(after[0], after[1]);
  double most = 0;
  for (const auto& [name, values] : before)
    for (size_t i = 0; i < values.size(); ++i) {
      const float both = first.at(name)[i] + second.at(name)[i];
      ASSERT_NEAR(after[0].at(name)[i] - values[i], both, 1e-6) << name << " " << i;
      most = std::max(most, double(std::abs(both)));
    }
  EXPECT_NEAR(most, 2e-3, 1e-5) << "two updates of 1e-3 each";
}

// As well as one rank that sees all sequences in each update, whatever else is enabled; more updates are not worse.
TEST(Hogwild, RunsLearn) {
  const auto plain = run_losses(1, config(1, kClip), 12);
  ASSERT_LT(plain.back(), plain.front() - 0.1);
  const auto expect_learns = [&](int ranks, const std::string& text) {
    SCOPED_TRACE(text);
    const auto losses = run_losses(ranks, text, 12);
    EXPECT_NEAR(losses.front(), plain.front(), 0.05 * plain.front());
    EXPECT_LT(losses.back(), plain.back() + 0.02 * plain.back());
  };
  for (int ranks : {2, 4}) expect_learns(ranks, config(ranks, kClip + kHogwild));
  expect_learns(2, config(2, kHogwild + kHalf + "[plugins.recompute]\n", 2));
  expect_learns(2, config(2, kParallel + kClip + kHogwild + "[plugins.gist]\nminimum = 0\n"));
}

// The file that memory of this process is of, as the system tells it.
std::string file_at(const void* place) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0, end = 0, inode = 0;
    char rest[64];
    if (std::sscanf(line.c_str(), "%lx-%lx %*s %*s %63s %lu", &begin, &end, rest, &inode) == 4 &&
        begin <= reinterpret_cast<unsigned long>(place) && reinterpret_cast<unsigned long>(place) < end)
      return std::to_string(inode);
  }
  return "";
}

// Planned as a part of the arena, and one file in memory under all ranks' parameters; nothing else is.
TEST(Hogwild, ParametersAreInMemoryOnce) {
  std::mutex mutex;
  std::set<std::string> files, other;
  int64_t parameters = 0;
  run_losses(4, config(4, kHogwild), 1, [&](test::Runner& runner, World&, int step) {
    const std::lock_guard lock(mutex);
    if (step != 0) return;
    parameters = 0;
    for (const Tensor& tensor : runner.storage->persistent_tensors()) {
      const void* place = runner.storage->persistent(tensor.name.text());
      if (tensor.role == Role::parameter) {
        files.insert(file_at(place));
        parameters += (tensor.bytes() + kAlignment - 1) / kAlignment * kAlignment;
      } else if (tensor.role == Role::optimizer_state) {
        other.insert(file_at(place));
      }
    }
    EXPECT_EQ(runner.plan.device().shared_bytes, (parameters + 4095) / 4096 * 4096);
  });
  EXPECT_EQ(files.size(), 1u);
  EXPECT_EQ(files.count("0"), 0u);
  EXPECT_EQ(other, std::set<std::string>{"0"});
  const test::TemporaryFolder folder;
  Session session(test::write_file(folder / "c.toml", config(4, kHogwild)), {});
  const RunPlans plans = session.plan_run(Goal::train);
  EXPECT_NE(plan_text(plans).find("one memory of all ranks of a host"), std::string::npos);
  EXPECT_NE(plan_json(plans).find("\"shared_bytes\": " + std::to_string((parameters + 4095) / 4096 * 4096)),
            std::string::npos);
  EXPECT_NE(plans.main().built.notes.at(0).find("no two runs are the same to the bit"), std::string::npos);
}

class HogwildRuns : public test::ResumedRuns {
 protected:
  // Rank 0's loss.
  double train_to(int ranks, int steps, bool resume, const std::string& with = "") const {
    const std::string path = test::write_file(folder_ / "c.toml", config(ranks, kHogwild + with, 2));
    double loss = 0;
    run_local(ranks, [&](World& world) {
      Session session(path,
                      {"run.steps=" + std::to_string(steps), "run.directory=\"" + (folder_ / "run") + "\"",
                       "data.train=[\"" + tokens() + "\"]"},
                      &world);
      const TrainSummary summary = train(session, {.resume = resume, .trace = ""});
      if (world.rank() == 0) loss = summary.loss;
    });
    return loss;
  }
  const test::TemporaryFolder folder_;
};

// Parameters are written once, states once a rank, and a run goes on with both, also with other ranks.
TEST_F(HogwildRuns, CheckpointsHoldParametersOnce) {
  const double first = train_to(2, 20, false);
  const Checkpoint checkpoint(folder_ / "run/step-00000020");
  const auto holds = [&](const std::string& name) { return checkpoint.tensors().count(name) == 1; };
  EXPECT_TRUE(holds("block.0.mlp.up.weight"));
  EXPECT_FALSE(holds("block.0.mlp.up.weight.apart.1"));
  int states = 0, of_second = 0;
  for (const auto& [name, entry] : checkpoint.tensors()) {
    states += entry.role == Role::optimizer_state;
    of_second += entry.role == Role::optimizer_state && name.ends_with(".apart.1");
  }
  EXPECT_GT(of_second, 0);
  EXPECT_EQ(states, 2 * of_second);
  const double second = train_to(2, 60, true), third = train_to(4, 61, true);
  EXPECT_LT(second, first);
  EXPECT_LT(third, first);
}

TEST(Hogwild, WhatCannotBeIsRefused) {
  const test::TemporaryFolder folder;
  const auto expect = [](const std::string& text, const std::string& message) {
    const std::string found = test::usage_error_of(text);
    EXPECT_NE(found.find(message), std::string::npos) << found;
  };
  expect("[run]\nreproducible = true\n" + config(2, kHogwild), "whose update comes first is left to chance");
  expect(config(2, kHogwild + zero_stage(1)), "\"hogwild\" and \"zero\" cannot work together");
  expect(config(2, kHogwild + "[plugins.gossip]\n"), "train apart in its own way");
  expect(config(2, kHogwild + "[plugins.onebit]\n"), "do not cross, in whatever form");
  expect(config(2, kHogwild + "[plugins.pipeline]\n", 1, "pipeline = 2\n"), "stages wait for each other in every step");
  expect(config(2, kHogwild + "[plugins.tensor_parallel]\n", 1, "tensor = 3\n"),
         "have alike would be in several memories, updated in another order in each");
  expect(config(2, kHogwild + "[plugins.mixed_precision]\ndtype = \"fp16\"\n"), "train without loss scaling");
  expect(config(2, kHogwild + "[plugins.offload]\nminimum = 0\nparameters = \"nvme\"\ndirectory = \"" + folder.path() +
                       "\"\n"),
         "is to rest on NVMe, but ranks have one memory of it");
}

}  // namespace
}  // namespace strata::hogwild_test
