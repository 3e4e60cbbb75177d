// Sparse exchanges: selection against sorting, each step of whole runs against a plain program of the paper, bit for
// bit, what it composes with, what crosses the wire, and what is refused.
#include <cmath>
#include <mutex>
#include <numeric>
#include <random>

#include "plugins/top_k/top_k_kernel.cpp"  // a plugin's code is not in the engine's library
#include "tests/exchange_runs.h"
#include "tests/resumed_runs.h"

namespace strata::top_k {
namespace {

using Values = std::vector<float>;

// Indices of the k largest, rising; the first of equals first, NaN before all.
std::vector<uint32_t> largest(const Values& x, int64_t k) {
  std::vector<uint32_t> order(x.size());
  std::iota(order.begin(), order.end(), 0u);
  const auto size = [&](uint32_t i) { return std::isnan(x[i]) ? std::numeric_limits<double>::max() : std::abs(x[i]); };
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return size(a) > size(b); });
  order.resize(std::min(order.size(), size_t(k)));
  std::sort(order.begin(), order.end());
  return order;
}

// One rank of the paper's algorithm: what it sends, and 0 elsewhere. In f32 as the kernel does: products with a
// momentum of 0.5 are exact.
Values plain_step(const Values& gradient, float momentum, int64_t k, Values& velocity, Values& accumulated) {
  for (size_t i = 0; i < gradient.size(); ++i) {
    velocity[i] = momentum * velocity[i] + gradient[i];
    accumulated[i] += velocity[i];
  }
  Values sent(gradient.size());
  for (uint32_t i : largest(accumulated, k)) sent[i] = accumulated[i], accumulated[i] = velocity[i] = 0;
  return sent;
}

TEST(TopK, StepsAreThoseOfThePaperForAnyNumberOfThreads) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (size_t count : {1, 2, 61, 1025, 40001})
    for (double sparsity : {0.0, 0.5, 0.99, 0.99999})
      for (float momentum : {0.0f, 0.5f})
        for (int threads_count : {1, 3}) {
          SCOPED_TRACE(std::to_string(count) + ", " + std::to_string(sparsity) + ", " + std::to_string(momentum));
          Threads threads(threads_count);
          const int64_t k = kept(int64_t(count), sparsity);
          Values velocity(count), accumulated(count), expected_velocity(count), expected_accumulated(count);
          std::vector<std::byte> list(size_t(list_bytes(k, DType::f32))),
              workspace(size_t(workspace_bytes(int64_t(count), threads_count)));
          for (int step = 0; step < 3; ++step) {
            Values gradient(count), sum(count);
            // Few sizes, so that many are equal.
            for (float& x : gradient) x = std::round(4 * normal(random)) / 4;
            take(threads, DType::f32, gradient.data(), int64_t(count), k, momentum,
                 momentum > 0 ? velocity.data() : nullptr, accumulated.data(), workspace.data(), list.data());
            if (momentum == 0) std::fill(expected_velocity.begin(), expected_velocity.end(), 0.0f);
            const Values sent = plain_step(gradient, momentum, k, expected_velocity, expected_accumulated);
            add_up(threads, DType::f32, list.data(), 1, 0, k, 0, int64_t(count), sum.data());
            ASSERT_EQ(sum, sent);
            ASSERT_EQ(accumulated, expected_accumulated);
            if (momentum > 0) {
              ASSERT_EQ(velocity, expected_velocity);
            }
          }
        }
}

