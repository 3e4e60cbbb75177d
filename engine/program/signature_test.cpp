// Ops that a rule can tell apart have different signatures, their copies the same.
#include "engine/program/signature.h"

#include <gtest/gtest.h>

#include <functional>

#include "strata/builder.h"

namespace strata::signature_test {
namespace {

Program product() {
  Program program;
  Builder build(program);
  const TensorId x = build.data("x", {4, 8}, DType::f32), weight = build.parameter("weight", {16, 8}, {});
  build.emit("linear", {x, weight, {}}, {{"a", int64_t{1}}, {"b", 0.5}, {"c", "text"}}, "y");
  return program;
}

uint64_t changed(const std::function<void(Program&, Op&)>& change) {
  Program program = product();
  change(program, program.ops[0]);
  return signature(OpView(program, program.ops[0]));
}

TEST(Signature, CopiesHaveTheSame) {
  const uint64_t plain = changed([](Program&, Op&) {});
  EXPECT_EQ(plain, changed([](Program&, Op&) {}));
  EXPECT_EQ(plain, changed([](Program& p, Op& op) {
              op.microbatch = 7, op.block = 3, op.chunk = 1;
              for (Tensor& tensor : p.tensors) tensor.name = tensor.name.of_microbatch(7);
            }));
  EXPECT_EQ(plain, changed([](Program& p, Op& op) { op.outputs[0] = p.add(p[op.outputs[0]]); }));
}

// Tensors and attributes that share values with others, and such that do not, in a program of many more than are
// remembered.
TEST(Signature, OneAfterTheOtherTheyAreAsByThemselves) {
  Program program;
  Builder build(program);
  const TensorId weight = build.parameter("weight", {16, 8}, {});
  for (int i = 0; i < 3000; ++i) {
    const TensorId x = build.data("x", {4 + i % 7, 8}, DType::f32);
    if (i % 5 == 0) program[x].role = Role::activation;
    if (i % 3 == 0) program[x].shape = program.tensors[size_t(x.value) / 2].shape;
    if (program[x].shape.size() != 2 || program[x].shape[1] != 8) program[x].shape = {4, 8};
    build.emit("linear", {x, weight, {}}, {{"a", int64_t{i % 11}}, {"b", "text"}}, "y");
    if (i % 2 == 0) program.ops.back().attributes = program.ops[program.ops.size() / 2].attributes;
  }
  Signatures all(program);
  for (const Op& op : program.ops) ASSERT_EQ(all.of(op), signature(OpView(program, op)));
}

TEST(Signature, WhatARuleSeesCounts) {
  using Change = std::function<void(Program&, Op&)>;
  const std::vector<Change> changes = {
      [](Program&, Op&) {},
      [](Program&, Op& op) { op.kind = &find_kind("add"); },
      [](Program&, Op& op) { op.attributes.set("a", int64_t{2}); },
      [](Program&, Op& op) { op.attributes.set("b", 0.25); },
      [](Program&, Op& op) { op.attributes.set("c", "other"); },
      [](Program&, Op& op) { op.attributes.set("d", int64_t{0}); },
      [](Program&, Op& op) { op.stream = Stream::host; },
      [](Program&, Op& op) { op.tier = Tier::host; },
      [](Program&, Op& op) { op.accumulate = 1; },
      [](Program&, Op& op) { op.inputs.pop_back(); },
      [](Program&, Op& op) { op.inputs[2] = op.inputs[0]; },
      [](Program&, Op& op) { std::swap(op.inputs[0], op.inputs[1]); },
      [](Program& p, Op& op) {
        p[op.inputs[0]].shape = {8, 4};
      },
      [](Program& p, Op& op) {
        p[op.inputs[0]].shape = {4, 8, 1};
      },
      [](Program& p, Op& op) { p[op.inputs[0]].dtype = DType::bf16; },
      [](Program& p, Op& op) { p[op.inputs[0]].home = Tier::host; },
      [](Program& p, Op& op) { p[op.inputs[1]].role = Role::activation; },
      [](Program& p, Op& op) { p[op.inputs[1]].persistent = false; },
      [](Program& p, Op& op) {
        p[op.inputs[1]].layout = {{0, "shard", 32, 0}};
      },
      [](Program& p, Op& op) {
        p[op.inputs[1]].layout = {{0, "shard", 32, 16}};
      },
      [](Program& p, Op& op) {
        p[op.inputs[1]].layout = {{0, "tensor", 32, 0}};
      },
      [](Program& p, Op& op) {
        p[op.inputs[1]].lasting = Lasting{.fused = {8, 8}};
      },
      [](Program& p, Op& op) {
        p[op.outputs[0]].shape = {4, 15};
      },
  };
  std::map<uint64_t, size_t> seen;
  for (size_t i = 0; i < changes.size(); ++i) {
    const auto [at, is_new] = seen.emplace(changed(changes[i]), i);
    EXPECT_TRUE(is_new) << "changes " << at->second << " and " << i;
  }
}

TEST(Signature, DistinctOpsAreCounted) {
  Program program = product();
  for (int m = 0; m < 3; ++m) program.ops.push_back(program.ops[0]);
  Builder(program).emit("gelu", {program.ops[0].outputs[0]});
  const auto ops = distinct_ops(program);
  ASSERT_EQ(ops.size(), 2u);
  EXPECT_EQ(ops[0], std::pair(std::as_const(program).ops.data(), int64_t{4}));
  EXPECT_EQ(ops[1].second, 1);
}

TEST(Names, OfMicrobatchesAreFoundAndStayUnique) {
  Program program;
  const TensorId data = program.add({.name = "tokens@1", .shape = {1}, .role = Role::data});
  program.tensors.push_back({.name = "x@12", .shape = {1}});  // as unrolling does
  EXPECT_EQ(program.find("tokens@1"), data);
  EXPECT_EQ(program.find("x@12"), TensorId{1});
  EXPECT_FALSE(program.find("x@1"));
  EXPECT_FALSE(program.find("x"));
  const TensorId copy = program.add({.name = "x@12", .shape = {1}});
  EXPECT_EQ(program.find("x@12"), TensorId{1});
  EXPECT_EQ(program.find(program[copy].name), copy);
  EXPECT_NE(program[copy].name, "x@12");
}

}  // namespace
}  // namespace strata::signature_test
