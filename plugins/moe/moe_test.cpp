// Whole models with experts: what they learn and take, every strategy against the plain run, and wrong options.
//
// STRATA_SEED and STRATA_CASES choose what is drawn, to repeat a case or to look for longer.
#include <algorithm>
#include <cmath>

#include "tests/harness.h"
#include "tests/ordering.h"
#include "tests/outcome.h"
#include "tests/random_cases.h"

namespace strata {
namespace {

using test::Random;

constexpr int kTokens = 8 * 11, kWords = 61;

struct ExpertsCase {
  std::string run, model, experts, optimizer, precision;  // of both runs
  std::string mesh, strategies;                           // of the one that is tested
  int ranks = 1, micro_batch = 2;
};

std::string text_of(const ExpertsCase& c, bool plain) {
  return "[run]\n" + c.run + "[model]\nplugin = \"gpt\"\nlayers = 2\nvocabulary = " + std::to_string(kWords) +
         "\ncontext = 16\n" + c.model + "[data]\ntrain = [\"none\"]\nsequence_length = 11\nglobal_batch = 8\n" +
         "micro_batch = " + std::to_string(c.micro_batch) + "\n[device]\nthreads = 1\n[plugins.moe]\n" + c.experts +
         c.optimizer + c.precision + (plain ? "" : "[mesh]\n" + c.mesh + c.strategies);
}

ExpertsCase draw_case(Random& random, const std::string& folder) {
  const auto pick = [&](const std::vector<std::string>& from) {
    return from[size_t(test::draw(random, 0, int64_t(from.size()) - 1))];
  };
  ExpertsCase c;
  const auto experts = test::draw(random, 1, 9);
  c.model = pick({"hidden = 60\nheads = 3\n", "hidden = 32\nheads = 4\ndropout = 0.1\n",
                  "hidden = 24\nheads = 2\npositions = \"rotary\"\nnorm = \"rms_norm\"\nbias = false\n"});
  const std::string router = pick({"topk", "topk", experts > 1 ? "gshard" : "topk", "switch", "shazeer"});
  const auto k = test::draw(random, 1, std::min<int64_t>(experts, 3));
  c.experts = "experts = " + std::to_string(experts) + "\nrouter = \"" + router + "\"\nffn = " + pick({"17", "40"}) +
              "\n" + (router == "topk" || router == "shazeer" ? "k = " + std::to_string(k) + "\n" : "") +
              pick({"", "normalize = false\n"}) + pick({"", "shared = 13\n"}) + pick({"", "blocks = [1]\n"}) +
              pick({"", "capacity_factor = 1.0\n", "capacity_factor = 0.9\n"}) +
              pick({"", "z_loss = 0.01\n", "balance = 0.0\n"}) + pick({"", "jitter = 0.1\n"}) +
              (router == "topk" || router == "switch" ? pick({"", "bias_rate = 0.01\n"}) : "") +
              pick({"", "dropout = 0.2\n"}) + pick({"", "activation = \"gelu\"\n", "activation = \"squared_relu\"\n"});
  c.optimizer = pick({"[plugins.adamw]\n", "[plugins.adamw]\n", "[plugins.adafactor]\n", "[plugins.sm3]\n",
                      "[plugins.adamw8bit]\n"}) +
                "learning_rate = 1e-3\n";
  const bool adamw = c.optimizer.starts_with("[plugins.adamw]");
  c.optimizer += pick({"", "[plugins.clip]\nmax_norm = 0.1\n"});
  c.precision =
      pick({"", "", "[plugins.mixed_precision]\n", "[plugins.mixed_precision]\ndtype = \"fp16\"\nloss_scale = 1024\n"});
  c.micro_batch = int(test::draw(random, 1, 2));
  if (adamw && test::draw(random, 0, 2) > 0) {  // the same bits on any number of ranks
    c.run = "reproducible = true\n";
    const bool pipeline = test::draw(random, 0, 2) == 0;
    c.ranks = pipeline ? 2 : 2 << test::draw(random, 0, 1);
    c.mesh = (pipeline ? "pipeline = " : "data = ") + std::to_string(c.ranks) + "\n";
    c.strategies = pipeline ? "[plugins.pipeline]\n"
                            : pick({"[plugins.data_parallel]\n", "[plugins.zero]\nstage = 1\n",
                                    "[plugins.zero]\nstage = 2\n", "[plugins.zero]\nstage = 3\n"});
  }
  c.strategies += pick({"", "[plugins.recompute]\n", "[plugins.recompute]\nevery = 2\n",
                        "[plugins.recompute]\nmode = \"selective\"\nkinds = [\"route\", \"expert_dispatch\", "
                        "\"grouped_linear\"]\n"}) +
                  pick({"", "[plugins.gist]\nminimum = 0\ncapacity = 1.0\n"});
  if (test::draw(random, 0, 1)) {
    const std::string tier = pick({"host", "nvme"});
    c.strategies += "[plugins.offload]\nminimum = 0\ndirectory = \"" + folder + "\"\noptimizer = \"" + tier +
                    "\"\ngradients = \"" + tier + "\"\nparameters = \"" + tier + "\"\nactivations = \"" + tier + "\"\n";
  }
  return c;
}

test::Outcome outcome(const ExpertsCase& c, bool plain) {
  return test::outcome_of(text_of(c, plain), plain ? 1 : c.ranks, kTokens, kWords);
}

void expect_equal(const test::Outcome& actual, const test::Outcome& expected) {
  EXPECT_EQ(actual.losses, expected.losses);
  ASSERT_EQ(actual.tensors.size(), expected.tensors.size());
  for (const auto& [name, values] : expected.tensors) EXPECT_EQ(actual.tensors.at(name), values) << name;
}

// Where things rest, what is made again and who has which part changes no bit; routing made again is the same.
TEST(Experts, RandomCompositionsAreExact) {
  const test::TemporaryFolder folder;
  const uint64_t base = test::first_seed();
  const auto cases = uint64_t(test::cases(4));
  for (uint64_t seed = base; seed < base + cases; ++seed) {
    Random random(seed);
    const ExpertsCase c = draw_case(random, folder.path());
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed) + " STRATA_CASES=1\n" + text_of(c, false));
    expect_equal(outcome(c, false), outcome(c, true));
    if (HasFailure()) return;
  }
}

