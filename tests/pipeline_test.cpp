// Stages of a pipeline against one rank, as threads: numbers of stages, layers and microbatches, schedules, tied and
// untied models and subsets of the other strategies by chance. Reproducible runs are the same bit for bit; where a
// strategy divides products or tokens, or sums are taken in another order, close.
//
// STRATA_SEED and STRATA_CASES choose what is drawn, to repeat a case or to look for longer.
#include <gtest/gtest.h>

#include <cstring>

#include "engine/runtime/saver.h"
#include "tests/outcome.h"
#include "tests/random_cases.h"

namespace strata::pipeline_test {
namespace {

using test::Outcome, test::Random;

constexpr int kSequence = 12, kVocabulary = 61;

struct Case {
  std::string run, model, optimizer, precision, parameters, strategies;  // strategies: of the stages alone
  int stages = 2, data = 1, tensor = 1, sequence = 1, batch = 8, micro_batch = 1;
  bool exact = false;  // a reproducible run of strategies that take sums as one rank does
  int ranks() const { return stages * data * tensor * sequence; }
};

std::string text_of(const Case& c, bool plain) {
  std::string text =
      "[run]\n" + c.run + "[model]\nplugin = \"gpt\"\ncontext = 16\nvocabulary = " + std::to_string(kVocabulary) +
      "\n" + c.model + "[data]\ntrain = [\"none\"]\nsequence_length = " + std::to_string(kSequence) +
      "\nglobal_batch = " + std::to_string(c.batch) + "\nmicro_batch = " + std::to_string(c.micro_batch) +
      "\n[device]\nthreads = 1\n" + c.optimizer + c.precision + c.parameters;
  if (plain) return text;
  return text + "[mesh]\npipeline = " + std::to_string(c.stages) + "\ndata = " + std::to_string(c.data) +
         "\ntensor = " + std::to_string(c.tensor) + "\nsequence = " + std::to_string(c.sequence) + "\n" + c.strategies;
}

Case draw(Random& random, const std::string& folder) {
  const auto pick = [&](const std::vector<std::string>& from) {
    return from[size_t(test::draw(random, 0, int64_t(from.size()) - 1))];
  };
  const auto one_in = [&](int n) { return test::draw(random, 1, n) == 1; };
  Case c;
  c.stages = std::vector<int>{2, 3, 4, 8}[size_t(test::draw(random, 0, 3))];
  c.exact = !one_in(3);
  c.run = c.exact ? "reproducible = true\n" : "";
  if (c.stages < 8 && one_in(2)) c.data = 2;
  if (!c.exact && c.ranks() <= 6) (one_in(2) ? c.tensor : c.sequence) = c.ranks() <= 3 && one_in(2) ? 3 : 2;
  c.micro_batch = int(test::draw(random, 1, 2));
  // Microbatches of a rank; a reproducible sum over several ranks is a tree of a power of two.
  const int microbatches =
      c.exact && c.data > 1 ? 1 << test::draw(random, 0, 3) : int(test::draw(random, 1, 16 / c.data));
  c.batch = c.micro_batch * c.data * microbatches;
  c.model = "hidden = 24\nheads = 6\nffn = " + std::to_string(36 + 6 * test::draw(random, 0, 3)) +
            "\nlayers = " + std::to_string(c.stages + test::draw(random, 0, 3)) + "\n" +
            pick({"tied = true\n", "tied = false\n"}) + pick({"", "dropout = 0.1\nattention_dropout = 0.1\n"}) +
            pick({"", "positions = \"rotary\"\n"}) + pick({"", "norm = \"rms_norm\"\n"}) +
            pick({"", "activation = \"swiglu\"\n", "activation = \"relu\"\n"}) +
            pick({"", "",
                  "window = 3\nlayer_kinds = [\"global\", \"local\", \"local\"]\npost_norms = true\nlogit_cap = 3\n"});
  // The gradient of keys' biases is zero but for rounding, of which some make steps of full size: an epsilon above it.
  c.optimizer = pick({"[plugins.adamw]\nlearning_rate = 1e-3\nepsilon = 1e-5\n",
                      "[plugins.adafactor]\nlearning_rate = 1e-3\n", "[plugins.sm3]\nlearning_rate = 1e-3\n"}) +
                pick({"", "[plugins.clip]\nmax_norm = 0.1\n"});
  if (c.exact) c.precision = pick({"", "[plugins.mixed_precision]\n", "[plugins.mixed_precision]\ndtype = \"fp16\"\n"});
  // An adapter's first gradients are zero but for rounding where sums are taken in another order.
  c.parameters =
      pick({"", c.exact ? "[plugins.lora]\nrank = 3\n" : "", "[parameters.\"embedding.weight\"]\nfrozen = true\n",
            "[parameters.\"*\"]\nfrozen = true\nexcept = [\"*.mlp.*\"]\n"});
  c.strategies =
      "[plugins.pipeline]\nschedule = " + pick({"\"gpipe\"", "\"1f1b\"", "\"zero_bubble_h1\"", "\"zero_bubble_h2\""}) +
      "\n";
  if (c.data > 1)
    c.strategies += pick({"[plugins.data_parallel]\n", "[plugins.zero]\nstage = 1\n", "[plugins.zero]\nstage = 2\n",
                          "[plugins.zero]\nstage = 3\n"}) +
                    pick({"bucket = 20000\n", ""});
  if (c.tensor > 1) c.strategies += "[plugins.tensor_parallel]\n" + pick({"", "sequence = true\n"});
  if (c.sequence > 1)
    c.strategies += "[plugins.context_parallel]\nattention = " + pick({"\"ring\"", "\"ulysses\"", "\"gather\""}) + "\n";
  c.strategies += pick({"", "[plugins.recompute]\n", "[plugins.recompute]\nmode = \"selective\"\n"}) +
                  (c.tensor == 1 && c.sequence == 1 && one_in(3) ? "[plugins.gist]\nminimum = 0\n" : "");
  if (one_in(3)) {
    const std::string tier = pick({"host", "nvme"});
    c.strategies += "[plugins.offload]\nminimum = 0\ndirectory = \"" + folder + "\"\noptimizer = \"" + tier +
                    "\"\nparameters = \"" + tier + "\"\nactivations = \"" + tier + "\"\n" +
                    pick({"", "[host]\nthreads = 1\n"});
  }
  return c;
}

Outcome outcome(const Case& c, bool plain) {
  return test::outcome_of(text_of(c, plain), plain ? 1 : c.ranks(), c.batch * kSequence, kVocabulary);
}

void expect_same(const Outcome& actual, const Outcome& expected) {
  EXPECT_EQ(actual.losses, expected.losses);
  ASSERT_EQ(actual.tensors.size(), expected.tensors.size());
  for (const auto& [name, values] : expected.tensors) {
    ASSERT_TRUE(actual.tensors.contains(name)) << name;
    ASSERT_EQ(actual.tensors.at(name).size(), values.size()) << name;
    EXPECT_EQ(std::memcmp(actual.tensors.at(name).data(), values.data(), values.size() * sizeof(float)), 0) << name;
  }
}

TEST(Pipeline, RandomStagesAgreeWithOneRank) {
  const test::TemporaryFolder folder;
  const uint64_t base = test::first_seed();
  for (uint64_t seed = base; seed < base + uint64_t(test::cases(5)); ++seed) {
    Random random(seed);
    const Case c = draw(random, folder.path());
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed) + " STRATA_CASES=1\n" + text_of(c, false));
    if (c.exact)
      expect_same(outcome(c, false), outcome(c, true));
    else
      test::expect_close(outcome(c, false), outcome(c, true));
    if (testing::Test::HasFailure()) return;
  }
}

