// Passes begun in the step before: a pipeline without flush on one rank. Against delayed gradients written by hand, and
// against each other: orders, ranks, tiers, devices, and runs that are resumed while passes are under way.
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <set>

#include "tests/backends.h"
#include "tests/descent.h"
#include "tests/harness.h"
#include "tests/resumed_runs.h"

namespace strata::begun_passes_test {
namespace {

using test::kRate, test::step_down;

constexpr int kVocabulary = 61, kSequence = 16;

// Which passes of the last microbatch wait for the next step, and when they run there.
class Delayed final : public Plugin {
 public:
  void options(Options& o) override {
    o.add("what", what_, "is delayed").choices({"backward", "weights", "half"});
    o.add("when", when_, "it runs in the next step").choices({"first", "middle", "last"});
    o.add("microbatches", count_, "that are delayed").positive();
  }
  void phases(PhaseStage& stage) override { stage.declare("filling", {.last = 1}); }
  void schedule(ScheduleStage& stage) override {
    using Part = Pass::Part;
    if (what_ == "half") stage.cut({0, 1});
    std::vector<Pass> now, begun;
    for (Pass pass : stage.order) {
      const bool late = pass.microbatch >= stage.microbatches - count_ && pass.part == Part::backward;
      Pass then = pass;
      then.microbatch -= stage.microbatches;
      if (!late) {
        now.push_back(pass);
      } else if (what_ == "weights") {  // gradients of activations stay in their step
        pass.part = Part::input_gradient;
        now.push_back(pass);
        then.part = Part::weight_gradient;
        begun.push_back(then);
      } else if (what_ == "half" && pass.chunk == 1) {  // the loss, too, is made in the next step
        std::erase_if(now, [&](const Pass& p) { return p.microbatch == pass.microbatch && p.chunk == 1; });
        begun.push_back({Part::forward, 1, then.microbatch});
        begun.push_back(then);
      } else {
        begun.push_back(then);
      }
    }
    if (!stage.phases.in("filling"))
      now.insert(when_ == "first"    ? now.begin()
                 : when_ == "middle" ? now.begin() + int64_t(now.size() / 2)
                                     : now.end(),
                 begun.begin(), begun.end());
    stage.order = now;
  }

