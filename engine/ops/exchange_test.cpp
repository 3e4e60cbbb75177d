// Exchanges between ranks as threads: random shapes, dimensions, types and numbers of ranks against plain loops over
// whole tensors, gradients against central differences in double, a tensor-parallel layer against one rank. On the CPU,
// and on CUDA (emulated or real) over NCCL and through host memory.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>
#include <random>

#include "comm/world.h"
#include "engine/planning/localize.h"
#include "engine/planning/memory_plan.h"
#include "engine/program/autodiff.h"
#include "engine/runtime/executor.h"
#include "engine/runtime/ranks.h"
#include "strata/builder.h"
#include "strata/convert.h"
#include "strata/layout.h"
#include "tests/backends.h"
#include "tests/random_cases.h"

namespace strata::exchange_test {
namespace {

using test::cases;
using test::draw;
using test::first_seed;
using test::Random;
using Values = std::vector<double>;

constexpr const char* kAxis = "tensor";
Mesh mesh_of(int rank, int ranks) { return Mesh(rank, {{"replicate", 1}, {"shard", 1}, {kAxis, ranks}}); }

void put(DType dtype, void* data, const Values& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    const float narrow = float(values[i]);
    if (dtype == DType::f64)
      static_cast<double*>(data)[i] = values[i];
    else
      from_f32(dtype, &narrow, at(data, dtype, int64_t(i)), 1);
  }
}
Values take(DType dtype, const void* data, int64_t count) {
  Values values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    float narrow = 0;
    if (dtype != DType::f64) to_f32(dtype, at(data, dtype, int64_t(i)), &narrow, 1);
    values[i] = dtype == DType::f64 ? static_cast<const double*>(data)[i] : double(narrow);
  }
  return values;
}

// Builds a program as rank 0 of the mesh plans it: data tensors to fill, tensors to read afterwards.
struct Built {
  Program program;
  std::vector<TensorId> inputs, results;
};

// Runs it on every rank: `fill(rank, i, tensor)` gives input i of a rank, whose shape and layout `tensor` has by then.
// Returns results by rank and number.
using Fill = std::function<Values(int rank, size_t input, const Tensor& tensor)>;
std::vector<std::vector<Values>> run(const Built& planned, int ranks, const Fill& fill, const std::string& backend,
                                     const std::string& provider = "auto", int times = 1) {
  std::vector<std::vector<Values>> all(static_cast<size_t>(ranks), std::vector<Values>(planned.results.size()));
  try {
    run_local(
        ranks,
        [&](World& world) {
          const int rank = world.rank();
          const std::unique_ptr<Device> device = backend == "cuda" ? test::rank_device(rank) : nullptr;
          Program program = planned.program;
          for (TensorId id : planned.results) program[id].step_output = true;
          const MemoryPlan plan = plan_memory(program, backend, 1);
          const Mesh mesh = mesh_of(rank, ranks);
          NetworkSection network;
          network.provider = provider;
          const Groups groups = make_groups(world, mesh, device.get(), network, false, {&program});
          localize(program, mesh, 1);
          Threads threads(1);
          Storage storage(program, plan, {}, {}, device.get());
          Executor executor(program, plan, storage, backend, threads, 1, &groups);
          for (int time = 0; time < times; ++time) {  // the second and third time as a graph
            for (size_t i = 0; i < planned.inputs.size(); ++i) {
              const Tensor& tensor = program[planned.inputs[i]];
              const Values values = fill(rank, i, tensor);
              ASSERT_EQ(int64_t(values.size()), elements(tensor.shape));
              put(tensor.dtype, executor.pointer(planned.inputs[i]), values);
            }
            executor.run();
          }
          auto result = all[size_t(rank)].begin();
          for (TensorId id : planned.results)
            *result++ = take(program[id].dtype, executor.pointer(id), elements(program[id].shape));
        },
        60);
  } catch (const Error& error) {
    ADD_FAILURE() << error.what();
  }
  return all;
}

// Part of a whole tensor that a rank holds by its layout.
Values cut(const Values& whole, const Tensor& tensor) {
  const GlobalIndex global(tensor);
  Values mine(static_cast<size_t>(elements(tensor.shape)));
  for (size_t i = 0; i < mine.size(); ++i) mine[i] = whole[size_t(global(int64_t(i)))];
  return mine;
}