Case reversible() {
  Case c;
  c.stages = 3;
  c.model = "hidden = 24\nheads = 6\nlayers = 7\ndropout = 0.1\nattention_dropout = 0.1\n[plugins.reversible]\n";
  c.optimizer = "[plugins.adamw]\nlearning_rate = 1e-3\nepsilon = 1e-5\n";
  c.strategies = "[plugins.pipeline]\n";
  return c;
}

// Two streams cross. What is inverted is rounded, and a stage keeps what it sends, which one rank inverts.
TEST(Pipeline, ReversibleBlocksAgreeWithOneRank) {
  Case c = reversible();
  test::expect_close(outcome(c, false), outcome(c, true));
  c.run = "reproducible = true\n";
  c.model += "invert = false\n";
  for (const char* schedule : {"gpipe", "1f1b", "zero_bubble_h1", "zero_bubble_h2"}) {
    c.strategies = "[plugins.pipeline]\nschedule = \"" + std::string(schedule) + "\"\n";
    expect_same(outcome(c, false), outcome(c, true));
  }
}

// The ops of each rank's step.
template <class Look>
void each_program(const Case& c, Look look) {
  run_local(c.ranks(), [&](World& world) {
    test::Runner runner(text_of(c, false), {}, Goal::train, {}, &world);
    look(world.rank(), runner);
  });
}

