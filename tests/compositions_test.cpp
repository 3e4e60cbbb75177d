// Strategies, meshes, threads of the host, budgets and backends drawn by chance, against the plain run: losses and
// every persistent tensor bit for bit. The plain run has the same model, optimizer, precision and backend, and the same
// ranks with the same sums over them; with `run.reproducible` it is one rank. Nothing that only says where things rest,
// when they are made again, what runs on which thread or in which order may change a bit.
//
// STRATA_SEED and STRATA_CASES choose what is drawn, to repeat a case or to look for longer.
#include <cstdlib>
#include <cstring>
#include <random>

#include "strata/layout.h"
#include "tests/backends.h"
#include "tests/harness.h"
#include "tests/ordering.h"
#if defined(STRATA_EMULATED_CUDA)
#include "cuda/emulated/machine.h"
#endif

namespace strata::compositions_test {
namespace {

constexpr int kSequence = 16, kVocabulary = 61;

struct Case {
  std::string run, model, batch, mesh, network, optimizer, precision, exchange, parameters;  // of both runs
  std::string strategies, host;                  // of the one that is tested
  int64_t device_percent = 0, host_percent = 0;  // budgets, of what the plain run takes
  int ranks = 1, batch_size = 4;
  bool reproducible = false, poisoned = false;
};

std::string text_of(const Case& c, bool plain, int64_t device_bytes = 0, int64_t host_bytes = 0) {
  const bool one = plain && c.reproducible;  // rank
  std::string text =
      "[run]\n" + c.run + "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 32\nheads = 2\nffn = 71\n" +
      "vocabulary = " + std::to_string(kVocabulary) + "\ncontext = 16\n" + c.model +
      "[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = " + std::to_string(c.batch_size) + "\n" +
      c.batch + "[device]\nthreads = 1\n";
  if (device_bytes > 0) text += "memory = " + std::to_string(device_bytes) + "\n";
  if (!plain) text += "[host]\n" + c.host;
  if (!plain && host_bytes > 0) text += "memory = " + std::to_string(host_bytes) + "\n";
  text += "[mesh]\n" + (one ? std::string("data = 1\n") : c.mesh) + (one ? "" : "[network]\n" + c.network);
  return text + c.optimizer + c.precision + c.parameters + (one ? "" : c.exchange) + (plain ? "" : c.strategies);
}

Case draw(std::mt19937& random, const std::string& backend, const std::string& folder) {
  const auto pick = [&](const std::vector<std::string>& from) { return from[random() % from.size()]; };
  const bool cuda = backend == "cuda";
  Case c;
  c.ranks = int(random() % 3) ? 2 << random() % 2 : 1;
  c.batch_size = c.ranks == 4 ? 8 : 4;
  c.batch = "micro_batch = " + std::to_string(c.batch_size / c.ranks / (1 + int(random() % 2))) + "\n";
  c.mesh = "data = " + std::to_string(c.ranks) + "\n" + (c.ranks == 4 && random() % 2 ? "replicate = 2\n" : "");
  if (c.ranks > 1) c.network = cuda ? pick({"", "", "provider = \"shm\"\n", "provider = \"tcp\"\n"}) : "";
  c.model = pick({"dropout = 0.1\n", "activation = \"relu\"\n", "activation = \"squared_relu\"\ndropout = 0.2\n",
                  "activation = \"swiglu\"\nnorm = \"rms_norm\"\npositions = \"rotary\"\nkv_heads = 1\n",
                  "activation = \"geglu\"\nnorm = \"rms_norm\"\npositions = \"rotary\"\nkv_heads = 1\nbias = false\n"
                  "query_key_norm = true\npost_norms = true\nnorm_from_one = true\nscaled_embedding = true\n"
                  "score_scalar = 9\nscore_cap = 4\nlogit_cap = 3\nwindow = 5\nlayer_kinds = [\"local\", \"global\"]\n"
                  "local_rotary_base = 50\nrotary_scaling = \"linear\"\nrotary_factor = 2\n",
                  "activation = \"geglu_exact\"\nnorm = \"rms_norm\"\npositions = \"rotary\"\nkv_heads = 1\nbias = "
                  "false\nqkv_bias = true\noutput_bias = true\nmlp_bias = true\nquery_key_norm = true\nwindow = 3\n"
                  "rotary_size = 8\nrotary_scaling = \"llama3\"\nrotary_factor = 4\n"});
  c.optimizer = pick({"[plugins.adamw]\nlearning_rate = 1e-3\n", "[plugins.adamw]\nlearning_rate = 1e-3\n",
                      "[plugins.adafactor]\n", "[plugins.sm3]\n",
                      cuda ? "[plugins.sm3]\n" : "[plugins.adamw8bit]\n"});  // its emulated kernel takes seconds a step
  const bool adamw = c.optimizer.starts_with("[plugins.adamw]");
  c.reproducible = c.ranks > 1 && adamw && random() % 3 == 0;
  c.run = c.reproducible ? "reproducible = true\n" : "";
  c.optimizer += pick({"", "[plugins.clip]\nmax_norm = 0.1\n"});
  c.precision = pick({"", "", "[plugins.mixed_precision]\n", "[plugins.mixed_precision]\ndtype = \"fp16\"\n"});
  if (!c.precision.empty() && adamw) c.precision += pick({"", "states = \"bf16\"\n"});
  if (!c.precision.empty()) c.precision += pick({"", "gradients = \"bf16\"\n"});
  c.parameters = pick({"", "", "[plugins.lora]\nrank = 3\ndropout = 0.1\n",
                       c.model.find("rotary") == std::string::npos
                           ? "[plugins.lora]\nrank = 2\ntargets = [\"*.qkv.*\", \"*.down.*\"]\n"
                           : "[plugins.lora]\nrank = 2\ntargets = [\"*.qkv.*: 0 2\", \"*.gate.*\"]\n",
                       "[parameters.\"embedding.weight\"]\nfrozen = true\n",
                       "[parameters.\"block.*\"]\nfrozen = true\nexcept = [\"*.mlp.*\"]\n",
                       "[parameters.\"block.0.*\"]\nfrozen = true\n[parameters.\"*.norm*\"]\n"
                       "learning_rate_factor = 0.1\nweight_decay_factor = 0\n"});
  if (c.ranks > 1)
    c.exchange = pick({"[plugins.data_parallel]\n", "[plugins.zero]\nstage = 1\n", "[plugins.zero]\nstage = 2\n",
                       "[plugins.zero]\nstage = 3\n", "[plugins.zero]\nstage = 3\nreshard = \"always\"\n"}) +
                 pick({"bucket = 20000\n", ""});
  const std::vector<std::string> tiers = {"device", "host", "nvme"};
  // Beside offloaded states an update runs on the host; there AdamW's has the device's bits, other optimizers' have
  // not.
  const std::vector<std::string> of_update = cuda && !adamw ? std::vector<std::string>{"device"} : tiers;
  c.strategies = pick({"", "[plugins.recompute]\n", "[plugins.recompute]\nevery = 2\n",
                       "[plugins.recompute]\nmode = \"selective\"\n", "[plugins.recompute]\nmode = \"budget\"\n"}) +
                 pick({"", "", "[plugins.gist]\nminimum = 0\ncapacity = 1.0\n"});
  if (random() % 5)
    c.strategies += "[plugins.offload]\nminimum = 0\ndirectory = \"" + folder + "\"\noptimizer = \"" + pick(of_update) +
                    "\"\ngradients = \"" + pick(of_update) + "\"\nparameters = \"" + pick(of_update) +
                    "\"\nactivations = \"" + pick(tiers) + "\"\n";
  if (random() % 2) c.device_percent = 60 + int64_t(random() % 50);
  if (random() % 3 == 0) c.host_percent = 100;
  c.host = pick({"", "threads = 1\n", "threads = 2\n"});
  c.poisoned = !cuda && random() % 4 == 0;
  // Orders of passes, of more microbatches. Block by block the gradient of a tied embedding is another sum.
  if (c.strategies.find("offload") != std::string::npos && random() % 2) {
    if (!c.reproducible) c.model += "tied = false\n";
    c.batch = "micro_batch = 1\n";
    c.strategies += pick({"order = \"block\"\n", "order = \"block\"\ngroup = 2\n", "order = \"auto\"\n"});
  }
  return c;
}

struct Outcome {
  std::vector<double> losses;
  std::map<std::string, std::vector<std::byte>> tensors;  // whole, put together from all ranks' rows
  int64_t device_bytes = 0;
};

Outcome outcome(const std::string& text, int ranks, int batch, const std::string& backend, bool poisoned) {
  constexpr int kSteps = 3;  // on a device a graph is made in the second
  Outcome result;
  std::mutex mutex;
  run_local(
      ranks,
      [&](World& world) {
        const std::unique_ptr<Device> device = backend == "cuda" ? test::rank_device(world.rank()) : nullptr;
        test::Runner runner(text, {}, Goal::train, {}, ranks > 1 ? &world : nullptr, backend, device.get());
        runner.poisoned = poisoned;
        test::expect_ordered(runner.built.program, runner.plan);
        std::mt19937 random(7);
        std::vector<int32_t> tokens(size_t(batch * kSequence)), targets(tokens.size());
        for (int step = 0; step < kSteps; ++step) {
          for (auto* list : {&tokens, &targets})
            for (int32_t& token : *list) token = int32_t(random() % kVocabulary);
          runner.in_loop = step + 1 < kSteps;
          const double loss = runner.run_step(tokens.data(), targets.data());
          if (world.rank() == 0) result.losses.push_back(loss);
        }
        for (const Tensor& tensor : runner.storage->persistent_tensors()) {
          const std::vector<std::byte> bytes = runner.storage->copy(tensor);
          const std::lock_guard lock(mutex);
          test::put_together(tensor, bytes, result.tensors[tensor.name], size_of(tensor.dtype));
        }
        if (world.rank() == 0) result.device_bytes = runner.plan.device().total_bytes();
      },
      60);
  return result;
}

// Under budgets that may be too small; then the one that the refusal asks for must do.
void check(const Case& c, const std::string& backend) {
  const Outcome expected = outcome(text_of(c, true), c.reproducible ? 1 : c.ranks, c.batch_size, backend, false);
  int64_t device_bytes = expected.device_bytes * c.device_percent / 100;
  int64_t host_bytes = expected.device_bytes * c.host_percent / 100;
  for (int attempt = 0;; ++attempt) {
    const std::string text = text_of(c, false, device_bytes, host_bytes);
    SCOPED_TRACE(text);
    Outcome actual;
    try {
      actual = outcome(text, c.ranks, c.batch_size, backend, c.poisoned);
    } catch (const Error& error) {
      const std::string what = error.what();
      int64_t& budget = what.find("host memory, but") == std::string::npos ? device_bytes : host_bytes;
      ASSERT_GT(test::smallest_in(what), budget) << what;
      ASSERT_LT(attempt, 4) << what;
      budget = test::smallest_in(what);
      continue;
    }
    EXPECT_EQ(actual.losses, expected.losses);
    for (const auto& [name, bytes] : expected.tensors) {
      const auto found = actual.tensors.find(name);
      ASSERT_NE(found, actual.tensors.end()) << name;
      ASSERT_EQ(found->second.size(), bytes.size()) << name;
      EXPECT_EQ(std::memcmp(found->second.data(), bytes.data(), bytes.size()), 0) << name;
    }
    return;
  }
}

int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoll(text) : otherwise;
}

void check_cases(const std::string& backend, int count) {
  const test::TemporaryFolder folder;
  const auto base = uint32_t(setting("STRATA_SEED", 1));
  const auto cases = uint32_t(setting("STRATA_CASES", test::left_out(1) ? (count + 2) / 3 : count));
  for (uint32_t seed = base; seed < base + cases; ++seed) {
    std::mt19937 random(seed);
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed) + " STRATA_CASES=1");
#if defined(STRATA_EMULATED_CUDA)
    cuda::shuffle_streams(seed);
#endif
    ASSERT_NO_FATAL_FAILURE(check(draw(random, backend, folder.path()), backend));
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Compositions, RandomOnesAreExactOnTheCpu) { check_cases("cpu", 12); }
#if defined(STRATA_EMULATED_CUDA)
TEST(Compositions, RandomOnesAreExactOnCuda) { check_cases("cuda", 4); }
#endif

}  // namespace
}  // namespace strata::compositions_test
