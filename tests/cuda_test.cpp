// Whole programs on the CUDA backend beside the CPU's: losses of training steps, reruns and recomputation bit for bit.
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "engine/runtime/device_rates.h"
#include "tests/backends.h"
#include "tests/harness.h"
#if defined(STRATA_EMULATED_CUDA)
#include <filesystem>
#include <fstream>

#include "cuda/choices.h"
#include "cuda/emulated/machine.h"
#endif

namespace strata::cuda_test {
namespace {

constexpr int kSequence = 16, kBatch = 4, kVocabulary = 61;

const std::string kGpt2 = "layers = 2\nhidden = 32\nheads = 2\ndropout = 0.1\nattention_dropout = 0.1\n";
const std::string kLlama =
    "layers = 1\nhidden = 32\nheads = 4\nkv_heads = 2\nffn = 40\npositions = \"rotary\"\nnorm = "
    "\"rms_norm\"\nactivation "
    "= \"swiglu\"\nbias = false\nqkv_bias = true\ntied = false\n";

std::string toml(const std::string& model, const std::string& plugins,
                 const std::string& optimizer = "[plugins.adamw]\nlearning_rate = 1e-3\n") {
  return "[model]\nplugin = \"gpt\"\nvocabulary = " + std::to_string(kVocabulary) + "\ncontext = 16\n" + model +
         "[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = " + std::to_string(kBatch) +
         "\nmicro_batch = 2\n[device]\nthreads = 1\n" + optimizer + plugins;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<float> weights;
};

Outcome outcome(const std::string& text, const std::string& backend, int steps) {
  test::Runner runner(text, {}, Goal::train, {}, nullptr, backend, test::device_of(backend));
  std::mt19937 random(7);
  std::vector<int32_t> tokens(kBatch * kSequence), targets(tokens.size());
  Outcome result;
  for (int step = 0; step < steps; ++step) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = int32_t(random() % kVocabulary);
      targets[i] = (tokens[i] + 1) % kVocabulary;
    }
    runner.in_loop = step + 1 < steps;  // as in training
    result.losses.push_back(runner.run_step(tokens.data(), targets.data()));
  }
  result.weights = runner.values("block.0.qkv.weight");
  return result;
}

#if defined(STRATA_GPU)
constexpr int kSteps = 20;
void shuffle(uint64_t) {}  // its own business
int64_t graphs_run() { return 2; }
#else
#if defined(STRATA_EMULATED_CUDA)
void shuffle(uint64_t seed) { cuda::shuffle_streams(seed); }
int64_t graphs_run() { return cuda::graphs_run(); }
#endif
constexpr int kSteps = 2;  // the emulator takes its time
#endif

// fp32 to 1e-4, 16 bits to 2e-2 of the loss.
void expect_agreement(const std::string& text, double tolerance) {
  SCOPED_TRACE(text);
  const Outcome cpu = outcome(text, "cpu", kSteps), cuda = outcome(text, "cuda", kSteps),
                first = outcome(text, "cpu", 0);
  for (int i = 0; i < kSteps; ++i)
    EXPECT_NEAR(cuda.losses[size_t(i)], cpu.losses[size_t(i)], tolerance * cpu.losses[size_t(i)]) << i;
  double moved = 0, apart = 0;
  for (size_t i = 0; i < cpu.weights.size(); ++i) {
    moved += double(std::abs(cpu.weights[i] - first.weights[i]));
    apart += double(std::abs(cuda.weights[i] - cpu.weights[i]));
  }
  EXPECT_GT(moved, 0);
  EXPECT_LT(apart, (tolerance < 1e-3 ? 0.02 : 0.2) * moved) << "of the way that weights moved";
}

#if defined(STRATA_GPU) || defined(STRATA_EMULATED_CUDA)
TEST(Cuda, AgreesWithTheCpu) {
  STRATA_NEEDS_GPU();
  const std::string clip = "[plugins.clip]\nmax_norm = 0.5\n", mixed = "[plugins.mixed_precision]\n";
  expect_agreement(toml(kGpt2, clip), 1e-4);
  expect_agreement(toml(kLlama, ""), 1e-4);
  expect_agreement(toml(kGpt2, clip + mixed), 2e-2);
  expect_agreement(toml(kLlama, mixed + "gradients = \"bf16\"\nstates = \"bf16\"\n"), 2e-2);
  expect_agreement(toml(kGpt2 + "activation = \"squared_relu\"\n", mixed + "dtype = \"fp16\"\n"), 2e-2);
}