Case tied(const std::string& strategies) {
  Case c;
  c.model = "hidden = 24\nheads = 6\nlayers = 3\ntied = true\n";
  c.optimizer = "[plugins.adamw]\nlearning_rate = 1e-3\n";
  c.strategies = "[plugins.pipeline]\n" + strategies;
  return c;
}

std::vector<const Op*> ops_on(const Program& program, Stream stream) {
  std::vector<const Op*> ops;
  for (const Op& op : program.ops)
    if (op.stream == stream) ops.push_back(&op);
  return ops;
}

// Once a step and not once a microbatch, by the first and the last stage alone.
TEST(Pipeline, GradientsOfATiedEmbeddingAreExchangedOnce) {
  Case c = tied("");
  c.stages = 3;
  for (const char* run : {"", "reproducible = true\n"}) {
    c.run = run;
    std::mutex mutex;
    each_program(c, [&](int rank, const test::Runner& runner) {
      const std::lock_guard lock(mutex);
      size_t sent = 0;
      for (const Op* op : ops_on(runner.built.program, Stream::send))
        sent += runner.built.program[op->inputs[0]].shape == SharedVector<int64_t>({kVocabulary, 24});
      EXPECT_EQ(sent, rank == 1 ? 0u : 1u) << "rank " << rank;
      EXPECT_EQ(bool(runner.built.program.find("embedding.weight")), rank != 1);
    });
  }
}

// Of a tied embedding the first stage's part is in a checkpoint, which any number of stages reads.
TEST(Pipeline, CheckpointsHoldATiedEmbeddingOnce) {
  const test::TemporaryFolder folder;
  const Case c = tied("[plugins.mixed_precision]\ndtype = \"fp16\"\n");
  std::vector<float> first;
  std::mutex mutex;
  run_local(2, [&](World& world) {
    test::Runner runner(text_of(c, false), {}, Goal::train, {}, &world);
    std::vector<int32_t> tokens(size_t(c.batch * kSequence), 5);
    runner.run_step(tokens.data(), tokens.data());
    const Mesh mesh(world.rank(), {{"pipeline", 2, true}});
    Threads threads(1);
    EXPECT_EQ(Saver(*runner.storage, mesh, world, threads, folder.path(), 1, false).save({1, c.batch, {}, "text"}), "");
    const std::lock_guard lock(mutex);
    const std::vector<float> mine = runner.values("embedding.weight");
    if (first.empty()) first = mine;
    EXPECT_EQ(mine, first) << "both hold the same";
  });
  test::Runner one(text_of(c, true));
  const auto world = single_world();
  const Mesh mesh;
  Threads threads(1);
  Saver saver(*one.storage, mesh, *world, threads, folder.path(), 1, false);
  saver.load(*saver.latest(), true, 1);
  const Tensor& weight = one.built.program[one.built.program.find("embedding.weight")];
  const std::vector<std::byte> bytes = one.storage->copy(weight);
  EXPECT_EQ(bytes.size(), first.size() * (weight.dtype == DType::f32 ? 4 : 2));
}

// Activations and their gradients cross in the type of 16 bits, and each rank's part alone where names are split.
TEST(Pipeline, WhatCrossesIsNarrowedAndSplit) {
  struct Crossing {
    std::string strategies, precision;
    int tensor, sequence;
    int64_t bytes;
  };
  constexpr int64_t kWhole = kSequence * 24;
  for (const Crossing& one :
       {Crossing{"", "", 1, 1, 4 * kWhole}, Crossing{"", "[plugins.mixed_precision]\n", 1, 1, 2 * kWhole},
        Crossing{"[plugins.tensor_parallel]\n", "", 2, 1, 4 * kWhole},
        Crossing{"[plugins.tensor_parallel]\nsequence = true\n", "", 2, 1, 2 * kWhole},
        Crossing{"[plugins.context_parallel]\n", "", 1, 2, 2 * kWhole}}) {
    Case c = tied(one.strategies);
    c.model = "hidden = 24\nheads = 6\nlayers = 3\ntied = false\n";
    c.precision = one.precision, c.tensor = one.tensor, c.sequence = one.sequence;
    SCOPED_TRACE(text_of(c, false));
    std::mutex mutex;
    each_program(c, [&](int, const test::Runner& runner) {
      const std::lock_guard lock(mutex);
      const Program& program = runner.built.program;
      for (const Op* op : ops_on(program, Stream::send)) EXPECT_EQ(program[op->inputs[0]].bytes(), one.bytes);
      for (const Op* op : ops_on(program, Stream::receive)) EXPECT_EQ(program[op->outputs[0]].bytes(), one.bytes);
      EXPECT_EQ(ops_on(program, Stream::send).size(), size_t(c.batch));
    });
  }
}