// Ranks that share the work of each expert sum in another order.
TEST(Experts, RanksThatShareTheWorkAgree) {
  for (const std::string experts : {"", "capacity_factor = 1.0\nshared = 14\n"})
    for (const std::string sequence : {"", "pieces = 2\n"}) {
      ExpertsCase c;
      c.model = "hidden = 24\nheads = 4\n";
      c.experts = "experts = 5\nk = 2\nffn = 20\n" + experts;
      c.optimizer = "[plugins.adamw]\nlearning_rate = 1e-3\nepsilon = 1e-5\n";
      c.mesh = "tensor = 2\ndata = 2\n", c.ranks = 4;
      c.strategies = "[plugins.tensor_parallel]\n" + sequence + "[plugins.zero]\nstage = 2\n";
      SCOPED_TRACE(text_of(c, false));
      test::expect_close(outcome(c, false), outcome(c, true));
    }
}

// Numbers kept for the backward pass a block, by the choices R = tokens·k of a microbatch, width C and inner width F:
// of the dense block without its feed-forward layer; rows C, up, gate and product F each, result C; logits E, weights
// and choices and slots k a token; offsets.
TEST(Experts, ActivationBytesFollowTheFormula) {
  constexpr int64_t kHidden = 32, kInner = 48, kOf = 4, kChosen = 2, kAll = 4 * 16;
  const auto activations = [](int layers) {
    return test::Runner("[model]\nplugin = \"gpt\"\nlayers = " + std::to_string(layers) +
                        "\nhidden = 32\nheads = 4\nvocabulary = 64\ncontext = 16\n[data]\ntrain = "
                        "[\"none\"]\nsequence_length = 16\nglobal_batch = 4\n"
                        "micro_batch = 4\n[plugins.moe]\nexperts = 4\nffn = 48\n[plugins.adamw]\n")
        .plan.device()
        .at_peak[int(Role::activation)];
  };
  const int64_t rows = kAll * kChosen;
  const int64_t dense = 8 * kAll * kHidden + kAll * (2 + 2 + 4);  // plugins/recompute/recompute_test.cpp
  const int64_t small = kAll * kOf + 3 * kAll * kChosen + 16;     // offsets fill a line of 64 bytes
  EXPECT_EQ(activations(9) - activations(8), 4 * (dense + rows * (2 * kHidden + 3 * kInner) + small));
}

