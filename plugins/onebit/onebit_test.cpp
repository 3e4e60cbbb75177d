// One-bit exchanges: bits against a plain program, each step of whole runs against one of the paper's algorithm, bit
// for bit, what it composes with, what crosses the wire, and what is refused.
#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <random>

#include "plugins/onebit/signs.cpp"  // a plugin's code is not in the engine's library
#include "tests/exchange_runs.h"
#include "tests/resumed_runs.h"

namespace strata::onebit {
namespace {

using FloatList = std::vector<float>;

// Each element of [begin, end) as the mean of those that have its sign, of blocks of 512; what it leaves out stays in
// `error`. The order of sums is the kernel's.
FloatList plain_bits(const FloatList& gradient, size_t begin, size_t end, FloatList& error) {
  FloatList sent;
  for (size_t first = begin; first < end; first += 512) {
    const size_t last = std::min(end, first + 512);
    float parts[2][16] = {}, sums[2] = {}, counts[2] = {};
    FloatList x;
    for (size_t i = first; i < last; ++i) {
      x.push_back(gradient[i] + error[i]);
      const bool sign = std::signbit(x.back());
      parts[sign][(i - first) % 16] += x.back();
      counts[sign] += 1;
    }
    for (int sign : {0, 1})
      for (float part : parts[sign]) sums[sign] += part;
    for (size_t i = first; i < last; ++i) {
      const bool sign = std::signbit(x[i - first]);
      sent.push_back(sums[sign] / counts[sign]);
      error[i] = x[i - first] - sent.back();
    }
  }
  return sent;
}

TEST(OneBit, BitsAndWhatTheyLeaveOutAreThoseOfThePlainProgram) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0.1f);
  for (size_t count : {1, 31, 33, 511, 512, 513, 1500, 20001})
    for (int threads_count : {1, 3}) {
      SCOPED_TRACE(std::to_string(count) + " on " + std::to_string(threads_count));
      Threads threads(threads_count);
      FloatList error(count), expected_error(count), read(count), gradient(count);
      std::vector<std::byte> list(static_cast<size_t>(list_bytes(int64_t(count))));
      for (int step = 0; step < 3; ++step) {
        for (float& x : gradient) x = normal(random);
        FloatList all = error;
        for (size_t i = 0; i < count; ++i) all[i] += gradient[i];
        pack(threads, DType::f32, gradient.data(), int64_t(count), error.data(), list.data());
        unpack(threads, list.data(), 1, 0, int64_t(count), DType::f32, read.data());
        ASSERT_EQ(read, plain_bits(gradient, 0, count, expected_error));
        ASSERT_EQ(error, expected_error);
        // Nothing is lost but the rounding of one subtraction.
        for (size_t i = 0; i < count; ++i) ASSERT_NEAR(read[i] + error[i], all[i], 1e-6f * (1 + std::abs(all[i])));
      }
    }
}

TEST(OneBit, WhatIsNotFiniteIsSeenAndNotKept) {
  Threads threads(1);
  for (float bad : {INFINITY, -INFINITY, NAN, -NAN}) {
    FloatList x(700, 1.0f), error(x.size()), read(x.size());
    x[77] = bad;
    std::vector<std::byte> list(size_t(list_bytes(700)));
    pack(threads, DType::f32, x.data(), 700, error.data(), list.data());
    unpack(threads, list.data(), 1, 0, 700, DType::f32, read.data());
    EXPECT_FALSE(std::isfinite(read[77]));
    EXPECT_EQ(read[600], 1.0f) << "of another block";
    EXPECT_EQ(error, FloatList(x.size()));
  }
}

using test::expect_near, test::kParallel, test::Look, test::run_losses, test::zero_stage;

std::string config(int ranks, const std::string& plugins, int micro_batch = 4, const std::string& mesh = "") {
  return test::exchange_config(60, 3, ranks, plugins, micro_batch, mesh);
}
std::string form(const std::string& more = "") { return "[plugins.onebit]\nminimum = 200\n" + more; }

// Keeps what each rank gives to the exchange, and what it gets, readable after the step.
class Probe final : public Plugin {
 public:
  void gradients(GradientStage& stage) override {
    Program& program = stage.build().program();
    for (const Op& op : program.ops) {
      if (op.kind->name == "onebit_pack") program[op.inputs[0]].step_output = true;
      if (op.kind->name == "onebit_unpack") program[op.outputs[0]].step_output = true;
    }
  }
};

