// Quantized exchanges: codes against a NumPy program, errors within their bounds and without a bias, whole runs beside
// those that exchange all bits, what crosses the wire, and what is refused.
#include <cmath>
#include <mutex>
#include <random>

#include "plugins/quantized_exchange/codes.cpp"  // a plugin's code is not in the engine's library
#include "plugins/quantized_exchange/quantized_recorded.h"
#include "tests/exchange_runs.h"
#include "tests/resumed_runs.h"

namespace strata::quantized {
namespace {

using Values = std::vector<float>;

std::vector<std::byte> packed(Threads& threads, Format format, const Values& x, const Noise& noise) {
  std::vector<std::byte> bytes(size_t(packed_bytes(format, int64_t(x.size()))), std::byte{0xEE});
  pack(threads, format, DType::f32, x.data(), int64_t(x.size()), noise, bytes.data());
  return bytes;
}
Values unpacked(Threads& threads, Format format, const std::vector<std::byte>& bytes, size_t count) {
  Values x(count);
  unpack(threads, format, bytes.data(), 1, 0, int64_t(count), DType::f32, x.data());
  return x;
}

// Three ranks, both rounds. Sums may be rounded once where NumPy rounds twice: 1e-6 of values up to 40; what is rounded
// again are NumPy's sums, since a number between two codes may become either.
TEST(QuantizedExchange, CodesAreThoseOfThePlainProgram) {
  using namespace recorded;
  for (int threads_count : {1, 3})
    for (const auto& [format, sums, results] : {std::tuple(Format::int8, kSumsOfInt8, kResultsOfInt8),
                                                std::tuple(Format::int4, kSumsOfInt4, kResultsOfInt4)}) {
      Threads threads(threads_count);
      for (int share = 0; share < kRanks; ++share) {
        const Range rows = share_of(int64_t{kRows}, share, kRanks);
        const auto count = size_t(rows.count()) * kColumns, first = size_t(rows.begin) * kColumns;
        std::vector<std::byte> lists;
        for (int rank = 0; rank < kRanks; ++rank) {
          Values x;
          for (int64_t i = rows.begin; i < rows.end; ++i)
            for (int j = 0; j < kColumns; ++j)
              x.push_back(
                  float(std::sin(1.7 * double(i) + 2.3 * j * (rank + 1)) * std::exp(0.3 * double(i) - 0.02 * j)));
          const auto list = packed(threads, format, x, {kSeed, kStream + unsigned(share), kStep});
          lists.insert(lists.end(), list.begin(), list.end());
        }
        Values sum(count);
        unpack(threads, format, lists.data(), kRanks, int64_t(lists.size()) / kRanks, int64_t(count), DType::f32,
               sum.data());
        for (size_t i = 0; i < count; ++i) ASSERT_NEAR(sum[i], sums[first + i], 1e-6 * 40) << share << ", " << i;
        const Values expected(sums + first, sums + first + count);
        const Values result =
            unpacked(threads, format, packed(threads, format, expected, {kSeed, kStream + 10, kStep}), count);
        for (size_t i = 0; i < count; ++i) ASSERT_NEAR(result[i], results[first + i], 1e-7 * 40) << share << ", " << i;
      }
    }
}

// Of any number of elements, by any number of threads, from any type: within a step of the format, and of many
// roundings the mean is the number, to five standard errors of a step.
TEST(QuantizedExchange, RoundingIsWithinAStepAndWithoutABias) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const auto& [format, step, relative] :
       {std::tuple(Format::int8, 1.0 / 127, 0.0), std::tuple(Format::int4, 1.0 / 7, 0.0),
        std::tuple(Format::fp8_e4m3, 0.001 / 448, 0.0626), std::tuple(Format::bf16, 0.0, 0.004)})
    for (size_t count : {1, 2, 255, 256, 257, 1023, 9001}) {
      Values x(count);
      for (float& value : x) value = normal(random) * std::exp(normal(random));
      Threads one(1), three(3);
      const auto bytes = packed(one, format, x, {1, 2, 3});
      EXPECT_EQ(bytes, packed(three, format, x, {1, 2, 3}));
      const Values back = unpacked(three, format, bytes, count);
      std::vector<double> mean(count);
      constexpr int kTries = 100;
      const bool stochastic = relative == 0;
      for (unsigned k = 0; stochastic && count < 1000 && k < kTries; ++k) {
        const Values again = unpacked(one, format, packed(one, format, x, {k, 5, 6}), count);
        for (size_t i = 0; i < count; ++i) mean[i] += again[i] / kTries;
      }
      for (size_t begin = 0; begin < count; begin += kBlock) {
        double largest = 0, off = 0;
        const size_t end = std::min(count, begin + kBlock);
        for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::abs(double(x[i])));
        for (size_t i = begin; i < end; ++i) {
          EXPECT_LE(std::abs(back[i] - x[i]), step * largest * 1.001 + relative * std::abs(x[i])) << i;
          off += mean[i] - x[i];
        }
        if (stochastic && count < 1000) {
          EXPECT_LE(std::abs(off), 5 * 0.5 * step * largest * std::sqrt(double(end - begin) / kTries)) << begin;
        }
      }
    }
}