// What the rounding to 16 bits leaves is sent later, and nothing is lost.
TEST(TopK, RoundingIsKept) {
  Threads threads(1);
  for (DType dtype : {DType::bf16, DType::f16}) {
    Values x{1.001f, -3.3f, 0.25f, 7.7f, 0.1f}, rounded(x.size()), sum(x.size()),
        accumulated{1e-4f, 2e-4f, 0, 1e-3f, 0};
    std::vector<uint16_t> gradient(x.size()), result(x.size());
    from_f32(dtype, x.data(), gradient.data(), 5);
    to_f32(dtype, gradient.data(), rounded.data(), 5);
    Values all = accumulated;
    for (size_t i = 0; i < x.size(); ++i) all[i] += rounded[i];
    const int64_t k = 3;
    std::vector<std::byte> list(size_t(list_bytes(k, dtype))), workspace(size_t(workspace_bytes(5, 1)));
    EXPECT_EQ(list.size(), 20u);
    take(threads, dtype, gradient.data(), 5, k, 0, nullptr, accumulated.data(), workspace.data(), list.data());
    add_up(threads, dtype, list.data(), 1, 0, k, 0, 5, result.data());
    to_f32(dtype, result.data(), sum.data(), 5);
    for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(sum[i] + accumulated[i], all[i]) << i;
    EXPECT_EQ(sum[2], 0.0f);
    EXPECT_NE(accumulated[1], 0.0f);
  }
}

TEST(TopK, WhatIsNotFiniteIsSeenAndNotKept) {
  Threads threads(1);
  for (float bad : {INFINITY, -INFINITY, NAN}) {
    Values x(100, 1e38f), accumulated(100), sum(100);
    x[77] = bad;
    std::vector<std::byte> list(size_t(list_bytes(1, DType::f32))), workspace(size_t(workspace_bytes(100, 1)));
    take(threads, DType::f32, x.data(), 100, 1, 0, nullptr, accumulated.data(), workspace.data(), list.data());
    add_up(threads, DType::f32, list.data(), 1, 0, 1, 0, 100, sum.data());
    EXPECT_FALSE(std::isfinite(sum[77]));
    EXPECT_EQ(accumulated[77], 0.0f);
  }
}

using test::expect_near, test::kParallel, test::Look, test::run_losses, test::zero_stage;

std::string config(int ranks, const std::string& plugins, int micro_batch = 4, const std::string& mesh = "") {
  return test::exchange_config(60, 3, ranks, plugins, micro_batch, mesh);
}
std::string form(double sparsity, const std::string& more = "") {
  return "[plugins.top_k]\nminimum = 200\nsparsity = " + std::to_string(sparsity) + "\n" + more;
}

// Keeps what each rank gives to the exchange, and what it gets, readable after the step.
class Probe final : public Plugin {
 public:
  void gradients(GradientStage& stage) override {
    Program& program = stage.build().program();
    for (const Op& op : program.ops) {
      if (op.kind->name.starts_with("top_k_take")) program[op.inputs[0]].step_output = true;
      if (op.kind->name == "top_k_add_up") program[op.outputs[0]].step_output = true;
    }
  }
};

// Under ZeRO each rank gets its share, put together here; 71 and 61 rows do not divide by the ranks. The kernel takes
// and adds up in the order of a bucket, so op i of one kind belongs to op i of the other.
TEST(TopK, EachStepOfARunIsThePapersAndLosesNothing) {
  struct Rank {
    Values gradient, accumulated, velocity;
  };
  for (const std::string& wanting : {kParallel, zero_stage(1)})
    for (int ranks : {2, 4}) {
      SCOPED_TRACE(wanting + std::to_string(ranks));
      Probe probe;
      std::mutex mutex;
      std::map<size_t, std::vector<Rank>> seen, expected;
      std::map<size_t, Values> results;
      int checked = 0;
      const Look look = [&](test::Runner& runner, World& world, int step) {
        if (step < 0) return;
        const Program& program = runner.built.program;
        world.gather("");  // all ranks have made the step
        size_t taken = 0, added = 0;
        for (const Op& op : program.ops) {
          const std::lock_guard lock(mutex);
          if (op.kind->name == "top_k_add_up")
            test::put_together(program[op.outputs[0]], runner.values(op.outputs[0]), results[added++]);
          if (!op.kind->name.starts_with("top_k_take")) continue;
          auto& all = seen[taken++];
          all.resize(size_t(ranks));
          Rank& own = all[size_t(world.rank())];
          own.gradient = runner.values(op.inputs[0]);
          own.accumulated = runner.values(program[op.inputs[1]].name);
          own.velocity = runner.values(program[op.inputs[3]].name);
        }
        world.gather("");
        if (world.rank() == 0)
          for (auto& [op, all] : seen) {
            SCOPED_TRACE(std::to_string(op) + ", step " + std::to_string(step));
            auto& before = expected[op];
            before.resize(size_t(ranks));
            const size_t count = all[0].gradient.size();
            Values sum(count);
            for (size_t r = 0; r < all.size(); ++r) {
              Rank& rank = before[r];
              rank.accumulated.resize(count), rank.velocity.resize(count);
              const Values sent =
                  plain_step(all[r].gradient, 0.5f, kept(int64_t(count), 0.9), rank.velocity, rank.accumulated);
              for (size_t i = 0; i < count; ++i) sum[i] += sent[i];
              EXPECT_EQ(all[r].accumulated, rank.accumulated);
              EXPECT_EQ(all[r].velocity, rank.velocity);
            }
            EXPECT_EQ(results[op], sum);
            ++checked;
          }
        world.gather("");
      };
      run_losses(ranks, config(ranks, wanting + form(0.9, "momentum = 0.5\n"), 2), 3, look, &probe);
      EXPECT_GT(checked, 3 * 8);
    }
}