// ZeRO's stages 2 and 3 reduce once a step, as stage 1 does.
TEST(Pipeline, ZeroReducesGradientsOnce) {
  for (const std::string stage : {"1", "2", "3"}) {
    Case c = tied("[plugins.zero]\nstage = " + stage + "\n");
    c.data = 2;
    std::mutex mutex;
    each_program(c, [&](int, const test::Runner& runner) {
      const std::lock_guard lock(mutex);
      const Program& program = runner.built.program;
      size_t reduced = 0;
      for (const Op& op : program.ops)
        if (op.kind->name == "reduce_scatter") reduced += op.inputs.size();
      size_t parameters = program.with_role(Role::parameter).size();
      EXPECT_EQ(reduced, parameters) << "stage " << stage;
    });
  }
}

// Each block scales what goes into its feed-forward layer by one and the same parameter.
class OneScale final : public Plugin {
 public:
  void model(ModelStage& stage) override {
    stage.wrap("mlp", [](Builder& build, TensorId x, const ModelStage::Module& inner) {
      TensorId scale = build.program().find("shared.scale");
      if (!scale)
        scale = build.program().add({.name = "shared.scale",
                                     .shape = {24},
                                     .role = Role::parameter,
                                     .persistent = true,
                                     .lasting = Lasting{.initializer = {Initializer::Kind::ones, 0}}});
      return inner(build, build.emit("rms_norm", {x, scale}, {{"epsilon", 1e-5}}, "scaled"));
    });
  }
};

// All stages hold it, and the middle ones hold it for two blocks. The order of one rank's sum cannot be kept then.
TEST(Pipeline, ParametersThatMoreThanTwoStagesShare) {
  OneScale one_scale;
  Case c;
  c.stages = 3;
  c.model = "hidden = 24\nheads = 6\nlayers = 5\n";
  c.optimizer = "[plugins.adamw]\nlearning_rate = 1e-3\nepsilon = 1e-5\n[plugins.clip]\nmax_norm = 0.1\n";
  c.strategies = "[plugins.pipeline]\n";
  const auto run = [&](bool plain) {
    std::vector<std::vector<float>> values(plain ? 1 : size_t(c.stages));
    run_local(int(values.size()), [&](World& world) {
      test::Runner runner(text_of(c, plain), {{"one_scale", &one_scale}}, Goal::train, {}, plain ? nullptr : &world);
      std::vector<int32_t> tokens(size_t(c.batch * kSequence), 5);
      for (int step = 0; step < 5; ++step) runner.run_step(tokens.data(), tokens.data());
      values[size_t(world.rank())] = runner.values("shared.scale");
    });
    return values;
  };
  const std::vector<float> expected = run(true)[0];
  const std::vector<std::vector<float>> of_stages = run(false);
  for (const std::vector<float>& values : of_stages) {
    EXPECT_EQ(values, of_stages[0]) << "all hold the same";
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(values[i], expected[i], 1e-5);
  }
  c.run = "reproducible = true\n";
  try {
    run(false);
    FAIL() << "a sum in another order is not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_NE(std::string(error.what()).find("\"shared.scale\" is used by 5 ops on several stages"), std::string::npos)
        << error.what();
  }
}

// A scale that overflows on one stage skips the step on all.
TEST(Pipeline, AnOverflowSkipsTheStepOnAllStages) {
  Case c = tied("");
  c.precision =
      "[plugins.mixed_precision]\ndtype = \"fp16\"\nloss_scale = 1099511627776.0\n[plugins.clip]\nmax_norm = 0.1\n";
  c.stages = 3;
  const auto scales = [&](bool plain) {
    std::vector<std::vector<double>> all(plain ? 1 : size_t(c.ranks()));
    run_local(int(all.size()), [&](World& world) {
      test::Runner runner(text_of(c, plain), {}, Goal::train, {}, plain ? nullptr : &world);
      std::vector<int32_t> tokens(size_t(c.batch * kSequence), 5);
      for (int step = 0; step < 12; ++step) {
        runner.run_step(tokens.data(), tokens.data());
        all[size_t(world.rank())].push_back(runner.scalar("loss_scale"));
      }
    });
    return all;
  };
  const std::vector<double> expected = scales(true)[0];
  EXPECT_LT(expected.front(), 0x1p40);
  for (const std::vector<double>& of_stage : scales(false)) EXPECT_EQ(of_stage, expected);
}

}  // namespace
}  // namespace strata::pipeline_test