// An overflow on one rank is one of the sum; zeros and the smallest numbers do no harm.
TEST(QuantizedExchange, WhatIsNotFiniteIsSeen) {
  Threads threads(2);
  for (Format format : {Format::int8, Format::int4, Format::fp8_e4m3, Format::bf16})
    for (float bad : {INFINITY, -INFINITY, NAN}) {
      Values x(700, 1.0f);
      x[300] = bad;
      const Values back = unpacked(threads, format, packed(threads, format, x, {}), x.size());
      EXPECT_FALSE(std::isfinite(back[300]));
      EXPECT_EQ(back[0], 1.0f);
      EXPECT_EQ(back[699], 1.0f);
      for (float small : {0.0f, 1e-45f, 1e-38f}) {
        const Values little = unpacked(threads, format, packed(threads, format, Values(300, small), {}), 300);
        for (float value : little) ASSERT_LE(std::abs(value - small), 1e-38f);
      }
    }
}

using test::expect_near, test::kParallel, test::run_losses, test::zero_stage;

std::string config(int ranks, const std::string& plugins, int micro_batch = 1, const std::string& mesh = "") {
  return test::exchange_config(60, 3, ranks, plugins, micro_batch, mesh);
}
std::string form(const std::string& format) {
  return "[plugins.quantized_exchange]\nformat = \"" + format + "\"\nminimum = 200\n";
}

// Losses of six steps of AdamW, which divides by the size of what it is given, so that a relative error of gradients is
// one of updates: int8's rounding is some 1% of a typical element of a block, int4's some 20%.
TEST(QuantizedExchange, RunsStayCloseWhateverElseIsEnabled) {
  test::TemporaryFolder folder;
  const std::string clip = "[plugins.clip]\nmax_norm = 0.1\n", half = "[plugins.mixed_precision]\ndtype = ",
                    nvme = "[plugins.offload]\nminimum = 0\ndirectory = \"" + folder.path() +
                           "\"\noptimizer = \"nvme\"\ngradients = \"host\"\nparameters = \"host\"\n";
  const auto plain = run_losses(1, config(1, clip), 6);
  for (const auto& [format, band] : {std::pair("int8", 2e-3), {"int4", 3e-2}, {"fp8_e4m3", 4e-3}, {"bf16", 1e-3}})
    for (const std::string& wanting : {kParallel, zero_stage(1), zero_stage(3)}) {
      SCOPED_TRACE(format + wanting);
      const auto losses = run_losses(2, config(2, wanting + clip + form(format)), 6);
      expect_near(losses, plain, band);
      EXPECT_NE(losses, plain);
    }
  const std::string int8 = form("int8") + clip;
  for (const std::string& with : {kParallel + nvme, zero_stage(2), zero_stage(3) + nvme + "[plugins.recompute]\n"})
    expect_near(run_losses(2, config(2, with + int8, 2), 6), plain, 2e-3);
  expect_near(run_losses(4, config(4, zero_stage(1) + int8, 1, "replicate = 2\n"), 6), plain, 2e-3);
  expect_near(run_losses(6, config(2, kParallel + int8 + "[plugins.tensor_parallel]\n", 4, "tensor = 3\n"), 6), plain,
              2e-3);
  expect_near(run_losses(2, config(2, kParallel + int8 + half + "\"bf16\"\n"), 6), plain, 2e-2);
  expect_near(run_losses(2, config(2, zero_stage(2) + int8 + half + "\"bf16\"\n"), 6), plain, 2e-2);
  expect_near(run_losses(2, config(2, zero_stage(1) + int8 + half + "\"fp16\"\n"), 6), plain, 1e-2);
}