// What a tensor is over the axis: every rank has the same; a value of its own; its share of one along a dimension.
struct Held {
  enum How { same, own, share } how = same;
  int dimension = 0;
};

struct Case {
  std::string kind;
  Attributes attributes;
  Held in, out, in_gradient;  // the gradient of the output is held as the output is, or each rank's own
  bool own_cotangent = false;
};

// A random exchange; what its result is follows from its definition alone.
Case random_case(Random& random, int ranks, const Shape& shape) {
  const int dimensions = int(shape.size()), d = int(draw(random, 0, dimensions - 1));
  const Attributes along{{"axis", kAxis}, {"dimension", int64_t{d}}, {"size", int64_t{ranks}}};
  Attributes whole = along, sum{{"axis", kAxis}, {"reduction", "sum"}};
  whole.set("gradient", std::string("whole"));
  const Held share{Held::share, d}, same{Held::same}, own{Held::own};
  switch (draw(random, 0, dimensions > 1 ? 6 : 5)) {
    case 0:
      return {"all_reduce", sum, own, same, same};
    case 1:
      return {"reduce_scatter", along, own, share, same};
    case 2:
      return {"all_gather", along, share, same, share, true};
    case 3:
      return {"all_gather", whole, share, same, share};
    case 4:
      return {"local_slice", along, same, share, same};
    case 5:
      return {"replicated", {{"axis", kAxis}}, same, same, same, true};
    default: {
      const int to = int(draw(random, 0, dimensions - 2)), other = to >= d ? to + 1 : to;
      return {"all_to_all",
              {{"axis", kAxis}, {"size", int64_t{ranks}}, {"gather", int64_t{d}}, {"split", int64_t{other}}},
              share,
              {Held::share, other},
              share};
    }
  }
}

TensorId declare(Builder& build, const std::string& name, const Shape& shape, DType dtype, const Held& held,
                 int ranks) {
  Shape own = shape;
  Layout layout;
  if (held.how == Held::share) {
    layout.push_back({.dimension = held.dimension, .axis = kAxis, .full = shape[size_t(held.dimension)]});
    own[size_t(held.dimension)] = share_of(own[size_t(held.dimension)], 0, ranks).count();
  }
  const TensorId id = build.data(name, own, dtype);
  build.program()[id].layout = layout;
  return id;
}

// Whole tensors by rank: one for all where they are the same or shares of one.
using Wholes = std::vector<Values>;
Wholes random_wholes(Random& random, int ranks, int64_t count, bool own, bool integers) {
  std::normal_distribution<double> normal;
  Wholes wholes(static_cast<size_t>(ranks), Values(static_cast<size_t>(count)));
  for (size_t r = 0; r < wholes.size(); ++r)
    for (double& value : wholes[r]) value = integers ? double(draw(random, -8, 8)) : normal(random);
  if (!own)
    for (Values& whole : wholes) whole = wholes[0];
  return wholes;
}
Values sum_of(const Wholes& wholes) {
  Values sum(wholes[0].size());
  for (const Values& whole : wholes)
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += whole[i];
  return sum;
}

struct Setting {
  std::string backend, provider;
  int times;
};
std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const std::string& backend : test::kBackends) {
    all.push_back({backend, "auto", backend == "cuda" ? 3 : 1});
    if (backend == "cuda") all.push_back({backend, "tcp", 2});
  }
  return all;
}

Shape random_shape(Random& random, int ranks) {
  Shape shape;
  for (int64_t d = draw(random, 1, 4); d > 0; --d) shape.push_back(draw(random, ranks, ranks + 5));
  if (draw(random, 0, 7) == 0) shape.back() += 3000;
  if (draw(random, 0, 15) == 0)  // pieces that are long enough to stay where they are
    shape = {draw(random, ranks, ranks + 5), draw(random, 17000, 20000)};
  return shape;
}

