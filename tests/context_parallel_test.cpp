// Ranks that have parts of the tokens of the same sequences against one rank: random models, meshes, forms of attention
// and strategies over threads; bytes on the wire against the papers' formulas; what cannot be split is refused.
//
// STRATA_SEED and STRATA_CASES choose what is drawn, to repeat a case or to look for longer.
#include <cmath>
#include <mutex>

#include "engine/planning/rates.h"
#include "tests/backends.h"
#include "tests/harness.h"
#include "tests/ordering.h"
#include "tests/outcome.h"
#include "tests/random_cases.h"

namespace strata::context_parallel_test {
namespace {

constexpr int kVocabulary = 61;

struct Case {
  std::string model, optimizer, strategies;  // strategies: of the run that is tested alone
  int data = 1, sequence = 2, tensor = 1, expert = 1, batch = 4, micro_batch = 1, length = 24;
  int ranks() const { return data * sequence * tensor; }
};

std::string text_of(const Case& c, bool plain) {
  const auto set = [](const std::string& key, int64_t value) { return key + " = " + std::to_string(value) + "\n"; };
  const std::string text = "[model]\nplugin = \"gpt\"\n" + set("layers", 2) + set("vocabulary", kVocabulary) +
                           set("context", c.length + 3) + c.model + "[data]\ntrain = [\"none\"]\n" +
                           set("sequence_length", c.length) + set("global_batch", c.batch) +
                           set("micro_batch", c.micro_batch) + "[device]\nthreads = 1\n" + c.optimizer;
  if (plain) return text;
  return text + "[mesh]\n" + set("data", c.data) + set("sequence", c.sequence) + set("tensor", c.tensor) +
         (c.expert > 1 ? set("expert", c.expert) : "") + c.strategies;
}

std::string pick(test::Random& random, const std::vector<std::string>& from) {
  return from[size_t(test::draw(random, 0, int64_t(from.size()) - 1))];
}

Case draw(test::Random& random, const std::string& folder) {
  Case c;
  const std::vector<std::array<int, 3>> meshes = {{1, 2, 1}, {1, 3, 1}, {1, 4, 1}, {2, 2, 1}, {1, 2, 2}, {1, 8, 1},
                                                  {2, 3, 1}, {1, 4, 2}, {2, 2, 2}, {4, 2, 1}, {1, 5, 1}, {1, 6, 1}};
  const auto& mesh = meshes[size_t(test::draw(random, 0, int64_t(meshes.size()) - 1))];
  c.data = mesh[0], c.sequence = mesh[1], c.tensor = mesh[2];
  c.micro_batch = int(test::draw(random, 1, 2));
  c.batch = c.data * c.micro_batch * int(test::draw(random, 1, 2));
  c.length = 2 * c.sequence * int(test::draw(random, 1, 3));
  const std::string form = pick(random, {"gather", "ulysses", "ring", "ring"});
  // Ulysses divides heads; of fewer keys and values than ranks each rank gets a copy.
  int groups = c.tensor * int(test::draw(random, 1, 3)), per_group = int(test::draw(random, 1, 3));
  if (form == "ulysses" && test::draw(random, 0, 1))
    groups = c.tensor, per_group = c.sequence * int(test::draw(random, 1, 2));
  else if (form == "ulysses")
    groups = c.tensor * c.sequence;
  c.model = "hidden = " + std::to_string(test::draw(random, 19, 27)) + "\nhead_size = " + pick(random, {"4", "6"}) +
            "\nheads = " + std::to_string(groups * per_group) + "\nkv_heads = " + std::to_string(groups) +
            "\nffn = " + std::to_string(c.tensor * test::draw(random, 9, 16)) + "\n" +
            pick(random, {"", "dropout = 0.1\nattention_dropout = 0.1\n"}) +
            pick(random, {"tied = true\n", "tied = false\n"}) + pick(random, {"", "positions = \"rotary\"\n"}) +
            pick(random, {"", "norm = \"rms_norm\"\n"}) +
            pick(random, {"", "activation = \"swiglu\"\n", "activation = \"relu\"\n"}) +
            pick(random, {"", "bias = false\n", "bias = false\nqkv_bias = true\n"}) +
            pick(random, {"", "window = 3\nscore_cap = 2\nlogit_cap = 3\nscore_scalar = 5\n",
                          "window = 5\nlayer_kinds = [\"local\", \"global\"]\npost_norms = true\n"});
  if (c.model.find("rms_norm") != std::string::npos) c.model += pick(random, {"", "query_key_norm = true\n"});
  // The gradient of keys' biases is zero but for rounding, of which some make steps of full size: an epsilon above it.
  c.optimizer = pick(random, {"[plugins.adamw]\nlearning_rate = 1e-3\nepsilon = 1e-5\n",
                              "[plugins.sm3]\nlearning_rate = 1e-3\nepsilon = 1e-8\n"}) +
                pick(random, {"", "[plugins.clip]\nmax_norm = 0.1\n"});
  if (c.tensor == 1 && test::draw(random, 0, 3) == 0) c.optimizer = "[plugins.adafactor]\nlearning_rate = 1e-3\n";
  c.strategies = "[plugins.context_parallel]\nattention = \"" + form + "\"\n" +
                 pick(random, {"", "balance = false\n"}) + pick(random, {"", "bucket = 20000\n"});
  if (c.tensor > 1) {
    c.strategies += "[plugins.tensor_parallel]\n";
    if (c.length / c.sequence % c.tensor == 0) c.strategies += pick(random, {"", "sequence = true\n"});
  }
  if (c.data > 1)
    c.strategies += pick(random, {"[plugins.data_parallel]\n", "[plugins.zero]\nstage = 1\n",
                                  "[plugins.zero]\nstage = 2\n", "[plugins.zero]\nstage = 3\nreshard = \"always\"\n"});
  c.strategies += pick(random, {"", "[plugins.recompute]\n", "[plugins.recompute]\nmode = \"selective\"\n"});
  if (test::draw(random, 0, 2) == 0) c.strategies += "[plugins.gist]\nminimum = 0\ncapacity = 1.0\n";
  if (test::draw(random, 0, 2) == 0) {
    const std::string tier = pick(random, {"host", "nvme"});
    c.strategies += "[plugins.offload]\nminimum = 0\ndirectory = \"" + folder + "\"\noptimizer = \"" + tier +
                    "\"\ngradients = \"" + tier + "\"\nparameters = \"" + tier + "\"\nactivations = \"" + tier + "\"\n";
  }
  return c;
}

using test::expect_close, test::Outcome;

Outcome outcome(const Case& c, bool plain, const std::string& backend = "cpu") {
  return test::outcome_of(text_of(c, plain), plain ? 1 : c.ranks(), c.batch * c.length, kVocabulary, backend);
}

TEST(ContextParallel, RandomModelsAgreeWithOneRank) {
  const test::TemporaryFolder folder;
  const uint64_t first = test::first_seed();
  for (uint64_t seed = first; seed < first + uint64_t(test::cases(16)); ++seed) {
    test::Random random(seed);
    const Case c = draw(random, folder.path());
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed) + " STRATA_CASES=1\n" + text_of(c, false));
    const Outcome expected = outcome(c, true), actual = outcome(c, false);
    expect_close(actual, expected);
    if (seed % 4 == 0) {
      EXPECT_EQ(outcome(c, false).losses, actual.losses) << "the same run again";
    }
    if (HasFailure()) return;
  }
}

