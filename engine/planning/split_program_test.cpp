// A program that is split over ranks against central differences in double: through every exchange that is inserted,
// forward and backward, and with the sums that gradients of whole parameters are left for.
#include "engine/planning/split_program.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>
#include <random>
#include <set>

#include "comm/world.h"
#include "engine/planning/localize.h"
#include "engine/planning/memory_plan.h"
#include "engine/program/autodiff.h"
#include "engine/program/sharding.h"
#include "engine/runtime/executor.h"
#include "engine/runtime/ranks.h"
#include "strata/builder.h"
#include "strata/layout.h"

namespace strata::split_program_test {
namespace {

using Values = std::vector<double>;

constexpr int64_t kBatch = 2, kTime = 4, kHidden = 3, kHeads = 4, kHeadSize = 2, kFfn = 5, kVocabulary = 7;
const std::string kAxis{kTensorAxis};

Mesh mesh_of(int rank, int ranks) { return Mesh(rank, {{"shard", 1}, {kAxis, ranks}}); }

struct Built {
  Program program;
  TensorId tokens, targets;
  std::vector<TensorId> parameters, gradients;
  std::vector<Partial> partial;  // of the gradients
};

// A transformer of one layer: every kind of split that a model has. 5 and 7 do not divide evenly.
Built build(int ranks, bool sequence) {
  Built built;
  Program& program = built.program;
  Builder b(program);
  b.microbatch = 0;
  const auto parameter = [&](const std::string& name, const Shape& shape, const Dimensions& dimensions) {
    const TensorId id = b.parameter(name, shape, {}, dimensions);
    program[id].dtype = DType::f64;
    return id;
  };
  const auto norm = [&](const std::string& name, TensorId x) {
    return b.emit(
        "layer_norm",
        {x, parameter(name + ".weight", {kHidden}, {"hidden"}), parameter(name + ".bias", {kHidden}, {"hidden"})},
        {{"epsilon", 1e-5}});
  };
  const auto linear = [&](const std::string& name, TensorId x, int64_t size, const Dimension& out,
                          const Dimension& in) {
    const TensorId weight = parameter(name + ".weight", {size, b[x].shape.back()}, {out, in});
    return b.emit("linear", {x, weight, parameter(name + ".bias", {size}, {out})});
  };
  const auto residual = [&](TensorId x) { return b.name_dimensions(x, {"batch", "time", "hidden"}); };
  built.tokens = b.data("tokens", {kBatch, kTime}, DType::i32, {"batch", "time"});
  built.targets = b.data("targets", {kBatch, kTime}, DType::i32, {"batch", "time"});
  const TensorId embedding = parameter("embedding", {kVocabulary, kHidden}, {"vocabulary", "hidden"}),
                 positions = parameter("positions", {kTime, kHidden}, {"context", "hidden"});
  TensorId x = residual(b.emit("embedding", {built.tokens, embedding, positions}));
  const TensorId qkv = linear("qkv", norm("norm1", x), kHeads * 3 * kHeadSize, {"heads", 3 * kHeadSize}, "hidden");
  const TensorId attention = b.emit("attention", {qkv}, {{"head_size", kHeadSize}, {"queries_per_group", 1}});
  x = residual(b.emit("add", {x, linear("out", attention, kHidden, "hidden", {"heads", kHeadSize})}));
  const TensorId inner = b.emit("gelu", {linear("up", norm("norm2", x), kFfn, "ffn", "hidden")});
  x = residual(b.emit("add", {x, linear("down", inner, kHidden, "hidden", "ffn")}));
  const TensorId loss =
      b.emit("lm_head_loss", {norm("norm3", x), embedding, built.targets}, {{"scale", 1.0 / (kBatch * kTime)}}, "loss");
  program.losses = {loss};

  std::vector<NamedSplit> splits;
  for (const char* name : {"heads", "ffn", "vocabulary"}) splits.push_back({.dimension = name, .axis = kAxis});
  if (sequence) splits.push_back({.dimension = "time", .axis = kAxis, .role = Role::activation});
  const Mesh mesh = mesh_of(0, ranks);
  split_program(program, splits, {}, mesh);
  built.parameters = program.with_role(Role::parameter);
  built.gradients = differentiate(program, {{loss, {}}}, built.parameters).wanted;
  const std::vector<Partial> partial = partial_sums(program, "test", &mesh);
  for (size_t i = 0; i < built.parameters.size(); ++i) {
    Tensor& gradient = program[built.gradients[i]];
    gradient.layout = program[built.parameters[i]].layout;
    gradient.step_output = true;
    built.partial.push_back(partial[size_t(built.gradients[i].value)]);
  }
  program[loss].step_output = true;
  verify(program, "test", &mesh);
  return built;
}

Values random_values(std::mt19937& random, int64_t count) {
  std::normal_distribution<double> normal;
  Values values(static_cast<size_t>(count));
  for (double& value : values) value = normal(random);
  return values;
}

double loss_of(const Program& program, const Executor& executor) {
  const TensorId id = program.losses[0];
  return program[id].dtype == DType::f64 ? *static_cast<double*>(executor.pointer(id))
                                         : double(*static_cast<float*>(executor.pointer(id)));
}

// Along a random direction of each parameter: its gradient's product with it, put together from the ranks' parts, and
// central differences of the loss.
void check(int ranks, bool sequence) {
  const Built planned = build(ranks, sequence);
  std::mt19937 random(5);
  std::vector<Values> values, ways;
  std::vector<std::string> names;
  for (TensorId id : planned.parameters) {
    values.push_back(random_values(random, elements(planned.program[id].full_shape())));
    ways.push_back(random_values(random, int64_t(values.back().size())));
    names.push_back(planned.program[id].name);
  }
  std::vector<double> products(values.size()), differences(values.size());
  std::mutex mutex;
  run_local(
      ranks,
      [&](World& world) {
        Program program = planned.program;
        const MemoryPlan plan = plan_memory(program, "reference", 1);
        const Mesh mesh = mesh_of(world.rank(), ranks);
        const Groups groups = make_groups(world, mesh, nullptr, {}, false, {&program});
        localize(program, mesh, 1);
        Threads threads(1);
        Storage storage(program, plan, {}, {}, nullptr);
        Executor executor(program, plan, storage, "reference", threads, 1, &groups);
        const auto each = [&](TensorId id, auto&& visit) {
          const GlobalIndex global(program[id]);
          auto* data = static_cast<double*>(executor.pointer(id));
          for (int64_t i = 0; i < elements(program[id].shape); ++i) visit(data[i], size_t(global(i)));
        };
        const auto set = [&](size_t p, double step) {
          each(planned.parameters[p], [&](double& value, size_t at) { value = values[p][at] + step * ways[p][at]; });
        };
        for (int64_t i = 0; i < kBatch * kTime; ++i) {
          static_cast<int32_t*>(executor.pointer(planned.tokens))[i] = int32_t(i * 5 % kVocabulary);
          static_cast<int32_t*>(executor.pointer(planned.targets))[i] = int32_t((i * 3 + 1) % kVocabulary);
        }
        for (size_t p = 0; p < values.size(); ++p) set(p, 0);
        executor.run();
        {
          const std::lock_guard lock(mutex);
          for (size_t p = 0; p < values.size(); ++p) {
            const bool counts = world.rank() == 0 || !program[planned.parameters[p]].layout.empty() ||
                                planned.partial[p].contains(kAxis);
            each(planned.gradients[p],
                 [&](double value, size_t at) { products[p] += counts ? value * ways[p][at] : 0; });
          }
        }
        constexpr double kStep = 1e-4;
        for (size_t p = 0; p < values.size(); ++p) {
          set(p, kStep);
          executor.run();
          const double above = loss_of(program, executor);
          set(p, -kStep);
          executor.run();
          if (world.rank() == 0) differences[p] = (above - loss_of(program, executor)) / (2 * kStep);
          set(p, 0);
        }
      },
      60);
  for (size_t p = 0; p < values.size(); ++p)  // of the third derivative kStep² is left
    EXPECT_NEAR(products[p], differences[p], 1e-6 * (1 + std::abs(differences[p]))) << names[p];
}

TEST(SplitProgram, GradientsAreCentralDifferences) {
  for (int ranks : {2, 4})
    for (bool sequence : {false, true}) {
      SCOPED_TRACE(std::to_string(ranks) + (sequence ? " ranks, sequences too" : " ranks"));
      std::set<std::string> exchanges;
      for (const Op& op : build(ranks, sequence).program.ops)
        if (op.kind->exchange) exchanges.insert(op.kind->name);
      const std::set<std::string> sums = {"all_reduce"}, shares = {"all_gather", "all_reduce", "reduce_scatter"};
      EXPECT_EQ(exchanges, sequence ? shares : sums);
      check(ranks, sequence);
    }
}

}  // namespace
}  // namespace strata::split_program_test
