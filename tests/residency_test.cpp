// Residency: every strategy and combination against the plain run, bit for bit, with released memory poisoned.
#include <cstring>
#include <random>

#include "engine/planning/predict.h"
#include "tests/backends.h"
#include "tests/harness.h"
#include "tests/ordering.h"

namespace strata {
namespace {

constexpr int kLayers = 3, kHidden = 32, kSequence = 16, kBatch = 4;

std::string toml(int64_t micro_batch, const std::string& plugins, const std::string& model = "dropout = 0.1\n",
                 const std::string& optimizer = "[plugins.adamw]\n") {
  return "[model]\nplugin = \"gpt\"\nlayers = " + std::to_string(kLayers) + "\nhidden = " + std::to_string(kHidden) +
         "\nheads = 4\nvocabulary = 64\ncontext = 16\n" + model +
         "[data]\ntrain = [\"none\"]\nsequence_length = " + std::to_string(kSequence) +
         "\nglobal_batch = " + std::to_string(kBatch) + "\nmicro_batch = " + std::to_string(micro_batch) + "\n" +
         optimizer + plugins;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<std::vector<float>> parameters;
};

Outcome outcome(test::Runner& runner, int steps = 4) {
  std::mt19937 random(7);
  std::vector<int32_t> tokens(kBatch * kSequence), targets(tokens.size());
  Outcome result;
  for (int step = 0; step < steps; ++step) {
    for (auto* list : {&tokens, &targets})
      for (int32_t& token : *list) token = int32_t(random() % 64);
    result.losses.push_back(runner.run_step(tokens.data(), targets.data()));
  }
  for (TensorId id : runner.built.program.with_role(Role::parameter))
    result.parameters.push_back(runner.values(runner.built.program[id].name));
  return result;
}

void expect_equal(const Outcome& a, const Outcome& b, const std::string& what) {
  EXPECT_EQ(a.losses, b.losses) << what;
  ASSERT_EQ(a.parameters.size(), b.parameters.size());
  for (size_t i = 0; i < a.parameters.size(); ++i)
    EXPECT_EQ(std::memcmp(a.parameters[i].data(), b.parameters[i].data(), a.parameters[i].size() * 4), 0)
        << what << ", parameter " << i;
}

std::string offload(const std::string& directory, const std::string& optimizer, const std::string& gradients,
                    const std::string& parameters, const std::string& activations) {
  return "[plugins.offload]\nminimum = 0\ndirectory = \"" + directory + "\"\noptimizer = \"" + optimizer +
         "\"\ngradients = \"" + gradients + "\"\nparameters = \"" + parameters + "\"\nactivations = \"" + activations +
         "\"\n";
}

// Every subset of tiers, with and without recomputation, clipping and accumulation.
TEST(Residency, EverySubsetIsExact) {
  const std::vector<std::string> tiers = {"device", "host", "nvme"};
  test::TemporaryFolder folder;
  size_t number = 0;
  for (const std::string clip : {"", "[plugins.clip]\n"})
    for (int64_t micro_batch : {4, 2}) {
      test::Runner plain(toml(micro_batch, clip));
      const Outcome expected = outcome(plain);
      for (const std::string recompute : {"", "[plugins.recompute]\n", "[plugins.recompute]\nevery = 2\n",
                                          "[plugins.recompute]\nmode = \"selective\"\n"})
        for (int code = 0; code < 81; code += recompute.empty() && clip.empty() && micro_batch == 2 ? 1 : 20) {
          if (test::left_out(number++)) continue;
          const std::string extra =
              offload(folder.path(), tiers[code % 3], tiers[code / 3 % 3], tiers[code / 9 % 3], tiers[code / 27]);
          const std::string what = clip + recompute + extra;
          test::Runner runner(toml(micro_batch, clip + recompute + extra));
          runner.poisoned = code % 2;
          expect_equal(outcome(runner), expected, what);
          if (testing::Test::HasFailure()) return;
        }
    }
}

// Inversion rounds differently from keeping: single precision's 1e-5 after a few steps.
TEST(Residency, InversionAgreesWithKeeping) {
  const std::string model = "dropout = 0.1\n", reversible = "[plugins.reversible]\n";
  test::Runner keeping(toml(2, reversible + "invert = false\n", model)), inverting(toml(2, reversible, model));
  const Outcome expected = outcome(keeping, 8), actual = outcome(inverting, 8);
  for (size_t i = 0; i < expected.losses.size(); ++i)
    EXPECT_NEAR(actual.losses[i], expected.losses[i], 1e-5 * expected.losses[i]) << i;
  const auto activations = [](const test::Runner& runner) {
    return runner.plan.device().at_peak[int(Role::activation)];
  };
  EXPECT_LT(activations(inverting), activations(keeping));
  test::Runner poisoned(toml(2, reversible, model));
  poisoned.poisoned = true;
  expect_equal(outcome(poisoned, 8), actual, "released memory poisoned");
}

// Inverted blocks hold the activations of one block however many there are.
TEST(Residency, InversionNeedsNoMemoryForDepth) {
  const auto activations = [](int layers) {
    std::string text = toml(4, "[plugins.reversible]\n", "");
    text.replace(text.find("layers = 3"), 10, "layers = " + std::to_string(layers));
    return test::Runner(text).plan.device().at_peak[int(Role::activation)];
  };
  EXPECT_EQ(activations(4), activations(16));
}

// A random program: a forward part, a backward part that reads from it, updates in place; anything may rest anywhere.
struct RandomProgram {
  explicit RandomProgram(uint32_t seed) : random(seed) {
    Builder build(program);
    struct Family {
      std::vector<TensorId> known, parameters;
    };
    std::vector<Family> families(3);
    for (size_t f = 0; f < families.size(); ++f) {
      const Shape shape{int64_t(1 + random() % 40), 64};
      const std::string name = "family" + std::to_string(f);
      families[f].known = {build.data(name, shape, DType::f32)};
      for (int p = 0; p < 3; ++p)
        families[f].parameters.push_back(
            build.parameter(name + ".w" + std::to_string(p), shape, {Initializer::Kind::normal, 0.3}));
    }
    const int count = 40 + int(random() % 80);
    for (int i = 0; i < count; ++i) {
      build.stage = i < count / 2 ? Stage::forward : Stage::backward;
      build.block_index = i / 6;
      Family& family = families[random() % families.size()];
      const TensorId a = family.known[random() % family.known.size()];
      const TensorId b = random() % 3 ? family.known[random() % family.known.size()] : family.parameters[random() % 3];
      const TensorId made = random() % 2 ? build.emit("gelu", {a}) : build.emit("add", {a, b});
      family.known.push_back(made);
      if (family.known.size() > 8) family.known.erase(family.known.begin() + 1);
      if (random() % 12 == 0) program[made].step_output = true;
      if (random() % 10 == 0 && build.stage == Stage::backward) {
        const TensorId p = family.parameters[random() % 3];
        build.stage = Stage::update;
        build.emit_all("add", {p, made}, {}, {p});
      }
    }
    for (const Family& family : families) program[family.known.back()].step_output = true;
  }

