// Short runs on several ranks that are threads, for tests of forms of exchange: what is enabled beside them, losses,
// and refusals.
#pragma once
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tests/harness.h"

namespace strata::test {

inline const std::string kParallel = "[plugins.data_parallel]\nbucket = 20000\n";
inline std::string zero_stage(int stage) {
  return "[plugins.zero]\nbucket = 20000\nstage = " + std::to_string(stage) + "\n";
}
// Eight sequences of 16 tokens of 61 a step, for a model of two layers and an odd feed-forward size.
inline std::string exchange_config(int hidden, int heads, int ranks, const std::string& plugins, int micro_batch,
                                   const std::string& mesh) {
  return "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = " + std::to_string(hidden) +
         "\nheads = " + std::to_string(heads) +
         "\nffn = 71\nvocabulary = 61\ncontext = 16\n"
         "[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = 8\nmicro_batch = " +
         std::to_string(micro_batch) + "\n[device]\nthreads = 1\n[mesh]\ndata = " + std::to_string(ranks) + "\n" +
         mesh + "[plugins.adamw]\nlearning_rate = 1e-3\n" + plugins;
}

// The same tokens in every step, so that losses fall. `look` is called on each rank before (step -1) and after each
// step.
using Look = std::function<void(Runner&, World&, int step)>;
inline std::vector<double> run_losses(int ranks, const std::string& text, int steps, const Look& look = {},
                                      Plugin* plugin = nullptr) {
  std::vector<double> result;
  run_local(
      ranks,
      [&](World& world) {
        std::vector<NamedPlugin> more;
        if (plugin) more.push_back({"probe", plugin});
        Runner runner(text, more, Goal::train, {}, ranks > 1 ? &world : nullptr);
        std::mt19937 random(7);
        std::vector<int32_t> tokens(128), targets(tokens.size());
        for (auto* list : {&tokens, &targets})
          for (int32_t& token : *list) token = int32_t(random() % 61);
        if (look) look(runner, world, -1);
        for (int step = 0; step < steps; ++step) {
          const double loss = runner.run_step(tokens.data(), targets.data());
          if (world.rank() == 0) result.push_back(loss);
          if (look) look(runner, world, step);
        }
      },
      60);
  return result;
}

inline void expect_near(const std::vector<double>& actual, const std::vector<double>& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i)
    EXPECT_NEAR(actual[i], expected[i], tolerance * expected[i]) << "step " << i;
}

// What planning a run of the configuration says as wrong usage; "" where it is planned.
inline std::string usage_error_of(const std::string& text) {
  const TemporaryFolder folder;
  try {
    Session(write_file(folder / "config.toml", text), {}).plan(Goal::train);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    return error.what();
  }
  return "";
}

}  // namespace strata::test