// Each rank sends its own tokens to experts, divided among data ranks or not; what is of all tokens of a microbatch,
// such as losses of balance, capacities, counts of choices, is of those that all ranks have. Where rounding decides who
// is chosen, losses part by 1e-4 from that step on: 2 of the first 160 cases.
TEST(ContextParallel, ExpertsAgreeWithOneRank) {
  const test::TemporaryFolder folder;
  const uint64_t first = test::first_seed();
  for (uint64_t seed = first; seed < first + uint64_t(test::cases(12)); ++seed) {
    test::Random random(seed);
    Case c = draw(random, folder.path());
    const int experts = c.data * int(test::draw(random, 1, 3));
    const std::string router = pick(random, {"topk", "topk", "switch", "gshard", "shazeer"});
    const int k = router == "gshard" ? 2 : router == "switch" ? 1 : int(test::draw(random, 1, std::min(experts, 3)));
    const int choices = c.micro_batch * c.length * k;
    if (experts < k || choices * 0.8 < experts) continue;
    // Noise between steps decides who is chosen where logits are near each other: no dropout, few near ones.
    const auto without = [&](const std::string& line) {
      if (const size_t at = c.model.find(line); at != c.model.npos) c.model.erase(at, line.size());
    };
    without("dropout = 0.1\nattention_dropout = 0.1\n");
    c.optimizer += "[plugins.moe]\ndeviation = 0.5\nexperts = " + std::to_string(experts) +
                   "\nk = " + std::to_string(k) + "\nrouter = \"" + router + "\"\nffn = " +
                   std::to_string(c.tensor * test::draw(random, 3, 7)) + "\n" + pick(random, {"", "shared = 8\n"}) +
                   pick(random, {"", "activation = \"gelu\"\n"}) + pick(random, {"", "blocks = [1]\n"});
    if (router == "topk") c.optimizer += pick(random, {"", "bias_rate = 0.01\nbalance = 0\n", "z_loss = 0.01\n"});
    if (router == "switch") c.optimizer += pick(random, {"", "jitter = 0.1\n"});
    const std::string bound = pick(random, {"", "capacity_factor = 0.8\n", "capacity_factor = 1.1\n"});
    c.optimizer += bound;
    if (c.data > 1 && test::draw(random, 0, 1)) {
      c.expert = c.data == 4 && test::draw(random, 0, 1) ? 2 : c.data;  // experts of which two ranks have the same
      if (bound.empty()) c.optimizer += pick(random, {"", "receive_factor = 1.2\n", "pieces = 2\n"});
    }
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed) + " STRATA_CASES=1\n" + text_of(c, false));
    const Outcome expected = outcome(c, true), actual = outcome(c, false);
    expect_close(actual, expected);
    if (HasFailure()) return;
  }
}