// Two rounds, each with an error of its own; under ZeRO one, and shares are put together here. 71 and 61 rows do not
// divide by the ranks. Ops of one kind stand in the order of their buckets, so the i-th of each belong together.
TEST(OneBit, EachStepOfARunIsThePlainProgram) {
  for (const bool zero : {false, true})
    for (int ranks : {2, 4}) {
      SCOPED_TRACE((zero ? "zero, " : "parallel, ") + std::to_string(ranks));
      Probe probe;
      std::mutex mutex;
      std::map<size_t, std::vector<FloatList>> gradients, errors, expected_errors;
      std::map<size_t, FloatList> results, expected_share_errors;
      std::map<size_t, Shape> shapes;
      int checked = 0;
      const Look look = [&](test::Runner& runner, World& world, int step) {
        if (step < 0) return;
        const Program& program = runner.built.program;
        world.gather("");  // all ranks have made the step
        size_t packed = 0, read = 0;
        for (const Op& op : program.ops) {
          const std::lock_guard lock(mutex);
          if (op.kind->name == "onebit_unpack" && (op.attributes.integer("sum") != 0) == zero) {
            FloatList& all = results[read++];
            if (zero)
              test::put_together(program[op.outputs[0]], runner.values(op.outputs[0]), all);
            else
              all = runner.values(op.outputs[0]);
          }
          if (op.kind->name != "onebit_pack" || op.attributes.integer("lists") == 1) continue;
          for (auto* of_op : {&gradients[packed], &errors[packed]}) of_op->resize(size_t(ranks));
          gradients[packed][size_t(world.rank())] = runner.values(op.inputs[0]);
          errors[packed][size_t(world.rank())] = runner.values(program[op.inputs[1]].name);
          shapes[packed++] = program[op.inputs[0]].shape;
        }
        world.gather("");
        if (world.rank() == 0)
          for (auto& [op, all] : gradients) {
            SCOPED_TRACE(std::to_string(op) + ", step " + std::to_string(step));
            const size_t count = all[0].size(), row = count / size_t(shapes[op][0]);
            auto& own = expected_errors[op];
            own.resize(size_t(ranks), FloatList(count));
            FloatList& share = expected_share_errors[op];
            share.resize(count);
            FloatList expected;
            for (int r = 0; r < ranks; ++r) {  // the rank whose share it is
              const Range rows = share_of(shapes[op][0], r, ranks);
              const size_t begin = size_t(rows.begin) * row, end = size_t(rows.end) * row;
              FloatList sum(count);
              for (size_t from = 0; from < size_t(ranks); ++from) {
                const FloatList sent = plain_bits(all[from], begin, end, own[from]);
                for (size_t i = begin; i < end; ++i) sum[i] += sent[i - begin];
              }
              const FloatList result = zero ? FloatList(sum.begin() + int64_t(begin), sum.begin() + int64_t(end))
                                            : plain_bits(sum, begin, end, share);
              expected.insert(expected.end(), result.begin(), result.end());
            }
            EXPECT_EQ(results[op], expected);
            EXPECT_EQ(errors[op], own);
            ++checked;
          }
        world.gather("");
      };
      run_losses(ranks, config(ranks, (zero ? zero_stage(1) : kParallel) + form(), 2), 3, look, &probe);
      EXPECT_GT(checked, 3 * 8);
    }
}

TEST(OneBit, ItLearnsWithWhateverElseIsEnabled) {
  test::TemporaryFolder folder;
  const std::string clip = "[plugins.clip]\nmax_norm = 0.1\n", half = "[plugins.mixed_precision]\ndtype = ",
                    nvme = "[plugins.offload]\nminimum = 0\ndirectory = \"" + folder.path() +
                           "\"\noptimizer = \"nvme\"\ngradients = \"host\"\nparameters = \"host\"\n";
  const std::string own = form() + clip;
  const auto expected = run_losses(2, config(2, kParallel + own), 6);
  EXPECT_NE(expected, run_losses(2, config(2, kParallel + clip), 6));
  EXPECT_LT(expected.back(), expected.front()) << "it learns";
  expect_near(run_losses(2, config(2, kParallel + own + nvme), 6), expected, 1e-6);
  // Compressed once instead of twice, of each part of a tensor, and of sums.
  const auto shared = run_losses(2, config(2, zero_stage(1) + own), 6);
  expect_near(shared, expected, 5e-2);
  for (const std::string& with : {zero_stage(2), zero_stage(3), zero_stage(3) + nvme + "[plugins.recompute]\n"}) {
    SCOPED_TRACE(with);
    expect_near(run_losses(2, config(2, with + own), 6), shared, 1e-4);
  }
  expect_near(run_losses(2, config(2, kParallel + own, 2), 6), expected, 5e-2);
  expect_near(run_losses(2, config(2, kParallel + own + half + "\"bf16\"\n"), 6), expected, 5e-2);
  expect_near(run_losses(2, config(2, zero_stage(1) + own + half + "\"fp16\"\n"), 6), expected, 5e-2);
  expect_near(run_losses(4, config(4, zero_stage(1) + own, 2, "replicate = 2\n"), 6), expected, 5e-2);
  expect_near(run_losses(6, config(2, kParallel + own + "[plugins.tensor_parallel]\n", 4, "tensor = 3\n"), 6), expected,
              5e-2);
  // Before it begins, gradients cross as they are.
  expect_near(run_losses(2, config(2, kParallel + clip + form("start = 100\n")), 6),
              run_losses(2, config(2, kParallel + clip), 6), 0);
}

