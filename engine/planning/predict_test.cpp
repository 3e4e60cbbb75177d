// Prices and predictions at rates made up so that the answers are known.
#include "engine/planning/predict.h"

#include <gtest/gtest.h>

#include "strata/builder.h"

namespace strata::predict_test {
namespace {

Rates round_rates() {
  return {.flops = 1e9,
          .half_flops = 4e9,
          .memory = 1e9,
          .host_memory = 0.5e9,
          .copy = 1e9,
          .read = 1e9,
          .write = 1e9,
          .launch = 0,
          .copy_latency = 0,
          .storage_latency = 0};
}

// One op over fresh tensors of these shapes.
struct OneOp {
  Program program;
  OneOp(const std::string& kind, const std::vector<Shape>& shapes, DType dtype = DType::f32, Attributes attributes = {},
        Stream stream = Stream::compute) {
    Builder build(program);
    std::vector<TensorId> inputs;
    for (const Shape& shape : shapes) inputs.push_back(build.data("x", shape, dtype));
    build.stream = stream;
    build.emit_all(kind, inputs, std::move(attributes));
  }
  OpView view() const { return OpView(program, program.ops.back()); }
};

TEST(Price, OfProductsFollowsTheirType) {
  const Rates rates = round_rates();
  EXPECT_DOUBLE_EQ(seconds_of(OneOp("linear", {{1000, 1000}, {1000, 1000}}).view(), rates), 2.0);
  EXPECT_DOUBLE_EQ(seconds_of(OneOp("linear", {{1000, 1000}, {1000, 1000}}, DType::bf16).view(), rates), 0.5);
}

TEST(Price, OfHostUpdatesFollowsTheHostsMemory) {
  const Rates rates = round_rates();
  const double bytes = 3 * 4e6;
  EXPECT_DOUBLE_EQ(seconds_of(OneOp("add", {{1000, 1000}, {1000, 1000}}).view(), rates), bytes / 1e9);
  EXPECT_DOUBLE_EQ(seconds_of(OneOp("add", {{1000, 1000}, {1000, 1000}}, DType::f32, {}, Stream::host).view(), rates),
                   bytes / 0.5e9);
}

TEST(Price, FollowsWhatTheKernelTook) {
  Rates rates = round_rates();
  const OneOp op("add", {{1000, 1000}, {1000, 1000}});  // 12 MB: 12 ms where the kernel reaches the memory's rate
  EXPECT_EQ(kernel_name(op.view()), "add f32");
  rates.kernels["add f32"] = {{0, 12e6, 20e-3}};
  EXPECT_DOUBLE_EQ(seconds_of(op.view(), rates), 20e-3);  // measured at that very size
  rates.kernels["add f32"] = {{0, 3e6, 6e-3}, {0, 48e6, 8 * 48e-3}};
  EXPECT_NEAR(seconds_of(op.view(), rates), 4 * 12e-3, 1e-9);  // half way in logarithms: 2 x and 8 x give 4 x
  rates.kernels["add f32"] = {{0, 3e6, 6e-3}};
  EXPECT_NEAR(seconds_of(op.view(), rates), 2 * 12e-3, 1e-9);  // beyond the last: as there
  rates.kernels["add f32"] = {{0, 48e6, 3 * 48e-3}};
  EXPECT_NEAR(seconds_of(op.view(), rates), 3 * 12e-3, 1e-9);
  rates.kernels = {{"add bf16", {{0, 12e6, 1}}}};  // another kernel's
  EXPECT_NEAR(seconds_of(op.view(), rates), 12e-3, 1e-9);
  // Where nothing is known of a kernel, all of them reach less than the figures say; what is known stays.
  rates.reach = 0.5, rates.launch = 1e-3;
  EXPECT_NEAR(seconds_of(op.view(), rates), 1e-3 + 24e-3, 1e-9);
  EXPECT_NEAR(seconds_of(OneOp("add", {{1000, 1000}, {1000, 1000}}, DType::f32, {}, Stream::host).view(), rates),
              1e-3 + 24e-3, 1e-9);  // at half the memory's rate, as it was
  rates.kernels["add f32"] = {{0, 12e6, 20e-3}};
  EXPECT_DOUBLE_EQ(seconds_of(op.view(), rates), 20e-3);
}

// Formats of one kind take different times: what one took must not be believed of another.
TEST(Price, OfAFormatIsItsOwn) {
  Rates rates = round_rates();
  const auto cast = [](const std::string& type) {
    return OneOp("cast", {{1000, 1000}}, DType::f32, {{"dtype", type}});
  };
  const OneOp bf16 = cast("bf16"), f16 = cast("f16");
  EXPECT_EQ(cost_of(bf16.view()).bytes, cost_of(f16.view()).bytes);
  rates.kernels[kernel_name(bf16.view())] = {{0, cost_of(bf16.view()).bytes, 1}};
  EXPECT_EQ(seconds_of(bf16.view(), rates), 1);
  EXPECT_LT(seconds_of(f16.view(), rates), 0.1);
}

TEST(Price, OfExchangesFollowsTheLink) {
  Rates rates = round_rates();
  rates.links["data"] = {.ranks = 4, .bandwidth = 3e9, .latency = 1e-3};
  const Attributes attributes{{"axis", "data"}, {"reduction", "sum"}};
  const OneOp reduce("all_reduce", {{1000, 1000}}, DType::f32, attributes, Stream::exchange);
  // Reduced and gathered: each rank hands on three quarters of the tensor twice.
  EXPECT_DOUBLE_EQ(wire_bytes(reduce.view(), rates), 2 * 0.75 * 4e6);
  EXPECT_DOUBLE_EQ(seconds_of(reduce.view(), rates), 1e-3 + 6e6 / 3e9);
  const OneOp scatter("reduce_scatter", {{1000, 1000}}, DType::f32, {{"axis", "data"}, {"size", int64_t{4}}},
                      Stream::exchange);
  EXPECT_DOUBLE_EQ(wire_bytes(scatter.view(), rates), 0.75 * 4e6);
  const OneOp gather("gather_rows", {{1000, 1000}}, DType::f32, {{"axis", "data"}}, Stream::exchange);
  EXPECT_DOUBLE_EQ(wire_bytes(gather.view(), rates), 0.75 * 4e6);

  rates.links["data"].samples["all_reduce"] = {{0, 4e6, 5e-3}, {0, 1e3, 1e-3}, {0, 8e6, 9e-3}};
  EXPECT_NEAR(seconds_of(reduce.view(), rates), 7e-3, 1e-12);
  EXPECT_NEAR(seconds_of(scatter.view(), rates), 1e-3 + 4e-3 * (3e6 - 1e3) / (4e6 - 1e3), 1e-12);  // as all_reduce
  rates.links["data"].samples["reduce_scatter"] = {{0, 1e6, 1e-3}, {0, 2e6, 3e-3}};
  EXPECT_NEAR(seconds_of(scatter.view(), rates), 5e-3, 1e-12);  // along the last two
  rates.links["data"].samples["reduce_scatter"] = {{0, 1e6, 7e-3}, {0, 2e6, 3e-3}};
  EXPECT_EQ(seconds_of(scatter.view(), rates), 3e-3) << "not less than nothing";
  EXPECT_EQ(wire_bytes(OneOp("add", {{4}, {4}}).view(), rates), 0);
}

TEST(Price, RanksThatComeLateAreThoseOfRuns) {
  Rates rates = round_rates();
  rates.links["tensor"] = {.ranks = 2, .bandwidth = 1e9, .latency = 0};
  const auto exchange = [](const std::string& kind, int64_t rows) {
    return OneOp(kind, {{rows, 1000}}, DType::f32, {{"axis", "tensor"}, {"size", int64_t{2}}, {"reduction", "sum"}},
                 Stream::model_exchange);
  };
  const OneOp scatter = exchange("reduce_scatter", 1000), sum = exchange("all_reduce", 1000);
  EXPECT_EQ(late_seconds(scatter.view(), rates), 0);  // never ran
  rates.links["tensor"].late = {{"reduce_scatter", {{0, 1e3, 1e-3}, {0, 2e6, 5e-3}}}, {"all_gather", {{0, 2e6, 3e-3}}}};
  EXPECT_EQ(late_seconds(scatter.view(), rates), 5e-3);
  EXPECT_EQ(late_seconds(exchange("reduce_scatter", 500).view(), rates), 5e-3);  // of the nearest size
  EXPECT_EQ(late_seconds(exchange("reduce_scatter", 2).view(), rates), 1e-3);
  EXPECT_DOUBLE_EQ(late_seconds(sum.view(), rates), 3e-3);    // of all kinds
  EXPECT_DOUBLE_EQ(seconds_of(scatter.view(), rates), 2e-3);  // the wire's alone
  EXPECT_EQ(late_seconds(OneOp("add", {{4}, {4}}).view(), rates), 0);
  rates.links["data"] = std::move(rates.links["tensor"]);
  rates.links.erase("tensor");
  EXPECT_EQ(late_seconds(scatter.view(), rates), 0);  // another axis
}

TEST(Price, SurvivesTheWayToOtherRanks) {
  Rates rates = round_rates();
  rates.kernels["add f32"] = {{1, 2, 3.5}, {4, 5, 6}};
  rates.links["data"] = {.ranks = 3, .bandwidth = 7, .latency = 8, .samples = {{"all_reduce", {{0, 1, 2}}}}};
  rates.links["data"].late["all_reduce"] = {{0, 1, 0.5}};
  rates.assumed = {"flops", "link data"};
  rates.processors = 2;
  const Rates copy = rates_from(Json::parse(to_json(rates).dump(), "rates"));
  EXPECT_EQ(to_json(copy).dump(), to_json(rates).dump());
  EXPECT_EQ(copy.assumed, rates.assumed);
  EXPECT_EQ(copy.links.at("data").ranks, 3);
  EXPECT_EQ(copy.links.at("data").late.at("all_reduce")[0].seconds, 0.5);
  EXPECT_EQ(copy.kernels.at("add f32")[0].seconds, 3.5);
  EXPECT_THROW(rates_from(Json::parse("{}", "rates")), Error);
}

// An update beside the backward pass on processors that both want.
TEST(Predict, StreamsShareProcessors) {
  Program program;
  Builder build(program);
  const Shape shape{1000, 1000};
  const TensorId a = build.data("a", shape, DType::f32), b = build.data("b", shape, DType::f32);
  const TensorId c = build.data("c", shape, DType::f32);
  const TensorId first = build.emit("add", {a, b});
  build.stream = Stream::host;
  const TensorId second = build.emit("add", {a, c});
  program[first].step_output = program[second].step_output = true;  // each has memory of its own
  const MemoryPlan plan = plan_memory(program, "cpu", 1);
  Rates rates = round_rates();
  rates.host_memory = rates.memory;
  EXPECT_NEAR(predict(program, plan, rates).seconds, 12e-3, 1e-9);  // a device: side by side
  rates.processors = 2, rates.compute_threads = 2, rates.host_threads = 2;
  EXPECT_NEAR(predict(program, plan, rates).seconds, 24e-3, 1e-9);
  rates.host_threads = 1;  // three threads on two processors
  EXPECT_NEAR(predict(program, plan, rates).seconds, 18e-3, 1e-9);
  rates.processors = 3;
  EXPECT_NEAR(predict(program, plan, rates).seconds, 12e-3, 1e-9);
}

// Two sums, and one that takes the second's result on another stream.
Program two_sums_and(Stream stream) {
  Program program;
  Builder build(program);
  const TensorId x = build.data("x", {1000, 1000}, DType::f32);
  const TensorId sum = build.parameter("sum", {1000, 1000}, {});
  const TensorId first = build.emit("add", {x, x});
  const TensorId second = build.emit("add", {first, x});
  program[first].step_output = true;  // so that the second has memory of its own
  build.stream = stream;
  build.emit_all("add", {sum, second}, {}, {sum});
  return program;
}

// An update behind the next step's beginning, until the next product overwrites what it reads.
TEST(Predict, StepsOverlap) {
  Program program = two_sums_and(Stream::host);
  const MemoryPlan plan = plan_memory(program, "cpu", 1);
  Rates rates = round_rates();
  rates.host_memory = rates.memory;
  EXPECT_NEAR(predict(program, plan, rates).seconds, 24e-3, 1e-9);  // beside a device
  program.one_memory = true;
  Prediction prediction = predict(program, plan, rates);
  EXPECT_NEAR(prediction.seconds, 24e-3, 1e-9);
  EXPECT_NEAR(prediction.stalls.total(), 0, 1e-9);
  EXPECT_NEAR(prediction.spans[2].finish, 36e-3, 1e-9);  // behind the next
  EXPECT_NEAR(prediction.before[2].finish, 12e-3, 1e-9);
  rates.host_memory = rates.memory / 3;  // 36 ms: the second product waits 24 of them
  prediction = predict(program, plan, rates);
  EXPECT_NEAR(prediction.seconds, 48e-3, 1e-9);
  EXPECT_NEAR(prediction.stalls.host(), 24e-3, 1e-9);
  const TimedProgram alone = timed(program, plan, rates), sent = timed_from(text_of(alone));
  EXPECT_NEAR(run_together({&sent, 1}, {}).seconds, 48e-3, 1e-9);
}

// On a device what runs as one graph has an end before the next step: no thread takes part in it.
TEST(Predict, AGraphOfTheStepEndsBeforeTheNext) {
  Program program = two_sums_and(Stream::to_host);
  const MemoryPlan plan = plan_memory(program, "cpu", 1);
  EXPECT_NEAR(predict(program, plan, round_rates()).seconds, 28e-3, 1e-9);
  program.one_memory = true;
  EXPECT_NEAR(predict(program, plan, round_rates()).seconds, 24e-3, 1e-9);
}

// A stream that has more to do than the step takes, and that nothing waits for within two of them, bounds it all the
// same.
TEST(Predict, WhatIsPutOffFromStepToStepCounts) {
  Program program;
  Builder build(program);
  const TensorId x = build.data("x", {1000, 1000}, DType::f32);
  const TensorId sum = build.parameter("sum", {1000, 1000}, {});
  build.emit("add", {x, x});
  build.stream = Stream::host;
  build.emit_all("add", {sum, sum}, {}, {sum});
  program.one_memory = true;
  Rates rates = round_rates();
  rates.host_memory = rates.memory / 4;  // 48 ms beside 12
  const Prediction prediction = predict(program, plan_memory(program, "cpu", 1), rates);
  EXPECT_NEAR(prediction.seconds, 48e-3, 1e-9);
  EXPECT_NEAR(prediction.stalls.host(), 36e-3, 1e-9);
}

TEST(Predict, CountsTheEndOfTheStepAndTheWire) {
  Program program;
  Builder build(program);
  const TensorId a = build.data("a", {1000, 1000}, DType::f32);
  const TensorId sum = build.emit("add", {a, a});
  build.stream = Stream::exchange;
  build.emit("all_reduce", {sum}, {{"axis", "data"}, {"reduction", "sum"}});
  Rates rates = round_rates();
  rates.links["data"] = {.ranks = 2, .bandwidth = 1e9, .latency = 0};
  const Prediction prediction = predict(program, plan_memory(program, "cpu", 1), rates);
  EXPECT_NEAR(prediction.seconds, 12e-3 + 4e-3, 1e-9);
  EXPECT_NEAR(prediction.stalls.ranks(), 4e-3, 1e-9);
  EXPECT_NEAR(prediction.busy[int(Stream::exchange)], 4e-3, 1e-9);
  EXPECT_EQ(prediction.wire_bytes, 4e6);
  const std::vector<KindTime> kinds = time_by_kind(program, prediction.spans);
  ASSERT_EQ(kinds.size(), 2u);
  EXPECT_EQ(kinds[0].name, "add f32");
  EXPECT_EQ(kinds[1].stream, Stream::exchange);
}

// 12 ms of compute, and beside it an exchange of 4 that waits for another rank beforehand: that takes no processor, and
// hides behind compute like the rest.
TEST(Predict, ExchangesWaitForRanksThatComeLate) {
  Program program;
  Builder build(program);
  const TensorId a = build.data("a", {1000, 1000}, DType::f32), b = build.data("b", {1000, 1000}, DType::f32);
  build.stream = Stream::model_exchange;
  const TensorId reduced = build.emit("all_reduce", {b}, {{"axis", "tensor"}, {"reduction", "sum"}});
  build.stream = Stream::compute;
  const TensorId sum = build.emit("add", {a, a});
  program[reduced].step_output = program[sum].step_output = true;  // each has memory of its own
  const MemoryPlan plan = plan_memory(program, "cpu", 1);
  Rates rates = round_rates();
  rates.processors = rates.compute_threads = 1;
  rates.links["tensor"] = {.ranks = 2, .bandwidth = 1e9, .latency = 0};
  const auto expect = [&](double late, double seconds, double exchanging, double waiting) {
    SCOPED_TRACE(late);
    rates.links["tensor"].late["all_reduce"] = {{0, 4e6, late}};
    const TimedProgram alone = timed(program, plan, rates), sent = timed_from(text_of(alone));
    for (const TimedProgram& one : {alone, sent}) {
      Timeline timeline = run_together({&one, 1}, {});
      const Prediction prediction = prediction_of(program, one, rates, timeline, 0);
      EXPECT_NEAR(prediction.seconds, seconds, 1e-9);
      EXPECT_NEAR(prediction.late, late, 1e-9);
      EXPECT_NEAR(prediction.stalls.exchanging, exchanging, 1e-9);
      EXPECT_NEAR(prediction.stalls.ranks(), waiting, 1e-9);
    }
  };
  expect(0, 16e-3, 8e-3, 0);            // both want the processor
  expect(5e-3, 16e-3, 5e-3 + 4e-3, 0);  // compute has it for itself until the other rank comes, and then again
  expect(10e-3, 16e-3, 10e-3 + 4e-3, 0);
  expect(20e-3, 24e-3, 24e-3, 12e-3);  // compute is over
  rates.links["tensor"].bandwidth = 2e8;
  expect(6e-3, 32e-3, 6e-3 + 26e-3, 14e-3);  // both want the processor again: 20 ms are more than a time slice
}

// Of exchanges that are alike one in five waits, for as long as all do together.
TEST(Predict, RanksAreSeldomLateAndThenByMuch) {
  Program program;
  Builder build(program);
  build.stream = Stream::model_exchange;
  for (int i = 0; i < 7; ++i)
    build.emit("all_reduce", {build.data("x", {1000, 1000}, DType::f32)}, {{"axis", "tensor"}, {"reduction", "sum"}});
  Rates rates = round_rates();
  rates.links["tensor"] = {.ranks = 2, .bandwidth = 1e9, .latency = 0, .late = {{"all_reduce", {{0, 4e6, 1e-3}}}}};
  const Prediction prediction = predict(program, plan_memory(program, "cpu", 1), rates);
  EXPECT_NEAR(prediction.seconds, 7 * 5e-3, 1e-9);
  EXPECT_NEAR(prediction.late, 7e-3, 1e-9);
  for (size_t i = 0; i < 7; ++i)
    EXPECT_NEAR(prediction.spans[i].finish - prediction.spans[i].start,
                i == 4   ? 9e-3
                : i == 6 ? 6e-3
                         : 4e-3,
                1e-9)
        << i;
}

TEST(Predict, TheTypeThatComputesIsWhereMostFlopsAre) {
  Program program;
  Builder build(program);
  const auto product = [&](int64_t n, DType dtype) {
    build.emit("linear", {build.data("x", {n, n}, dtype), build.data("w", {n, n}, dtype)});
  };
  EXPECT_EQ(compute_dtype(program), DType::f32);
  product(64, DType::bf16);
  product(32, DType::f32);
  EXPECT_EQ(compute_dtype(program), DType::bf16);
  product(128, DType::f32);
  EXPECT_EQ(compute_dtype(program), DType::f32);
  const Rates rates{.peak = 3, .half_peak = 5};
  EXPECT_EQ(peak_of(DType::f32, rates), 3);
  EXPECT_EQ(peak_of(DType::bf16, rates), 5);
}

}  // namespace
}  // namespace strata::predict_test
