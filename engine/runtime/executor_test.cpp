// Streams of an executor: any assignment of ops to them gives the same, and what cannot go on says where.
#include "engine/runtime/executor.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <vector>

#include "engine/planning/testing.h"
#include "strata/builder.h"

namespace strata::executor_test {
namespace {

// Ops on other streams: results equal those of one stream, whatever runs beside what.
TEST(Streams, WaitsMakeAnyAssignmentSafe) {
  std::mt19937 random(7);
  Threads threads(2);
  for (int round = 0; round < 30; ++round) {
    std::vector<float> want;
    for (bool many : {false, true}) {
      std::mt19937 shape(uint32_t(round) + 100);
      Program program;
      Builder build(program);
      std::vector<TensorId> known = {build.data("x", {257}, DType::f32)};
      program[known[0]].step_output = true;
      for (int i = 0; i < 60; ++i) {
        build.stream = many ? Stream(random() % kStreams) : Stream::compute;
        const TensorId a = known[shape() % known.size()], b = known[shape() % known.size()];
        known.push_back(a == b ? build.emit("gelu", {a}) : build.emit("add", {a, b}));
        if (known.size() > 6) known.erase(known.begin());
      }
      program[known.back()].step_output = true;
      const MemoryPlan plan = plan_memory(program, "cpu", 2);
      test::check_plan(plan);
      Storage storage(program, plan);
      Executor executor(program, plan, storage, "cpu", threads);
      for (int repeat = 0; repeat < 3; ++repeat) {
        for (int i = 0; i < 257; ++i) static_cast<float*>(executor.pointer({0}))[i] = 0.001f * float(i);
        executor.run();
        const float* y = static_cast<const float*>(executor.pointer(known.back()));
        if (!many && repeat == 0)
          want.assign(y, y + 257);
        else
          ASSERT_EQ(std::memcmp(want.data(), y, 257 * 4), 0) << "round " << round;
      }
    }
  }
}

// A kernel that asks for a group of ranks where there is none says which op it is.
TEST(Streams, AnExchangeWithoutItsGroupIsNamed) {
  Program program;
  Builder build(program);
  const TensorId x = build.data("x", {16}, DType::f32);
  build.emit("all_reduce", {x}, {{"axis", "data"}, {"reduction", "sum"}}, "sum");
  EXPECT_EQ(program.ops[0].stream, Stream::exchange);
  const MemoryPlan plan = plan_memory(program, "cpu", 1);
  Storage storage(program, plan);
  Threads threads(1);
  try {
    Executor executor(program, plan, storage, "cpu", threads);
    executor.run();
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(
        std::string(error.what())
            .find("op 0 (all_reduce): op \"all_reduce\", which makes sum, asks for a group of ranks (axis \"data\", "
                  "stream exchange) and has none"),
        std::string::npos)
        << error.what();
  }
}

// A step in which nothing moves ends, by name of what stands still; here a kernel that nobody can wake, so the process.
TEST(Streams, AStepInWhichNothingMovesEnds) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const auto stand_still = [] {
    register_kind({.name = "test_stands_still",
                   .summary = "",
                   .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                     return {{v.input(0).shape, DType::f32}};
                   },
                   .kernels = {{"cpu", {[](const Binding&) -> Launch { return [] { pause(); }; }}}}});
    Program program;
    Builder build(program);
    const TensorId x = build.data("x", {16}, DType::f32);
    build.stream = Stream::host;
    const TensorId y = build.emit("test_stands_still", {x}, {}, "y");
    build.stream = Stream::compute;
    build.emit("gelu", {y}, {}, "z");
    const MemoryPlan plan = plan_memory(program, "cpu", 1);
    Storage storage(program, plan);
    Threads threads(1);
    Executor executor(program, plan, storage, "cpu", threads, 1, nullptr, 0.1);
    executor.run();
  };
  EXPECT_EXIT(stand_still(), ::testing::ExitedWithCode(1),
              "nothing moved in this step any more: compute stands at op 1 \\(gelu, makes z\\); host stands at op 0 "
              "\\(test_stands_still, makes y\\)");
}

}  // namespace
}  // namespace strata::executor_test
