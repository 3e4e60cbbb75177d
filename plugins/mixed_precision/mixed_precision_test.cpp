// Mixed precision in whole programs: close to f32, exact under every strategy that reorders nothing, the same on
// several ranks; loss scaling that skips, shrinks and grows; checkpoints that fit runs of any precision.
#include <cstring>
#include <mutex>
#include <random>

#include "engine/runtime/saver.h"
#include "strata/convert.h"
#include "tests/harness.h"

namespace strata::mixed_precision_test {
namespace {

constexpr int kSequence = 16, kBatch = 8, kVocabulary = 61;
const std::string kAdamW = "[plugins.adamw]\nlearning_rate = 1e-3\n";

std::string mixed(const std::string& options = "") { return "[plugins.mixed_precision]\n" + options; }

std::string toml(const std::string& plugins, int ranks = 1, const std::string& run = "",
                 const std::string& model = "") {
  return "[run]\n" + run + "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 32\nheads = 4\nffn = 71\nvocabulary = " +
         std::to_string(kVocabulary) + "\ncontext = 16\ndropout = 0.1\nattention_dropout = 0.1\n" + model +
         "[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = " + std::to_string(kBatch) +
         "\nmicro_batch = 2\n[device]\nthreads = 1\n[mesh]\ndata = " + std::to_string(ranks) + "\n" + plugins;
}

using Bytes = std::vector<std::byte>;

struct Outcome {
  std::vector<double> losses;
  std::map<std::string, Bytes> tensors;  // whole, put together from all ranks' parts
};

void steps(test::Runner& runner, int count, std::vector<double>* losses) {
  std::mt19937 random(7);
  std::vector<int32_t> tokens(kBatch * kSequence), targets(tokens.size());
  for (int step = 0; step < count; ++step) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = int32_t(random() % kVocabulary);
      targets[i] = (tokens[i] + 1) % kVocabulary;
    }
    const double loss = runner.run_step(tokens.data(), targets.data());
    if (losses) losses->push_back(loss);
  }
}

Outcome outcome(const std::string& text, int ranks = 1, int count = 6, bool poisoned = false) {
  Outcome result;
  std::mutex mutex;
  run_local(
      ranks,
      [&](World& world) {
        test::Runner runner(text, {}, Goal::train, {}, ranks > 1 ? &world : nullptr);
        runner.poisoned = poisoned;
        steps(runner, count, world.rank() == 0 ? &result.losses : nullptr);
        for (const Tensor& tensor : runner.storage->persistent_tensors()) {
          if (tensor.role == Role::scalar) continue;
          const std::vector<std::byte> data = runner.storage->copy(tensor);
          std::lock_guard lock(mutex);
          test::put_together(tensor, data, result.tensors[tensor.name], size_of(tensor.dtype));
        }
      },
      30);
  return result;
}

void expect_same(const Outcome& actual, const Outcome& expected) {
  EXPECT_EQ(actual.losses, expected.losses);
  for (const auto& [name, bytes] : expected.tensors) EXPECT_EQ(actual.tensors.at(name), bytes) << name;
}

std::string offload(const std::string& directory, const std::string& tier) {
  return "[plugins.offload]\nminimum = 0\ndirectory = \"" + directory + "\"\noptimizer = \"" + tier +
         "\"\ngradients = \"" + tier + "\"\nparameters = \"" + tier + "\"\nactivations = \"" + tier + "\"\n";
}

const std::string kPrecisions[] = {mixed(), mixed("dtype = \"fp16\"\nloss_scale = 1024.0\n"),
                                   mixed("gradients = \"bf16\"\nstates = \"bf16\"\n")};

// Sixteen bits leave eight (bf16) or eleven significant ones: losses within 2e-2 after twenty steps of learning.
TEST(MixedPrecision, LearnsAsF32Does) {
  for (const std::string& optimizer : {kAdamW, std::string("[plugins.adafactor]\n"), std::string("[plugins.sm3]\n"),
                                       std::string("[plugins.adamw8bit]\nlearning_rate = 1e-3\n")})
    for (const std::string clip : {"", "[plugins.clip]\nmax_norm = 0.5\n"}) {
      const Outcome expected = outcome(toml(optimizer + clip), 1, 20);
      for (std::string precision : kPrecisions) {
        if (optimizer != kAdamW && precision == kPrecisions[2]) precision = mixed("gradients = \"bf16\"\n");
        SCOPED_TRACE(optimizer + clip + precision);
        const Outcome actual = outcome(toml(optimizer + clip + precision), 1, 20);
        for (size_t i = 0; i < expected.losses.size(); ++i)
          EXPECT_NEAR(actual.losses[i], expected.losses[i], 2e-2 * expected.losses[i]) << i;
        EXPECT_LT(actual.losses.back(), actual.losses.front() - 0.05);
        EXPECT_NE(actual.losses, expected.losses);  // it is another precision indeed
      }
    }
}

