// What bounds a step, of programs put together by hand.
#include "engine/planning/roofline.h"

#include <gtest/gtest.h>

namespace strata {
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

}  // namespace
}  // namespace strata
