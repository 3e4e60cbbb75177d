// Parameters that cross as codes: what ranks compute with is what a plain loop makes of the shares, bit for bit and on
// all ranks alike; masters stay as they are; whole runs beside a plain program; what crosses the wire; what is refused.
#include <cmath>
#include <mutex>
#include <optional>

#include "plugins/quantized_exchange/codes.h"
#include "strata/builder.h"
#include "strata/convert.h"
#include "tests/exchange_runs.h"
#include "tests/resumed_runs.h"

namespace strata::quantized_gather_test {
namespace {

using test::expect_near, test::kParallel, test::run_losses, test::zero_stage;
using Values = std::vector<float>;

constexpr int64_t kBlock = 256;
constexpr int64_t kMinimum = 200;

std::string config(int ranks, const std::string& plugins, int micro_batch = 1, const std::string& mesh = "") {
  std::string text = test::exchange_config(60, 3, ranks, plugins, micro_batch, mesh);
  if (ranks == 3) text.replace(text.find("global_batch = 8"), 16, "global_batch = 6");
  return text;
}
std::string as(const std::string& parameters, const std::string& gradients = "none") {
  return "[plugins.quantized_exchange]\nformat = \"" + gradients + "\"\nparameters = \"" + parameters +
         "\"\nminimum = " + std::to_string(kMinimum) + "\n";
}
const std::string kHalf = "[plugins.mixed_precision]\ndtype = \"bf16\"\n";

float kept_as(DType dtype, float value) {
  std::byte narrow[4];
  from_f32(dtype, &value, narrow, 1);
  to_f32(dtype, narrow, &value, 1);
  return value;
}

// To the nearest of 2 · largest + 1 multiples of the scale of each block, in f32 as kernels have it; `dtype` is what
// the numbers are kept in.
void round_list(float* x, int64_t count, float largest, DType dtype) {
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    float top = 0;
    for (int64_t i = begin; i < end; ++i) top = std::max(top, std::abs(x[i]));
    const float scale = top / largest, factor = scale > 0 ? 1 / scale : 0;
    for (int64_t i = begin; i < end; ++i) {
      const float code = std::floor(x[i] * factor + largest + 0.5f) - largest;
      x[i] = kept_as(dtype, code * scale);
    }
  }
}
// Of all rows, a list for each rank.
void round_rows(Values& x, const Shape& shape, int ranks, float largest, DType dtype) {
  const int64_t row = elements(shape) / shape[0];
  for (int rank = 0; rank < ranks; ++rank) {
    const Range rows = share_of(shape[0], rank, ranks);
    round_list(x.data() + rows.begin * row, rows.count() * row, largest, dtype);
  }
}
float largest_of(const std::string& format) { return format == "int8" ? 127 : 7; }

Values wide(const Storage& storage, const Tensor& tensor) {
  const std::vector<std::byte> bytes = const_cast<Storage&>(storage).copy(tensor);
  Values values(size_t(elements(tensor.shape)));
  to_f32(tensor.dtype, bytes.data(), values.data(), int64_t(values.size()));
  return values;
}

// Keeps what is gathered readable after the step.
class KeepGathered final : public Plugin {
 public:
  void placement(ProgramStage& stage) override {
    for (const Op& op : stage.program.ops)
      if (op.kind->name == "quantized_gather")
        for (TensorId id : op.outputs) stage.program[id].step_output = true;
  }
};

using Tensors = std::map<std::string, Values>;

// The parameters that the rank has, put into the whole ones.
void put_parameters(const test::Runner& runner, Tensors& whole) {
  for (TensorId id : runner.built.program.with_role(Role::parameter)) {
    const Tensor& tensor = runner.built.program[id];
    test::put_together(tensor, wide(*runner.storage, tensor), whole[tensor.name]);
  }
}

// Which parameters cross so, is what a formula says: those of so many elements.
TEST(QuantizedGather, AllRanksComputeWithTheCodesOfTheShares) {
  for (int ranks : {2, 3, 4})
    for (const std::string format : {"int8", "int4"}) {
      SCOPED_TRACE(format + " on " + std::to_string(ranks));
      std::mutex mutex;
      Tensors whole;  // what the second step begins with
      std::map<std::string, Shape> shapes;
      std::vector<Tensors> seen(static_cast<size_t>(ranks));
      KeepGathered keep;
      run_losses(
          ranks, config(ranks, zero_stage(3) + as(format)), 2,
          [&](test::Runner& runner, World& world, int step) {
            const std::lock_guard lock(mutex);
            const Program& program = runner.built.program;
            if (step == 0) put_parameters(runner, whole);
            for (const Op& op : program.ops)
              if (op.kind->name == "quantized_gather" && step == 1)
                for (size_t i = 0; i < op.inputs.size(); ++i) {
                  if (!program[op.outputs[i]].step_output) continue;
                  const std::string name = program[op.inputs[i]].name;
                  shapes[name] = program[op.outputs[i]].shape;
                  seen[size_t(world.rank())][name] = runner.values(op.outputs[i]);
                }
          },
          &keep);
      size_t crossed = 0;
      for (auto& [name, values] : whole) {
        if (int64_t(values.size()) < kMinimum) continue;
        ++crossed;
        const Values master = values;
        round_rows(values, shapes[name], ranks, largest_of(format), DType::f32);
        EXPECT_NE(values, master) << name;
        for (const Tensors& of_rank : seen) EXPECT_TRUE(of_rank.at(name) == values) << name;
      }
      for (const Tensors& of_rank : seen) EXPECT_EQ(of_rank.size(), crossed);
      EXPECT_EQ(crossed, 10u);
    }
}

// Where ranks keep working copies of all parameters, those are what the codes of each rank's part say, after every
// step; in the first step and in one after a resume they were made of masters by nobody's codes, and are rounded first.
TEST(QuantizedGather, WorkingCopiesAreTheCodesOfMasters) {
  for (int stage : {1, 2})
    for (int ranks : {2, 3}) {
      SCOPED_TRACE("stage " + std::to_string(stage) + " on " + std::to_string(ranks));
      std::mutex mutex;
      Tensors masters;
      std::map<std::string, Shape> shapes;
      std::vector<Tensors> seen(static_cast<size_t>(ranks));
      run_losses(ranks, config(ranks, zero_stage(stage) + kHalf + as("int8")), 2,
                 [&](test::Runner& runner, World& world, int step) {
                   if (step < 1) return;
                   const std::lock_guard lock(mutex);
                   const Program& program = runner.built.program;
                   for (TensorId id : program.with_role(Role::parameter)) {
                     const Tensor& tensor = program[id];
                     const std::string name = tensor.lasting->rounded_from.text();
                     shapes[name] = tensor.shape;
                     seen[size_t(world.rank())][name] = wide(*runner.storage, tensor);
                     const Tensor& master = program[program.find(name)];
                     test::put_together(master, wide(*runner.storage, master), masters[name]);
                   }
                 });
      EXPECT_EQ(seen[0].size(), masters.size());
      for (auto& [name, values] : masters) {
        const Values master = values;
        for (float& value : values) value = kept_as(DType::bf16, value);
        if (int64_t(values.size()) >= kMinimum) round_rows(values, shapes[name], ranks, 127, DType::bf16);
        EXPECT_NE(values, master) << name;
        for (const Tensors& of_rank : seen) EXPECT_TRUE(of_rank.at(name) == values) << name;
      }
    }
}

// A plain program: parameters are rounded where they are read, gradients pass.
class Rounded final : public Plugin {
 public:
  Rounded(int ranks, const std::string& format) : ranks_(ranks), largest_(largest_of(format)) {
    static const bool once = [] {
      OpKind kind{.name = "test_rounded_rows", .summary = "x (rows, …) -> x as codes of the rows of each rank say"};
      kind.half = true;
      kind.shape = [](const OpView& v) -> std::vector<TensorSpec> { return {{v.input(0).shape, v.input(0).dtype}}; };
      kind.gradient = [](Differentiation& d) { d.set(0, d.output_gradient(0)); };
      kind.kernels["cpu"] = {[](const Binding& b) -> Launch {
        return [b] {
          Values x(size_t(elements(b.input(0).shape)));
          to_f32(b.input(0).dtype, b.in<void>(0), x.data(), int64_t(x.size()));
          round_rows(x, b.input(0).shape, int(b.attributes().integer("ranks")), float(b.attributes().real("largest")),
                     b.input(0).dtype);
          from_f32(b.input(0).dtype, x.data(), b.out<void>(0), int64_t(x.size()));
        };
      }};
      register_kind(std::move(kind));
      return true;
    }();
    (void)once;
  }

