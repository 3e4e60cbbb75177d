// Early placement against the rule it follows, on random programs.
#include "engine/planning/hoist.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "strata/builder.h"

namespace strata::hoist_test {
namespace {

// Each movable op right behind the last op before it that touches its tensors in a conflicting way, by looking at all
// pairs; what has one place keeps its order.
std::vector<std::string> expected(const Program& program, const std::vector<char>& movable) {
  const auto& ops = program.ops;
  std::vector<int> place(ops.size()), order(ops.size());
  const auto has = [](const auto& list, TensorId id) { return std::find(list.begin(), list.end(), id) != list.end(); };
  for (size_t i = 0; i < ops.size(); ++i) {
    place[i] = movable[i] ? -1 : int(i);
    order[i] = int(i);
    for (size_t before = 0; movable[i] && before < i; ++before) {
      bool conflict = false;
      for (TensorId id : ops[i].inputs) conflict |= has(ops[before].outputs, id);
      for (TensorId id : ops[i].outputs) conflict |= has(ops[before].outputs, id) || has(ops[before].inputs, id);
      if (conflict) place[i] = std::max(place[i], place[before]);
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return place[size_t(a)] < place[size_t(b)]; });
  std::vector<std::string> text;
  for (int i : order) text.push_back(print(program, ops[size_t(i)]));
  return text;
}

TEST(Hoist, MovesOpsToWhereTheirInputsAreFinal) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    SCOPED_TRACE(round);
    Program program;
    Builder build(program);
    std::vector<TensorId> known = {build.data("x", {4}, DType::f32)};
    for (int i = 0; i < 4; ++i) known.push_back(build.state("state" + std::to_string(i), {4}, DType::f32));
    for (int i = 0; i < 40; ++i) {
      const TensorId a = known[random() % known.size()], b = known[random() % known.size()];
      if (random() % 3 == 0)  // in place
        build.emit_all("add", {a, b}, {}, {known[1 + random() % 4]});
      else
        known.push_back(build.emit("add", {a, b}));
    }
    std::vector<char> movable;
    const uint32_t share = random() % 5;
    for (size_t i = 0; i < program.ops.size(); ++i) movable.push_back(random() % 4 < share);
    const std::vector<std::string> want = expected(program, movable);
    hoist(program, movable);
    ASSERT_EQ(program.ops.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) ASSERT_EQ(print(program, program.ops[i]), want[i]) << "op " << i;
    verify(program, "hoist");
  }
}

// A stage that exchanged with all before it has sent what another waits for would wait for ever.
TEST(Hoist, WhatAllExchangeComesAfterWhatIsSentAlongTheSameAxis) {
  Program program;
  Builder build(program);
  const TensorId x = build.data("x", {4}, DType::f32), y = build.data("y", {4}, DType::f32);
  const auto send = [&](TensorId id) {
    return build.emit("send", {id}, {{"axis", std::string("along")}, {"offset", int64_t(1)}});
  };
  send(x);
  send(build.emit("add", {x, y}));
  const size_t first = program.ops.size();
  const auto sum = [&](const std::string& axis) {
    build.emit("all_reduce", {y}, {{"axis", axis}, {"reduction", std::string("sum")}});
  };
  sum("along");
  sum("other");
  hoist(program, first);
  std::string kinds;
  for (const Op& op : program.ops)
    kinds += std::string(op.kind->name) + (op.attributes.has("axis") ? " " + op.attributes.string("axis") : "") + ", ";
  EXPECT_EQ(kinds, "all_reduce other, send along, add, send along, all_reduce along, ");
}

// Of two such exchanges the first may be ready last on one stage and first on another: they keep their order.
TEST(Hoist, WhatAllExchangeAlongAnAxisOfStagesKeepsItsOrder) {
  Program program;
  Builder build(program);
  const TensorId x = build.data("x", {4}, DType::f32), y = build.data("y", {8}, DType::f32);
  build.emit("send", {x}, {{"axis", std::string("along")}, {"offset", int64_t(1)}});
  const TensorId late = build.emit("gelu", {y});
  const size_t first = program.ops.size();
  for (TensorId id : {late, x})
    build.emit("all_reduce", {id}, {{"axis", std::string("along")}, {"reduction", std::string("sum")}});
  hoist(program, first);
  std::string order;
  for (const Op& op : program.ops)
    if (op.kind->name == "all_reduce") order += program[op.inputs[0]].name.text() + ", ";
  EXPECT_EQ(order, program[late].name.text() + ", x, ");
}

}  // namespace
}  // namespace strata::hoist_test
