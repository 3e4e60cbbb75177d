// Residency: every strategy and combination against the plain run, bit for bit, with released memory poisoned.
#include <cstring>
#include <random>

#include "tests/random_cases.h"
#include "tests/small_runs.h"

namespace strata::residency_test {
namespace {

using test::expect_equal;
using test::small_run;
using test::SmallRun;

constexpr int kLayers = 3, kHidden = 32, kSequence = 16, kBatch = 4;

std::string toml(int64_t micro_batch, const std::string& plugins,
                 const std::string& model = "dropout = 0.1\nattention_dropout = 0.1\n",
                 const std::string& optimizer = "[plugins.adamw]\n") {
  return "[model]\nplugin = \"gpt\"\nlayers = " + std::to_string(kLayers) + "\nhidden = " + std::to_string(kHidden) +
         "\nheads = 4\nvocabulary = 64\ncontext = 16\n" + model +
         "[data]\ntrain = [\"none\"]\nsequence_length = " + std::to_string(kSequence) +
         "\nglobal_batch = " + std::to_string(kBatch) + "\nmicro_batch = " + std::to_string(micro_batch) + "\n" +
         optimizer + plugins;
}

std::string offload(const std::string& directory, const std::string& optimizer, const std::string& gradients,
                    const std::string& parameters, const std::string& activations) {
  return "[plugins.offload]\nminimum = 0\ndirectory = \"" + directory + "\"\noptimizer = \"" + optimizer +
         "\"\ngradients = \"" + gradients + "\"\nparameters = \"" + parameters + "\"\nactivations = \"" + activations +
         "\"\n";
}

// Every subset of tiers, with and without recomputation, clipping and accumulation.
TEST(Residency, EverySubsetIsExact) {
  const std::vector<std::string> tiers = {"device", "host", "nvme"};
  test::TemporaryFolder folder;
  size_t number = 0;
  for (const std::string clip : {"", "[plugins.clip]\n"})
    for (int64_t micro_batch : {4, 2}) {
      test::Runner plain(toml(micro_batch, clip));
      const SmallRun expected = small_run(plain);
      for (const std::string recompute : {"", "[plugins.recompute]\n", "[plugins.recompute]\nevery = 2\n",
                                          "[plugins.recompute]\nmode = \"selective\"\n"})
        for (int code = 0; code < 81; code += recompute.empty() && clip.empty() && micro_batch == 2 ? 1 : 20) {
          if (test::left_out(number++)) continue;
          const std::string extra =
              offload(folder.path(), tiers[code % 3], tiers[code / 3 % 3], tiers[code / 9 % 3], tiers[code / 27]);
          const std::string what = clip + recompute + extra;
          test::Runner runner(toml(micro_batch, clip + recompute + extra));
          runner.poisoned = code % 2;
          expect_equal(small_run(runner), expected, what);
          if (testing::Test::HasFailure()) return;
        }
    }
}

// Any subset of strategies, optimizers and budgets, drawn by chance: the plain run's losses and parameters bit for bit.
TEST(Residency, RandomCombinationsAreExact) {
  test::TemporaryFolder folder;
  const uint32_t base = std::random_device{}();
  const std::vector<std::string> tiers = {"device", "host", "nvme"};
  for (uint32_t seed = base; seed < base + uint32_t(test::cases(10)); ++seed) {
    std::mt19937 random(seed);
    const auto pick = [&](const std::vector<std::string>& from) { return from[random() % from.size()]; };
    const std::string model =
        pick({"dropout = 0.1\nattention_dropout = 0.1\n", "activation = \"relu\"\n",
              "activation = \"squared_relu\"\ndropout = 0.2\n",
              "activation = \"swiglu\"\nnorm = \"rms_norm\"\npositions = \"rotary\"\nkv_heads = 2\n"});
    const std::string optimizer =
        pick({"[plugins.adamw]\n", "[plugins.adafactor]\n", "[plugins.sm3]\n", "[plugins.adamw8bit]\n"}) +
        pick({"", "[plugins.clip]\nmax_norm = 0.1\n"});
    const int64_t micro_batch = int64_t(1) << random() % 3;
    test::Runner plain(toml(micro_batch, "", model, optimizer));
    const SmallRun expected = small_run(plain);
    const int64_t bytes = plain.plan.device().total_bytes();
    std::string extra = offload(folder.path(), pick(tiers), pick(tiers), pick(tiers), pick(tiers));
    extra += pick({"", "[plugins.recompute]\n", "[plugins.recompute]\nevery = 2\n",
                   "[plugins.recompute]\nmode = \"selective\"\n", "[plugins.recompute]\nmode = \"budget\"\n"});
    extra += pick({"", "[plugins.gist]\nminimum = 0\ncapacity = 1.0\n"});
    if (random() % 2) extra += "[device]\nmemory = " + std::to_string(bytes * int64_t(60 + random() % 50) / 100) + "\n";
    if (random() % 3 == 0)
      extra += "[host]\nmemory = " + std::to_string(bytes) + "\n";
    else if (random() % 2)
      extra += "[host]\nthreads = 1\n";
    const std::string text = toml(micro_batch, extra, model, optimizer);
    SCOPED_TRACE("seed " + std::to_string(seed) + "\n" + text);
    for (bool poisoned : {false, true}) {
      std::unique_ptr<test::Runner> runner;
      try {
        runner = std::make_unique<test::Runner>(text);
      } catch (const Error& error) {  // a budget that is too small says so; that is tested elsewhere
        ASSERT_GT(test::smallest_in(error.what()), 0) << error.what();
        break;
      }
      runner->poisoned = poisoned;
      expect_equal(small_run(*runner), expected, poisoned ? "poisoned" : "");
    }
    if (HasFailure()) return;
  }
}

#if defined(STRATA_EMULATED_CUDA)
// With room for all a step takes no longer for what may be elsewhere: gradients that come to an update by way of a cast
// stay with its states, too.
TEST(Residency, WithRoomForAllNothingTakesLonger) {
  const test::TemporaryFolder folder;
  const auto seconds = [](const std::string& optimizer, const std::string& plugins) {
    return test::planned(toml(1, optimizer + "[plugins.clip]\n" + plugins, "", "") +
                         "[plugins.mixed_precision]\ngradients = \"bf16\"\n[device]\nbackend = \"cuda\"\nmemory = "
                         "\"1GiB\"\n")
        .prediction->seconds;
  };
  for (const std::string optimizer : {"[plugins.adamw]\n", "[plugins.sm3]\n", "[plugins.adafactor]\n"})
    for (const std::string states : {"device", "host", "nvme"})
      for (const std::string parameters : {"device", "host"})
        EXPECT_LE(seconds(optimizer, offload(folder.path(), states, "host", parameters, "host")),
                  1.001 * seconds(optimizer, ""))
            << optimizer << states << parameters;
}
#endif

}  // namespace
}  // namespace strata::residency_test