TEST(Cuda, ExpertsAgreeWithTheCpu) {
  STRATA_NEEDS_GPU();
  const std::string moe = "[plugins.moe]\nffn = 24\nexperts = 5\n", mixed = "[plugins.mixed_precision]\n";
  expect_agreement(toml(kLlama, moe + "k = 2\nz_loss = 0.01\nbias_rate = 0.01\nlog_experts = true\n"), 1e-4);
  expect_agreement(toml(kGpt2, moe + "router = \"gshard\"\ncapacity_factor = 1.2\nactivation = \"gelu\"\n"), 1e-4);
  expect_agreement(toml(kGpt2, moe + "router = \"shazeer\"\nk = 2\ndropout = 0.1\n"), 1e-4);
  expect_agreement(toml(kLlama, moe + "router = \"switch\"\njitter = 0.1\nshared = 20\nshared_gate = true\n"), 1e-4);
  expect_agreement(toml(kLlama, mixed + moe + "shared = 20\nshared_gate = true\n"), 2e-2);
}

TEST(Cuda, OtherOptimizersAgreeWithTheCpu) {
  STRATA_NEEDS_GPU();
  for (const std::string optimizer :
       {"[plugins.sm3]\n", "[plugins.sm3]\nmomentum = 0.0\n", "[plugins.adafactor]\nbeta1 = 0.9\n",
        "[plugins.adafactor]\n", "[plugins.adamw8bit]\nlearning_rate = 1e-3\n"}) {
    expect_agreement(toml(kLlama, "[plugins.clip]\nmax_norm = 0.5\n", optimizer), 1e-4);
    expect_agreement(toml(kLlama, "[plugins.mixed_precision]\ngradients = \"bf16\"\n", optimizer), 2e-2);
  }
  expect_agreement("[run]\nreproducible = true\n" + toml(kLlama, "", "[plugins.adafactor]\nbeta1 = 0.9\n"), 1e-4);
}

TEST(Cuda, EncodedActivationsAgreeWithTheCpu) {
  STRATA_NEEDS_GPU();
  const std::string gist = "[plugins.gist]\nminimum = 0\n", mixed = "[plugins.mixed_precision]\n";
  expect_agreement(toml(kGpt2 + "activation = \"relu\"\n", gist + "lossless = false\nlossy = \"bf16\"\n"), 1e-4);
  for (const std::string format : {"int8", "fp8_e4m3", "fp8_e5m2"})
    expect_agreement(toml(kGpt2, mixed + gist + "lossy = \"" + format + "\"\n"), 2e-2);
}

// Masks and nonzeros lose nothing; more nonzeros than there is room for end the step.
TEST(Cuda, LosslessEncodingsAreExact) {
  STRATA_NEEDS_GPU();
  const std::string sparse = kGpt2 + "activation = \"squared_relu\"\n", relu = kGpt2 + "activation = \"relu\"\n",
                    gist = "[plugins.gist]\nminimum = 0\n";
  for (const std::string& model : {sparse, relu})
    for (const std::string mixed : {"", "[plugins.mixed_precision]\n"}) {
      const Outcome plain = outcome(toml(model, mixed), "cuda", kSteps),
                    encoded = outcome(toml(model, mixed + gist), "cuda", kSteps);
      EXPECT_EQ(encoded.losses, plain.losses);
      EXPECT_EQ(encoded.weights, plain.weights);
    }
  try {
    outcome(toml(sparse, gist + "capacity = 0.1\n"), "cuda", 1);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("plugins.gist.capacity has room for"), std::string::npos) << error.what();
  }
}

