// Attention whose tokens ranks divide, in each form, on the backend of plain loops in double: results and gradients are
// those of attention on one rank, and central differences. With grouped queries, in pairs of chunks and contiguous.
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "comm/world.h"
#include "engine/planning/localize.h"
#include "engine/planning/memory_plan.h"
#include "engine/planning/split_program.h"
#include "engine/program/autodiff.h"
#include "engine/runtime/executor.h"
#include "engine/runtime/ranks.h"
#include "strata/builder.h"
#include "strata/layout.h"
#include "tests/random_cases.h"

namespace strata::context_attention_test {
namespace {

using test::cases;
using test::draw;
using test::Random;
using Values = std::vector<double>;

struct Case {
  std::string form;  // empty: attention on one rank
  int ranks = 1;
  bool paired = false;
  int64_t batch = 1, time = 4, groups = 1, per_group = 1, size = 2, window = 0;
  double soft_cap = 0, dropout = 0;
  std::vector<int32_t> documents{};  // of each token where its document begins; empty: all is one
  Shape qkv() const { return {batch, time, groups * (per_group + 2) * size}; }
  Shape out() const { return {batch, time, groups * per_group * size}; }
};

struct Built {
  Program program;
  TensorId qkv, cotangent, documents, seed, step, out, gradient;
};

Mesh mesh_of(int rank, int ranks) { return Mesh(rank, {{"shard", 1}, {"sequence", ranks}}); }

Built built(const Case& c) {
  Built built;
  Builder build(built.program);
  const Dimensions names = {"batch", "time", "heads"};
  built.qkv = build.data("qkv", c.qkv(), DType::f64, names);
  built.cotangent = build.data("cotangent", c.out(), DType::f64, names);
  Attributes attributes{{"head_size", c.size}, {"queries_per_group", c.per_group}};
  if (c.window > 0) attributes.set("window", c.window);
  if (c.soft_cap > 0) attributes.set("soft_cap", c.soft_cap);
  if (!c.form.empty()) attributes.set("form", c.form);
  std::vector<TensorId> inputs{built.qkv};
  if (!c.documents.empty())
    inputs.push_back(built.documents = build.data("documents", {c.batch, c.time}, DType::i32, {"batch", "time"}));
  if (c.dropout > 0) {
    attributes.set("dropout", c.dropout);
    attributes.set("stream", int64_t{77});
    inputs.resize(2);
    inputs.push_back(built.seed = build.data("seed", {1}, DType::f64));
    inputs.push_back(built.step = build.data("step", {1}, DType::f64));
  }
  build.microbatch = 1;
  built.out = build.emit(c.form.empty() ? "attention" : "context_attention", inputs, attributes);
  split_program(built.program, {{.dimension = "time", .axis = "sequence", .role = Role::data, .paired = c.paired}}, {},
                mesh_of(0, c.ranks));
  built.gradient = differentiate(built.program, {{built.out, built.cotangent}}, {built.qkv}).wanted[0];
  const Mesh mesh = mesh_of(0, c.ranks);
  verify(built.program, "test", &mesh);
  for (TensorId id : {built.out, built.gradient}) built.program[id].step_output = true;
  return built;
}

// The whole result and the whole gradient.
std::pair<Values, Values> run(const Case& c, const Values& qkv, const Values& cotangent) {
  const Built planned = built(c);
  Values out(size_t(elements(c.out()))), gradient(qkv.size());
  std::mutex mutex;
  run_local(
      c.ranks,
      [&](World& world) {
        Program program = planned.program;
        const MemoryPlan plan = plan_memory(program, "reference", 1);
        const Mesh mesh = mesh_of(world.rank(), c.ranks);
        const Groups groups = make_groups(world, mesh, nullptr, {}, false, {&program});
        localize(program, mesh, 1);
        Threads threads(1);
        Storage storage(program, plan, {}, {}, nullptr);
        Executor executor(program, plan, storage, "reference", threads, 1, &groups);
        const auto each = [&]<class T = double>(TensorId id, auto&& visit, T = {}) {
          const Tensor& tensor = program[id];
          const GlobalIndex global(tensor);
          auto* data = static_cast<T*>(executor.pointer(id));
          for (int64_t i = 0; i < elements(tensor.shape); ++i) visit(data[i], size_t(global(i)));
        };
        each(planned.qkv, [&](double& value, size_t at) { value = qkv[at]; });
        each(planned.cotangent, [&](double& value, size_t at) { value = cotangent[at]; });
        if (planned.documents)
          each(
              planned.documents, [&](int32_t& value, size_t at) { value = c.documents[at]; }, int32_t{});
        if (c.dropout > 0)
          *static_cast<double*>(executor.pointer(planned.seed)) = 12,
          *static_cast<double*>(executor.pointer(planned.step)) = 3;
        executor.run();
        const std::lock_guard lock(mutex);
        each(planned.out, [&](double value, size_t at) { out[at] = value; });
        each(planned.gradient, [&](double value, size_t at) { gradient[at] = value; });
      },
      60);
  return {out, gradient};
}

Values random_values(Random& random, int64_t count) {
  std::normal_distribution<double> normal;
  Values values(static_cast<size_t>(count));
  for (double& value : values) value = normal(random);
  return values;
}

double dot(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

TEST(ContextAttention, IsAttentionAndItsGradientIsCentralDifferences) {
  for (uint64_t seed = test::first_seed(), end = seed + uint64_t(cases(30)); seed < end; ++seed) {
    Random random(seed);
    const char* forms[] = {"ring", "gather", "ulysses"};
    Case c{.form = forms[seed % 3], .ranks = int(draw(random, 2, 4)), .paired = false, .batch = draw(random, 1, 2)};
    c.paired = c.form != "ulysses" && draw(random, 0, 1);
    c.time = c.ranks * (c.paired ? 2 : 1) * draw(random, 1, 3);
    c.groups = draw(random, 1, 3) * (c.form == "ulysses" ? c.ranks : 1);
    c.per_group = draw(random, 1, 3);
    if (draw(random, 0, 1)) c.window = draw(random, 1, c.time + 1);
    if (draw(random, 0, 1)) c.soft_cap = 0.8;
    if (draw(random, 0, 1)) c.dropout = 0.3;
    if (c.form == "ulysses" && draw(random, 0, 1)) c.groups = 1, c.per_group = c.ranks * draw(random, 1, 2);
    if (c.form != "ulysses" && draw(random, 0, 1))
      for (int64_t i = 0; i < c.batch * c.time; ++i)
        c.documents.push_back(i % c.time > 0 && draw(random, 0, 2) > 0 ? c.documents.back() : int32_t(i % c.time));
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed) + " " + c.form + (c.documents.empty() ? "" : " of documents") +
                 (c.paired ? " in pairs, " : ", ") + std::to_string(c.ranks) + " ranks, qkv " + text(c.qkv()) +
                 ", window " + std::to_string(c.window) + ", cap " + std::to_string(c.soft_cap) + ", dropout " +
                 std::to_string(c.dropout));
    const Values qkv = random_values(random, elements(c.qkv())), way = random_values(random, elements(c.qkv())),
                 cotangent = random_values(random, elements(c.out()));
    const auto [out, gradient] = run(c, qkv, cotangent);
    Case alone = c;
    alone.form = "", alone.ranks = 1;
    const auto [expected, expected_gradient] = run(alone, qkv, cotangent);
    for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], expected[i], 1e-12) << i;
    for (size_t i = 0; i < gradient.size(); ++i) ASSERT_NEAR(gradient[i], expected_gradient[i], 1e-12) << i;
    constexpr double kStep = 1e-4;
    const auto along = [&](double step) {
      Values moved = qkv;
      for (size_t i = 0; i < moved.size(); ++i) moved[i] += step * way[i];
      return dot(run(c, moved, cotangent).first, cotangent);
    };
    const double difference = (along(kStep) - along(-kStep)) / (2 * kStep);
    // Of the third derivative kStep² is left.
    ASSERT_NEAR(dot(gradient, way), difference, 1e-6 * (1 + std::abs(difference)));
  }
}