// Lists of the largest share to each other rank, once where results are shared, twice where they are whole; the small
// gradients as they are: as planned, and on two ranks as sent (of more, small sums go to all others at once).
TEST(QuantizedExchange, BytesOnTheWireFollowTheFormula) {
  for (int ranks : {2, 4})
    for (const bool shares : {false, true})
      for (const auto& [name, format] : {std::pair("int8", Format::int8), {"int4", Format::int4}}) {
        SCOPED_TRACE(name + std::to_string(ranks) + (shares ? " shares" : ""));
        std::mutex mutex;
        double planned = 0, formula = 0, sent = 0, others = 0;
        run_losses(ranks, config(ranks, (shares ? zero_stage(2) : kParallel) + form(name)), 1,
                   [&, format = format](test::Runner& runner, World& world, int step) {
                     if (step < 0) return;
                     const std::lock_guard lock(mutex);
                     for (const auto& [axis, group] : runner.groups)
                       if (axis != "loop") sent += double(group->bytes_sent()) / ranks;
                     if (world.rank() != 0) return;
                     const Program& program = runner.built.program;
                     for (const Op& op : program.ops) {
                       const bool codes = program[op.inputs.empty() ? op.outputs[0] : op.inputs[0]].dtype == DType::u8;
                       for (TensorId id : op.inputs) {
                         if (!op.kind->exchange) break;
                         const double bytes = double(program[id].bytes());
                         if (codes)
                           planned += op.kind->name == "all_gather" ? bytes * (ranks - 1) : bytes * (ranks - 1) / ranks;
                         else if (op.kind->name == "all_reduce")
                           others += 2 * bytes * (ranks - 1) / ranks;
                         else if (op.kind->name == "reduce_scatter")
                           others += bytes * (ranks - 1) / ranks;
                         else
                           others += bytes * (ranks - 1);
                       }
                     }
                     for (TensorId id : program.with_role(Role::parameter)) {
                       const Shape shape = program[id].shape;
                       if (elements(shape) < 200 || program[id].part_of) continue;
                       const int64_t share = share_of(shape[0], 0, ranks).count() * (elements(shape) / shape[0]);
                       formula += double(ranks - 1) * double(packed_bytes(format, share)) * (shares ? 8 / ranks : 2);
                     }
                   });
        EXPECT_GT(planned, 0);
        EXPECT_EQ(planned, formula);
        if (ranks == 2 && !shares) {
          EXPECT_EQ(sent, planned + others);
        }
      }
}

using QuantizedRuns = test::ResumedRuns;
TEST_F(QuantizedRuns, ResumeExactly) { expect_resumes(config(2, zero_stage(2) + form("int4"), 2), 2, 3, 2); }

TEST(QuantizedExchange, WhatCannotBeIsRefused) {
  const auto expect = [](const std::string& text, const std::string& message) {
    const std::string found = test::usage_error_of(text);
    EXPECT_NE(found.find(message), std::string::npos) << found;
  };
  expect("[run]\nreproducible = true\n" + config(2, kParallel + form("int8")),
         "cannot work with run.reproducible, because");
  expect(config(2, kParallel + form("int5")), "int5");
  expect(config(2, kParallel + "[plugins.quantized_exchange]\nminimum = 20000\n"),
         "no gradient has minimum = 20000 elements; the largest has 10800.");
  expect(config(2, kParallel + "[plugins.quantized_exchange]\nminimum = -1\n"), "minimum");
}

}  // namespace
}  // namespace strata::quantized
