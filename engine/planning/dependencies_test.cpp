// Which ops wait for which: conflicts that a look at whole tensors alone would miss.
#include "engine/planning/dependencies.h"

#include <gtest/gtest.h>

#include <random>

#include "strata/builder.h"
#include "strata/op_kind.h"

namespace strata::dependencies_test {
namespace {

// Whether op `index` waits for the first `count` ops of `stream`.
bool waits_for(const Waits& waits, size_t index, Stream stream, int32_t count) {
  for (const Wait& wait : waits[index])
    if (wait.stream == stream && wait.count >= count) return true;
  return false;
}

// Direct I/O reads whole pages: what is read in front of a part of an earlier tensor overwrites the part as well.
TEST(Dependencies, AReadFromStorageFillsItsLastPage) {
  Program program;
  Builder build(program);
  const TensorId whole = build.emit("gelu", {build.data("x", {256}, DType::f32)}, {}, "whole");
  Tensor part = program[whole];
  part.name = "part", part.shape = {16}, part.part_of = whole, part.part_offset = 512;
  program.tensors.push_back(part);
  build.emit("gelu", {TensorId{int32_t(program.tensors.size()) - 1}}, {}, "of_part");
  const TensorId stored = build.parameter("stored", {4}, {});
  program[stored].home = Tier::nvme;
  Tensor small = program[stored];
  small.name = "restored", small.persistent = false, small.home = Tier::device;
  program.tensors.push_back(small);
  const TensorId restored{int32_t(program.tensors.size()) - 1};
  program.ops.push_back(
      {.kind = &find_kind("move"), .inputs = {stored}, .outputs = {restored}, .stream = Stream::read});
  build.emit("gelu", {restored}, {}, "of_restored");

  MemoryPlan plan = plan_memory(program, "cpu", 1);
  const auto buffer = [&](TensorId id) -> Buffer& { return plan.buffers[size_t(plan.buffer_of[size_t(id.value)])]; };
  EXPECT_GE(buffer(restored).bytes, kStorageAlignment);
  buffer(restored).offset = buffer(whole).offset;  // which is dead by then
  const auto waits = plan_waits(program, plan);
  EXPECT_TRUE(waits_for(waits, 2, Stream::compute, 2));
  EXPECT_TRUE(waits_for(waits, 3, Stream::read, 1));
}

// What moves between the tiers of memory is not rounded: small tensors beside each other stay independent.
TEST(Dependencies, ACopyBetweenMemoriesTouchesItsBytesAlone) {
  Program program;
  Builder build(program);
  const TensorId x = build.data("x", {16}, DType::f32);
  program[build.emit("gelu", {x}, {}, "first")].step_output = true;
  build.stream = Stream::write;
  program[build.emit("gelu", {x}, {}, "copied")].step_output = true;
  const auto waits = plan_waits(program, plan_memory(program, "cpu", 1));
  EXPECT_TRUE(waits[0].empty());
  EXPECT_TRUE(waits[1].empty());
}

// Ranges that are looked up once for each tensor are those of every op: of random programs with tensors on the disk,
// whose buffers lie across each other anyhow.
TEST(Dependencies, ThoseOfAPlanAreThoseOfItsOps) {
  int waits = 0;
  for (uint32_t seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](size_t n) { return size_t(random() % n); };
    Program program;
    Builder build(program);
    std::vector<TensorId> made{build.data("x", {16}, DType::f32)};
    for (int i = 0; i < 60; ++i) {
      const TensorId from = made[below(made.size())];
      const bool on_disk = program[from].home == Tier::nvme;
      Tensor copy{.name = "t" + std::to_string(i), .shape = {int64_t(16 + 40 * below(60))}};
      Op op{.kind = &find_kind("gelu"), .inputs = {from}};
      if (on_disk || below(3) == 0) {
        op = {.kind = &find_kind("move"), .inputs = {from}, .stream = on_disk ? Stream::read : Stream::write};
        copy.shape = program[from].shape;
        copy.home = on_disk ? Tier::device : Tier::nvme;
      } else if (below(3) == 0) {
        op.stream = Stream::host;
      }
      op.outputs = {program.add(copy)};
      made.push_back(op.outputs[0]);
      program.ops.push_back(std::move(op));
    }
    MemoryPlan plan = plan_memory(program, "cpu", 1);
    for (Buffer& buffer : plan.buffers)
      buffer.offset = int64_t(below(buffer.tier == Tier::nvme ? 8 : 300)) *
                      (buffer.tier == Tier::nvme ? kStorageAlignment : kAlignment);
    const Waits planned = plan_waits(program, plan);
    const Waits given = plan_waits(program, [&](int32_t op) { return accesses_of(program, plan, op); });
    for (size_t i = 0; i < program.ops.size(); ++i) {
      ASSERT_EQ(planned[i].size(), given[i].size()) << "seed " << seed << ", op " << i;
      for (size_t w = 0; w < planned[i].size(); ++w, ++waits) {
        EXPECT_EQ(planned[i][w].stream, given[i][w].stream);
        EXPECT_EQ(planned[i][w].count, given[i][w].count);
      }
    }
  }
  EXPECT_GT(waits, 500);
}

// What an op that has an empty share writes hides nothing of what others have written there.
TEST(Dependencies, AnEmptyRangeHidesNothing) {
  Program program;
  for (const Stream stream : {Stream::compute, Stream::read, Stream::exchange, Stream::write})
    program.ops.push_back({.kind = &find_kind("gelu"), .stream = stream});
  const std::vector<std::vector<Access>> accesses{{{0, 10, true}}, {{0, 10, false}}, {{0, 0, true}}, {{0, 10, true}}};
  const auto waits = plan_waits(program, [&](int32_t op) { return accesses[size_t(op)]; });
  EXPECT_TRUE(waits_for(waits, 1, Stream::compute, 1));
  EXPECT_TRUE(waits_for(waits, 3, Stream::read, 1));
  EXPECT_FALSE(waits_for(waits, 3, Stream::exchange, 1));
}

}  // namespace
}  // namespace strata::dependencies_test