// One tensor, or several in one op, each of another shape.
TEST(Exchanges, AreWhatTheyAreDefinedToBe) {
  STRATA_NEEDS_GPU();
  for (const Setting& setting : settings())
    for (uint64_t seed = first_seed(), end = seed + uint64_t(cases(setting.backend == "cpu" ? 300 : 40)); seed < end;
         ++seed) {
      Random random(seed);
      const int ranks = int(draw(random, 2, 4));
      Shape shape = random_shape(random, ranks);
      const Case c = random_case(random, ranks, shape);
      if ((c.kind == "reduce_scatter" || c.kind == "all_gather") && draw(random, 0, 3) == 0)  // some have nothing
        shape[size_t(c.attributes.integer("dimension"))] = draw(random, 1, ranks - 1);
      const DType types[] = {DType::f32, DType::f64, DType::bf16, DType::f16};
      const DType dtype = types[draw(random, 0, 3)];
      SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed) + " " + c.kind + " " + text(shape) + " " +
                   std::string(name_of(dtype)) + " " + setting.backend + " " + setting.provider);
      const bool grouped = c.kind != "local_slice" && c.kind != "replicated" && draw(random, 0, 1);
      Built built;
      Builder build(built.program);
      std::vector<TensorId> list;
      std::vector<Shape> shapes{shape};
      if (grouped) {
        shapes.push_back(shape);
        shapes[1].back() += 1;
      }
      std::vector<Wholes> wholes;
      for (size_t i = 0; i < shapes.size(); ++i) {
        built.inputs.push_back(declare(build, "x" + std::to_string(i), shapes[i], dtype, c.in, ranks));
        wholes.push_back(random_wholes(random, ranks, elements(shapes[i]), c.in.how == Held::own, true));
      }
      built.results = build.emit_all(c.kind, built.inputs, c.attributes);
      verify(built.program, "test");
      const auto results = run(
          built, ranks, [&](int rank, size_t i, const Tensor& tensor) { return cut(wholes[i][size_t(rank)], tensor); },
          setting.backend, setting.provider, setting.times);
      for (size_t i = 0; i < shapes.size(); ++i) {
        const Values whole = c.in.how == Held::own ? sum_of(wholes[i]) : wholes[i][0];
        for (int rank = 0; rank < ranks; ++rank) {
          Program own;
          Builder there(own);
          const TensorId id = declare(there, "y", shapes[i], dtype, c.out, ranks);
          localize(own, mesh_of(rank, ranks), 1);
          ASSERT_EQ(results[size_t(rank)][i], cut(whole, own[id])) << "rank " << rank << ", tensor " << i;
        }
      }
    }
}

// Of L, the sum over all that the ranks' outputs hold of output times cotangent, each value counted once: values that
// are the same on all ranks once, values of their own for each rank.
TEST(Exchanges, GradientsAreCentralDifferences) {
  for (uint64_t seed = first_seed(), end = seed + uint64_t(cases(100)); seed < end; ++seed) {
    Random random(seed);
    const int ranks = int(draw(random, 2, 4));
    const Shape shape = random_shape(random, ranks);
    const Case c = random_case(random, ranks, shape);
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed) + " " + c.kind + " " + text(shape));
    Built built;
    Builder build(built.program);
    const TensorId x = declare(build, "x", shape, DType::f64, c.in, ranks);
    const TensorId y = build.emit(c.kind, {x}, c.attributes);
    const TensorId cotangent = declare(build, "c", shape, DType::f64, c.out, ranks);
    built.inputs = {x, cotangent};
    const std::vector<TensorId> gradients = differentiate(built.program, {{y, cotangent}}, {x}).wanted;
    ASSERT_TRUE(gradients[0]);
    built.results = {y, gradients[0]};
    verify(built.program, "test");
    const bool own_input = c.in.how == Held::own;
    const Wholes point = random_wholes(random, ranks, elements(shape), own_input, false),
                 way = random_wholes(random, ranks, elements(shape), own_input, false),
                 weights = random_wholes(random, ranks, elements(shape), c.own_cotangent, false);
    const auto at = [&](double step) {
      return run(
          built, ranks,
          [&](int rank, size_t i, const Tensor& tensor) {
            if (i == 1) return cut(weights[size_t(rank)], tensor);
            Values moved = point[size_t(rank)];
            for (size_t k = 0; k < moved.size(); ++k) moved[k] += step * way[size_t(rank)][k];
            return cut(moved, tensor);
          },
          "reference");
    };
    // Values of a tensor that all ranks hold alike are one variable.
    const auto dot = [&](const auto& results, size_t which, const Held& held, const Wholes& with, bool each_counts) {
      double sum = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        if (held.how == Held::same && !each_counts && rank > 0) continue;
        Program own;
        Builder there(own);
        const TensorId id = declare(there, "t", shape, DType::f64, held, ranks);
        localize(own, mesh_of(rank, ranks), 1);
        const Values mine = cut(with[size_t(rank)], own[id]);
        const Values& found = results[size_t(rank)][which];
        EXPECT_EQ(found.size(), mine.size());
        for (size_t k = 0; k < std::min(mine.size(), found.size()); ++k) sum += found[k] * mine[k];
      }
      return sum;
    };
    constexpr double kStep = 1e-3;
    const auto here = at(0);
    const double difference =
        (dot(at(kStep), 0, c.out, weights, c.own_cotangent) - dot(at(-kStep), 0, c.out, weights, c.own_cotangent)) /
        (2 * kStep);
    const Held gradient = own_input ? Held{Held::own} : c.in;
    ASSERT_NEAR(dot(here, 1, gradient, way, own_input), difference, 1e-8 * (1 + std::abs(difference)));
    for (int rank = 1; rank < ranks && c.in.how == Held::same; ++rank)
      ASSERT_EQ(here[size_t(rank)][1], here[0][1]) << "the gradient of what is the same everywhere is, too";
  }
}

