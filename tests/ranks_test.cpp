// Several ranks against one: data parallelism and every ZeRO stage, with every other strategy, over threads.
#include <cstring>
#include <random>

#include "tests/harness.h"

namespace strata {
namespace {

constexpr int kSequence = 16, kBatch = 8, kVocabulary = 61;

std::string toml(int ranks, int micro_batch, const std::string& plugins, const std::string& run = "",
                 const std::string& mesh = "") {
  return "[run]\n" + run + "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 32\nheads = 4\nffn = 71\nvocabulary = " +
         std::to_string(kVocabulary) +
         "\ncontext = 16\ndropout = 0.1\n[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = " +
         std::to_string(kBatch) + "\nmicro_batch = " + std::to_string(micro_batch) +
         "\n[device]\nthreads = 1\n[mesh]\ndata = " + std::to_string(ranks) + "\n" + mesh + plugins;
}

struct Outcome {
  std::vector<double> losses;
  std::map<std::string, std::vector<float>> tensors;  // whole, put together from all ranks' parts
};

constexpr int kSteps = 10;

void steps(test::Runner& runner, std::vector<double>* losses) {
  std::mt19937 random(7);
  std::vector<int32_t> tokens(kBatch * kSequence), targets(tokens.size());
  for (int step = 0; step < kSteps; ++step) {
    for (auto* list : {&tokens, &targets})
      for (int32_t& token : *list) token = int32_t(random() % kVocabulary);
    const double loss = runner.run_step(tokens.data(), targets.data());
    if (losses) losses->push_back(loss);
  }
}

Outcome outcome(int ranks, const std::string& text, bool poisoned = false) {
  Outcome result;
  std::mutex mutex;
  run_local(
      ranks,
      [&](World& world) {
        test::Runner runner(text, {}, Goal::train, {}, ranks > 1 ? &world : nullptr);
        runner.poisoned = poisoned;
        steps(runner, world.rank() == 0 ? &result.losses : nullptr);
        for (const Tensor& tensor : runner.storage->persistent_tensors()) {
          if (tensor.role == Role::scalar || tensor.dtype != DType::f32) continue;
          const std::vector<float> values = runner.values(tensor.name);
          std::lock_guard lock(mutex);
          std::vector<float>& whole = result.tensors[tensor.name];
          whole.resize(size_t(elements(tensor.full_shape())));
          const int64_t row = elements(tensor.shape) / tensor.shape[0];
          const int64_t first = tensor.layout.empty() ? 0 : tensor.layout[0].first * row;
          std::copy(values.begin(), values.end(), whole.begin() + first);
        }
      },
      30);
  return result;
}

// Sums are taken in another order: 1e-5 of the largest magnitude after ten steps, as fp32 gives.
void expect_close(const Outcome& actual, const Outcome& expected, const std::string& what) {
  ASSERT_EQ(actual.losses.size(), expected.losses.size());
  for (size_t i = 0; i < expected.losses.size(); ++i)
    EXPECT_NEAR(actual.losses[i], expected.losses[i], 1e-5 * expected.losses[i]) << what << ", step " << i;
  for (const auto& [name, values] : expected.tensors) {
    if (!actual.tensors.contains(name)) {
      ADD_FAILURE() << what << " lacks " << name;
      continue;
    }
    if (name.find("adamw.") != std::string::npos || name.find("sm3.") != std::string::npos ||
        name.find("adafactor.") != std::string::npos)
      continue;  // states: compared bit for bit in reproducible runs
    double difference = 0, largest = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      difference = std::max(difference, double(std::abs(actual.tensors.at(name)[i] - values[i])));
      largest = std::max(largest, double(std::abs(values[i])));
    }
    EXPECT_LE(difference, 1e-5 * std::max(largest, 0.1)) << what << ": " << name;
  }
}

void expect_same(const Outcome& actual, const Outcome& expected, const std::string& what) {
  EXPECT_EQ(actual.losses, expected.losses) << what;
  ASSERT_EQ(actual.tensors.size(), expected.tensors.size()) << what;
  for (const auto& [name, values] : expected.tensors)
    EXPECT_EQ(std::memcmp(actual.tensors.at(name).data(), values.data(), values.size() * 4), 0) << what << ": " << name;
}

const std::string kExchanges[] = {
    "[plugins.data_parallel]\nbucket = 20000\n", "[plugins.zero]\nstage = 1\nbucket = 20000\n",
    "[plugins.zero]\nstage = 2\nbucket = 20000\n", "[plugins.zero]\nstage = 3\nbucket = 20000\n"};

std::string offload(const std::string& directory, const std::string& tier) {
  return "[plugins.offload]\nminimum = 0\ndirectory = \"" + directory + "\"\noptimizer = \"" + tier +
         "\"\ngradients = \"" + tier + "\"\nparameters = \"" + tier + "\"\nactivations = \"" + tier + "\"\n";
}

// Bit for bit whatever the number of ranks, the stage, and what else is enabled.
TEST(Ranks, ReproducibleRunsAreEqual) {
  test::TemporaryFolder folder;
  const std::string run = "reproducible = true\n";
  for (const std::string optimizer : {"[plugins.adamw]\nlearning_rate = 1e-3\n[plugins.clip]\nmax_norm = 0.1\n"})
    for (int micro_batch : {1, 2}) {
      const Outcome expected = outcome(1, toml(1, micro_batch, optimizer, run));
      for (int ranks : {2, 4})
        for (const std::string& exchange : kExchanges)
          for (const std::string& extra :
               {std::string(), "[plugins.recompute]\n" + offload(folder.path(), ranks == 2 ? "host" : "nvme")}) {
            const std::string text = toml(ranks, micro_batch, optimizer + exchange + extra, run);
            SCOPED_TRACE(text);
            expect_same(outcome(ranks, text), expected, "");
            if (HasFailure()) return;
          }
    }
}

}  // namespace
}  // namespace strata
