// What verify says of configurations that are right, of plugins with a mistake, and of those that do not say what they
// do. The mistaken plugins are written here.
#include "engine/verify/verify.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "engine/plugin/testing.h"
#include "strata/plugin.h"

namespace strata::verifying {
namespace {

using Kind = Verdict::Kind;

constexpr const char* kConfig = R"(
[model]
plugin = "gpt"
layers = 2
hidden = 32
heads = 2
vocabulary = 61
context = 16
[data]
train = ["none"]
sequence_length = 16
global_batch = 8
micro_batch = 2
[device]
threads = 1
[plugins.adamw]
learning_rate = 1e-2
)";

class Verify : public ::testing::Test {
 protected:
  ~Verify() override { std::filesystem::remove(path_); }
  verifying::Setup setup(const std::string& more) {
    std::ofstream(path_) << kConfig << more;
    return {.config = path_, .sets = {}, .steps = 5};
  }
  Report report(const std::string& more) { return verify(setup(more)); }
  static const Verdict& of(const Report& report, std::vector<std::string> plugins) {
    plugins.push_back("adamw");
    for (const Verdict& verdict : report.verdicts)
      if (verdict.trial.plugins == plugins && !verdict.trial.budgets) return verdict;
    throw Error("no verdict of these plugins");
  }

 private:
  const std::string path_ = ::testing::TempDir() + "verify_" + std::to_string(getpid()) + ".toml";
};

// Takes steps of another size from the second on, whatever it says of itself.
class Mistaken final : public Plugin {
 public:
  void options(Options& o) override {
    o.add("effect", effect_, "what it says").choices({"exact", "reorders", "lossy", "program", "nothing"});
    o.add("by", by_, "factor of the learning rate").positive();
    o.add("ranks", ranks_, "least number of ranks").positive();
  }
  Capabilities capabilities() const override {
    if (effect_ == "exact") return {.effect = Effect::exact()};
    if (effect_ == "reorders") return {.effect = Effect::reorders()};
    if (effect_ == "lossy") return {.effect = Effect::lossy(1e-3)};
    return {.effect = effect_ == "program" ? Effect::program() : Effect()};
  }
  void forward(ProgramStage& stage) override {
    if (stage.mesh.size(kDataAxis) < ranks_) throw Error("one rank is not enough.");
  }
  void step_start(StepContext& context) override {
    if (context.step() >= 2) context.set_scalar(kLearningRateFactor, by_);
  }

