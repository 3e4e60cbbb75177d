// What bounds a step, of programs put together by hand.
#include "engine/planning/roofline.h"

#include <gtest/gtest.h>

#include <cmath>

#include "engine/planning/report.h"

namespace strata::roofline_test {
namespace {

struct Timed {
  Program program;
  Prediction prediction;
  void op(Stream stream, int microbatch, double seconds) {
    Op op;
    op.kind = &find_kind("move");
    op.stream = stream;
    op.microbatch = microbatch;
    program.ops.push_back(op);
    prediction.spans.push_back({0, seconds});
    prediction.seconds = std::max(prediction.seconds, seconds);
  }
};

TEST(Roofline, SaysWhatWouldHideReads) {
  Timed timed;
  timed.op(Stream::compute, 0, 1);
  timed.op(Stream::compute, 1, 1);
  timed.op(Stream::read, -1, 90);
  timed.op(Stream::to_device, 0, 0.5);
  timed.prediction.seconds = 100;
  const Roofline bound = roofline(timed.program, timed.prediction);
  ASSERT_EQ(bound.streams.size(), 3u);
  EXPECT_EQ(bound.streams[0].stream, Stream::read);
  EXPECT_DOUBLE_EQ(bound.streams[0].once, 90);
  EXPECT_DOUBLE_EQ(bound.streams[1].by_microbatch, 2);
  EXPECT_DOUBLE_EQ(bound.reached, 0.9);
  EXPECT_DOUBLE_EQ(bound.microbatches, 45);  // 45 x 2 s of compute
  const std::string text = roofline_text(bound);
  EXPECT_NE(text.find("bound by reads from NVMe: 90.000 s, 90% of it; 45 times data.global_batch"), std::string::npos)
      << text;
  EXPECT_NE(text.find("a second disk as fast halves them"), std::string::npos) << text;
  timed.program.storage_directories = {"/nvme0", "/nvme1"};
  const std::string of_two = roofline_text(roofline(timed.program, timed.prediction));
  EXPECT_NE(of_two.find("twice as many disks halves them"), std::string::npos) << of_two;
}

TEST(Roofline, WhatComesWithEachMicrobatchIsNotHiddenByMore) {
  Timed timed;
  timed.op(Stream::compute, 0, 1);
  timed.op(Stream::to_device, 0, 3);
  const Roofline bound = roofline(timed.program, timed.prediction);
  EXPECT_EQ(bound.microbatches, 0);
  EXPECT_NE(roofline_text(bound).find("a larger data.micro_batch"), std::string::npos);
  Timed compute;
  compute.op(Stream::compute, 0, 3);
  compute.op(Stream::to_device, 0, 1);
  EXPECT_EQ(roofline(compute.program, compute.prediction).microbatches, 1);
}

// A peak that was measured on a busy machine may be less than what kernels reach.
TEST(Roofline, ShareOfThePeakIsNeverAboveOne) {
  PlannedProgram planned;
  planned.prediction.emplace().dtype = DType::bf16;
  planned.built.model_flops = 3e9;
  planned.ranks = 2;
  planned.rates.peak = 1e9, planned.rates.half_peak = 2e9;
  EXPECT_DOUBLE_EQ(model_flop_share(planned, 1), 0.75);  // of the type that computes
  EXPECT_EQ(model_flop_share(planned, 0.1), 1);
  planned.rates.half_peak = 0;
  EXPECT_TRUE(std::isnan(model_flop_share(planned, 1)));
}

// Disks side by side: shares by what takes least both ways, large tensors by all of them, small ones by one.
TEST(Roofline, DisksTogether) {
  const std::vector<DiskRates> unlike{{.read = 3e9, .write = 1e9}, {.read = 1e9, .write = 3e9}};
  const Stripes stripes = stripes_of(unlike);
  EXPECT_NEAR(stripes.share(0), 0.5, 0.01);  // what suits reads alone would have writes wait for the first, and so back
  EXPECT_NEAR(together(unlike, stripes).read, 2e9, 2e7);
  Rates one{.read = 1e9, .write = 1e9, .storage_latency = 0}, two = one;
  two.disks = {{1e9, 1e9}, {1e9, 1e9}};
  two.read = two.write = 2e9;
  EXPECT_EQ(to_json(rates_from(to_json(two))).dump(), to_json(two).dump());
  for (int64_t size : {int64_t{1000}, int64_t{64 << 20}}) {
    Program program;
    Tensor tensor;
    tensor.name = "t", tensor.shape = {size}, tensor.home = Tier::nvme;
    const TensorId from = program.add(tensor);
    tensor.home = Tier::device;
    Op op;
    op.kind = &find_kind("move");
    op.inputs = {from};
    op.outputs = {program.add(tensor)};
    op.stream = Stream::read;
    program.ops.push_back(op);
    const OpView view(program, program.ops[0]);
    EXPECT_NEAR(seconds_of(view, one) / seconds_of(view, two), size > 1000 ? 2 : 1, 1e-3);
  }
}

}  // namespace
}  // namespace strata::roofline_test
