// Residency: every strategy and combination against the plain run, bit for bit, with released memory poisoned.
#include <cstring>
#include <random>

#include "tests/harness.h"

namespace strata {
namespace {

constexpr int kLayers = 3, kHidden = 32, kSequence = 16, kBatch = 4;

std::string toml(int64_t micro_batch, const std::string& plugins, const std::string& model = "dropout = 0.1\n",
                 const std::string& optimizer = "[plugins.adamw]\n") {
  return "[model]\nplugin = \"gpt\"\nlayers = " + std::to_string(kLayers) + "\nhidden = " + std::to_string(kHidden) +
         "\nheads = 4\nvocabulary = 64\ncontext = 16\n" + model +
         "[data]\ntrain = [\"none\"]\nsequence_length = " + std::to_string(kSequence) +
         "\nglobal_batch = " + std::to_string(kBatch) + "\nmicro_batch = " + std::to_string(micro_batch) + "\n" +
         optimizer + plugins;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<std::vector<float>> parameters;
};

Outcome outcome(test::Runner& runner, int steps = 4) {
  std::mt19937 random(7);
  std::vector<int32_t> tokens(kBatch * kSequence), targets(tokens.size());
  Outcome result;
  for (int step = 0; step < steps; ++step) {
    for (auto* list : {&tokens, &targets})
      for (int32_t& token : *list) token = int32_t(random() % 64);
    result.losses.push_back(runner.run_step(tokens.data(), targets.data()));
  }
  for (TensorId id : runner.built.program.with_role(Role::parameter))
    result.parameters.push_back(runner.values(runner.built.program[id].name));
  return result;
}

void expect_equal(const Outcome& a, const Outcome& b, const std::string& what) {
  EXPECT_EQ(a.losses, b.losses) << what;
  ASSERT_EQ(a.parameters.size(), b.parameters.size());
  for (size_t i = 0; i < a.parameters.size(); ++i)
    EXPECT_EQ(std::memcmp(a.parameters[i].data(), b.parameters[i].data(), a.parameters[i].size() * 4), 0)
        << what << ", parameter " << i;
}

std::string offload(const std::string& optimizer, const std::string& gradients, const std::string& parameters,
                    const std::string& activations) {
  return "[plugins.offload]\nminimum = 0\ndirectory = \"" + std::filesystem::temp_directory_path().string() +
         "\"\noptimizer = \"" + optimizer + "\"\ngradients = \"" + gradients + "\"\nparameters = \"" + parameters +
         "\"\nactivations = \"" + activations + "\"\n";
}

// Every subset of tiers, with and without recomputation, clipping and accumulation.
TEST(Residency, EverySubsetIsExact) {
  const std::vector<std::string> tiers = {"device", "host", "nvme"};
  for (const std::string clip : {"", "[plugins.clip]\n"})
    for (int64_t micro_batch : {4, 2}) {
      test::Runner plain(toml(micro_batch, clip));
      const Outcome expected = outcome(plain);
      for (const std::string recompute : {"", "[plugins.recompute]\n", "[plugins.recompute]\nevery = 2\n",
                                          "[plugins.recompute]\nmode = \"selective\"\n"})
        for (int code = 0; code < 81; code += recompute.empty() ? 1 : 5) {
          const std::string extra =
              offload(tiers[code % 3], tiers[code / 3 % 3], tiers[code / 9 % 3], tiers[code / 27]);
          const std::string what = clip + recompute + extra;
          for (bool poisoned : {false, true}) {
            test::Runner runner(toml(micro_batch, clip + recompute + extra));
            runner.poisoned = poisoned;
            expect_equal(outcome(runner), expected, what);
          }
          if (testing::Test::HasFailure()) return;
        }
    }
}

// Inversion rounds differently from keeping: single precision's 1e-5 after a few steps.
TEST(Residency, InversionAgreesWithKeeping) {
  const std::string model = "dropout = 0.1\n", reversible = "[plugins.reversible]\n";
  test::Runner keeping(toml(2, reversible + "invert = false\n", model)), inverting(toml(2, reversible, model));
  const Outcome expected = outcome(keeping, 8), actual = outcome(inverting, 8);
  for (size_t i = 0; i < expected.losses.size(); ++i)
    EXPECT_NEAR(actual.losses[i], expected.losses[i], 1e-5 * expected.losses[i]) << i;
  const auto activations = [](const test::Runner& runner) { return runner.plan.device().at_peak[int(Role::activation)]; };
  EXPECT_LT(activations(inverting), activations(keeping));
  test::Runner poisoned(toml(2, reversible, model));
  poisoned.poisoned = true;
  expect_equal(outcome(poisoned, 8), actual, "released memory poisoned");
}

// Inverted blocks hold the activations of one block however many there are.
TEST(Residency, InversionNeedsNoMemoryForDepth) {
  const auto activations = [](int layers) {
    std::string text = toml(4, "[plugins.reversible]\n", "");
    text.replace(text.find("layers = 3"), 10, "layers = " + std::to_string(layers));
    return test::Runner(text).plan.device().at_peak[int(Role::activation)];
  };
  EXPECT_EQ(activations(4), activations(16));
}

}  // namespace
}  // namespace strata
