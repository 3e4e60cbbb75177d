// Orders of waits that come to an end and such that never do, among queues, threads and the thread that fills queues.
#include "engine/planning/progress.h"

#include <gtest/gtest.h>

#include "strata/op_kind.h"

namespace strata::progress_test {
namespace {

// Ops that only have streams.
Program program_of(const std::vector<Stream>& streams) {
  Program program;
  for (Stream stream : streams) program.ops.push_back({.kind = &find_kind("gelu"), .stream = stream});
  return program;
}

std::string verdict(const std::vector<Stream>& streams, const std::vector<std::vector<Wait>>& waits,
                    const std::vector<std::vector<int32_t>>& runs = {}, const VectorClock& awaited = {}) {
  const auto queued = [](Stream s) { return s == Stream::compute || s == Stream::exchange || s == Stream::to_device; };
  try {
    require_progress(program_of(streams), waits, awaited, queued, runs);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Progress, WaitsForWhatCameBefore) {
  EXPECT_EQ(verdict({Stream::compute, Stream::host, Stream::to_device, Stream::compute},
                    {{}, {{Stream::compute, 1}}, {{Stream::host, 1}}, {{Stream::to_device, 1}}}),
            "");
}

TEST(Progress, ThreadsThatWaitForEachOther) {
  const std::string said = verdict({Stream::host, Stream::read}, {{{Stream::read, 1}}, {{Stream::host, 1}}});
  EXPECT_EQ(said,
            "the step would never end: host at op 0 (gelu), which waits for op 1; read at op 1 (gelu), which waits for "
            "op 0. This is a mistake in the plan.");
}

TEST(Progress, AThreadThatWaitsForAQueueWhoseFillingWaitsForTheThread) {
  EXPECT_NE(verdict({Stream::compute, Stream::host, Stream::compute}, {{{Stream::host, 1}}, {{Stream::compute, 2}}, {}})
                .find("compute at op 0 (gelu), which waits for op 1; host at op 1 (gelu), which waits for op 2"),
            std::string::npos);
}

// The filling thread goes by the program, so that an op of one queue holds up those of all others behind it.
TEST(Progress, TheFillingThreadHoldsUpOtherQueues) {
  const std::vector<std::vector<Wait>> waits{{{Stream::host, 1}}, {}, {{Stream::exchange, 1}}};
  EXPECT_NE(verdict({Stream::to_device, Stream::exchange, Stream::host}, waits)
                .find("host at op 2 (gelu), which waits for op 1; to_device at op 0 (gelu), which waits for op 2; "
                      "exchange at op 1 (gelu)"),
            std::string::npos);
  EXPECT_EQ(
      verdict({Stream::exchange, Stream::host, Stream::to_device}, {{}, {{Stream::exchange, 1}}, {{Stream::host, 1}}}),
      "");
}

// What is put into a queue as one run comes with the first op of it.
TEST(Progress, RunsAreIssuedAtOnce) {
  const std::vector<Stream> streams{Stream::compute, Stream::host, Stream::to_device, Stream::compute};
  const std::vector<std::vector<Wait>> waits{{}, {{Stream::compute, 2}}, {{Stream::host, 1}}, {}};
  EXPECT_NE(verdict(streams, waits), "");
  EXPECT_EQ(verdict(streams, waits, {{0, 3}}), "");
}

// The next step begins when compute is over, and its first op waits for the update that is left behind it.
TEST(Progress, StepsThatOverlap) {
  const std::vector<Stream> streams{Stream::compute, Stream::to_device, Stream::compute, Stream::host};
  const std::vector<std::vector<Wait>> waits{{{Stream::host, 0}}, {}, {{Stream::to_device, 1}}, {{Stream::compute, 2}}};
  VectorClock awaited{};
  awaited[size_t(Stream::compute)] = 2;
  EXPECT_EQ(verdict(streams, waits, {}, awaited), "");
  EXPECT_EQ(verdict(streams, waits, {{0, 2}}, awaited), "");
}

// In a first step nothing comes before; the second stands still where an op waits for more than the first one has.
TEST(Progress, WhatNoStepBeforeHas) {
  const std::vector<Stream> streams{Stream::compute, Stream::host};
  EXPECT_EQ(
      verdict(streams, {{{Stream::host, 2}}, {}}),
      "the step would never end: compute at op 0 (gelu), which waits for more ops than host has. This is a mistake "
      "in the plan.");
  VectorClock awaited{};
  awaited[size_t(Stream::compute)] = 1;
  EXPECT_EQ(verdict(streams, {{{Stream::host, -1}, {Stream::host, 0}}, {}}, {}, awaited), "");
  awaited[size_t(Stream::host)] = 2;
  EXPECT_NE(verdict(streams, {{{Stream::host, 0}}, {}}, {}, awaited), "");  // nobody ever begins it
}

}  // namespace
}  // namespace strata::progress_test