// Whatever needs all tokens gets them where ranks have one part each; of two chunks each it is refused.
TEST(ContextAttention, KindsWithoutARuleGetNoPairs) {
  const OpKind kind{.name = "test_of_all_tokens",
                    .summary = "x -> x",
                    .shape = [](const OpView& v) -> std::vector<TensorSpec> { return {{v.input(0).shape}}; }};
  register_kind(kind);
  for (bool paired : {false, true}) {
    Program program;
    Builder build(program);
    const TensorId x = build.data("x", {2, 8, 3}, DType::f32, {"batch", "time", "hidden"});
    const TensorId y = build.emit("test_of_all_tokens", {x});
    const std::vector<NamedSplit> splits = {
        {.dimension = "time", .axis = "sequence", .role = Role::data, .paired = paired}};
    try {
      split_program(program, splits, {}, mesh_of(0, 2));
      EXPECT_FALSE(paired);
      EXPECT_EQ(program[y].shape, (Shape{2, 8, 3}));
    } catch (const Error& error) {
      EXPECT_TRUE(paired);
      EXPECT_EQ(error.code(), ExitCode::usage);
      EXPECT_NE(std::string(error.what()).find("an op needs x (2, 8, 3) otherwise than axis \"sequence\" splits it"),
                std::string::npos)
          << error.what();
    }
  }
}

}  // namespace
}  // namespace strata::context_attention_test
