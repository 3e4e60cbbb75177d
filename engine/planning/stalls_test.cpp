// Who is to blame for a wait: spans made by hand, chains whose beginning is known.
#include "engine/planning/stalls.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace strata::stalls_test {
namespace {

// Ops with the spans they had, one after the other in program order.
struct Steps {
  Program program;
  std::vector<std::vector<Wait>> waits;
  std::vector<Span> spans;
  std::array<int32_t, kStreams> count{};

  // Runs when its stream and the ops `after` are done; returns its number.
  size_t add(Stream stream, double seconds, std::vector<size_t> after = {}, Purpose purpose = Purpose::work) {
    Op op;
    op.stream = stream, op.purpose = purpose;
    double start = 0;
    for (size_t i = 0; i < spans.size(); ++i)
      if (program.ops[i].stream == stream) start = std::max(start, spans[i].finish);
    std::vector<Wait> list;
    for (size_t i : after) {
      const Stream other = program.ops[i].stream;
      const auto before = std::count_if(program.ops.begin(), program.ops.begin() + int64_t(i) + 1,
                                        [&](const Op& o) { return o.stream == other; });
      list.push_back({other, int32_t(before)});
      start = std::max(start, spans[i].finish);
    }
    program.ops.push_back(op);
    waits.push_back(list);
    spans.push_back({start, start + seconds});
    return spans.size() - 1;
  }
  Stalls find() const { return StallFinder(program, waits).find(spans); }
};

// Each block is read from NVMe, copied to the device and computed with: reading is what takes long. The last link of
// each chain is the copy, which is not to blame.
TEST(Stalls, AreChargedToWhatBeganThem) {
  Steps steps;
  constexpr int kBlocks = 20;
  for (int k = 0; k < kBlocks; ++k) {
    const size_t read = steps.add(Stream::read, 10);
    const size_t copy = steps.add(Stream::to_device, 1, {read});
    steps.add(Stream::compute, 9.5, {copy});
  }
  const Stalls stalls = steps.find();
  const double idle = steps.spans.back().finish - kBlocks * 9.5;
  EXPECT_NEAR(stalls.total(), idle, 1e-9);
  EXPECT_GT(stalls.storage(), 0.9 * idle);
  EXPECT_LT(stalls.copies(), 0.1 * idle);
  EXPECT_GT(stalls.copies(), 0);
}

// The other way round: what is read early waits for a busy bus.
TEST(Stalls, OfABusyBusAreItsOwn) {
  Steps steps;
  for (int k = 0; k < 20; ++k) {
    const size_t read = steps.add(Stream::read, 1);
    const size_t copy = steps.add(Stream::to_device, 10, {read});
    steps.add(Stream::compute, 5, {copy});
  }
  const Stalls stalls = steps.find();
  EXPECT_GT(stalls.copies(), 0.9 * stalls.total());
}

// What compute itself released is nobody's fault but of the ops after that: the long read before has no part in it.
TEST(Stalls, EndAtWhatComputeReleased) {
  Steps steps;
  const size_t read = steps.add(Stream::read, 8);
  const size_t first = steps.add(Stream::compute, 10, {read});
  const size_t exchange = steps.add(Stream::exchange, 3, {first, read});
  steps.add(Stream::compute, 1, {exchange});
  const Stalls stalls = steps.find();
  EXPECT_DOUBLE_EQ(stalls.storage(), 8);
  EXPECT_DOUBLE_EQ(stalls.ranks(), 3);
  EXPECT_DOUBLE_EQ(stalls.exchanging, 3);
  EXPECT_DOUBLE_EQ(stalls.total(), 11);
}

TEST(Stalls, CountTheEndOfTheStep) {
  Steps steps;
  const size_t update = steps.add(Stream::compute, 4);
  const size_t copy = steps.add(Stream::to_host, 1, {update});
  steps.add(Stream::write, 5, {copy});
  steps.add(Stream::compute, 2);
  const Stalls stalls = steps.find();  // compute ends at 6, the step at 10
  EXPECT_DOUBLE_EQ(stalls.total(), 4);
  EXPECT_NEAR(stalls.storage(), 4 * 5.0 / 6, 1e-12);
  EXPECT_NEAR(stalls.copies(), 4 * 1.0 / 6, 1e-12);
}

// A step whose write goes on behind the beginning of the next, for which that one's product waits.
TEST(Stalls, AreChargedToTheStepBefore) {
  Steps steps;
  steps.add(Stream::compute, 2);
  const size_t product = steps.add(Stream::compute, 4);
  steps.add(Stream::write, 10, {product});
  steps.waits[product].push_back({Stream::write, 0});  // all of the step before
  StallFinder finder(steps.program, steps.waits);
  VectorClock all = ops_by_stream(steps.program), awaited = all;
  awaited[size_t(Stream::write)] = 0;
  // The step before ends at 0 but for its write; its own write has not begun.
  const std::vector<Span> before{{-6, -4}, {-4, 0}, {0, 10}}, now{{0, 2}, {10, 14}, {-1, 1e9}};
  Stalls stalls = finder.find({.spans = now, .over = awaited, .awaited = awaited}, &before);
  EXPECT_DOUBLE_EQ(stalls.storage(), 8);
  EXPECT_DOUBLE_EQ(stalls.total(), 8);
  // Two steps are under way at most: this one ends with the write of the one before.
  const std::vector<Span> at_once{{0, 2}, {2, 6}, {-1, 1e9}};
  stalls = finder.find({.spans = at_once, .over = awaited, .awaited = awaited}, &before);
  EXPECT_DOUBLE_EQ(stalls.storage(), 4);
  // And the last of all with its own.
  const std::vector<Span> last{{0, 2}, {10, 14}, {14, 24}};
  stalls = finder.find({.spans = last, .over = all, .awaited = all}, &before);
  EXPECT_DOUBLE_EQ(stalls.storage(), 18);
}

TEST(Stalls, CountWhatRunsAgain) {
  Steps steps;
  steps.add(Stream::compute, 4);
  steps.add(Stream::compute, 1.5, {}, Purpose::restore);
  const Stalls stalls = steps.find();
  EXPECT_DOUBLE_EQ(stalls.restoring, 1.5);
  EXPECT_DOUBLE_EQ(stalls.total(), 1.5);
}

}  // namespace
}  // namespace strata::stalls_test