// Steps that overflow leave what the bits left out as it was.
TEST(OneBit, SkippedStepsChangeNothing) {
  const std::string text =
      config(2, kParallel + form() + "[plugins.mixed_precision]\ndtype = \"fp16\"\nloss_scale = 33554432.0\n");
  int skipped = 0, made = 0;
  std::map<std::string, FloatList> before;
  run_losses(2, text, 6, [&](test::Runner& runner, World& world, int step) {
    if (world.rank() != 0) return;
    bool changed = false;
    for (const Tensor& tensor : runner.storage->persistent_tensors()) {
      if (tensor.name.text().find(".onebit.") == std::string::npos) continue;
      const FloatList now = runner.values(tensor.name);
      for (float value : now) ASSERT_TRUE(std::isfinite(value)) << tensor.name;
      changed |= before[tensor.name] != now;
      before[tensor.name] = now;
    }
    if (step >= 0) ++(changed ? made : skipped);
  });
  EXPECT_GT(skipped, 0);
  EXPECT_GT(made, 0);
}

// Each rank sends the list of the other's share, then that of its own: as planned, and on two ranks as sent.
TEST(OneBit, BytesOnTheWireFollowTheFormula) {
  std::mutex mutex;
  double sent = 0, others = 0, formula = 0;
  run_losses(2, config(2, kParallel + form()), 1, [&](test::Runner& runner, World& world, int step) {
    if (step < 0) return;
    const std::lock_guard lock(mutex);
    for (const auto& [axis, group] : runner.groups)
      if (axis != "loop") sent += double(group->bytes_sent()) / 2;
    if (world.rank() != 0) return;
    const Program& program = runner.built.program;
    for (const Op& op : program.ops)
      if (op.kind->name == "all_reduce")
        for (TensorId id : op.inputs) others += double(program[id].bytes());
    for (TensorId id : program.with_role(Role::parameter)) {
      const Shape& shape = program[id].shape;
      if (elements(shape) < 200) continue;
      const int64_t share = (shape[0] + 1) / 2 * (elements(shape) / shape[0]);
      formula += 2 * 72 * double((share + 511) / 512);
    }
  });
  EXPECT_GT(formula, 0);
  EXPECT_EQ(sent, formula + others);
}

using OneBitRuns = test::ResumedRuns;
TEST_F(OneBitRuns, ResumeOnceAStep) { expect_resumes(config(2, kParallel + form("start = 1\n"), 2), 2, 3, 2); }
TEST_F(OneBitRuns, ResumeOfEachMicrobatch) { expect_resumes(config(2, zero_stage(2) + form(), 2), 2, 3, 2); }

// Shares of 71 rows are 18 on 4 ranks and 24 on 3, 72 in all either way, but of other rows.
TEST(OneBit, ErrorsOfSharesAreOfOneNumberOfRanks) {
  std::mutex mutex;
  std::map<int, std::vector<std::string>> names;
  for (int ranks : {2, 4})
    run_losses(ranks, config(ranks, kParallel + form(), 2), 1, [&](test::Runner& runner, World&, int) {
      const std::lock_guard lock(mutex);
      for (const Tensor& tensor : runner.storage->persistent_tensors())
        if (tensor.name.text().find("share_error") != std::string::npos) names[ranks].push_back(tensor.name.text());
    });
  ASSERT_FALSE(names[2].empty());
  for (const std::string& name : names[2]) EXPECT_EQ(std::count(names[4].begin(), names[4].end(), name), 0) << name;
}

TEST(OneBit, WhatCannotBeIsRefused) {
  const auto expect = [](const std::string& text, const std::string& message) {
    const std::string found = test::usage_error_of(text);
    EXPECT_NE(found.find(message), std::string::npos) << found;
  };
  expect("[run]\nreproducible = true\n" + config(2, kParallel + form()), "cannot work with run.reproducible, because");
  expect(config(2, kParallel + "[plugins.onebit]\nminimum = 20000\n"),
         "no gradient has minimum = 20000 elements; the largest has 10800.");
  expect(config(2, kParallel + form("start = -1\n")), "start");
  expect(config(2, kParallel + form() + "[plugins.powersgd]\n"), "both set the form");
  expect(config(2, zero_stage(2) + form() + "[plugins.mixed_precision]\ndtype = \"fp16\"\n"),
         "the form \"onebit\" of plugin \"onebit\" needs finite gradients");
}

}  // namespace
}  // namespace strata::onebit