// What evens out the load is of all tokens of a microbatch: a bias by counts of choices, losses, who finds room.
TEST(ContextParallel, BalanceIsOfAllTokens) {
  for (const std::string router :
       {"bias_rate = 0.1\nbalance = 0\n", "balance = 0.5\nz_loss = 0.1\ncapacity_factor = 0.7\n",
        "router = \"shazeer\"\nimportance = 0.5\nload = 0.5\n"}) {
    Case c;
    c.model = "hidden = 24\nheads = 2\nffn = 24\n";
    c.optimizer = "[plugins.adamw]\nlearning_rate = 1e-3\nepsilon = 1e-5\n[plugins.moe]\nexperts = 4\nk = 2\nffn = 9\n"
                  "deviation = 0.5\n" + router;
    c.strategies = "[plugins.context_parallel]\n";
    c.sequence = 3;
    SCOPED_TRACE(text_of(c, false));
    const Outcome expected = outcome(c, true), actual = outcome(c, false);
    expect_close(actual, expected);
  }
}

// Rounded to 16 bits wherever one rank rounds, and gradients once more in each step of a ring: losses are as near as
// bf16's eight bits allow.
TEST(ContextParallel, MixedPrecisionLearnsAlike) {
  for (const std::string form : {"gather", "ulysses", "ring"})
    for (const std::string how : {"dtype = \"bf16\"\n", "dtype = \"fp16\"\n", "gradients = \"bf16\"\n"}) {
      if (how.starts_with("gradients") && form != "ring") continue;
      Case c;
      c.model = "hidden = 32\nheads = 4\nkv_heads = 2\nffn = 71\ndropout = 0.1\nattention_dropout = 0.1\n";
      c.optimizer = "[plugins.adamw]\nlearning_rate = 1e-3\n[plugins.mixed_precision]\n" + how;
      c.strategies = "[plugins.context_parallel]\nattention = \"" + form + "\"\n";
      c.sequence = 4;
      SCOPED_TRACE(text_of(c, false));
      const Outcome expected = outcome(c, true), actual = outcome(c, false);
      ASSERT_EQ(actual.losses.size(), expected.losses.size());
      for (size_t i = 0; i < expected.losses.size(); ++i)
        EXPECT_NEAR(actual.losses[i], expected.losses[i], 0x1p-8 * expected.losses[i]) << "step " << i;
    }
}