 private:
  std::string effect_ = "exact";
  double by_ = 1.001;
  int64_t ranks_ = 1;
};
STRATA_PLUGIN(Mistaken, "test_mistaken", "1", "does what it does not say")

TEST_F(Verify, SaysOfEachPartAndPairWhatItIs) {
  const Report all = report(
      "[mesh]\ndata = 2\n[plugins.clip]\n[plugins.recompute]\n[plugins.zero]\n[plugins.mixed_precision]\n"
      "[plugins.offload]\nminimum = 0\noptimizer = \"host\"\n");
  for (const Verdict& failure : all.failures) ADD_FAILURE() << failure_of(failure);
  EXPECT_TRUE(all.passed());
  EXPECT_EQ(all.verdicts.size(), 1u + 5 + 10);
  EXPECT_EQ(of(all, {"clip"}).kind, Kind::program);
  EXPECT_EQ(of(all, {"recompute"}).kind, Kind::same);
  EXPECT_EQ(of(all, {"recompute"}).ranks, 1);
  const Verdict& zero = of(all, {"zero"});
  EXPECT_EQ(zero.kind, Kind::within);
  EXPECT_EQ(zero.ranks, 2);
  EXPECT_GT(zero.difference.relative, 0);
  const Verdict& mixed = of(all, {"mixed_precision"});
  EXPECT_EQ(mixed.kind, Kind::within);
  EXPECT_EQ(mixed.difference.bound, 0.02);
  EXPECT_GT(mixed.planned_bytes, 0);
  EXPECT_GT(mixed.measured_bytes, 0);
  EXPECT_NE(json_of(all).find("\"bit for bit\""), std::string::npos);
}

TEST_F(Verify, ReproducibleRanksAreBitForBit) {
  const Report all = report(
      "[run]\nreproducible = true\n[mesh]\ndata = "
      "4\n[plugins.data_parallel]\n[plugins.clip]\n[plugins.mixed_precision]\n");
  EXPECT_TRUE(all.passed());
  EXPECT_EQ(of(all, {"data_parallel"}).kind, Kind::same);
  EXPECT_EQ(of(all, {"data_parallel", "clip"}).kind, Kind::same);
}

TEST_F(Verify, NamesTheMistakenPluginTheStepAndTheTensor) {
  const Report all = report("[plugins.recompute]\n[plugins.test_mistaken]\n[plugins.clip]\n");
  ASSERT_EQ(all.failures.size(), 1u);  // the whole and two pairs are outside, and one plugin is why
  const Verdict& failure = all.failures.front();
  EXPECT_EQ(failure.trial.plugins, (std::vector<std::string>{"test_mistaken", "adamw"}));
  EXPECT_EQ(failure.first_step, 2);
  EXPECT_EQ(failure.difference.where, "embedding.weight");
  EXPECT_TRUE(failure_of(failure).starts_with(
      "test_mistaken + adamw (one rank) differs from the plain program first in step 2, in embedding.weight: by "))
      << failure_of(failure);
  EXPECT_EQ(of(all, {"recompute"}).kind, Kind::same);
  EXPECT_EQ(of(all, {"recompute", "clip"}).kind, Kind::same);
}

TEST_F(Verify, OrdersOfSumsExcuseRoundingAlone) {
  EXPECT_EQ(report("[plugins.test_mistaken]\neffect = \"reorders\"\n").verdicts[0].kind, Kind::outside);
  EXPECT_EQ(report("[plugins.test_mistaken]\neffect = \"reorders\"\nby = 1.0000001\n").verdicts[0].kind, Kind::within);
}

TEST_F(Verify, LossesOfLossyOnesStayWithinTheirBand) {
  EXPECT_EQ(report("[plugins.test_mistaken]\neffect = \"lossy\"\n").verdicts[0].kind, Kind::within);
  const Report wrong = report("[plugins.test_mistaken]\neffect = \"lossy\"\nby = 3\n");
  ASSERT_EQ(wrong.failures.size(), 1u);
  EXPECT_TRUE(wrong.failures[0].difference.where.starts_with("loss of step ")) << wrong.failures[0].difference.where;
  EXPECT_GE(wrong.failures[0].first_step, 3);
}

TEST_F(Verify, RefusesWhatCannotBeHeldToAnything) {
  const auto message = [&](const std::string& more) { return strata::testing::message_of([&] { report(more); }); };
  EXPECT_EQ(
      message("[plugins.test_mistaken]\neffect = \"nothing\"\n"),
      "plugin \"test_mistaken\" does not say what it does to the numbers of a run, so it cannot be held to it; set "
      "`effect` in its capabilities() (docs/plugins.md).");
  EXPECT_EQ(
      message("[mesh]\ndata = 2\n[plugins.data_parallel]\n[plugins.test_mistaken]\neffect = \"program\"\nranks = 2\n"),
      "the plain program (test_mistaken, adamw and the model, one rank) cannot run here: plugin "
      "\"test_mistaken\", stage forward: one rank is not enough. Verify on fewer layers with --layers, or with a "
      "smaller batch.");
  EXPECT_EQ(
      message("[mesh]\ndata = 2\n"),
      "the configuration cannot run here: mesh.data asks for several ranks, but no enabled plugin sums gradients over "
      "them; enable one that does (installed: data_parallel, zero), or set it to 1.");
}

TEST(VerifyDistance, IsRelativeToTheTensorsNorm) {
  const auto whole = [](std::vector<float> values) {
    Whole result{.name = "x", .dtype = DType::f32, .shape = {int64_t(values.size())}, .bytes = {}};
    result.bytes.resize(values.size() * 4);
    std::memcpy(result.bytes.data(), values.data(), result.bytes.size());
    result.digest = uint64_t(values.back() * 1000);
    return result;
  };
  EXPECT_EQ(distance(whole({3, 4}), whole({3, 4})), 0);
  EXPECT_DOUBLE_EQ(distance(whole({3, 4.5}), whole({3, 4})), 0.1);
  EXPECT_TRUE(std::isinf(distance(whole({3, NAN}), whole({3, 4}))));
  EXPECT_TRUE(std::isinf(distance(whole({0, 1e-30F}), whole({0, -0.0F}))) ||
              distance(whole({0, 1e-3F}), whole({0, 0})) > 1);
}

}  // namespace
}  // namespace strata::verifying