TEST(Cuda, MasksAreTheCpus) {
  STRATA_NEEDS_GPU();
  const LoadedPlugin gist = load_plugin("gist", {});
  constexpr int64_t kCount = 4099;
  std::map<std::string, std::vector<uint8_t>> masks;
  for (const std::string backend : {"cpu", "cuda"}) {
    Program program;
    Builder build(program);
    const TensorId x = build.data("x", {kCount}, DType::bf16), mask = build.emit("gist_mask_encode", {x}),
                   y = build.emit("gist_mask_decode", {mask},
                                  {{"rank", int64_t{1}}, {"d0", kCount}, {"dtype", int64_t(DType::bf16)}});
    program[mask].step_output = program[y].step_output = true;
    const MemoryPlan plan = plan_memory(program, backend, 1);
    Storage storage(program, plan, {}, {}, test::device_of(backend));
    Threads threads(1);
    Executor executor(program, plan, storage, backend, threads);
    std::mt19937 random(3);
    auto* values = static_cast<uint16_t*>(executor.pointer(x));
    for (int64_t i = 0; i < kCount; ++i) values[i] = uint16_t(random() % 5 == 0 ? 0 : random());
    executor.run();
    const auto* bits = static_cast<const uint8_t*>(executor.pointer(mask));
    masks[backend].assign(bits, bits + (kCount + 7) / 8);
    for (int64_t i = 0; i < kCount; ++i)
      ASSERT_EQ(static_cast<const uint16_t*>(executor.pointer(y))[i], bits[i / 8] >> (i % 8) & 1 ? 0x3F80 : 0) << i;
  }
  EXPECT_EQ(masks["cuda"], masks["cpu"]);
}

TEST(Cuda, InvertedBlocksAgreeWithTheCpu) {
  STRATA_NEEDS_GPU();
  expect_agreement(toml(kGpt2, "[plugins.reversible]\n"), 1e-4);
}

TEST(Cuda, RerunsAndRecomputationAreExact) {
  STRATA_NEEDS_GPU();
  for (const std::string& model : {kGpt2, kLlama}) {
    const std::string plugins = "[plugins.mixed_precision]\n[plugins.clip]\n";
    const Outcome first = outcome(toml(model, plugins), "cuda", kSteps);
    for (const std::string extra : {"", "[plugins.recompute]\n",
                                    "[plugins.offload]\nminimum = 0\noptimizer = \"host\"\n"
                                    "activations = \"host\"\n"}) {
      SCOPED_TRACE(extra);
      const Outcome again = outcome(toml(model, plugins + extra), "cuda", kSteps);
      EXPECT_EQ(again.losses[0], first.losses[0]);
      if (extra.find("optimizer") != std::string::npos) continue;  // the update ran on the host: other roundings
      EXPECT_EQ(again.losses, first.losses);
      EXPECT_EQ(again.weights, first.weights);
    }
  }
}

// What waits for nothing but events comes out the same in whatever order streams are served, with and without graphs.
TEST(Cuda, StreamsInAnyOrder) {
  STRATA_NEEDS_GPU();
  test::TemporaryFolder folder;
  const std::string plugins = "[plugins.mixed_precision]\n[plugins.clip]\n";
  graphs_run();
  const Outcome plain = outcome(toml(kGpt2, plugins), "cuda", 3);
  EXPECT_EQ(graphs_run(), 2);  // the whole step, from the second on
  for (const std::string tier : {"host", "nvme"})
    for (const std::string states : {"device", "host"}) {
      const std::string offload = "[plugins.recompute]\n[plugins.offload]\nminimum = 0\ndirectory = \"" +
                                  folder.path() + "\"\noptimizer = \"" + states + "\"\nparameters = \"" +
                                  (states == "device" ? tier : "device") + "\"\nactivations = \"" + tier + "\"\n";
      Outcome first;
      for (uint64_t seed = 1; seed <= 2; ++seed) {
        SCOPED_TRACE(offload + std::to_string(seed));
        shuffle(seed);
        const Outcome some = outcome(toml(kGpt2, plugins + offload), "cuda", 3);
        const int64_t graphs = graphs_run();
        EXPECT_TRUE(graphs == 2 || graphs > 5) << graphs;  // whole steps, or between the waits for the host
        if (seed == 1) first = some;
        EXPECT_EQ(some.losses, states == "device" ? plain.losses : first.losses);
        EXPECT_EQ(some.weights, states == "device" ? plain.weights : first.weights);
      }
    }
}