  // Gives tensors forms and tiers by chance.
  void let_rest(const std::string& directory) {
    program.storage_directory = directory;
    for (const Op& op : program.ops)
      for (TensorId id : op.outputs) {
        if (program[id].persistent) continue;
        if (op.stage == Stage::forward && random() % 2)
          program.forms[id.value].push_back(
              {.name = "recompute", .restore = {op}, .when = RestingForm::When(random() % 4)});
      }
    for (Tensor& tensor : program.tensors) {
      if (tensor.role == Role::data || random() % 2) continue;
      tensor.farthest = Tier(random() % kTiers);
      tensor.nearest = tensor.farthest == Tier::nvme && random() % 2 ? Tier::host : tensor.farthest;
    }
  }

  // Every persistent tensor and step output after three steps.
  std::vector<std::vector<float>> results(const MemoryPlan& plan, bool poisoned, const std::string& backend) {
    Threads threads(2);
    Storage storage(program, plan, {}, {}, test::device_of(backend));
    storage.initialize(5, threads);
    Executor executor(program, plan, storage, backend, threads);
    for (int step = 0; step < 3; ++step) {
      for (size_t t = 0; t < program.tensors.size(); ++t)
        if (program.tensors[t].role == Role::data)
          for (int64_t i = 0; i < elements(program.tensors[t].shape); ++i)
            static_cast<float*>(executor.pointer({int32_t(t)}))[i] = 0.01f * float(i % 97) - 0.3f;
      poisoned ? executor.run_poisoned() : executor.run();
    }
    std::vector<std::vector<float>> all;
    for (size_t t = 0; t < program.tensors.size(); ++t) {
      const Tensor& tensor = program.tensors[t];
      if (!tensor.persistent && !tensor.step_output) continue;
      const std::vector<std::byte> bytes = tensor.persistent ? storage.copy(tensor) : std::vector<std::byte>();
      const auto* data = static_cast<const float*>(tensor.persistent ? static_cast<const void*>(bytes.data())
                                                                     : executor.pointer({int32_t(t)}));
      all.emplace_back(data, data + elements(tensor.shape));
    }
    return all;
  }