// Sums of 16 bits: 1 beside 256 (2048) is lost in each rounding, so only sums that are rounded once have it.
TEST(Exchanges, SumsOf16BitsAreRoundedOnce) {
  for (const auto& [dtype, large] : {std::pair(DType::bf16, 256.0), std::pair(DType::f16, 2048.0)})
    for (const char* kind : {"all_reduce", "reduce_scatter"}) {
      Built built;
      Builder build(built.program);
      built.inputs = {build.data("x", {4, 3}, dtype)};
      built.results = {
          build.emit(kind, built.inputs,
                     {{"axis", kAxis}, {"dimension", int64_t{1}}, {"size", int64_t{3}}, {"reduction", "sum"}})};
      const auto results = run(
          built, 3, [&, large = large](int rank, size_t, const Tensor&) { return Values(12, rank == 0 ? large : 1); },
          "cpu");
      for (const auto& rank : results)
        for (double value : rank[0]) EXPECT_EQ(value, large + 2) << kind << " " << name_of(dtype);
    }
}

// A feed-forward layer with its first weight split by columns and its second by rows, the sequence split between
// (arXiv 2205.05198), in double: outputs and gradients are the single rank's.
TEST(Exchanges, ATensorParallelLayerIsTheSingleRanks) {
  constexpr int64_t kBatch = 2, kTime = 6, kHidden = 5, kInner = 12;
  const auto build_layer = [&](int ranks) {
    Built built;
    Builder build(built.program);
    const Held time = ranks > 1 ? Held{Held::share, 1} : Held{}, inner0 = ranks > 1 ? Held{Held::share, 0} : Held{},
               inner1 = ranks > 1 ? Held{Held::share, 1} : Held{};
    const TensorId x = declare(build, "x", {kBatch, kTime, kHidden}, DType::f64, time, ranks),
                   up = declare(build, "up", {kInner, kHidden}, DType::f64, inner0, ranks),
                   down = declare(build, "down", {kHidden, kInner}, DType::f64, inner1, ranks),
                   cotangent = declare(build, "c", {kBatch, kTime, kHidden}, DType::f64, time, ranks);
    const Attributes along{{"axis", kAxis}, {"dimension", int64_t{1}}, {"size", int64_t{ranks}}};
    const TensorId whole = ranks > 1 ? build.emit("all_gather", {x}, along) : x;
    TensorId y = build.emit("linear", {build.emit("gelu", {build.emit("linear", {whole, up})}), down});
    if (ranks > 1) y = build.emit("reduce_scatter", {y}, along);
    built.inputs = {x, up, down, cotangent};
    built.results = differentiate(built.program, {{y, cotangent}}, {x, up, down}).wanted;
    built.results.push_back(y);
    for (size_t i = 0; i < 3; ++i) built.program[built.results[i]].layout = built.program[built.inputs[i]].layout;
    verify(built.program, "test");
    return built;
  };
  Random random(5);
  const Shape shapes[] = {{kBatch, kTime, kHidden}, {kInner, kHidden}, {kHidden, kInner}, {kBatch, kTime, kHidden}};
  std::vector<Values> wholes;
  for (const Shape& shape : shapes) wholes.push_back(random_wholes(random, 1, elements(shape), false, false)[0]);
  // One rank of a mesh of one has no groups; two run the plain program side by side.
  const auto fill = [&](int, size_t i, const Tensor& tensor) { return cut(wholes[i], tensor); };
  const Built plain = build_layer(1);
  const auto expected = run(plain, 2, fill, "reference");
  for (int ranks : {2, 3}) {
    const Built split = build_layer(ranks);
    const auto results = run(split, ranks, fill, "reference");
    for (int rank = 0; rank < ranks; ++rank)
      for (size_t i = 0; i < 4; ++i) {
        Program own = split.program;
        localize(own, mesh_of(rank, ranks), 1);
        const Values whole = cut(expected[0][i], own[split.results[i]]);
        ASSERT_EQ(results[size_t(rank)][i].size(), whole.size());
        for (size_t k = 0; k < whole.size(); ++k)
          EXPECT_NEAR(results[size_t(rank)][i][k], whole[k], 1e-12 * (1 + std::abs(whole[k])))
              << "result " << i << " of rank " << rank << " of " << ranks;
      }
  }
}