// Moments in bf16 take two bytes, and nothing else changes its size.
TEST(MixedPrecision, MomentsTakeHalfWhereAsked) {
  const Outcome wide = outcome(toml(kAdamW + mixed()), 1, 4),
                rounded = outcome(toml(kAdamW + mixed("states = \"bf16\"\n")), 1, 4);
  int moments = 0;
  for (const auto& [name, bytes] : wide.tensors) {
    const bool is_moment = name.ends_with(".adamw.m") || name.ends_with(".adamw.v");
    EXPECT_EQ(rounded.tensors.at(name).size() * (is_moment ? 2 : 1), bytes.size()) << name;
    moments += is_moment;
  }
  EXPECT_GT(moments, 0);
  EXPECT_NE(rounded.losses, wide.losses);
}

// What moves, encodes without loss or runs again changes no bit, with any precision.
TEST(MixedPrecision, StrategiesThatReorderNothingAreExact) {
  const test::TemporaryFolder folder;
  const std::string relu = "activation = \"relu\"\n";
  for (const std::string& precision : kPrecisions) {
    const Outcome expected = outcome(toml(kAdamW + precision, 1, "", relu));
    for (const std::string& extra : {std::string("[plugins.recompute]\n"), std::string("[plugins.gist]\nminimum = 0\n"),
                                     offload(folder.path(), "host"), offload(folder.path(), "nvme"),
                                     std::string("[plugins.offload]\nminimum = 0\noptimizer = \"host\"\n"),
                                     "[plugins.recompute]\nmode = \"selective\"\n[plugins.gist]\nminimum = 0\n" +
                                         offload(folder.path(), "nvme")}) {
      SCOPED_TRACE(precision + extra);
      expect_same(outcome(toml(kAdamW + precision + extra, 1, "", relu), 1, 6, true), expected);
    }
  }
}

// Reproducible runs: bit for bit on any number of ranks under any stage.
TEST(MixedPrecision, ReproducibleOnSeveralRanks) {
  const test::TemporaryFolder folder;
  const std::string run = "reproducible = true\n", clip = "[plugins.clip]\nmax_norm = 0.1\n";
  for (const std::string& precision : kPrecisions) {
    const Outcome expected = outcome(toml(kAdamW + clip + precision, 1, run), 1, 4);
    for (int ranks : {2, 4})
      for (const std::string exchange : {"[plugins.data_parallel]\n", "[plugins.zero]\nstage = 1\n",
                                         "[plugins.zero]\nstage = 2\n", "[plugins.zero]\nstage = 3\n"})
        for (const std::string& extra : {std::string(), "[plugins.recompute]\n" + offload(folder.path(), "nvme"),
                                         std::string("[plugins.offload]\nminimum = 0\noptimizer = \"host\"\n")}) {
          if (ranks == 4 && (extra.empty() || exchange.find("stage = 3") == std::string::npos)) continue;
          const std::string text = toml(kAdamW + clip + precision + exchange + extra, ranks, run);
          SCOPED_TRACE(text);
          expect_same(outcome(text, ranks, 4, ranks == 4), expected);
          if (HasFailure()) return;
        }
  }
}

// Gradients of 16 bits over ranks: other roundings, so close and no more.
TEST(MixedPrecision, NarrowGradientsOverRanks) {
  const std::string plugins = kAdamW + mixed("gradients = \"bf16\"\n");
  const Outcome expected = outcome(toml(plugins));
  for (const std::string exchange : {"[plugins.data_parallel]\n", "[plugins.zero]\nstage = 1\n",
                                     "[plugins.zero]\nstage = 2\n", "[plugins.zero]\nstage = 3\n"}) {
    const Outcome actual = outcome(toml(plugins + exchange, 4), 4);
    for (size_t i = 0; i < expected.losses.size(); ++i)
      EXPECT_NEAR(actual.losses[i], expected.losses[i], 1e-2 * expected.losses[i]) << exchange << i;
  }
}

// Makes numbers of NaN, as plugins may that change gradients.
class Clamp final : public Plugin {
 public:
  explicit Clamp(bool all) : all_(all) {}
  void gradients(GradientStage& stage) override {
    for (Gradient& gradient : stage.gradients())
      if (all_ || stage.build()[gradient.parameter].shape.size() > 1)
        for (const double limit : {0.5, 0.25}) stage.append("clamp", {gradient}, {{"limit", limit}});
  }

 private:
  bool all_;
};
struct Overflow {
  std::string exchange;
  enum Change { none, some, all } change = none;
};

