// Tables [parameters."PATTERN"]: what is frozen against the same run in which it has a learning rate of 0 and does not
// count in norms, bit for bit; factors; memory; checkpoints; patterns that cannot be meant so.
#include <cstring>

#include "strata/layout.h"
#include "tests/backends.h"
#include "tests/outcome.h"
#include "tests/resumed_runs.h"

namespace strata::parameters_test {
namespace {

constexpr int kBatch = 4, kSequence = 16, kVocabulary = 61;

std::string text_of(const std::string& rest, const std::string& model = "") {
  return "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 20\nheads = 2\nffn = 37\ncontext = 16\nvocabulary = 61\n" +
         model + "[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = 4\nmicro_batch = 1\n" +
         "[device]\nthreads = 2\n" + rest;
}

// Gradients of parameters that do not learn do not count in what is made of all gradients.
class CountsWhatLearns final : public Plugin {
 public:
  Capabilities capabilities() const override { return {.early = true}; }
  void gradients(GradientStage& stage) override {
    const Program& program = stage.build().program();
    for (Gradient& gradient : stage.gradients())
      gradient.counts = program[program.whole(gradient.parameter)].lasting->learning_rate_factor > 0;
  }
};

struct Bits {
  std::vector<double> losses;
  std::map<std::string, std::vector<std::byte>> tensors;  // persistent ones, whole
};

Bits bits_of(const std::string& text, int ranks, bool counts_what_learns, const std::string& backend) {
  Bits result;
  std::mutex mutex;
  run_local(
      ranks,
      [&](World& world) {
        const std::unique_ptr<Device> device = backend == "cuda" ? test::rank_device(world.rank()) : nullptr;
        CountsWhatLearns counts;
        std::vector<NamedPlugin> more;
        if (counts_what_learns) more.push_back({"counts", &counts});
        test::Runner runner(text, more, Goal::train, {}, ranks > 1 ? &world : nullptr, backend, device.get());
        test::Random random(7);
        std::vector<int32_t> tokens(kBatch * kSequence), targets(tokens);
        for (int step = 0; step < 3; ++step) {
          for (auto* list : {&tokens, &targets})
            for (int32_t& token : *list) token = int32_t(test::draw(random, 0, kVocabulary - 1));
          const double loss = runner.run_step(tokens.data(), targets.data());
          if (world.rank() == 0) result.losses.push_back(loss);
        }
        for (const Tensor& tensor : runner.storage->persistent_tensors()) {
          const std::vector<std::byte> bytes = runner.storage->copy(tensor);
          const std::lock_guard lock(mutex);
          test::put_together(tensor, bytes, result.tensors[tensor.name], size_of(tensor.dtype));
        }
      },
      60);
  return result;
}

// `frozen`: the head of a table and what it excepts. With the plugin that counts what learns last in the list it comes
// first in its stage, as it is early.
void expect_as_without_rate(const std::string& frozen, const std::string& rest, int ranks,
                            const std::string& model = "", const std::string& backend = "cpu") {
  const Bits actual = bits_of(text_of(rest + frozen + "frozen = true\n", model), ranks, false, backend);
  const Bits expected = bits_of(text_of(rest + frozen + "learning_rate_factor = 0\n", model), ranks, true, backend);
  SCOPED_TRACE(frozen + rest);
  EXPECT_EQ(actual.losses, expected.losses);
  EXPECT_LT(actual.tensors.size(), expected.tensors.size());  // states
  for (const auto& [name, bytes] : actual.tensors) {
    ASSERT_TRUE(expected.tensors.contains(name)) << name;
    EXPECT_TRUE(bytes == expected.tensors.at(name)) << name;
  }
}

const std::string kAllButMlps = "[parameters.\"*\"]\nexcept = [\"block.*.mlp.*\"]\n";
const std::string kLower = "[parameters.\"block.0.*\"]\n";
const std::string kEmbedding = "[parameters.\"embedding.weight\"]\n";  // tied
const std::string kAdamw = "[plugins.adamw]\nlearning_rate = 1e-2\n", kClip = "[plugins.clip]\nmax_norm = 0.1\n";

TEST(Frozen, IsAsWithoutALearningRate) {
  for (const std::string& frozen : {kAllButMlps, kLower, kEmbedding})
    expect_as_without_rate(frozen, kAdamw + kClip, 1, "dropout = 0.1\n");
  for (const char* optimizer : {"[plugins.adafactor]\n", "[plugins.sm3]\n"})
    expect_as_without_rate(kAllButMlps, optimizer + kClip, 1);
  expect_as_without_rate(kLower, "[plugins.adamw8bit]\nlearning_rate = 1e-2\n" + kClip, 1);
}

TEST(Frozen, IsAsWithoutALearningRateInEveryPrecision) {
  for (const std::string& frozen : {kAllButMlps, kEmbedding})
    for (const char* precision : {"", "dtype = \"fp16\"\n", "gradients = \"bf16\"\nstates = \"bf16\"\n"})
      expect_as_without_rate(frozen, kAdamw + kClip + "[plugins.mixed_precision]\n" + precision, 1);
}

TEST(Frozen, IsAsWithoutALearningRateOnRanks) {
  for (const char* strategy : {"data_parallel]\n", "zero]\nstage = 1\n", "zero]\nstage = 2\n", "zero]\nstage = 3\n"})
    expect_as_without_rate(kAllButMlps, "[mesh]\ndata = 2\n" + kAdamw + kClip + "[plugins." + strategy, 2);
  expect_as_without_rate(kEmbedding, "[mesh]\ndata = 2\n[plugins.zero]\nstage = 3\n" + kClip + kAdamw, 2);
  for (const char* optimizer : {"[plugins.adafactor]\n", "[plugins.adamw8bit]\n"})
    expect_as_without_rate(kLower, "[mesh]\ndata = 2\n[plugins.zero]\nstage = 2\n" + kClip + optimizer, 2);
  expect_as_without_rate(kEmbedding, "[mesh]\ntensor = 2\n[plugins.tensor_parallel]\n" + kAdamw + kClip, 2);
}

TEST(Frozen, IsAsWithoutALearningRateInReversibleBlocks) {
  for (const std::string& frozen : {kAllButMlps, kLower})
    expect_as_without_rate(frozen, kAdamw + kClip + "[plugins.reversible]\n", 1);
}

#if defined(STRATA_EMULATED_CUDA)
TEST(Frozen, IsAsWithoutALearningRateOnCuda) {
  expect_as_without_rate(kEmbedding, kAdamw + kClip, 1, "", "cuda");
  expect_as_without_rate(kLower, "[plugins.adafactor]\n" + kClip + "[plugins.mixed_precision]\n", 1, "", "cuda");
}
#endif

// A stage of a pipeline with two chunks, of which nothing in the first is trained: nothing comes back to it.
TEST(Frozen, NothingComesBackToWhatHasNoGradient) {
  const auto text = [](bool pipeline) {
    return "[run]\nreproducible = true\n" +
           text_of((pipeline ? "[mesh]\npipeline = 2\n[plugins.pipeline]\nschedule = \"interleaved\"\nchunks = 2\n"
                               "boundaries = [1, 2, 3]\n"
                             : "") +
                       kAdamw + kClip +
                       "[parameters.\"embedding.*\"]\nfrozen = true\n[parameters.\"block.0.*\"]\nfrozen = true\n"
                       "[parameters.\"block.2.*\"]\nlearning_rate_factor = 0.25\n",
                   "layers = 4\ntied = false\npositions = \"rotary\"\nnorm = \"rms_norm\"\n");
  };
  const auto run = [&](bool pipeline) {
    std::string config = text(pipeline);
    config.replace(config.find("layers = 2\n"), 11, "");
    return test::outcome_of(config, pipeline ? 2 : 1, kBatch * kSequence, kVocabulary);
  };
  const test::Outcome actual = run(true), expected = run(false);
  EXPECT_EQ(actual.losses, expected.losses);
  ASSERT_EQ(actual.tensors.size(), expected.tensors.size());
  for (const auto& [name, values] : expected.tensors) EXPECT_TRUE(values == actual.tensors.at(name)) << name;
}

// What is not trained has neither gradient nor states nor, beside its 16 bits, a master; and nothing is computed for
// it.
TEST(Frozen, TakesTheMemoryOfItsValues) {
  for (const std::string precision : {"", "[plugins.mixed_precision]\n"}) {
    const test::Runner plain(text_of(kAdamw + precision)),
        frozen(text_of(kAdamw + precision + kAllButMlps + "frozen = true\n"));
    int64_t saved = 0;
    const auto room = [](int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; };
    const Program& program = frozen.built.program;
    for (TensorId id : program.with_role(Role::parameter))
      if (program[id].lasting->frozen) saved += room(4 * elements(program[id].shape)) * (precision.empty() ? 2 : 3);
    EXPECT_GT(saved, 0);
    EXPECT_EQ(plain.plan.device().persistent_bytes - frozen.plan.device().persistent_bytes, saved);
    EXPECT_LT(frozen.plan.device().transient_bytes, plain.plan.device().transient_bytes);
    EXPECT_LT(frozen.built.model_flops, 0.8 * plain.built.model_flops);
    // Norms make x's gradient and w's with one op, and the latter is not read; all else is.
    std::vector<char> read(program.tensors.size(), false);
    for (const Op& op : program.ops)
      for (TensorId id : op.inputs)
        if (id) read[size_t(program.whole(id).value)] = read[size_t(id.value)] = true;
    for (const Op& op : program.ops)
      EXPECT_TRUE(std::any_of(op.outputs.begin(), op.outputs.end(), [&](TensorId id) {
        const Tensor& whole = program[program.whole(id)];
        return read[size_t(id.value)] || whole.persistent || whole.step_output;
      })) << print(program, op);
  }
}

TEST(Parameters, FactorsAreThoseOfTheOptimizer) {
  const auto run = [](const std::string& rate, const std::string& decay, const std::string& tables) {
    test::Runner runner(
        text_of("[plugins.adamw]\nlearning_rate = " + rate + "\nweight_decay = " + decay + "\n" + tables));
    std::vector<int32_t> tokens(kBatch * kSequence, 5), targets(kBatch * kSequence, 7);
    runner.run_step(tokens.data(), targets.data());  // of the first alone the other parameters are the same
    return runner.values("block.1.qkv.weight");
  };
  const auto half = run("0.005", "0.05", "");
  EXPECT_EQ(run("0.01", "0.1", "[parameters.\"block.1.*\"]\nlearning_rate_factor = 0.5\nweight_decay_factor = 0.5\n"),
            half);
  EXPECT_EQ(run("0.01", "0.1",
                "[parameters.\"*.qkv.*\"]\nlearning_rate_factor = 0.5\n"
                "[parameters.\"block.1.*\"]\nweight_decay_factor = 0.5\n"),
            half);
  EXPECT_NE(run("0.01", "0.1", "[parameters.\"block.1.*\"]\nweight_decay_factor = 0.5\n"), half);
  EXPECT_NE(run("0.005", "0.1", ""), half);
}

// Of parts that ranks hold and of vectors too, whichever op updates them.
TEST(Parameters, FactorsReachEveryOptimizer) {
  for (const std::string optimizer : {"adamw", "adamw8bit", "adafactor", "sm3"})
    for (const int ranks : {1, 2}) {
      if (optimizer == "adamw" && ranks == 2) continue;  // the same op
      SCOPED_TRACE(optimizer + " on " + std::to_string(ranks));
      const auto run = [&](const std::string& tables) {
        return bits_of(text_of((ranks > 1 ? "[mesh]\ndata = 2\n[plugins.zero]\nstage = 2\n" : "") +
                               ("[plugins." + optimizer) + "]\n" + tables),
                       ranks, false, "cpu");
      };
      const Bits plain = run(""), half = run("[parameters.\"*\"]\nlearning_rate_factor = 0.5\n");
      for (const auto& [name, bytes] : plain.tensors)
        if (name.ends_with(".weight") || name.ends_with(".bias")) {
          EXPECT_FALSE(half.tensors.at(name) == bytes) << name;
        }
    }
}

void expect_refused(const std::string& tables, const std::string& what) {
  SCOPED_TRACE(tables);
  try {
    const test::Runner runner(text_of(kAdamw + tables));
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
  }
}

TEST(Parameters, PatternsThatCannotBeMeantSoAreRefused) {
  // kAdamw begins in line 16 of the file.
  expect_refused("[parameters.\"blocks.*\"]\nfrozen = true\n",
                 "config.toml:18:1: [parameters.\"blocks.*\"] matches no parameter of the model, whose parameters have "
                 "names as embedding.weight and norm.bias.");
  expect_refused(
      "[parameters.\"block.*\"]\nfrozen = true\n[parameters.\"*.qkv.*\"]\nfrozen = false\n",
      "config.toml:20:1: [parameters.\"*.qkv.*\"] and [parameters.\"block.*\"] contradict each other in frozen "
      "of block.0.qkv.weight; narrow one of them, or name what it does not mean in except.");
  expect_refused("[parameters.\"*\"]\nfrozen = true\nexcept = [\"lora\"]\n",
                 "config.toml:18:1: [parameters.\"*\"] excepts \"lora\", which matches none of the parameters");
  expect_refused("[parameters.\"*\"]\nfrozen = true\n", "all parameters are frozen: there is nothing to train.");
  expect_refused("[parameters.\"*\"]\nfreeze = true\n", "config.toml:19:10: [parameters.*] has no key \"freeze\"");
  expect_refused("[parameters.\"*\"]\nlearning_rate_factor = -1\n",
                 "config.toml:19:24: parameters.*.learning_rate_factor must be >= 0");
  expect_refused("[parameters]\nfrozen = true\n", "config.toml:19:10: \"frozen\" must be a table");
}

class FrozenRuns : public test::ResumedRuns {};

TEST_F(FrozenRuns, GoOnFromCheckpoints) {
  expect_resumes(text_of(kAdamw + kClip + kAllButMlps + "frozen = true\n"), 1, 2, 1);
}

// What has 16 bits alone is in checkpoints with 16 bits.
TEST_F(FrozenRuns, GoOnFromCheckpointsInMixedPrecision) {
  expect_resumes(text_of(kAdamw + "[plugins.mixed_precision]\n" + kAllButMlps + "frozen = true\n"), 1, 2, 1);
}

TEST_F(FrozenRuns, GoOnFromCheckpointsOfParts) {
  expect_resumes(text_of("[mesh]\ndata = 2\n[plugins.zero]\nstage = 3\n" + kAdamw + "[plugins.mixed_precision]\n" +
                         kAllButMlps + "frozen = true\n"),
                 2, 2, 1);
}

}  // namespace
}  // namespace strata::parameters_test