  void forward(ProgramStage& stage) override {
    Program& program = stage.program;
    std::vector<Op> before;
    std::map<int32_t, TensorId> rounded;
    for (TensorId id : program.with_role(Role::parameter)) {
      if (elements(program[id].shape) < kMinimum) continue;
      const Tensor of = program[id];
      rounded[id.value] = program.add({.name = of.name + ".rounded", .shape = of.shape, .dtype = of.dtype});
      before.push_back(make_op("test_rounded_rows", {id}, {rounded[id.value]},
                               {{"ranks", int64_t{ranks_}}, {"largest", double(largest_)}}));
    }
    for (Op& op : program.ops)
      for (TensorId& id : op.inputs)
        if (const auto found = rounded.find(id.value); found != rounded.end()) id = found->second;
    program.ops.insert(program.ops.begin(), before.begin(), before.end());
  }

 private:
  int ranks_;
  float largest_;
};

// Sums are taken in another order, so an element between two codes may become the other one: a code of int8 is 1% of a
// typical element of its block, of int4 20%. What rounding itself does to the losses is a multiple of that.
TEST(QuantizedGather, RunsLearnAsAPlainProgramOfTheSameRounding) {
  const std::string clip = "[plugins.clip]\nmax_norm = 0.5\n";
  for (const auto& [format, band] : {std::pair("int8", 1e-5), {"int4", 2e-4}}) {
    SCOPED_TRACE(format);
    const auto plain = run_losses(1, config(1, clip), 6);
    Rounded rounded(2, format);
    const auto expected = run_losses(1, config(1, clip), 6, {}, &rounded);
    const auto losses = run_losses(2, config(2, zero_stage(3) + clip + as(format)), 6);
    expect_near(losses, expected, band);
    double off = 0;
    for (size_t i = 0; i < losses.size(); ++i) off = std::max(off, std::abs(plain[i] - expected[i]) / plain[i]);
    EXPECT_GT(off, 2 * band);
  }
}

// Beside what else moves, restores or divides parameters, and with gradients in forms of their own.
TEST(QuantizedGather, RunsStayCloseWhateverElseIsEnabled) {
  test::TemporaryFolder folder;
  const std::string clip = "[plugins.clip]\nmax_norm = 0.1\n",
                    nvme = "[plugins.offload]\nminimum = 0\ndirectory = \"" + folder.path() +
                           "\"\noptimizer = \"nvme\"\ngradients = \"host\"\nparameters = \"nvme\"\n";
  const auto plain = run_losses(1, config(1, clip), 4);
  const std::string three = zero_stage(3) + clip;
  const std::string always = zero_stage(3) + "reshard = \"always\"\n" + clip;
  for (const std::string& with : {three + as("int8", "int8") + nvme + "[plugins.recompute]\n", always + as("bf16")}) {
    SCOPED_TRACE(with);
    expect_near(run_losses(2, config(2, with, 2), 4), plain, 4e-3);
  }
  const std::string power = three + "[plugins.powersgd]\nrank = 4\n";
  expect_near(run_losses(2, config(2, power + as("fp8_e4m3")), 4), run_losses(2, config(2, power), 4), 4e-3);
  expect_near(run_losses(4, config(4, three + as("int8"), 1, "replicate = 2\n"), 4), plain, 2e-3);
  expect_near(run_losses(6, config(2, three + as("int8") + "[plugins.tensor_parallel]\n", 4, "tensor = 3\n"), 4), plain,
              2e-3);
  for (int stage : {1, 3})
    expect_near(run_losses(2, config(2, zero_stage(stage) + clip + as("int8", "int8") + kHalf), 4), plain, 2e-2);
}

// Each rank's list of each parameter to each other rank, as often as it is gathered: by the formula, as predicted, and
// as the communicator counted. With ranks that have more rows than others, on average.
TEST(QuantizedGather, BytesOnTheWireFollowTheFormula) {
  for (int ranks : {2, 3})
    for (const std::string format : {"int8", "int4"}) {
      SCOPED_TRACE(format + " on " + std::to_string(ranks));
      std::mutex mutex;
      double predicted = 0, formula = 0, sent = 0;
      run_losses(ranks, config(ranks, zero_stage(3) + as(format)), 1,
                 [&](test::Runner& runner, World& world, int step) {
                   if (step < 0) return;
                   const std::lock_guard lock(mutex);
                   for (const auto& [axis, group] : runner.groups)
                     if (axis != "loop") sent += double(group->bytes_sent()) / ranks;
                   if (world.rank() != 0) return;
                   const Program& program = runner.built.program;
                   for (const Op& op : program.ops) {
                     if (!op.kind->exchange) continue;
                     const double bytes = cost_of(OpView(program, op)).wire * (ranks - 1) / ranks;
                     predicted += bytes;
                     if (op.kind->name != "quantized_gather") {
                       formula += bytes;
                       continue;
                     }
                     for (TensorId id : op.outputs)
                       for (int r = 0; r < ranks; ++r) {
                         const Shape shape = program[id].shape;
                         const int64_t count = share_of(shape[0], r, ranks).count() * (elements(shape) / shape[0]),
                                       codes = (format == "int8" ? count : (count + 1) / 2) + 4 * ((count + 255) / 256);
                         formula += double((codes + 63) / 64 * 64) * (ranks - 1) / ranks;
                       }
                   }
                 });
      EXPECT_GT(predicted, 0);
      EXPECT_NEAR(predicted, formula, 1e-3);
      EXPECT_NEAR(sent, predicted, 1e-3);
    }
}

using QuantizedGatherRuns = test::ResumedRuns;
TEST_F(QuantizedGatherRuns, ResumeExactlyWithSharesOfParameters) {
  expect_resumes(config(2, zero_stage(3) + as("int4", "int8"), 2), 2, 3, 2);
}
TEST_F(QuantizedGatherRuns, ResumeExactlyWithWorkingCopies) {
  expect_resumes(config(2, zero_stage(1) + kHalf + as("int8"), 2), 2, 3, 2);
}

TEST(QuantizedGather, WhatCannotBeIsRefused) {
  const auto expect = [](const std::string& text, const std::string& message) {
    const std::string found = test::usage_error_of(text);
    EXPECT_NE(found.find(message), std::string::npos) << found;
  };
  expect(config(2, kParallel + as("int8")),
         "but ranks have whole parameters and gather none; let them share parameters (ZeRO)");
  expect(config(2, zero_stage(2) + as("int8")), "has no master: what it is rounded to would be");
  expect(config(2, zero_stage(3) + kHalf + as("bf16")), "of 16 bits as it is; choose fewer bits");
  expect(config(2, zero_stage(3) + as("none")), "so nothing crosses otherwise; leave the plugin out");
  expect("[run]\nreproducible = true\n" + config(2, zero_stage(3) + as("int8")),
         "cannot work with run.reproducible, because");
  expect(config(2, zero_stage(3) + as("int5")), "int5");
  expect(config(2, zero_stage(3) + "[plugins.quantized_exchange]\nformat = \"none\"\nparameters = \"int8\"\n"
                                   "minimum = 20000\n"),
         "ranks gather no parameter of minimum = 20000 elements");
}

}  // namespace
}  // namespace strata::quantized_gather_test