// Everybody sends to the next and receives from the one before at once, on streams of their own: blocking sends in a
// ring would wait for each other for ever. The gradient goes round the other way.
TEST(Exchanges, ARingOfSendsAndTheirGradients) {
  STRATA_NEEDS_GPU();
  for (const Setting& setting : settings())
    for (int ranks : {2, 3, 4, 5})
      for (int64_t offset : {1, 2, -1}) {
        if (offset % ranks == 0) continue;
        SCOPED_TRACE(setting.backend + " " + setting.provider + " ranks " + std::to_string(ranks) + " offset " +
                     std::to_string(offset));
        const Shape shape{700, 301};
        Built built;
        Builder build(built.program);
        const TensorId x = build.data("x", shape, DType::f32), start = build.data("start", {1}, DType::u8),
                       cotangent = build.data("c", shape, DType::f32);
        const TensorId token = build.emit("send", {x}, {{"axis", kAxis}, {"offset", offset}});
        const TensorId came = build.emit(
            "receive", {start}, {{"axis", kAxis}, {"offset", -offset}, {"shape", "700x301"}, {"dtype", "f32"}});
        EXPECT_EQ(built.program.ops[0].stream, Stream::send);
        EXPECT_EQ(built.program.ops[1].stream, Stream::receive);
        const auto gradients = differentiate(built.program, {{came, cotangent}, {token, token}}, {x, start}).wanted;
        built.inputs = {x, cotangent};
        built.results = {came, gradients[0]};
        verify(built.program, "test");
        const auto results = run(
            built, ranks,
            [&](int rank, size_t i, const Tensor& tensor) {
              return Values(size_t(elements(tensor.shape)), double(i == 0 ? rank : 100 + rank));
            },
            setting.backend, setting.provider, setting.times);
        const auto other = [&](int rank, int64_t by) { return double(((rank + by) % ranks + ranks) % ranks); };
        for (int rank = 0; rank < ranks; ++rank) {
          const Values count(size_t(elements(shape)));
          EXPECT_EQ(results[size_t(rank)][0], Values(count.size(), other(rank, -offset)));
          EXPECT_EQ(results[size_t(rank)][1], Values(count.size(), 100 + other(rank, offset)));
        }
      }
}