// Of all elements it is the sum, in whatever way gradients are wanted.
TEST(TopK, OfAllElementsItIsTheSum) {
  const std::string clip = "[plugins.clip]\nmax_norm = 0.1\n";
  const auto expected = run_losses(1, config(1, clip), 5);
  for (const std::string& wanting : {kParallel, zero_stage(1), zero_stage(2), zero_stage(3)})
    expect_near(run_losses(2, config(2, wanting + clip + form(0)), 5), expected, 1e-4);
  expect_near(run_losses(4, config(4, zero_stage(1) + clip + form(0), 2, "replicate = 2\n"), 5), expected, 1e-4);
}

// What crosses is the same whatever is wanted of it; only the rounding of sums differs.
TEST(TopK, LossesDoNotDependOnWhatElseIsEnabled) {
  test::TemporaryFolder folder;
  const std::string clip = "[plugins.clip]\nmax_norm = 0.1\n", half = "[plugins.mixed_precision]\ndtype = ",
                    nvme = "[plugins.offload]\nminimum = 0\ndirectory = \"" + folder.path() +
                           "\"\noptimizer = \"nvme\"\ngradients = \"host\"\nparameters = \"host\"\n";
  const std::string own = form(0.9) + clip;
  const auto expected = run_losses(2, config(2, kParallel + own), 6);
  const auto plain = run_losses(2, config(2, kParallel + clip), 6);
  EXPECT_NE(expected, plain);
  EXPECT_LT(expected.back(), expected.front()) << "it learns";
  for (const std::string& with : {zero_stage(1), zero_stage(2), zero_stage(3), kParallel + nvme,
                                  zero_stage(3) + nvme + "[plugins.recompute]\n"}) {
    SCOPED_TRACE(with);
    expect_near(run_losses(2, config(2, with + own), 6), expected, 1e-4);
  }
  expect_near(run_losses(2, config(2, zero_stage(1) + own, 2), 6), expected, 1e-3);
  expect_near(run_losses(2, config(2, kParallel + own + half + "\"bf16\"\n"), 6), expected, 2e-2);
  expect_near(run_losses(2, config(2, zero_stage(1) + own + half + "\"fp16\"\n"), 6), expected, 2e-2);
  // Chosen again of sums, and of each part of a tensor.
  expect_near(run_losses(4, config(4, zero_stage(1) + own, 2, "replicate = 2\n"), 6), expected, 2e-2);
  expect_near(run_losses(6, config(2, kParallel + own + "[plugins.tensor_parallel]\n", 4, "tensor = 3\n"), 6), expected,
              2e-2);
}