// The watchdog looks when a step begins: at what is put into queues in that step, not at what was captured in the one
// before, whose events nobody may ask for.
TEST(Cuda, AStepThatFollowsGraphsIsWatchedFromItsOwnBeginning) {
  STRATA_NEEDS_GPU();
  const std::string moves = "[plugins.offload]\nminimum = 0\nactivations = \"host\"\n";  // queues that wait for others
  test::Runner runner(toml(kGpt2, moves), {}, Goal::train, {}, nullptr, "cuda", test::device_of("cuda"));
  const std::vector<int32_t> tokens(kBatch * kSequence, 1);
  graphs_run();
  for (int step = 0; step < 2; ++step) runner.run_step(tokens.data(), tokens.data());
  EXPECT_GT(graphs_run(), 0);
  runner.executor->trace();
  EXPECT_NO_THROW(runner.run_step(tokens.data(), tokens.data()));
}

// A step fails while the thread that fills the queues puts an op in, and later another thread comes to wait for one
// that is put in no more: the step ends, not the watchdog it.
TEST(Cuda, AFailedStepWaitsForNobody) {
  STRATA_NEEDS_GPU();
  static std::atomic<bool> begun, failing, put;
  begun = failing = put = false;
  const auto kind = [](const std::string& name, const std::string& backend, const std::function<void()>& work) {
    register_kind({.name = name,
                   .summary = "",
                   .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                     return {{v.input(0).shape, DType::f32}};
                   },
                   .kernels = {{backend, {[work](const Binding&) -> Launch { return work; }}}}});
  };
  const auto a_while = [] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); };
  kind("test_fails", "cpu", [] {
    while (!begun) std::this_thread::yield();
    failing = true;
    throw Error("it failed.", ExitCode::failed);
  });
  kind("test_is_put_late", "cuda", [=] {
    while (!failing) std::this_thread::yield();
    a_while();
    put = true;
  });
  kind("test_is_never_put", "cuda", [] {});
  kind("test_ends_late", "cpu", [=] {
    begun = true;
    while (!put) std::this_thread::yield();
    a_while();
  });
  kind("test_waits", "cpu", [] {});
  Program program;
  Builder build(program);
  const TensorId x = build.data("x", {16}, DType::f32);
  build.stream = Stream::host;
  const TensorId failed = build.emit("test_fails", {x});
  build.stream = Stream::write;
  const TensorId late = build.emit("test_ends_late", {x});
  build.stream = Stream::compute;
  const TensorId last = build.emit("test_is_never_put", {build.emit("test_is_put_late", {x})});
  build.stream = Stream::write;
  build.emit("test_waits", {last, late, failed});  // nothing shares memory, and so waits for another
  const MemoryPlan plan = plan_memory(program, "cuda", 1);
  Storage storage(program, plan, {}, NvmeStore::Faults{}, test::gpu());
  Threads threads(1);
  constexpr double kPatience = 60;
  Executor executor(program, plan, storage, "cuda", threads, 1, nullptr, kPatience);
  const auto began = std::chrono::steady_clock::now();
  try {
    executor.run();
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "op 0 (test_fails): it failed.");
  }
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count(), kPatience);
}

TEST(Cuda, SpansAndStallsAreTheDevices) {
  STRATA_NEEDS_GPU();
  test::Runner runner(toml(kGpt2, "[plugins.offload]\nminimum = 0\nactivations = \"host\"\n"), {}, Goal::train, {},
                      nullptr, "cuda", test::device_of("cuda"));
  std::vector<int32_t> tokens(kBatch * kSequence, 3);
  runner.run_step(tokens.data(), tokens.data());
  runner.run_step(tokens.data(), tokens.data());
  EXPECT_TRUE(runner.executor->spans().empty());
  runner.executor->trace();
  runner.run_step(tokens.data(), tokens.data());
  const std::vector<Span>& spans = runner.executor->spans();
  const std::vector<Op>& ops = runner.built.program.ops;
  ASSERT_EQ(spans.size(), ops.size());
  std::map<Stream, double> finished;
  bool copied = false;
  for (size_t i = 0; i < spans.size(); ++i) {
    EXPECT_GE(spans[i].start, finished[ops[i].stream]) << i;  // a stream runs one op after the other
    EXPECT_GT(spans[i].finish, spans[i].start) << i;
    finished[ops[i].stream] = spans[i].finish;
    copied |= ops[i].stream == Stream::to_host;
  }
  EXPECT_TRUE(copied);
  EXPECT_LT(runner.executor->stalls().total(), finished[Stream::compute]);
}

