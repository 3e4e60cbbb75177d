// Whole programs: microbatch splits, bitwise reruns, plan against reality, budgets, schedules.
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>

#include "engine/runtime/usage.h"
#include "tests/harness.h"

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Counts what the C++ side of the process allocates, the engine's library included.
static std::atomic<int64_t> allocations{0};
void* operator new(size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
// Not inlined: the compiler would see free() of what `new` gave.
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
#define STRATA_COUNTS_ALLOCATIONS
#endif

namespace strata::program_test {
namespace {

std::string toml(int64_t micro_batch, const std::string& extra = "", const std::string& model = "") {
  return "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 32\nheads = 4\nvocabulary = 64\ncontext = 16\n" + model +
         "[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = 8\nmicro_batch = " +
         std::to_string(micro_batch) + "\n[plugins.adamw]\n" + extra;
}

std::vector<int32_t> random_tokens(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = int32_t(random() % 64);
  return tokens;
}

// Dropout on: only equal masks make these agree. Sums are taken in another order, so single precision's 1e-5.
TEST(Programs, MicrobatchSplitsAgree) {
  const auto tokens = random_tokens(8 * 16, 1), targets = random_tokens(8 * 16, 2);
  std::vector<std::vector<double>> losses;
  for (int64_t micro_batch : {8, 4, 2, 1}) {
    test::Runner runner(toml(micro_batch, "[plugins.clip]\n", "dropout = 0.2\n"));
    losses.emplace_back();
    for (int step = 0; step < 6; ++step) losses.back().push_back(runner.run_step(tokens.data(), targets.data()));
    for (size_t i = 0; i < losses.back().size(); ++i)
      EXPECT_NEAR(losses.back()[i], losses[0][i], 1e-5 * losses[0][i]) << micro_batch << " step " << i;
  }
  EXPECT_LT(losses[0].back(), losses[0].front());
}

TEST(Programs, RerunsAreBitwiseEqual) {
  const auto tokens = random_tokens(8 * 16, 1), targets = random_tokens(8 * 16, 2);
  std::vector<float> first;
  for (int run = 0; run < 2; ++run) {
    test::Runner runner(toml(2, "[plugins.clip]\n", "dropout = 0.1\n"));
    for (int step = 0; step < 4; ++step) runner.run_step(tokens.data(), targets.data());
    const auto values = runner.values("block.1.qkv.weight");
    if (run == 0)
      first = values;
    else
      EXPECT_EQ(std::memcmp(first.data(), values.data(), values.size() * 4), 0);
  }
}

#ifdef STRATA_COUNTS_ALLOCATIONS
TEST(Programs, StepsAllocateNothing) {
  const auto tokens = random_tokens(8 * 16, 1), targets = random_tokens(8 * 16, 2);
  test::Runner runner(toml(2, "[plugins.clip]\n", "dropout = 0.1\n"));
  runner.run_step(tokens.data(), targets.data());
  const int64_t before = allocations;
  runner.executor->run();
  EXPECT_EQ(allocations - before, 0);
}
#endif

// The whole program on plain reference kernels learns the same: the two backends agree to single precision.
TEST(Programs, ReferenceBackendAgrees) {
  const auto tokens = random_tokens(8 * 16, 1), targets = random_tokens(8 * 16, 2);
  test::Runner fast(toml(4, "[plugins.clip]\n")), plain(toml(4, "[plugins.clip]\n[device]\nbackend = \"reference\"\n"));
  for (int step = 0; step < 3; ++step)
    EXPECT_NEAR(fast.run_step(tokens.data(), targets.data()), plain.run_step(tokens.data(), targets.data()), 2e-5);
}

// Gradients that no clipping waits for are consumed as they arrive: far fewer bytes than all of them.
TEST(Programs, GradientsAreConsumedAsTheyArrive) {
  const test::Runner streaming(toml(8, "", "tied = false\n")), waiting(toml(8, "[plugins.clip]\n", "tied = false\n"));
  const auto gradients = [](const test::Runner& runner) {
    int64_t most = 0;
    for (const Ledger& live : timeline(runner.built.program, runner.plan))
      most = std::max(most, live[int(Role::gradient)]);
    return most;
  };
  EXPECT_LT(gradients(streaming) * 3, gradients(waiting));
}

TEST(Programs, BudgetIsHardAndSaysWhatIsLargest) {
  try {
    Program program = test::Runner(toml(8)).built.program;
    plan_residency(program, {.device_budget = 1000, .advice = [](const MemoryPlan&) { return " Try less."; }});
    FAIL();
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("device.memory allows 1000 B"), std::string::npos) << text;
    EXPECT_NE(text.find("optimizer_state"), std::string::npos) << text;
    EXPECT_NE(text.find("Try less."), std::string::npos) << text;
  }
}

// The program of a step is checked as a whole; who broke it is named all the same, also where another one fails for it.
class LateBreaker final : public Plugin {
 public:
  void gradients(GradientStage& stage) override {
    for (Op& op : stage.build().program().ops)
      if (op.kind->name == "layer_norm") op.inputs[1] = {};
  }
};
class Victim final : public Plugin {
 public:
  void update(UpdateStage& stage) override {
    for (const Op& op : stage.build().program().ops)
      if (op.kind->name == "layer_norm" && !op.inputs[1]) throw std::runtime_error("what is this?");
  }
};
class Placer final : public Plugin {
 public:
  void placement(ProgramStage& stage) override { stage.program.ops.back().inputs[0] = {}; }
};

TEST(Programs, WhoBreaksTheProgramOfAStepIsNamed) {
  LateBreaker breaker;
  Victim victim;
  Placer placer;
  const auto message = [](std::vector<NamedPlugin> plugins) {
    try {
      test::Runner runner(toml(2), std::move(plugins));
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const std::string first = "the program is not well formed after \"culprit\", stage \"gradients\": op ";
  EXPECT_EQ(message({{"culprit", &breaker}}).find(first), 0u);
  EXPECT_EQ(message({{"culprit", &breaker}, {"victim", &victim}}).find(first), 0u);
  EXPECT_EQ(
      message({{"culprit", &placer}}).find("the program is not well formed after \"culprit\", stage \"placement\""),
      0u);
}

// How often shape rules are asked does not grow with microbatches: what a step's planning costs.
TEST(Programs, RulesAreAskedOnceForAllMicrobatches) {
  static std::atomic<int> asked;
  [[maybe_unused]] static const OpKind& kind =
      register_kind({.name = "test_counts_questions",
                     .summary = "",
                     .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                       ++asked;
                       return {{v.input(0).shape, DType::f32}};
                     },
                     .gradient = [](Differentiation& d) { d.set(0, d.output_gradient(0)); },
                     .kernels = {{"cpu", {[](const Binding&) -> Launch { return [] {}; }}}}});
  class Asks final : public Plugin {
   public:
    void model(ModelStage& stage) override {
      stage.wrap("mlp", [](Builder& build, TensorId x, const ModelStage::Module& inner) {
        return build.emit("test_counts_questions", {inner(build, x)});
      });
    }
  } asks;
  std::vector<int> counts;
  for (int64_t micro_batch : {8, 4, 1}) {
    asked = 0;
    const test::Runner runner(toml(micro_batch), {{"asks", &asks}});
    counts.push_back(asked);
  }
  EXPECT_GT(counts[0], 0);
  EXPECT_EQ(counts[0], counts[1]);
  EXPECT_EQ(counts[0], counts[2]);
}

// Forward passes first, then backward passes (GPipe's order): the same gradients from a plugin of five lines.
class AllForwardFirst final : public Plugin {
 public:
  void schedule(ScheduleStage& stage) override {
    std::stable_sort(stage.order.begin(), stage.order.end(),
                     [](const Pass& a, const Pass& b) { return a.part < b.part; });
  }
};

TEST(Programs, SchedulesAgree) {
  const auto tokens = random_tokens(8 * 16, 1), targets = random_tokens(8 * 16, 2);
  AllForwardFirst gpipe;
  test::Runner plain(toml(2)), reordered(toml(2), {{"gpipe", &gpipe}});
  for (int step = 0; step < 3; ++step)
    EXPECT_EQ(plain.run_step(tokens.data(), targets.data()), reordered.run_step(tokens.data(), targets.data()));
  EXPECT_GT(reordered.plan.device().transient_bytes,
            plain.plan.device().transient_bytes);  // activations of all microbatches at once
}

// Multiplies gradients by a scalar of its own: a further input of what it appends, set before each step.
class Halves final : public Plugin {
 public:
  void gradients(GradientStage& stage) override {
    const TensorId factor = stage.build().scalar("half");
    for (Gradient& gradient : stage.gradients()) {
      stage.append("scale", {gradient}, {}, {factor});
      const Op& op = stage.build().program().ops.back();
      EXPECT_EQ(op.inputs.size(), 2u);
      EXPECT_EQ(op.inputs[1], factor);
      EXPECT_EQ(op.outputs[0], gradient.tensor);
    }
  }
  void step_start(StepContext& context) override { context.set_scalar(name, 0.5); }
  std::string name = "half";
};

TEST(Programs, OnlyScalarsAreSetAndOnlyByTheirName) {
  const auto tokens = random_tokens(8 * 16, 1), targets = random_tokens(8 * 16, 2);
  Halves halves;
  test::Runner runner(toml(2), {{"halves", &halves}});
  runner.run_step(tokens.data(), targets.data());
  EXPECT_EQ(runner.scalar("half"), 0.5);
  const auto message = [&](const std::string& name) {
    try {
      runner.set_scalar(name, 7);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message("hafl"), "no scalar is named \"hafl\" in this program. Did you mean \"half\"?");
  const std::string parameter = runner.built.program[runner.built.program.with_role(Role::parameter)[0]].name;
  const std::vector<float> before = runner.values(parameter);
  EXPECT_NE(message(parameter).find("\"" + parameter + "\" is no scalar, but one of the parameters, f32("),
            std::string::npos)
      << message(parameter);
  EXPECT_EQ(runner.values(parameter), before);
  for (const std::string_view step : {kStepScalar, kSeedScalar, kLearningRateFactor})  // read by the program or not
    EXPECT_EQ(message(std::string(step)), "");
}

}  // namespace
}  // namespace strata::program_test
