// Sharding rules by themselves: what kinds say of their dimensions, and what follows for layouts and partial sums.
#include "engine/program/sharding.h"

#include <gtest/gtest.h>

#include "strata/builder.h"
#include "strata/mesh.h"

namespace strata::sharding_test {
namespace {

const std::string kTensor{kTensorAxis};

// An activation of its own shape, split over `tensor` along a dimension (-1: whole) of `full`.
TensorId split(Builder& build, const std::string& name, Shape shape, int dimension, int64_t full) {
  const TensorId id = build.data(name, shape, DType::f32);
  if (dimension >= 0) build.program()[id].layout = {{.dimension = dimension, .axis = kTensor, .full = full}};
  return id;
}

std::vector<Partial> inputs_of(const OpView& view) { return std::vector<Partial>(size_t(view.inputs())); }

TEST(Sharding, ColumnsThenRows) {
  Program program;
  Builder build(program);
  const TensorId x = split(build, "x", {2, 3, 8}, -1, 0), up = split(build, "up", {6, 8}, 0, 12),
                 down = split(build, "down", {8, 6}, 1, 12);
  const TensorId columns = build.emit("linear", {x, up, {}});
  EXPECT_EQ(program[columns].layout, (Layout{{.dimension = 2, .axis = kTensor, .full = 12}}));
  OpView view(program, program.ops.back());
  EXPECT_EQ(split_problem(view, inputs_of(view)), "");
  EXPECT_TRUE(partial_of(view, inputs_of(view), nullptr)[0].empty());
  const TensorId gelu = build.emit("gelu", {columns}), rows = build.emit("linear", {gelu, down, {}});
  EXPECT_EQ(program[gelu].layout, program[columns].layout);
  EXPECT_TRUE(program[rows].layout.empty());
  const std::vector<Partial> partial = partial_sums(program, "test", nullptr);
  EXPECT_TRUE(partial[size_t(gelu.value)].empty());
  EXPECT_EQ(partial[size_t(rows.value)], Partial{kTensor});
  build.emit("all_reduce", {rows}, {{"axis", kTensor}, {"reduction", std::string("sum")}});
  EXPECT_TRUE(partial_sums(program, "test", nullptr).back().empty());
}

// Sizes that go with a factor may differ: keys and values are in one tensor and not in the other.
TEST(Sharding, HeadsAreSplitInAllTensorsOfAttention) {
  Program program;
  Builder build(program);
  const TensorId qkv = split(build, "qkv", {2, 3, 2 * (3 + 2) * 4}, 2, 4 * (3 + 2) * 4);
  const auto out = build.emit_all("attention", {qkv}, {{"head_size", 4}, {"queries_per_group", 3}});
  EXPECT_EQ(program[out[0]].layout, (Layout{{.dimension = 2, .axis = kTensor, .full = 4 * 3 * 4}}));
  EXPECT_EQ(program[out[1]].layout, (Layout{{.dimension = 1, .axis = kTensor, .full = 4 * 3}}));
}

// Rows of several leading dimensions merged into one.
TEST(Sharding, NormsOfSplitSequences) {
  Program program;
  Builder build(program);
  const TensorId x = split(build, "x", {2, 3, 8}, 1, 6), w = split(build, "w", {8}, -1, 0);
  const auto out = build.emit_all("rms_norm", {x, w}, {{"epsilon", 1e-5}});
  EXPECT_EQ(program[out[0]].layout, program[x].layout);
  EXPECT_EQ(program[out[1]].layout, (Layout{{.dimension = 0, .axis = kTensor, .full = 12}}));
  const auto back = build.emit_all("rms_norm_gradient", {out[0], x, w, out[1]});
  const std::vector<Partial> partial = partial_sums(program, "test", nullptr);
  EXPECT_TRUE(partial[size_t(back[0].value)].empty());
  EXPECT_EQ(partial[size_t(back[1].value)], Partial{kTensor}) << "the weight met a part of the tokens";
}

TEST(Sharding, WhatDoesNotFitIsSaid) {
  Program program;
  Builder build(program);
  const auto problem = [&](const std::string& kind, std::vector<TensorId> inputs, const Attributes& attributes,
                           std::vector<Partial> partial = {}) {
    build.emit_all(kind, std::move(inputs), attributes);
    const OpView view(program, program.ops.back());
    partial.resize(size_t(view.inputs()));
    return split_problem(view, partial);
  };
  const TensorId x = split(build, "x", {2, 3, 8}, 2, 16), w = split(build, "w", {8}, 0, 16),
                 whole = split(build, "whole", {2, 3, 8}, -1, 0), time = split(build, "time", {2, 3, 8}, 1, 6),
                 matrix = split(build, "matrix", {5, 8}, 0, 10);
  EXPECT_EQ(problem("rms_norm", {x, w}, {{"epsilon", 1e-5}}),
            "needs dimension 2 of x whole, but axis \"tensor\" splits it.");
  EXPECT_EQ(problem("add", {x, whole}, {}), "needs dimension 2 of whole split over axis \"tensor\", as others are.");
  EXPECT_EQ(problem("linear", {time, matrix, {}}, {}),
            "reads tensors that axis \"tensor\" splits along different dimensions.");
  EXPECT_EQ(problem("gelu", {whole}, {}, {{kTensor}}),
            "reads whole, which is a partial sum over axis \"tensor\", but is not linear in it.");
  EXPECT_EQ(problem("add", {whole, whole}, {}, {{kTensor}, {}}),
            "adds whole, which is whole, to a partial sum over axis \"tensor\".");
  EXPECT_EQ(problem("add", {whole, whole}, {}, {{kTensor}, {kTensor}}), "");
}

TEST(Sharding, TheVerifierFollowsPartialSums) {
  Program program;
  Builder build(program);
  const TensorId x = split(build, "x", {3, 8}, 1, 16), w = split(build, "w", {5, 8}, 1, 16);
  build.emit("gelu", {build.emit("linear", {x, w, {}})});
  try {
    verify(program, "somebody");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("after \"somebody\": op 1 (gelu) reads linear, which is a partial sum"),
              std::string::npos)
        << error.what();
  }
}

// What rounds a partial sum must say that it is meant to.
TEST(Sharding, RoundsPartialSumsWhereAnOpSaysSo) {
  for (const bool says : {false, true}) {
    Program program;
    Builder build(program);
    const TensorId x = split(build, "x", {3, 8}, 1, 16), w = split(build, "w", {5, 8}, 1, 16);
    Attributes attributes{{"dtype", "bf16"}};
    if (says) attributes.set(std::string(kTakesPartial), int64_t{1});
    const TensorId rounded = build.emit("cast", {build.emit("linear", {x, w, {}})}, attributes);
    std::string said;
    try {
      EXPECT_EQ(partial_sums(program, "somebody", nullptr)[size_t(rounded.value)], Partial{"tensor"});
    } catch (const Error& error) {
      said = error.what();
    }
    EXPECT_EQ(said.find("op 1 (cast) reads linear, which is a partial sum") == said.npos, says) << said;
  }
}

}  // namespace
}  // namespace strata::sharding_test
