// What a graph says of a small program: bytes, seconds, who reads what, and what may share memory.
#include "engine/planning/graph.h"

#include <gtest/gtest.h>

#include "strata/builder.h"
#include "strata/json.h"

namespace strata::graph_test {
namespace {

TEST(Graph, TellsWhatEachOpReadsWritesAndTakes) {
  Program program;
  Builder build(program);
  const TensorId weight = build.parameter("weight", {8, 8}, {Initializer::Kind::zeros, 0});
  const TensorId x = build.data("x", {5, 8}, DType::f32);
  const TensorId y = build.emit("linear", {x, weight, {}});
  build.emit("add", {y, y});
  build.emit("linear", {y, weight, {}});
  program.ops.back().inputs.push_back(y);
  program.ops.back().accumulate = 1;  // output 0 += y
  const MemoryPlan plan = plan_memory(program, "cpu", 1);
  const Rates rates{.flops = 1e9, .memory = 1e9};
  const NamedPlan named{"step", &program, &plan, &rates};
  const Json graph = Json::parse(graph_json({&named, 1}), "graph");
  const Json& one = graph.find("programs")->array("programs").at(0);
  EXPECT_EQ(one.find("name")->string("name"), "step");
  EXPECT_EQ(one.find("device")->find("live_peak_bytes")->integer("bytes"), plan.device().live_peak_bytes);
  const auto& tensors = one.find("tensors")->array("tensors");
  EXPECT_TRUE(tensors.at(size_t(weight.value)).find("persistent")->boolean("persistent"));
  EXPECT_FALSE(tensors.at(size_t(y.value)).find("persistent")->boolean("persistent"));
  EXPECT_EQ(tensors.at(size_t(y.value)).find("bytes")->integer("bytes"), 192);  // 160, in lines of 64
  const auto& ops = one.find("ops")->array("ops");
  ASSERT_EQ(ops.size(), 3u);
  EXPECT_EQ(ops[0].find("kind")->string("kind"), "linear");
  EXPECT_EQ(ops[0].find("part")->string("part"), "forward");
  EXPECT_DOUBLE_EQ(ops[0].find("seconds")->number("seconds"), seconds_of(OpView(program, program.ops[0]), rates));
  EXPECT_EQ(ops[0].find("inputs")->dump(), Json(Json::Array{int64_t{x.value}, int64_t{weight.value}, -1}).dump());
  EXPECT_EQ(ops[0].find("outputs")->dump(), Json(Json::Array{int64_t{y.value}}).dump());
  EXPECT_EQ(ops[0].find("in_place")->dump(), "[]");
  EXPECT_NE(ops[1].find("in_place")->dump(), "[]");  // elementwise: over what it reads
  const Json::Array pair{int64_t{program.ops[2].outputs.front().value}, int64_t{y.value}};
  EXPECT_EQ(ops[2].find("in_place")->dump(), Json(Json::Array{pair}).dump());
}

}  // namespace
}  // namespace strata::graph_test