 private:
  std::string what_ = "backward", when_ = "first";
  int64_t count_ = 1;
};
namespace descent {
using test::Descent;
STRATA_PLUGIN(Descent, "test_descent", "1", "gradient descent")
}  // namespace descent
namespace delayed {
STRATA_PLUGIN(Delayed, "delayed", "1", "leaves passes to the next step")
}

std::string toml(int batch, int ranks, const std::string& plugins, const std::string& run = "",
                 const std::string& model = "dropout = 0.1\nattention_dropout = 0.1\n") {
  return "[run]\n" + run + "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 32\nheads = 4\nffn = 71\nvocabulary = " +
         std::to_string(kVocabulary) + "\ncontext = 16\n" + model +
         "[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = " + std::to_string(batch) +
         "\nmicro_batch = 1\n[device]\nthreads = 1\n[mesh]\ndata = " + std::to_string(ranks) + "\n" + plugins;
}

using Values = std::map<std::string, std::vector<float>>;

Values parameters_of(const test::Runner& runner) {
  Values values;
  for (TensorId id : runner.built.program.with_role(Role::parameter)) {
    const std::string name = runner.built.program[id].name;
    values[name] = runner.values(name);
  }
  return values;
}

std::vector<int32_t> tokens_of(int step, int batch, uint32_t seed) {
  std::mt19937 random(seed + uint32_t(step) * 100);
  std::vector<int32_t> tokens(size_t(batch * kSequence));
  for (int32_t& token : tokens) token = int32_t(random() % kVocabulary);
  return tokens;
}

double step_of(test::Runner& runner, int step, int batch) {
  const auto tokens = tokens_of(step, batch, 1), targets = tokens_of(step, batch, 2);
  return runner.run_step(tokens.data(), targets.data(), step);
}

struct Outcome {
  std::vector<double> losses;
  Values parameters;
};

Outcome outcome(const std::string& text, int batch, int steps, World* world = nullptr, const std::string& backend = "",
                bool poisoned = false) {
  test::Runner runner(text, {}, Goal::train, {}, world, backend, test::device_of(backend));
  runner.poisoned = poisoned;
  Outcome result;
  for (int step = 1; step <= steps; ++step) result.losses.push_back(step_of(runner, step, batch));
  result.parameters = parameters_of(runner);
  return result;
}

void expect_equal(const Outcome& a, const Outcome& b) {
  EXPECT_EQ(a.losses, b.losses);
  ASSERT_FALSE(b.parameters.empty());
  EXPECT_EQ(a.parameters.size(), b.parameters.size());
  for (const auto& [name, values] : b.parameters) {
    ASSERT_EQ(a.parameters.at(name).size(), values.size()) << name;
    EXPECT_EQ(std::memcmp(a.parameters.at(name).data(), values.data(), values.size() * 4), 0) << name;
  }
}

// Each step computes loss and gradient at its parameters, with its dropout masks. The update takes the gradient of the
// step before, of the first none, but for parameters whose gradients are made at once (`prompt`).
Outcome delayed_by_hand(const std::string& text, int batch, int steps, World* world,
                        const std::set<std::string>& prompt) {
  test::KeepGradients keep;
  test::Runner runner(text, {{"keep", &keep}}, Goal::train, {}, world);
  Outcome result;
  Values parameters = parameters_of(runner), before;
  for (int step = 1; step <= steps; ++step) {
    for (const auto& [name, values] : parameters)
      std::memcpy(runner.storage->persistent(name), values.data(), values.size() * 4);
    result.losses.push_back(step_of(runner, step, batch));
    Values now;
    for (const auto& [name, id] : keep.tensors) now[name] = runner.values(id);
    for (auto& [name, values] : parameters)
      if (const bool at_once = prompt.contains(name); at_once || step > 1)
        step_down(values.data(), (at_once ? now : before).at(name).data(), int64_t(values.size()), kRate);
    before = std::move(now);
  }
  result.parameters = std::move(parameters);
  return result;
}

// What the first step updates, in which nothing waits yet.
std::set<std::string> updated_at_once(const std::string& text, bool& has_loss) {
  const test::TemporaryFolder folder;
  const Session session(test::write_file(folder / "config.toml", text), {});
  const Program program = session.plan(Goal::train).program();
  has_loss = !program.losses.empty();
  std::set<std::string> names;
  for (const Op& op : program.ops)
    if (op.step_part == StepPart::update) names.insert(program[program.whole(op.outputs[0])].name);
  return names;
}

// One microbatch a step and rank: the whole backward pass, which makes the loss as well, or the weight half of it.
TEST(BegunPasses, AreDelayedGradients) {
  constexpr int kSteps = 5;
  for (int ranks : {1, 2}) {
    const std::string exchange = ranks > 1 ? "[plugins.data_parallel]\n" : "";
    for (const std::string what : {"backward", "weights"}) {
      const auto text = [&](const std::string& when) {
        return toml(
            ranks, ranks,
            exchange + "[plugins.test_descent]\n[plugins.delayed]\nwhat = \"" + what + "\"\nwhen = \"" + when + "\"\n");
      };
      bool has_loss = false;
      const std::set<std::string> prompt = updated_at_once(text("first"), has_loss);
      EXPECT_EQ(prompt.empty(), what == "backward");
      EXPECT_FALSE(prompt.contains("block.0.qkv.weight"));
      EXPECT_EQ(has_loss, what == "weights");
      run_local(ranks, [&](World& world) {
        World* const some = ranks > 1 ? &world : nullptr;
        Outcome expected = delayed_by_hand(toml(ranks, ranks, exchange + "[plugins.test_descent]\nrate = 0.0\n"), ranks,
                                           kSteps, some, prompt);
        if (!has_loss) {  // each is told a step later
          expected.losses.insert(expected.losses.begin(), 0);
          expected.losses.pop_back();
        }
        for (const std::string when : {"first", "last"}) {
          SCOPED_TRACE(std::to_string(ranks) + " ranks, " + what + ", " + when);
          expect_equal(outcome(text(when), ranks, kSteps, some), expected);
        }
      });
    }
  }
}

// Several microbatches of which one or all are late: when in the step their passes run changes nothing where sums are
// taken in one order.
TEST(BegunPasses, AnyPlaceInTheNextStepGivesTheSame) {
  const std::string run = "reproducible = true\n";
  size_t number = 0;
  for (const std::string what : {"backward", "weights", "half"})
    for (const std::string count : {"1", "3"}) {
      if (test::left_out(number++)) continue;
      SCOPED_TRACE(what + " of " + count);
      const auto text = [&](const std::string& when, const std::string& more = "") {
        return toml(3, 1,
                    "[plugins.adamw]\n" + more + "[plugins.delayed]\nwhat = \"" + what + "\"\nmicrobatches = " + count +
                        "\nwhen = \"" + when + "\"\n",
                    run, "tied = false\ndropout = 0.1\nattention_dropout = 0.1\n");
      };
      const Outcome first = outcome(text("first"), 3, 4);
      expect_equal(outcome(text("last"), 3, 4), first);
      expect_equal(outcome(text("middle"), 3, 4, nullptr, "", true), first);
      // It is not what it would be without delay.
      EXPECT_NE(
          outcome(toml(3, 1, "[plugins.adamw]\n", run, "tied = false\ndropout = 0.1\nattention_dropout = 0.1\n"), 3, 4)
              .parameters,
          first.parameters);
    }
}

// What rests elsewhere, or is made again, does not change what passes find in the next step.
TEST(BegunPasses, RestLikeEverythingElse) {
  const test::TemporaryFolder folder;
  const std::string delayed = "[plugins.adamw]\n[plugins.clip]\nmax_norm = 0.1\n[plugins.delayed]\n";
  const Outcome plain = outcome(toml(2, 1, delayed), 2, 4);
  expect_equal(outcome(toml(2, 1, delayed + "[plugins.recompute]\n"), 2, 4), plain);
  for (const std::string where : {"host", "nvme"}) {
    const std::string offload = "[plugins.offload]\nminimum = 0\ndirectory = \"" + folder.path() +
                                "\"\noptimizer = \"" + where + "\"\nparameters = \"" + where + "\"\nactivations = \"" +
                                where + "\"\n";
    expect_equal(outcome(toml(2, 1, delayed + offload + "[plugins.recompute]\n"), 2, 4, nullptr, "", where == "host"),
                 plain);
  }
}

#if defined(STRATA_GPU) || defined(STRATA_EMULATED_CUDA)
TEST(Cuda, BegunPassesAgreeWithTheCpu) {
  STRATA_NEEDS_GPU();
  const auto text = [](const std::string& when) {
    return toml(2, 1, "[plugins.adamw]\n[plugins.delayed]\nwhen = \"" + when + "\"\n");
  };
  const Outcome cpu = outcome(text("first"), 2, 3), cuda = outcome(text("first"), 2, 3, nullptr, "cuda");
  for (size_t i = 0; i < cpu.losses.size(); ++i) EXPECT_NEAR(cuda.losses[i], cpu.losses[i], 1e-4 * cpu.losses[i]) << i;
  EXPECT_NEAR(cuda.losses.at(2), outcome(text("last"), 2, 3, nullptr, "cuda").losses.at(2), 1e-5);
}
#endif

using BegunPassesTraining = test::ResumedRuns;

// A checkpoint has what is under way, of each rank its own.
TEST_F(BegunPassesTraining, ResumesWhileTheyAreUnderWay) {
  for (int ranks : {1, 2})
    expect_resumes(toml(4, ranks, "[plugins.adamw]\n[plugins.data_parallel]\n[plugins.delayed]\nwhat = \"half\"\n"),
                   ranks, 4, 3);
}

// A schedule of a test's own.
class Ordered final : public Plugin {
 public:
  Ordered(std::optional<Steps> filling, std::function<void(ScheduleStage&, bool)> set)
      : filling_(filling), set_(std::move(set)) {}
  void phases(PhaseStage& stage) override {
    if (filling_) stage.declare("filling", *filling_);
  }
  void schedule(ScheduleStage& stage) override { set_(stage, filling_ && stage.phases.in("filling")); }