// Everybody hands on to the rank `offset` after it, in one exchange; the gradient goes round the other way.
TEST(Exchanges, AShiftAndItsGradient) {
  STRATA_NEEDS_GPU();
  for (const Setting& setting : settings())
    for (int ranks : {2, 3, 5})
      for (int64_t offset : {1, 2, -1, -7}) {
        if (offset % ranks == 0) continue;
        SCOPED_TRACE(setting.backend + " " + setting.provider + " ranks " + std::to_string(ranks) + " offset " +
                     std::to_string(offset));
        const Shape shape{70, 301};
        Built built;
        Builder build(built.program);
        const TensorId x = build.data("x", shape, DType::f32), cotangent = build.data("c", shape, DType::f32);
        const TensorId y = build.emit("shift", {x}, {{"axis", kAxis}, {"offset", offset}, {"size", int64_t(ranks)}});
        built.inputs = {x, cotangent};
        built.results = {y, differentiate(built.program, {{y, cotangent}}, {x}).wanted[0]};
        verify(built.program, "test");
        const auto results = run(
            built, ranks,
            [&](int rank, size_t i, const Tensor& tensor) {
              return Values(size_t(elements(tensor.shape)), double(i == 0 ? rank : 100 + rank));
            },
            setting.backend, setting.provider, setting.times);
        const auto other = [&](int rank, int64_t by) { return double(((rank + by) % ranks + ranks) % ranks); };
        for (int rank = 0; rank < ranks; ++rank) {
          EXPECT_EQ(results[size_t(rank)][0], Values(size_t(elements(shape)), other(rank, -offset)));
          EXPECT_EQ(results[size_t(rank)][1], Values(size_t(elements(shape)), 100 + other(rank, offset)));
        }
      }
}

// One class of exchanges does not wait behind another.
TEST(Exchanges, StreamsFollowFromTheAxis) {
  Program program;
  Builder build(program);
  const TensorId x = build.data("x", {4}, DType::f32);
  for (const auto& [axis, stream] :
       {std::pair("data", Stream::exchange), std::pair("replicate", Stream::exchange),
        std::pair("shard", Stream::exchange), std::pair("tensor", Stream::model_exchange),
        std::pair("shard_expert", Stream::exchange), std::pair("expert", Stream::model_exchange)}) {
    build.emit("all_reduce", {x}, {{"axis", axis}, {"reduction", "sum"}});
    EXPECT_EQ(program.ops.back().stream, stream) << axis;
  }
  verify(program, "test");
  program.ops.back().stream = Stream::exchange;
  EXPECT_THROW(verify(program, "test"), Error);
}

// What cannot be exchanged is refused with the op's name.
TEST(Exchanges, WhatDoesNotFitIsRefused) {
  Program program;
  Builder build(program);
  const TensorId x = build.data("x", {2, 6}, DType::f32), half = build.data("h", {2, 6}, DType::bf16);
  const auto refused = [&](const char* kind, std::vector<TensorId> inputs, Attributes attributes) {
    try {
      build.emit(kind, std::move(inputs), std::move(attributes));
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  const int64_t three = 3, one = 1, zero = 0, two = 2;
  EXPECT_TRUE(has(refused("reduce_scatter", {x}, {{"axis", kAxis}, {"size", two}, {"dimension", two}}), "dimension 2"));
  EXPECT_TRUE(has(refused("all_reduce", {x, half}, {{"axis", kAxis}, {"reduction", "sum"}}), "of one type"));
  EXPECT_TRUE(has(refused("all_gather", {x}, {{"axis", kAxis}}), "split along the dimension over the axis"));
  EXPECT_TRUE(has(refused("all_to_all", {x}, {{"axis", kAxis}, {"size", two}, {"gather", one}, {"split", one}}),
                  "two dimensions"));
  EXPECT_TRUE(has(refused("local_slice", {x}, {{"axis", kAxis}, {"size", three}}), "one of the dimension a rank"));
  EXPECT_TRUE(has(refused("send", {x}, {{"axis", kAxis}, {"offset", zero}}), "offset, which is not 0"));
  EXPECT_TRUE(has(refused("receive", {}, {{"axis", kAxis}, {"offset", one}, {"shape", "2xx"}, {"dtype", "f32"}}),
                  "sizes with an x between"));
  EXPECT_TRUE(has(refused("receive", {}, {{"axis", kAxis}, {"offset", one}, {"shape", "2"}, {"dtype", "f33"}}),
                  "\"f33\", which is no type"));
  // An exchange that leaves its result otherwise than the next one expects it.
  const TensorId sum = build.emit("reduce_scatter", {x}, {{"axis", kAxis}, {"size", two}});
  verify(program, "test");
  program[sum].layout = {};
  EXPECT_THROW(verify(program, "test"), Error);
}

}  // namespace
}  // namespace strata::exchange_test