#if defined(STRATA_EMULATED_CUDA)
TEST(ContextParallel, ExpertsOnCudaAgreeWithTheCpu) {
  for (const std::string router : {"router = \"topk\"\nk = 2\nbias_rate = 0.01\n", "router = \"gshard\"\n",
                                   "router = \"shazeer\"\nk = 2\n", "router = \"switch\"\njitter = 0.1\n"}) {
    Case c;
    c.model = "hidden = 16\nheads = 2\nffn = 64\n";
    c.optimizer =
        "[plugins.adamw]\nlearning_rate = 1e-3\nepsilon = 1e-5\n[plugins.moe]\nexperts = 4\nffn = 12\ndeviation = 0.5\n"
        "capacity_factor = 0.9\n" + router;
    c.strategies = "[plugins.context_parallel]\nattention = \"ulysses\"\n[plugins.data_parallel]\n";
    c.batch = c.data = 2;
    c.length = 8;
    if (router.find("topk") != router.npos) c.expert = 2;
    SCOPED_TRACE(text_of(c, false));
    const Outcome expected = outcome(c, true), actual = outcome(c, false, "cuda");
    expect_close(actual, expected);
  }
}

// Positions and dropout's masks are those of the tokens that a rank has, of two chunks or one; keys and values are of
// fewer heads.
TEST(ContextParallel, EachFormOnCudaAgreesWithTheCpu) {
  const std::string two = "heads = 2\ndropout = 0.1\nattention_dropout = 0.1\npositions = \"learned\"\n",
                    one = "heads = 4\nkv_heads = 1\nwindow = 5\nscore_cap = 2\npositions = \"rotary\"\n";
  const struct {
    std::string form, model;
    int ranks, length;
  } cases[] = {{"ulysses\"", one, 4, 16},
               {"gather\"", two, 2, 8},
               {"gather\"\nbalance = false", one, 3, 9},
               {"ring\"", one, 2, 8},
               {"ring\"\nbalance = false", two, 3, 9},
               {"ring\"", two, 2, 72}};
  for (const auto& [form, model, ranks, length] : cases) {
    Case c;
    c.model = "hidden = 16\nffn = 16\n" + model;
    c.optimizer = "[plugins.adamw]\nlearning_rate = 1e-3\nepsilon = 1e-5\n[plugins.clip]\nmax_norm = 0.1\n";
    c.strategies = "[plugins.context_parallel]\nattention = \"" + form + "\n";
    c.sequence = ranks, c.length = length;
    c.batch = length > 64 ? 1 : 2;
    SCOPED_TRACE(text_of(c, false));
    const Outcome expected = outcome(c, true), actual = outcome(c, false, "cuda");
    expect_close(actual, expected);
  }
}

TEST(ContextParallel, RandomModelsOnCudaAgreeWithTheCpu) {
  const test::TemporaryFolder folder;
  const uint64_t first = test::first_seed();
  for (uint64_t seed = first; seed < first + uint64_t(test::cases(1)); ++seed) {
    test::Random random(seed);
    const Case c = draw(random, folder.path());
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed) + " STRATA_CASES=1\n" + text_of(c, false));
    const Outcome expected = outcome(c, true), actual = outcome(c, false, "cuda");
    expect_close(actual, expected);
    if (HasFailure()) return;
  }
}
#endif

struct Bytes {
  double planned = 0, sent = 0;  // of a rank; sent: of what the wire counted, on average
  double activations = 0;        // planned, of what carries activations and their gradients
};