// Steps that overflow leave what is accumulated as it was.
TEST(TopK, SkippedStepsChangeNothing) {
  const std::string text = config(2, kParallel + form(0.9, "momentum = 0.5\n") +
                                         "[plugins.mixed_precision]\ndtype = \"fp16\"\nloss_scale = 33554432.0\n");
  int skipped = 0, made = 0;
  std::map<std::string, Values> before;
  run_losses(2, text, 6, [&](test::Runner& runner, World& world, int step) {
    if (world.rank() != 0) return;
    bool changed = false;
    for (const Tensor& tensor : runner.storage->persistent_tensors()) {
      if (tensor.name.text().find(".top_k.") == std::string::npos) continue;
      const Values now = runner.values(tensor.name);
      for (float value : now) ASSERT_TRUE(std::isfinite(value)) << tensor.name;
      changed |= before[tensor.name] != now;
      before[tensor.name] = now;
    }
    if (step >= 0) ++(changed ? made : skipped);
  });
  EXPECT_GT(skipped, 0);
  EXPECT_GT(made, 0);
}

// A list of each rank to each other: 8 bytes an element that is sent; as planned, and on two ranks as sent (of more,
// small exchanges go to all others at once). In the warm-up a quarter of all.
TEST(TopK, BytesOnTheWireFollowTheFormula) {
  for (const bool warm : {false, true}) {
    std::mutex mutex;
    double sent = 0, others = 0, planned = 0, formula = 0;
    run_losses(2, config(2, kParallel + form(0.9, warm ? "warmup = 5\n" : "")), 1,
               [&](test::Runner& runner, World& world, int step) {
                 if (step < 0) return;
                 const std::lock_guard lock(mutex);
                 for (const auto& [axis, group] : runner.groups)
                   if (axis != "loop") sent += double(group->bytes_sent()) / 2;
                 if (world.rank() != 0) return;
                 const Program& program = runner.built.program;
                 for (const Op& op : program.ops)
                   for (TensorId id : op.inputs) {
                     if (op.kind->name == "all_gather") planned += double(program[id].bytes());
                     if (op.kind->name == "all_reduce") others += double(program[id].bytes());
                   }
                 for (TensorId id : program.with_role(Role::parameter)) {
                   const int64_t count = elements(program[id].shape);
                   if (count >= 200) formula += 8 * double(std::llround((warm ? 0.25 : 0.1) * double(count)));
                 }
               });
    EXPECT_GT(planned, 0);
    EXPECT_EQ(planned, formula);
    EXPECT_EQ(sent, planned + others);
  }
}

using TopKRuns = test::ResumedRuns;
TEST_F(TopKRuns, ResumeOnceAStep) {
  expect_resumes(config(2, kParallel + form(0.9, "momentum = 0.5\nwarmup = 1\n"), 2), 2, 3, 2);
}
TEST_F(TopKRuns, ResumeOfEachMicrobatch) { expect_resumes(config(2, zero_stage(2) + form(0.9), 2), 2, 3, 2); }

TEST(TopK, WhatCannotBeIsRefused) {
  const auto expect = [](const std::string& text, const std::string& message) {
    const std::string found = test::usage_error_of(text);
    EXPECT_NE(found.find(message), std::string::npos) << found;
  };
  expect("[run]\nreproducible = true\n" + config(2, kParallel + form(0.9)),
         "cannot work with run.reproducible, because");
  expect(config(2, kParallel + form(1.0)), "sparsity");
  expect(config(2, kParallel + form(-0.1)), "sparsity");
  expect(config(2, kParallel + form(0.9, "momentum = 1.0\n")), "momentum");
  expect(config(2, kParallel + "[plugins.top_k]\nminimum = 20000\n"),
         "no gradient has minimum = 20000 elements; the largest has 10800.");
  expect(config(2, kParallel + form(0.9) + "[plugins.powersgd]\n"), "both set the form");
  expect(config(2, zero_stage(2) + form(0.9) + "[plugins.mixed_precision]\ndtype = \"fp16\"\n"),
         "the form \"top_k\" of plugin \"top_k\" needs finite gradients");
}

}  // namespace
}  // namespace strata::top_k