TEST(MixedPrecision, AnOverflowSkipsTheStepAndLowersTheScale) {
  using enum Overflow::Change;
  for (const auto& [exchange, change] :
       {Overflow{""}, Overflow{"[plugins.data_parallel]\n"}, Overflow{"[plugins.zero]\nstage = 2\n"},
        Overflow{"", some}, Overflow{"", all}, Overflow{"[plugins.zero]\nstage = 1\n", some}}) {
    SCOPED_TRACE(exchange + std::to_string(int(change)));
    const int ranks = exchange.empty() ? 1 : 2;
    const std::string text = toml(kAdamW + "[plugins.clip]\n" + exchange +
                                      mixed("dtype = \"fp16\"\nloss_scale = 1099511627776.0\nloss_scale_window = 3\n"),
                                  ranks);
    run_local(ranks, [&, change = change](World& world) {
      Clamp clamp(change == all);
      std::vector<NamedPlugin> more;
      if (change != none) more.push_back({"clamp", &clamp});
      test::Runner runner(text, more, Goal::train, {}, ranks > 1 ? &world : nullptr);
      const auto parameters = [&] { return runner.values("block.0.qkv.weight"); };
      const std::vector<float> before = parameters();
      double scale = 0x1p40;
      int skipped = 0;
      for (; skipped < 60; ++skipped) {
        steps(runner, 1, nullptr);
        if (runner.scalar("loss_scale") >= scale) break;
        EXPECT_EQ(runner.scalar("loss_scale"), scale / 2);
        EXPECT_EQ(parameters(), before);
        EXPECT_EQ(runner.values("block.0.qkv.weight.adamw.m"), std::vector<float>(before.size()));
        scale /= 2;
      }
      EXPECT_GT(skipped, 5);
      EXPECT_LT(skipped, 60);
      EXPECT_NE(parameters(), before);
      int doubled = 0;
      for (int step = 0, good = 1; step < 12; ++step) {
        steps(runner, 1, nullptr);
        const double now = runner.scalar("loss_scale");
        good = now < scale ? 0 : good + 1;
        EXPECT_EQ(now, good == 0 ? scale / 2 : good == 3 ? scale * 2 : scale);
        if (good == 3) ++doubled, good = 0;
        scale = now;
      }
      EXPECT_GT(doubled, 0);
    });
  }
}

// The scale is a power of two: where nothing over- or underflows it changes no bit.
TEST(MixedPrecision, TheLossScaleDoesNotMatter) {
  const auto losses = [](const std::string& scale) {
    return outcome(toml(kAdamW + mixed("dtype = \"fp16\"\nloss_scale = " + scale + "\n"))).losses;
  };
  const auto a = losses("16384.0"), b = losses("32768.0");
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-4 * a[i]) << i;  // but for what underflows
}

// A checkpoint holds masters under the parameters' names: it fits a run of any precision.
TEST(MixedPrecision, CheckpointsFitAnyPrecision) {
  const test::TemporaryFolder folder;
  const std::vector<std::string> all = {"", kPrecisions[0], kPrecisions[1], kPrecisions[2]};
  const auto world = single_world();
  const Mesh mesh;
  Threads threads(1);
  for (size_t from = 0; from < all.size(); ++from)
    for (size_t to = 0; to < all.size(); ++to) {
      SCOPED_TRACE(all[from] + " to " + all[to]);
      const std::string directory = folder / (std::to_string(from) + std::to_string(to));
      std::filesystem::create_directory(directory);
      test::Runner source(toml(kAdamW + all[from])), target(toml(kAdamW + all[to]));
      steps(source, 3, nullptr);
      Saver saver(*source.storage, mesh, *world, threads, directory, 1, false);
      EXPECT_EQ(saver.save({3, 24, {}, "text"}), "");
      Saver(*target.storage, mesh, *world, threads, directory, 1, false).load(*saver.latest(), true, 1);
      for (const Tensor& tensor : target.storage->persistent_tensors()) {
        if (tensor.role == Role::scalar) continue;
        const std::string& name = tensor.lasting->rounded_from.empty() ? tensor.name : tensor.lasting->rounded_from;
        if (tensor.dtype == DType::f64) continue;  // the loss scale, its own
        const Tensor& origin = source.built.program[source.built.program.find(name)];
        std::vector<std::byte> want(size_t(tensor.bytes()));
        convert(origin.dtype, source.storage->copy(origin).data(), tensor.dtype, want.data(), elements(tensor.shape));
        EXPECT_EQ(std::memcmp(target.storage->copy(tensor).data(), want.data(), want.size()), 0) << tensor.name;
      }
    }
}

TEST(MixedPrecision, WrongOptionsAreRefused) {
  const test::TemporaryFolder folder;
  const auto refusal = [&](const std::string& text) -> std::string {
    try {
      Session(test::write_file(folder / "config.toml", text), {}).plan(Goal::train);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage);
      return error.what();
    }
    return "";
  };
  const auto expect = [&](const std::string& plugins, const std::string& words) {
    EXPECT_NE(refusal(toml(plugins)).find(words), std::string::npos) << refusal(toml(plugins));
  };
  expect(kAdamW + mixed("dtype = \"fp16\"\nloss_scale = 1.0\n"), "needs loss scaling");
  expect(kAdamW + mixed("loss_scale = 1024.0\n"), "only with dtype = \"fp16\"");
  expect("[plugins.sm3]\n" + mixed("states = \"bf16\"\n"), "keeps no moments that can be rounded");
  expect(kAdamW + mixed("dtype = \"fp8\"\n"), "bf16");
}

}  // namespace
}  // namespace strata::mixed_precision_test