Bytes bytes_of(const std::string& text, int ranks, int64_t tokens) {
  Bytes bytes;
  std::mutex mutex;
  run_local(ranks, [&](World& world) {
    test::Runner runner(text, {}, Goal::train, {}, &world);
    const std::vector<int32_t> data(size_t(tokens), 3);
    runner.run_step(data.data(), data.data());
    const std::lock_guard lock(mutex);
    for (const auto& [axis, group] : runner.groups)
      if (axis != "loop") bytes.sent += double(group->bytes_sent()) / ranks;
    if (world.rank() > 0) return;
    for (const Op& op : runner.built.program.ops) {
      if (!op.kind->exchange) continue;
      const double wire = cost_of(OpView(runner.built.program, op)).wire * (ranks - 1) / ranks;
      bytes.planned += wire;
      if (op.step_part != StepPart::reduce) bytes.activations += wire;
    }
  });
  return bytes;
}

// A rank and layer, of b sequences of s tokens among n ranks, q elements of a token's queries, k of its keys and
// values:
//   ulysses (2309.14509, 3.2): qkv and the result turned, forward and backward: 2 (2 q + k) b s / n, of which 1 / n
//   stays; ring (2310.01889): keys and values n - 1 times forward and n - 1 times backward, their gradients n times;
//   gather: keys and values gathered twice, their gradients summed to shares.
// What is really sent grows by exactly that with the tokens; the sums of gradients do not depend on them.
TEST(ContextParallel, BytesOnTheWireFollowTheFormulas) {
  for (int n : {2, 4, 8})
    for (const std::string form : {"gather", "ulysses", "ring"}) {
      const int64_t b = 2, layers = n == 2 ? 3 : 1, q = 8 * 8, k = 2 * 8 * 8;
      const auto formula = [&](int64_t s) {
        const double tokens = 4.0 * double(layers * b * s) / n;
        if (form == "ulysses") return 2 * double(2 * q + k) * tokens * (n - 1) / n;
        return form == "ring" ? double(k) * tokens * (2 * (n - 1) + n) : 3 * double(k) * tokens * (n - 1);
      };
      const auto bytes = [&](int64_t s) {
        const std::string text =
            "[model]\nplugin = \"gpt\"\nlayers = " + std::to_string(layers) +
            "\nhidden = 24\nheads = 8\nhead_size = 8\nvocabulary = 61\ncontext = 512\npositions = \"rotary\"\n"
            "[data]\ntrain = [\"none\"]\nglobal_batch = 2\nmicro_batch = 2\nsequence_length = " +
            std::to_string(s) + "\n[device]\nthreads = 1\n[mesh]\nsequence = " + std::to_string(n) +
            "\n[plugins.adamw]\n[plugins.context_parallel]\nattention = \"" + form + "\"\n";
        return bytes_of(text, n, b * s);
      };
      const Bytes few = bytes(128), many = bytes(256);
      EXPECT_DOUBLE_EQ(few.activations, formula(128)) << form << ", " << n << " ranks";
      EXPECT_DOUBLE_EQ(many.sent - few.sent, formula(256) - formula(128)) << form << ", " << n << " ranks";
      EXPECT_GT(few.planned, few.activations) << "parameters' gradients are summed";
    }
}

PlannedProgram planned(const std::string& mesh, const Rates& rates, int layers, int length) {
  const test::TemporaryFolder folder;
  const std::string tokens = std::to_string(length);
  const std::string text =
      "[model]\nplugin = \"gpt\"\nlayers = " + std::to_string(layers) +
      "\nhidden = 256\nheads = 4\nvocabulary = 257\npositions = \"rotary\"\n"
      "context = " +
      tokens + "\n[data]\ntrain = [\"none\"]\nglobal_batch = 1\nmicro_batch = 1\nsequence_length = " + tokens +
      "\n[device]\nthreads = 1\n[plugins.adamw]\n" + mesh;
  Session session(test::write_file(folder / "config.toml", text), {});
  session.rates = rates;
  return session.plan_run(Goal::train).main();
}

// Beside its share of what is kept a rank has a few blocks of keys and values on their way, a hundredth of twelve
// layers.
TEST(ContextParallel, ALongSequenceTakesItsShareOfActivations) {
  const auto activations = [](const std::string& mesh) {
    return planned(mesh, {}, 12, 131072).memory.device().at_peak[int(Role::activation)];
  };
  const int64_t one = activations(""), many = activations("[mesh]\nsequence = 16\n[plugins.context_parallel]\n");
  EXPECT_NEAR(double(many) * 16 / double(one), 1, 0.02) << many << " of " << one;
}