// The loss of the router evens out the load, and what the log says of it and of dropped choices is so.
TEST(Experts, LearnAndShareTheLoad) {
  const auto last = [](const std::string& experts) {
    test::Runner runner(
        "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 32\nheads = 4\nvocabulary = 61\ncontext = 16\n"
        "[data]\ntrain = [\"none\"]\nsequence_length = 11\nglobal_batch = 8\n[device]\nthreads = "
        "1\n[plugins.adamw]\nlearning_rate = 1e-2\n"
        "[plugins.moe]\nffn = 32\n" +
        experts);
    std::vector<int32_t> tokens(kTokens), targets(kTokens);
    Random random(3);
    for (int i = 0; i < kTokens; ++i)
      tokens[size_t(i)] = int32_t(test::draw(random, 0, 60)), targets[size_t(i)] = (tokens[size_t(i)] * 7 + 3) % 61;
    double loss = 0;
    for (int step = 0; step < 60; ++step) loss = runner.run_step(tokens.data(), targets.data());
    const double load = runner.scalar("moe_load"), dropped = runner.scalar("moe_dropped");
    return std::array{loss, load, dropped};
  };
  const auto even = last("experts = 4\nk = 1\nnormalize = false\nbalance = 0.1\n");
  EXPECT_LT(even[0], 0.5);  // from log 61 = 4.1
  EXPECT_LT(even[1], 1.35);  // times the even share; without it, or a bias, 1.45
  EXPECT_EQ(even[2], 0.0);
  const auto pushed = last("experts = 4\nk = 1\nnormalize = false\nbalance = 0.0\nbias_rate = 0.01\n");
  EXPECT_LT(pushed[1], 1.35);
  const auto full = last("experts = 4\nk = 4\ncapacity_factor = 0.5\n");  // all choose all: half finds room
  EXPECT_EQ(full[1], 0.5);
  EXPECT_EQ(full[2], 0.5);
}

void expect_refused(const std::string& experts, const std::string& why, const std::string& more = "") {
  ExpertsCase c;
  c.experts = experts;
  c.optimizer = "[plugins.adamw]\n";
  c.strategies = more;
  try {
    test::Runner runner(text_of(c, false));
    ADD_FAILURE() << "accepted: " << experts;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    EXPECT_EQ(error.code(), ExitCode::usage);
  }
}

TEST(Experts, WrongOptionsAreErrors) {
  expect_refused("experts = 2\nk = 3\n", "chooses more experts for a token than the 2");
  expect_refused("router = \"switch\"\nk = 2\n", "chooses one expert for a token, but k = 2");
  expect_refused("router = \"gshard\"\nexperts = 1\n", "k = 2 chooses more experts");
  expect_refused("router = \"gshard\"\nbias_rate = 0.1\n", "bias_rate is of routers");
  expect_refused("experts = 0\n", "plugins.moe.experts must be 1 to 65536");
  expect_refused("capacity_factor = 0.01\n", "room for none of the 22 tokens");
  expect_refused("blocks = [1, 2]\n", "block 2");
  expect_refused("blocks = [-1]\n", "block -1");
}

}  // namespace
}  // namespace strata