 private:
  std::optional<Steps> filling_;
  std::function<void(ScheduleStage&, bool)> set_;
};

std::string refusal(std::optional<Steps> filling, std::function<void(ScheduleStage&, bool)> set,
                    const std::string& plugins = "") {
  const test::TemporaryFolder folder;
  Ordered ordered(filling, std::move(set));
  Session session(test::write_file(folder / "config.toml", toml(2, 1, "[plugins.adamw]\n" + plugins)), {});
  session.plugins.push_back({"culprit", &ordered});
  session.rates = Rates();
  try {
    session.plan_run();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// The backward pass of microbatch 1 in the next step, but in the first.
void delay(ScheduleStage& stage, bool filling) {
  stage.order.back().microbatch = -1;
  if (filling) stage.order.pop_back();
}

TEST(BegunPasses, WhatDoesNotFitIsRefused) {
  const Steps first{.last = 1};
  EXPECT_EQ(refusal(first, delay), "");
  const auto expect = [](const std::string& found, const std::string& part) {
    EXPECT_NE(found.find(part), std::string::npos) << found;
  };
  const std::string begin = "plugin \"culprit\", stage schedule: ";
  expect(refusal({}, delay), begin +
                                 "pass 3 of the schedule, backward of chunk 0, microbatch -1: before the first step "
                                 "there is none. Declare a phase of step 1 alone");
  expect(refusal(Steps{.last = 2}, delay),
         begin + "the schedule never runs the input gradient of chunk 0, microbatch 1.");
  expect(refusal(first,
                 [](ScheduleStage& s, bool filling) {
                   if (filling) s.order.pop_back();
                 }),
         "leaves the input gradient of chunk 0, microbatch 1 to the next step, and that of no phase does not");
  expect(refusal(first,
                 [](ScheduleStage& s, bool filling) {
                   if (!filling) s.order.push_back({Pass::Part::backward, 0, -1});
                 }),
         "microbatch -1: it has run in the step that it was begun in.");
  expect(refusal(first,
                 [](ScheduleStage& s, bool filling) {
                   delay(s, filling);
                   if (!filling) s.order.push_back(s.order.back());
                 }),
         "microbatch -1: it has run before.");
  expect(refusal(first,
                 [](ScheduleStage& s, bool filling) {
                   if (filling) s.order.resize(2);
                   if (filling) return;
                   s.order.resize(2);
                   s.order.push_back({Pass::Part::backward, 0, -1});
                   s.order.push_back({Pass::Part::forward, 0, -1});
                 }),
         "it needs the forward of chunk 0, microbatch -1, which has not run yet.");
  expect(refusal(first,
                 [](ScheduleStage& s, bool filling) {
                   delay(s, filling);
                   if (!filling) s.order.back().microbatch = -3;
                 }),
         "in the step before from -2 to -1.");
  expect(refusal(first, delay, "[plugins.mixed_precision]\ndtype = \"fp16\"\n"),
         "in which the loss scale may be another");
}

}  // namespace
}  // namespace strata::begun_passes_test
