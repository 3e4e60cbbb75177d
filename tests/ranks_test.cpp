// Several ranks against one: data parallelism and every ZeRO stage, with every other strategy, over threads.
#include <cstring>
#include <random>

#include "engine/runtime/saver.h"
#include "strata/layout.h"
#include "tests/harness.h"
#include "tests/ordering.h"

namespace strata::ranks_test {
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

void steps(test::Runner& runner, int batch, std::vector<double>* losses) {
  std::mt19937 random(7);
  std::vector<int32_t> tokens(size_t(batch * kSequence)), targets(tokens.size());
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
  const int batch = std::stoi(text.substr(text.find("global_batch = ") + 15));
  run_local(
      ranks,
      [&](World& world) {
        test::Runner runner(text, {}, Goal::train, {}, ranks > 1 ? &world : nullptr);
        runner.poisoned = poisoned;
        steps(runner, batch, world.rank() == 0 ? &result.losses : nullptr);
        for (const Tensor& tensor : runner.storage->persistent_tensors()) {
          if (tensor.role == Role::scalar || tensor.dtype != DType::f32) continue;
          const std::vector<float> values = runner.values(tensor.name);
          std::lock_guard lock(mutex);
          test::put_together(tensor, values, result.tensors[tensor.name]);
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
    // The gradient of keys' biases is zero but for rounding, of which these two make steps of full size.
    if (name.find("qkv.bias") != std::string::npos && what != "adamw") continue;
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
  const std::string run = "reproducible = true\n", optimizer = "[plugins.adamw]\nlearning_rate = 1e-3\n";
  size_t number = 0;
  for (const std::string clip : {"", "[plugins.clip]\nmax_norm = 0.1\n"})
    for (int micro_batch : {1, 2}) {
      const Outcome expected = outcome(1, toml(1, micro_batch, optimizer + clip, run));
      for (int ranks : {2, 4, 8}) {
        if (kBatch % (micro_batch * ranks) != 0) continue;
        for (const std::string& exchange : kExchanges)
          for (const std::string& extra :
               {std::string(), "[plugins.recompute]\n" + offload(folder.path(), ranks == 2 ? "host" : "nvme")}) {
            if (test::left_out(number++)) continue;
            const std::string text = toml(ranks, micro_batch, optimizer + clip + exchange + extra, run);
            SCOPED_TRACE(text);
            expect_same(outcome(ranks, text, ranks == 4 && micro_batch == 1), expected, "");
            if (HasFailure()) return;
          }
      }
    }
}

// ZeRO-Offload: updates on threads of the host's beside offloaded states, while exchanges stay on their stream.
TEST(Ranks, UpdatesRunOnThreadsOfTheHost) {
  test::TemporaryFolder folder;
  const std::string run = "reproducible = true\n", plugins = "[plugins.adamw]\n[plugins.clip]\nmax_norm = 0.1\n";
  const Outcome expected = outcome(1, toml(1, 2, plugins, run));
  size_t number = 0;
  for (const std::string& exchange : kExchanges)
    for (const std::string tier : {"host", "nvme"}) {
      if (test::left_out(number++)) continue;
      const std::string text =
          toml(2, 2, plugins + exchange + offload(folder.path(), tier) + "[host]\nthreads = 1\n", run);
      SCOPED_TRACE(text);
      expect_same(outcome(2, text), expected, "");
    }
}

// In the default order of sums, within fp32's rounding: every optimizer, odd numbers of ranks, groups of groups.
TEST(Ranks, EveryCombinationAgrees) {
  test::TemporaryFolder folder;
  struct Case {
    std::string optimizer;
    int ranks, micro_batch, batch;
    std::string mesh, extra;
  };
  // The gradient of keys' biases is zero but for rounding, which Adam would make into steps: an epsilon above it.
  const std::string adamw = "[plugins.adamw]\nlearning_rate = 1e-3\nepsilon = 1e-5\n",
                    sm3 = "[plugins.sm3]\nlearning_rate = 1e-3\n", adafactor = "[plugins.adafactor]\nbeta1 = 0.9\n",
                    clip = "[plugins.clip]\nmax_norm = 0.1\n", recompute = "[plugins.recompute]\n",
                    host = offload(folder.path(), "host"), nvme = offload(folder.path(), "nvme");
  const std::vector<Case> cases = {
      {adamw, 2, 2, 8, "", ""},
      {adamw, 3, 1, 12, "", clip},
      {adamw, 4, 1, 8, "replicate = 2\n", clip},
      {adamw, 4, 1, 8, "replicate = 2\n", recompute + nvme},
      {adamw, 4, 2, 8, "replicate = 4\n", host},
      {adafactor, 2, 2, 8, "", clip},
      {adafactor, 3, 2, 12, "", recompute + host},
      {adafactor, 4, 1, 8, "replicate = 2\n", nvme},
      {sm3, 2, 1, 8, "", ""},
      {sm3, 3, 2, 12, "", clip + nvme},
      {sm3, 4, 2, 8, "", recompute + host},
      {adamw, 2, 4, 8, "", "[plugins.gist]\nminimum = 0\n" + clip + host},
  };
  size_t number = 0;
  for (const Case& c : cases) {
    const auto text = [&](int ranks, const std::string& plugins, const std::string& mesh) {
      std::string all = toml(ranks, c.micro_batch, plugins, "", mesh);
      all.replace(all.find("global_batch = 8"), 16, "global_batch = " + std::to_string(c.batch));
      return all;
    };
    const Outcome expected =
        outcome(1, text(1, c.optimizer + (c.extra.find("clip") == std::string::npos ? "" : clip), ""));
    for (const std::string& exchange : kExchanges) {
      if (test::left_out(number++)) continue;
      const std::string all = text(c.ranks, c.optimizer + exchange + c.extra, c.mesh);
      SCOPED_TRACE(all);
      expect_close(outcome(c.ranks, all), expected, c.optimizer == adamw ? "adamw" : "adafactor or sm3");
      if (HasFailure()) return;
    }
  }
}

// Each rank's waits order whatever touches the same bytes, parts of tensors and blocks of the disk included; nothing
// runs.
TEST(Ranks, WaitsOrderWhatSharesBytes) {
  test::TemporaryFolder folder;
  size_t number = 1;  // of those that are kept under sanitizers one is Adafactor with ZeRO 2 on NVMe
  for (const std::string optimizer : {"[plugins.adamw]\n", "[plugins.adafactor]\nbeta1 = 0.9\n", "[plugins.sm3]\n"})
    for (const std::string& exchange : kExchanges)
      for (const std::string tier : {"host", "nvme"})
        for (const std::string more : {"", "[host]\nthreads = 1\n"}) {
          if (test::left_out(number++)) continue;
          const std::string text =
              toml(4, 1, optimizer + exchange + offload(folder.path(), tier) + more, "", "replicate = 2\n");
          SCOPED_TRACE(text);
          run_local(4, [&](World& world) {
            const test::Runner runner(text, {}, Goal::train, {}, &world);
            test::expect_ordered(runner.built.program, runner.plan);
          });
          if (HasFailure()) return;
        }
}

// The outcome does not hang on which stream is ahead.
TEST(Ranks, RunsAreEqualToTheBit) {
  test::TemporaryFolder folder;
  size_t number = 1;  // under sanitizers stage 2
  for (const std::string& exchange : kExchanges) {
    if (test::left_out(number++)) continue;
    const std::string plugins = "[plugins.adafactor]\nbeta1 = 0.9\n" + exchange + offload(folder.path(), "nvme");
    const std::string text = toml(4, 1, plugins, "", "replicate = 2\n");
    SCOPED_TRACE(text);
    const Outcome first = outcome(4, text);
    expect_same(outcome(4, text), first, "");
    if (HasFailure()) return;
  }
}

TEST(Ranks, AnAxisThatNothingUsesIsRefused) {
  try {
    const test::TemporaryFolder folder;
    Session(test::write_file(folder / "config.toml", toml(2, 1, "[plugins.adamw]\n")), {}).plan(Goal::train);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no enabled plugin sums gradients over them"), std::string::npos);
  }
}

// Saved by N ranks under any stage, at once or behind training, loaded by M under any other: bit for bit the same.
TEST(Ranks, CheckpointsFitAnyLayout) {
  test::TemporaryFolder folder;
  const std::string optimizer = "[plugins.adamw]\nlearning_rate = 1e-3\n";
  // 7 rows in one matrix and in a vector: fewer than eight ranks, uneven over the others.
  const auto text = [&](int ranks, size_t exchange, const std::string& more) {
    std::string result = toml(ranks, 1, optimizer + (ranks > 1 ? kExchanges[exchange] : "") + more);
    result.replace(result.find("ffn = 71"), 8, "ffn = 7");
    result.replace(result.find("global_batch = 8"), 16, "global_batch = 24");
    return result;
  };
  const auto hosted = [&](const std::string& tier) {
    return "[plugins.offload]\nminimum = 0\ndirectory = \"" + folder.path() + "\"\noptimizer = \"" + tier + "\"\n";
  };
  struct Layout {
    int ranks;
    size_t exchange;
  };
  std::vector<Layout> layouts{{1, 0}};
  for (int ranks : {2, 3, 4, 8})
    for (size_t exchange = 0; exchange < std::size(kExchanges); ++exchange) layouts.push_back({ranks, exchange});
  const auto directory = [&](size_t i) { return folder / ("from" + std::to_string(i)); };
  // Everything of a layout after `first` (load, then whatever) as whole tensors; saves into `to` when given.
  const auto run = [&](const Layout& layout, const std::string& more, const std::string& from, const std::string& to,
                       bool behind) {
    std::map<std::string, std::vector<std::byte>> tensors;
    std::mutex mutex;
    const auto body = [&](World& world) {
      test::Runner runner(text(layout.ranks, layout.exchange, more), {}, Goal::train, {},
                          layout.ranks > 1 ? &world : nullptr);
      Threads threads(1);
      const Mesh mesh(world.rank(), {{"replicate", 1}, {"shard", layout.ranks}});
      if (!to.empty()) std::filesystem::create_directories(to);
      world.gather("");
      Saver saver(*runner.storage, mesh, world, threads, to, 1, behind);
      if (!from.empty()) {
        const CheckpointInfo info = saver.load(find_checkpoint(from, ""), true, 1).info;
        EXPECT_EQ(info.step, 10);
        EXPECT_EQ(info.samples, 240);
      } else {
        steps(runner, 24, nullptr);
      }
      if (!to.empty()) {
        EXPECT_EQ(saver.save({10, 240, {{"note", "kept"}}, "text"}), "");
      }
      if (behind && from.empty()) return;
      for (const Tensor& tensor : runner.storage->persistent_tensors()) {
        if (tensor.role == Role::scalar) continue;
        const std::vector<std::byte> data = runner.storage->copy(tensor);
        std::lock_guard lock(mutex);
        test::put_together(tensor, data, tensors[tensor.name], size_of(tensor.dtype));
      }
    };
    run_local(layout.ranks, body, 30);
    return tensors;
  };
  const auto expected = run(layouts[0], "", "", directory(0), false);
  for (size_t i = 1; i < layouts.size(); ++i) {
    SCOPED_TRACE("into " + std::to_string(layouts[i].ranks) + ", exchange " + std::to_string(layouts[i].exchange));
    EXPECT_EQ(run(layouts[i], i % 3 == 0 ? hosted("nvme") : "", directory(0), directory(i), i % 2 == 0), expected);
  }
  const size_t third = std::random_device{}() % 3;  // of the pairs: into each layout from a third of all, and from each
  for (size_t i = 1; i < layouts.size(); ++i)
    for (size_t j = (third + i) % 3; j < layouts.size(); j += 3) {
      const Layout& to = layouts[j];
      SCOPED_TRACE("from " + std::to_string(layouts[i].ranks) + ", exchange " + std::to_string(layouts[i].exchange) +
                   " to " + std::to_string(to.ranks) + ", exchange " + std::to_string(to.exchange));
      ASSERT_EQ(run(to, "", directory(i), "", false), expected);
    }
}

}  // namespace
}  // namespace strata::ranks_test
