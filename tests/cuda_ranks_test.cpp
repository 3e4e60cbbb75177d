// Several ranks on the CUDA backend, over NCCL and through host memory: against one rank, and when a rank is gone.
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <random>

#include "engine/runtime/feed.h"
#include "tests/backends.h"
#include "tests/harness.h"
#if defined(STRATA_EMULATED_CUDA)
#include <cstdlib>

#include "cuda/emulated/machine.h"
#endif

namespace strata::cuda_ranks_test {
namespace {

#if defined(STRATA_GPU) || defined(STRATA_EMULATED_CUDA)

constexpr int kSequence = 16, kBatch = 4, kVocabulary = 61, kSteps = 3;  // a graph is made in the second step

std::string toml(int ranks, const std::string& plugins, const std::string& run = "", const std::string& network = "",
                 const std::string& optimizer = "[plugins.adamw]\nlearning_rate = 1e-3\n",
                 const std::string& model = "") {
  return "[run]\n" + run + "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 32\nheads = 2\nffn = 71\nvocabulary = " +
         std::to_string(kVocabulary) + "\ncontext = 16\n" + model +
         "[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = " + std::to_string(kBatch) +
         "\nmicro_batch = 1\n[device]\nthreads = 1\n[mesh]\ndata = " + std::to_string(ranks) + "\n[network]\n" +
         network + optimizer + "[plugins.clip]\nmax_norm = 0.1\n[plugins.mixed_precision]\n" + plugins;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<float> master;  // one tensor, put together from all ranks' rows
  bool in_queue = false;
};

Outcome outcome(int ranks, const std::string& text, const std::string& watched = "block.1.mlp.up.weight") {
  Outcome result;
  std::mutex mutex;
  run_local(
      ranks,
      [&](World& world) {
        const std::unique_ptr<Device> device = test::rank_device(world.rank());
        test::Runner runner(text, {}, Goal::train, {}, ranks > 1 ? &world : nullptr, "cuda", device.get());
        std::mt19937 random(7);
        std::vector<int32_t> tokens(kBatch * kSequence), targets(tokens.size());
        for (int step = 0; step < kSteps; ++step) {
          for (auto* list : {&tokens, &targets})
            for (int32_t& token : *list) token = int32_t(random() % kVocabulary);
          runner.in_loop = step + 1 < kSteps;
          const double loss = runner.run_step(tokens.data(), targets.data());
          if (world.rank() == 0) result.losses.push_back(loss);
        }
        for (const Tensor& tensor : runner.storage->persistent_tensors()) {
          if (tensor.name != watched) continue;
          const std::vector<float> values = runner.values(tensor.name);
          const std::lock_guard lock(mutex);
          test::put_together(tensor, values, result.master);
        }
        result.in_queue |= world.rank() == 0 && exchanges_in_queue(runner.groups);
      },
      30);
  return result;
}

const std::string kExchanges[] = {
    "[plugins.data_parallel]\nbucket = 20000\n", "[plugins.zero]\nstage = 1\nbucket = 20000\n",
    "[plugins.zero]\nstage = 2\nbucket = 20000\n", "[plugins.zero]\nstage = 3\nbucket = 20000\n"};

void expect_agreement(const Outcome& actual, const Outcome& expected) {
  ASSERT_FALSE(expected.master.empty());
  ASSERT_EQ(actual.master.size(), expected.master.size());
  for (size_t i = 0; i < expected.losses.size(); ++i)
    EXPECT_NEAR(actual.losses[i], expected.losses[i], 1e-3 * expected.losses[i]) << i;
  double apart = 0, size = 0;
  for (size_t i = 0; i < expected.master.size(); ++i) {
    apart += double(std::abs(actual.master[i] - expected.master[i]));
    size += double(std::abs(expected.master[i]));
  }
  EXPECT_LT(apart, 5e-3 * size);
}

TEST(CudaRanks, AgreeWithOne) {
  STRATA_NEEDS_GPU();
  const Outcome one = outcome(1, toml(1, ""));
  for (const std::string& exchange : kExchanges)
    for (const std::string network : {"", "provider = \"tcp\"\n"})
      for (int ranks : {2, 4}) {
        if (!network.empty() && (ranks == 4) == (&exchange == &kExchanges[3])) continue;
        SCOPED_TRACE(exchange + network + std::to_string(ranks));
        const Outcome some = outcome(ranks, toml(ranks, exchange, "", network));
        expect_agreement(some, one);
#if !defined(STRATA_GPU)
        EXPECT_EQ(some.in_queue, network.empty());
#endif
      }
}

TEST(CudaRanks, ReproducibleRunsAreEqual) {
  STRATA_NEEDS_GPU();
  const std::string run = "reproducible = true\n";
  const Outcome one = outcome(1, toml(1, "", run));
  for (const std::string& exchange : kExchanges) {
    const int ranks = &exchange == &kExchanges[2] ? 4 : 2;
    SCOPED_TRACE(exchange + std::to_string(ranks));
    const Outcome some = outcome(ranks, toml(ranks, exchange, run));
    EXPECT_FALSE(some.in_queue);
    EXPECT_EQ(some.losses, one.losses);
    EXPECT_EQ(some.master, one.master);
  }
}

// Losses of two ranks are within what a form of exchange does in a few steps, and not those of gradients that cross as
// they are.
void expect_learns_as(const Outcome& one, const std::string& plugins, const std::string& network, double band) {
  SCOPED_TRACE(plugins + network);
  const Outcome some = outcome(2, toml(2, plugins, "", network));
  for (size_t i = 0; i < one.losses.size(); ++i) EXPECT_NEAR(some.losses[i], one.losses[i], band * one.losses[i]) << i;
  EXPECT_NE(some.losses, one.losses);
}

// Over NCCL and through host memory.
TEST(CudaRanks, CodesAndBitsLearnAsOneRankDoes) {
  STRATA_NEEDS_GPU();
  const Outcome one = outcome(1, toml(1, ""));
  const std::string codes = "[plugins.quantized_exchange]\nminimum = 100\n", tcp = "provider = \"tcp\"\n";
  expect_learns_as(one, kExchanges[0] + codes, "", 5e-3);
  expect_learns_as(one, kExchanges[2] + codes + "format = \"int4\"\n", tcp, 3e-2);
  expect_learns_as(one, kExchanges[0] + "[plugins.onebit]\nminimum = 100\n", "", 5e-2);
}

// Shares of parameters that are gathered, and working copies after updates, as codes.
TEST(CudaRanks, GatheredCodesLearnAsOneRankDoes) {
  STRATA_NEEDS_GPU();
  const Outcome one = outcome(1, toml(1, ""));
  const std::string codes = "[plugins.quantized_exchange]\nminimum = 100\nparameters = \"int8\"\n";
  expect_learns_as(one, kExchanges[3] + codes + "format = \"none\"\n", "", 2e-2);
  expect_learns_as(one, kExchanges[1] + codes, "provider = \"tcp\"\n", 2e-2);
}

TEST(CudaRanks, FactorsAndLargestElementsLearnAsOneRankDoes) {
  STRATA_NEEDS_GPU();
  const Outcome one = outcome(1, toml(1, ""));
  const std::string factors = "[plugins.powersgd]\nrank = 4\nminimum_ratio = 1.0\n", tcp = "provider = \"tcp\"\n",
                    largest = "[plugins.top_k]\nminimum = 100\nsparsity = 0.9\n";
  expect_learns_as(one, kExchanges[2] + factors, "", 5e-2);
  expect_learns_as(one, kExchanges[1] + largest, "", 5e-2);
  expect_learns_as(one, kExchanges[0] + largest + "momentum = 0.5\n", tcp, 5e-2);
}

// Experts divided among ranks, in further rounds, and with room for all rows at once; with ZeRO two ranks have the same
// experts, and four share what is no expert's.
TEST(CudaRanks, ExpertsAgreeWithOne) {
  STRATA_NEEDS_GPU();
  const std::string expert = "[plugins.moe]\nexperts = 2\nk = 1\nffn = 24\n", watched = "block.1.mlp.experts.up.weight";
  const auto divided = [](std::string text) { return text.replace(text.find("[network]"), 0, "expert = 2\n"); };
  const std::string rounds = expert + "receive_factor = 1.0\nshared = 20\n", tcp = "provider = \"tcp\"\n";
  const Outcome whole = outcome(1, toml(1, rounds), watched);
  const std::string pieces = rounds + "pieces = 2\n";
  expect_agreement(outcome(4, divided(toml(4, kExchanges[3] + pieces)), watched), whole);
  expect_agreement(outcome(2, divided(toml(2, kExchanges[0] + rounds, "", tcp)), watched), whole);
  const std::string run = "reproducible = true\n";
  const Outcome one = outcome(1, toml(1, expert, run), watched);
  const Outcome some = outcome(2, divided(toml(2, kExchanges[0] + expert, run)), watched);
  EXPECT_EQ(some.losses, one.losses);
  EXPECT_EQ(some.master, one.master);
}

// Its statistics are exact sums over parts, of queries, keys and values each for itself: the CPU's, too.
TEST(CudaRanks, AdafactorInReproducibleRunsIsEqual) {
  STRATA_NEEDS_GPU();
  const auto run = [](int ranks, const std::string& exchange) {
    return outcome(ranks,
                   toml(ranks, exchange, "reproducible = true\n", "", "[plugins.adafactor]\nbeta1 = 0.9\n",
                        "positions = \"rotary\"\nkv_heads = 1\n"),
                   "block.1.qkv.weight");
  };
  const Outcome one = run(1, "");
  for (const int stage : {1, 3}) {
    SCOPED_TRACE(stage);
    const Outcome some = run(stage == 1 ? 2 : 4, kExchanges[stage]);
    EXPECT_EQ(some.losses, one.losses);
    EXPECT_EQ(some.master, one.master);
  }
}

TEST(CudaRanks, ComposesWithOffloadAndRecomputation) {
  STRATA_NEEDS_GPU();
  test::TemporaryFolder folder;
  const Outcome one = outcome(1, toml(1, ""));
  for (const auto& [tier, exchange] :
       {std::pair("host", kExchanges[0]), std::pair("nvme", kExchanges[3]), std::pair("host", kExchanges[1]),
        std::pair("nvme", kExchanges[2]), std::pair("host", kExchanges[3])}) {
    SCOPED_TRACE(exchange + tier);
    const std::string offload = "[plugins.recompute]\n[plugins.offload]\nminimum = 0\ndirectory = \"" + folder.path() +
                                "\"\noptimizer = \"" + tier + "\"\nparameters = \"" + tier + "\"\nactivations = \"" +
                                tier + "\"\n";
    expect_agreement(outcome(2, toml(2, exchange + offload)), one);
  }
}

// ZeRO-Infinity: updates on the host's threads wait for exchanges in the device's queues, these for gathers of what the
// host has updated, and both ranks for each other. It once stood still for ever. Streams in many orders.
TEST(CudaRanks, ZeroInfinityEndsInAnyOrder) {
  STRATA_NEEDS_GPU();
  const std::string text = toml(2,
                                "[plugins.zero]\nstage = 3\n[plugins.offload]\nminimum = 0\nparameters = "
                                "\"host\"\noptimizer = \"host\"\n",
                                "", "", "[plugins.adamw]\nlearning_rate = 1e-3\n", "activation = \"squared_relu\"\n");
  const Outcome first = outcome(2, text);
#if !defined(STRATA_GPU)
  EXPECT_TRUE(first.in_queue);
  const char* const asked = std::getenv("STRATA_CASES");
  for (int seed = 1; seed <= (asked ? std::atoi(asked) : 4); ++seed) {
    SCOPED_TRACE(seed);
    cuda::shuffle_streams(uint64_t(seed));
    const Outcome some = outcome(2, text);
    EXPECT_EQ(some.losses, first.losses);
    EXPECT_EQ(some.master, first.master);
  }
#endif
}

// The error that a rank gets, and after how many seconds, when rank 1 does not come to the second step.
std::pair<std::string, double> error_of(const std::function<void()>& instead, double timeout) {
  std::string text;
  double seconds = 0;
  const auto device_of = [](World& world) { return test::rank_device(world.rank()); };
  EXPECT_ANY_THROW(run_local(
      2,
      [&](World& world) {
        const std::unique_ptr<Device> device = device_of(world);
        const std::string network = "timeout = " + std::to_string(timeout) + "\n";
        test::Runner runner(toml(2, kExchanges[1], "", network), {}, Goal::train, {}, &world, "cuda", device.get());
        const std::vector<int32_t> tokens(kBatch * kSequence, 3);
        runner.run_step(tokens.data(), tokens.data());
        if (world.rank() == 1) return instead();
        const auto began = std::chrono::steady_clock::now();
        try {
          runner.run_step(tokens.data(), tokens.data());
        } catch (const Error& error) {
          text = error.what();
          seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
          throw;
        }
      },
      10));
  return {text, seconds};
}

TEST(CudaRanks, OptimizersAgreeInParts) {
  STRATA_NEEDS_GPU();
  for (const std::string optimizer : {"[plugins.adafactor]\n", "[plugins.adafactor]\nbeta1 = 0.9\n", "[plugins.sm3]\n",
                                      "[plugins.adamw8bit]\nlearning_rate = 1e-3\n"}) {
    SCOPED_TRACE(optimizer);
    expect_agreement(outcome(2, toml(2, kExchanges[2], "", "", optimizer)), outcome(1, toml(1, "", "", "", optimizer)));
  }
}

TEST(CudaRanks, OneThatFailsEndsTheOthers) {
  STRATA_NEEDS_GPU();
  constexpr double kTimeout = 60;  // s
  const auto [text, seconds] = error_of([] { throw Error("the disk is gone.", ExitCode::failed); }, kTimeout);
  EXPECT_NE(text.find("rank 1 failed: the disk is gone."), std::string::npos) << text;
  EXPECT_LT(seconds, kTimeout);
}

// A disk that fails at some request of a step while the next has begun: that rank names the tensor, the other it.
TEST(CudaRanks, ADiskThatFailsWhileStepsOverlapEndsAll) {
  STRATA_NEEDS_GPU();
  test::TemporaryFolder folder;
  const std::string text = toml(
      2, kExchanges[3] + "[plugins.offload]\nminimum = 0\noptimizer = \"nvme\"\nparameters = \"host\"\ndirectory = \"" +
             folder.path() + "\"\n");
  for (const int requests : {300, 411, 522}) {
    SCOPED_TRACE(requests);
    std::array<std::string, 2> errors;
    EXPECT_ANY_THROW(run_local(
        2,
        [&](World& world) {
          const std::unique_ptr<Device> device = test::rank_device(world.rank());
          Session session(test::write_file(folder / std::to_string(world.rank()), text), {}, &world);
          session.device.backend = "cuda";
          session.rates = Rates();
          std::atomic<int> left{world.rank() == 1 ? requests : INT32_MAX};
          session.storage_faults.request = [&](size_t, int64_t) { return --left == 0 ? -EIO : 0; };
          RunPlans plans = session.plan_run();
          make_own(plans, session, world);
          Assembly assembly(session, world, std::move(plans), device.get());
          StepRunner steps(session, assembly);
          assembly.storage.initialize(1, assembly.threads);
          const Feed feed(assembly.executor_of(0), session.batch(Goal::train));
          EXPECT_TRUE(assembly.executor_of(0).overlaps());
          try {
            for (int step = 1; step <= 12; ++step)
              steps.run(
                  step, [&] { feed.fill_random(kVocabulary, uint64_t(step)); },
                  [&] { sum_over_ranks(assembly.groups, feed.losses()); }, StepMode::in_loop);
            steps.drain();
          } catch (const Error& error) {
            errors[size_t(world.rank())] = error.what();
            EXPECT_TRUE(world.rank() == 0 || !assembly.storage.holder());
            throw;
          }
        },
        10));
    EXPECT_NE(errors[1].find("tensor \""), std::string::npos) << errors[1];
    EXPECT_NE(errors[0].find("rank 1 failed: "), std::string::npos) << errors[0];
  }
}

TEST(CudaRanks, OneThatDoesNotComeIsNamed) {
  STRATA_NEEDS_GPU();
  const auto [text, seconds] = error_of([] { std::this_thread::sleep_for(std::chrono::seconds(6)); }, 2);
  EXPECT_NE(text.find("rank 1 did not come"), std::string::npos) << text;
}

#endif

}  // namespace
}  // namespace strata::cuda_ranks_test