  std::mt19937 random;
  Program program;
};

// The figure in "the smallest … that would do here is N bytes".
int64_t smallest_in(const std::string& message) {
  const std::string before = "would do here is ";
  const size_t at = message.find(before);
  return at == std::string::npos ? -1 : std::stoll(message.substr(at + before.size()));
}

void check_random_programs(const std::string& backend, int count) {
  test::TemporaryFolder folder;
  const uint32_t base = std::random_device{}();
  int refused = 0;
  for (uint32_t seed = base; seed < base + uint32_t(count); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomProgram plain(seed), resting(seed);
    const MemoryPlan without = plan_memory(plain.program, backend, 2);
    const auto expected = plain.results(without, false, backend);
    resting.let_rest(folder.path());
    Residency settings{.backend = backend,
                       .threads = 2,
                       .host_stream = backend == "cuda",
                       .direct_storage = backend == "cuda" && seed % 2 == 0,
                       .rates = {}};
    // What is read from a disk is aligned as disks need it, here and in what it is compared with.
    const int64_t all = plan_memory(plain.program, backend, 2, kStorageAlignment).device().total_bytes();
    if (resting.random() % 4) settings.device_budget = all * int64_t(30 + resting.random() % 80) / 100;
    if (resting.random() % 2) settings.host_budget = all * int64_t(5 + resting.random() % 60) / 100;
    const Program before = resting.program;
    MemoryPlan plan;
    for (int attempt = 0;; ++attempt) {
      resting.program = before;
      try {
        plan = plan_residency(resting.program, settings);
        break;
      } catch (const Error& error) {  // the budget it asks for must do
        ++refused;
        const std::string text = error.what();
        int64_t& budget =
            text.find("device memory, but") != std::string::npos ? settings.device_budget : settings.host_budget;
        ASSERT_GT(smallest_in(text), budget) << text;
        ASSERT_LT(attempt, 4) << text;
        budget = smallest_in(text);
      }
    }
    verify(resting.program, "residency");
    test::expect_ordered(resting.program, plan);
    const int64_t budget = settings.device_budget + (settings.one_memory() ? settings.host_budget : 0);
    EXPECT_LE(plan.device().total_bytes(), budget > 0 ? budget : all);
    if (settings.one_memory()) {
      EXPECT_EQ(plan[Tier::host].total_bytes(), 0);
    } else if (settings.host_budget > 0) {
      EXPECT_LE(plan[Tier::host].total_bytes(), settings.host_budget);
    }
    for (bool poisoned : {false, true}) {
      if (poisoned && backend == "cuda") continue;
      const auto actual = resting.results(plan, poisoned, backend);
      ASSERT_EQ(actual.size(), expected.size());
      for (size_t i = 0; i < actual.size(); ++i)
        ASSERT_EQ(std::memcmp(actual[i].data(), expected[i].data(), actual[i].size() * 4), 0) << i << poisoned;
    }
  }
  EXPECT_GT(refused, 0);  // budgets were tight enough to be worth the test
}

TEST(Residency, RandomProgramsUnderRandomBudgets) { check_random_programs("cpu", 150); }
#if defined(STRATA_EMULATED_CUDA)
// On a device that the host cannot look into and a disk cannot reach, with streams served in random order.
TEST(Residency, RandomProgramsOnADevice) { check_random_programs("cuda", 40); }
#endif

// Plans of random programs over a series of budgets: a larger budget never gives a slower plan, the smallest that a
// refusal names does, and with a byte less the refusal names it again.
void check_series_of_budgets(const std::string& backend, int count) {
  test::TemporaryFolder folder;
  const uint32_t base = std::random_device{}();
  const Rates rates{.memory = 4e8, .copy = 2e8, .read = 1e8, .write = 1e8, .storage_latency = 1e-6};
  int refused = 0, slower = 0;
  for (uint32_t seed = base; seed < base + uint32_t(count); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomProgram resting(seed);
    const int64_t all = plan_memory(resting.program, backend, 2, kStorageAlignment).device().total_bytes();
    resting.let_rest(folder.path());
    const int64_t host = seed % 2 && backend == "cuda" ? all / 2 : 0;
    // The predicted seconds under a budget, or what is named as the smallest, negative.
    const auto plan = [&](int64_t budget, int64_t host_budget) -> double {
      Program program = resting.program;
      try {
        const MemoryPlan plan = plan_residency(
            program,
            {.backend = backend, .threads = 2, .device_budget = budget, .host_budget = host_budget, .rates = rates});
        EXPECT_LE(plan.device().total_bytes(), budget);
        return predict(program, plan, rates).seconds;
      } catch (const Error& error) {
        return -double(smallest_in(error.what()));
      }
    };
    double before = 1e30;
    for (int64_t percent = 120; percent >= 10; percent -= 10) {  // from large to small
      const double seconds = plan(all * percent / 100, host);
      if (seconds < 0) {
        ++refused;
        if (host > 0 && plan(int64_t(-seconds), host) < 0) break;  // it was the host's budget
        EXPECT_GT(plan(int64_t(-seconds), host), 0);
        EXPECT_EQ(plan(int64_t(-seconds) - 1, host), seconds);
        break;
      }
      if (before < 1e30) {
        EXPECT_GE(seconds, before) << percent;
      }
      slower += before < 1e30 && seconds > before;
      before = seconds;
    }
  }
  EXPECT_GT(refused, 0);
  EXPECT_GT(slower, 0);
}

TEST(Residency, LargerBudgetsGiveNoSlowerPlans) { check_series_of_budgets("cpu", 20); }
#if defined(STRATA_EMULATED_CUDA)
TEST(Residency, LargerBudgetsGiveNoSlowerPlansOnADevice) { check_series_of_budgets("cuda", 10); }
#endif

// Any subset of strategies, optimizers and budgets, drawn by chance: the plain run's losses and parameters bit for bit.
TEST(Residency, RandomCombinationsAreExact) {
  test::TemporaryFolder folder;
  const uint32_t base = std::random_device{}();
  const std::vector<std::string> tiers = {"device", "host", "nvme"};
  for (uint32_t seed = base; seed < base + 10; ++seed) {
    std::mt19937 random(seed);
    const auto pick = [&](const std::vector<std::string>& from) { return from[random() % from.size()]; };
    const std::string model =
        pick({"dropout = 0.1\n", "activation = \"relu\"\n", "activation = \"squared_relu\"\ndropout = 0.2\n",
              "activation = \"swiglu\"\nnorm = \"rms_norm\"\npositions = \"rotary\"\nkv_heads = 2\n"});
    const std::string optimizer =
        pick({"[plugins.adamw]\n", "[plugins.adafactor]\n", "[plugins.sm3]\n", "[plugins.adamw8bit]\n"}) +
        pick({"", "[plugins.clip]\nmax_norm = 0.1\n"});
    const int64_t micro_batch = int64_t(1) << random() % 3;
    test::Runner plain(toml(micro_batch, "", model, optimizer));
    const Outcome expected = outcome(plain);
    const int64_t bytes = plain.plan.device().total_bytes();
    std::string extra = offload(folder.path(), pick(tiers), pick(tiers), pick(tiers), pick(tiers));
    extra += pick({"", "[plugins.recompute]\n", "[plugins.recompute]\nevery = 2\n",
                   "[plugins.recompute]\nmode = \"selective\"\n", "[plugins.recompute]\nmode = \"budget\"\n"});
    extra += pick({"", "[plugins.gist]\nminimum = 0\ncapacity = 1.0\n"});
    if (random() % 2) extra += "[device]\nmemory = " + std::to_string(bytes * int64_t(60 + random() % 50) / 100) + "\n";
    if (random() % 3 == 0)
      extra += "[host]\nmemory = " + std::to_string(bytes) + "\n";
    else if (random() % 2)
      extra += "[host]\nthreads = 1\n";
    const std::string text = toml(micro_batch, extra, model, optimizer);
    SCOPED_TRACE("seed " + std::to_string(seed) + "\n" + text);
    for (bool poisoned : {false, true}) {
      std::unique_ptr<test::Runner> runner;
      try {
        runner = std::make_unique<test::Runner>(text);
      } catch (const Error& error) {  // a budget that is too small says so; that is tested elsewhere
        ASSERT_GT(smallest_in(error.what()), 0) << error.what();
        break;
      }
      runner->poisoned = poisoned;
      expect_equal(outcome(*runner), expected, poisoned ? "poisoned" : "");
    }
    if (HasFailure()) return;
  }
}

// Bytes kept a token by one block of GPT-2, against Korthikanti et al. (arXiv 2205.05198), equation 1: s·b·h (34 + 5
// as/h) in 16 bits with stored attention scores and dropout masks. Here everything is fp32, scores are never stored
// (the 5 as/h term, but one number a row), dropout masks are drawn again, and both norms keep their result: per element
// of the residual stream norm 1, qkv 3, attention 1, sum 1, norm 2, up 4, gelu 4, sum 1 = 16 numbers of 4 bytes, and
// statistics. With recomputation of blocks: 2 s·b·h bytes in 16 bits, here one number of 4.
TEST(Residency, ActivationBytesFollowTheFormula) {
  const auto activations = [](int layers, const std::string& extra) {
    std::string text = toml(4, extra, "");
    text.replace(text.find("layers = 3"), 10, "layers = " + std::to_string(layers));
    return test::Runner(text).plan.device().at_peak[int(Role::activation)];
  };
  const int64_t elements = kBatch * kSequence * kHidden;
  const int64_t statistics = 4 * kBatch * kSequence * (2 + 2 + 4);  // mean and deviation of two norms, a number a head
  EXPECT_EQ(activations(9, "") - activations(8, ""), 16 * 4 * elements + statistics);
  EXPECT_EQ(activations(9, "[plugins.recompute]\n") - activations(8, "[plugins.recompute]\n"), 4 * elements);
}

}  // namespace
}  // namespace strata