// A block of keys and values takes half as long on its way as attention to one: of a ring, only what follows its last
// step shows, the way home of the gradients, and the sums of parameters' gradients; what is gathered is waited for.
TEST(ContextParallel, ARingGoesRoundBehindAttention) {
  const auto exposed = [](const std::string& form) {
    Rates rates;
    rates.flops = 100e9;
    const double block = 2.0 * 256 * 4 * 16384 / 4;                            // bytes
    const double attention = 2.0 * 256 * 16384 * 16384 / 4 / 4 / rates.flops;  // seconds of a step, forward
    rates.links["sequence"] = {.ranks = 4, .bandwidth = block / (attention / 2), .latency = 1e-6};
    const auto plan =
        planned("[mesh]\nsequence = 4\n[plugins.context_parallel]\nattention = \"" + form + "\"\n", rates, 2, 16384);
    const Stalls& stalls = plan.prediction->stalls;
    EXPECT_GT(stalls.exchanging, 0);
    return stalls.ranks() / stalls.exchanging;
  };
  EXPECT_LT(exposed("ring"), 0.25);
  EXPECT_GT(exposed("gather"), 0.8);
}

std::string message(const std::string& model, const std::string& more, int length = 24) {
  const test::TemporaryFolder folder;
  const std::string text = "[model]\nplugin = \"gpt\"\nlayers = 1\nvocabulary = 61\ncontext = 64\n" + model +
                           "[data]\ntrain = [\"none\"]\nsequence_length = " + std::to_string(length) +
                           "\nglobal_batch = 2\nmicro_batch = 1\n[plugins.adamw]\n" + more;
  try {
    Session session(test::write_file(folder / "config.toml", text), {});
    session.rates = Rates{};
    session.plan(Goal::train);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage) << error.what();
    return error.what();
  }
  return "";
}

TEST(ContextParallel, WhatCannotBeSplitIsRefused) {
  const std::string heads = "hidden = 32\nheads = 4\nkv_heads = 2\n", plugin = "[plugins.context_parallel]\n",
                    ulysses = plugin + "attention = \"ulysses\"\n";
  const auto expect = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect(message(heads, "[mesh]\nsequence = 2\n" + plugin, 26),
         "tokens (batch 1, time 26): its dimension \"time\" cannot be divided evenly among the 2 ranks of axis "
         "\"sequence\", two chunks each; make it a multiple of 4, or change mesh.sequence.");
  EXPECT_EQ(message(heads, "[mesh]\nsequence = 2\n" + plugin + "balance = false\n", 26), "");
  expect(message(heads, "[mesh]\nsequence = 2\n" + ulysses, 25), "among the 2 ranks of axis \"sequence\"; make it a");
  expect(message(heads, "[mesh]\nsequence = 3\n" + ulysses),
         "has 4 heads that share 2 of keys and values, which the 3 ranks of axis \"sequence\" cannot divide evenly, as "
         "attention = \"ulysses\" does; set mesh.sequence to a divisor of the heads, or attention to \"ring\" or "
         "\"gather\".");
  EXPECT_EQ(message(heads, "[mesh]\nsequence = 4\n" + ulysses), "");
  expect(message(heads, plugin), "the ranks of axis \"sequence\", which has one; set mesh.sequence");
  expect(message(heads, "[mesh]\nsequence = 2\n"),
         "mesh.sequence asks for 2 ranks, but no enabled plugin splits anything over them; enable one that does "
         "(installed: context_parallel)");
  expect(message(heads, "[run]\nreproducible = true\n[mesh]\nsequence = 2\n" + plugin),
         "cannot work with run.reproducible and mesh.sequence above 1, because");
  expect(message(heads, "[mesh]\nsequence = 2\n" + plugin + "attention = \"rings\"\n"), "Did you mean \"ring\"?");
}

}  // namespace
}  // namespace strata::context_parallel_test