TEST(Cuda, RatesAreMeasured) {
  STRATA_NEEDS_GPU();
  Rates rates{.flops = 0, .half_flops = 0, .memory = 0, .copy = 0, .launch = 0};
  measure_device(*test::device_of("cuda"), "cuda", rates);
  for (double rate : {rates.flops, rates.half_flops, rates.memory, rates.copy, rates.launch}) EXPECT_GT(rate, 0);
}

#if !defined(STRATA_GPU)
// What opening a device says on a machine like `machine`.
std::string refusal(cuda::Machine machine, int index = 0) {
  std::swap(cuda::machine(), machine);
  std::string text;
  try {
    std::unique_ptr<Device>(strata_device_v1()->create(index, 0));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    text = error.what();
  }
  std::swap(cuda::machine(), machine);
  return text;
}

// What was measured once is taken from then on: by this process, by others, after a damaged line, and never in parts.
TEST(Cuda, ChoicesAreKept) {
  std::string folder = (std::filesystem::temp_directory_path() / "strata-choices-XXXXXX").string();
  ASSERT_TRUE(mkdtemp(folder.data()));
  const std::string path = folder + "/sub/products", bytes("\0\xff\n 1", 5);
  int measured = 0;
  const auto get = [&](const std::string& file, const std::string& key, const std::string& found) {
    return cuda::Choices(file).get(
        key, [&] { return ++measured, found; }, [] { return std::string("first"); });
  };
  EXPECT_EQ(get(path, "a product", bytes), bytes);
  EXPECT_EQ(get(path, "a product", "another"), bytes);
  EXPECT_EQ(get(path, "a product, aligned", "another"), "another");
  EXPECT_EQ(measured, 2);
  std::ofstream(path, std::ios::app) << "zz broken\n0a cut";  // without its end
  EXPECT_EQ(get(path, "broken", "new"), "new");
  EXPECT_EQ(get(path, "broken", "newer"), "new");
  EXPECT_EQ(get(path, "cut", "whole"), "\n");  // the next line ended it
  EXPECT_EQ(get(path, "a product", "another"), bytes);
  measured = 0;
  EXPECT_EQ(get("", "a product", bytes), "first");
  EXPECT_EQ(get(path + "/no folder", "a product", bytes), "first");
  EXPECT_EQ(measured, 0);
  std::vector<std::thread> threads;
  std::vector<std::string> results(8);
  for (size_t i = 0; i < results.size(); ++i)
    threads.emplace_back([&, i] {
      results[i] = cuda::Choices(path).get(
          "at once", [&] { return std::to_string(i); }, [] { return std::string(); });
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::count(results.begin(), results.end(), results[0]), 8);
  std::filesystem::remove_all(folder);
}

TEST(Cuda, RefusalsSayWhatToDo) {
  const auto expect = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect(refusal({.devices = 0, .driver = 0}), "no CUDA device: no NVIDIA driver is installed; set device.backend");
  expect(refusal({.devices = 0}), "no CUDA device: no CUDA-capable device is detected");
  expect(refusal({.driver = 12040}), "the NVIDIA driver is for CUDA 12.4, but this build needs CUDA 13.0; install");
  expect(refusal({.devices = 2}, 2), "device.index = 2, but this machine has 2 CUDA device(s), 0 to 1.");
  expect(refusal({.major = 7, .minor = 5}), "has compute capability 7.5, but this build has code for 8.0 and newer");
  Device& device = *test::device_of("cuda");
  try {
    device.allocate(Tier::device, int64_t{64} << 30);
    ADD_FAILURE();
  } catch (const Error& error) {
    expect(error.what(), "the plan needs 64.00 GiB of memory of emulated H100");
    expect(error.what(), "is free; lower device.memory");
  }
  cuda::machine().direct_storage = false;
  void* const memory = device.allocate(Tier::device, 4096);
  try {
    device.open_file(0, memory, 4096);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    expect(error.what(), "cuFile");
    expect(error.what(), "or leave out device.direct_storage");
  }
  device.release(Tier::device, memory);
  cuda::machine().direct_storage = true;
}
#endif
#endif

}  // namespace
}  // namespace strata::cuda_test
