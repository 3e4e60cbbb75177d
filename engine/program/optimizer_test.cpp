// Update ops as every optimizer gets them: what they refuse, which states are left out, when they change nothing.
#include "strata/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "engine/plugin/testing.h"

namespace strata::optimizer_test {
namespace {

// p ← p - rate · scale · g; the second state counts updates.
template <class T>
Launch bind(const Update& u) {
  return [u] {
    for (int64_t i = 0; i < u.count(); ++i)
      u.parameter<T>()[i] -= T(u.scalars().rate() * u.scalars().gradient_scale()) * u.gradient<T>()[i];
    if (T* counts = u.state<T>(1))
      for (int64_t i = 0; i < u.count(); ++i) counts[i] += T(u.scalars().step());
  };
}
bool fits(const UpdateView& v) {
  return v.states() == 2 && (!v.has_state(0) || v.state_is(0, v.parameter().shape, DType::bf16)) &&
         (!v.has_state(1) || v.state_is(1, v.parameter().shape, v.parameter().dtype));
}
// Once in a process: this is no plugin, which may say it whenever it is made.
void register_once() {
  static const OpKind& kind = register_update({.name = "test_update",
                                               .states = "[bf16], [counts]",
                                               .fits = fits,
                                               .cpu = {bind<float>},
                                               .reference = {by_type(bind<float>, bind<double>)}});
  (void)kind;
}

struct Built {
  Program program;
  TensorId parameter, rounded, counts;
  explicit Built(const Shape& shape, bool with_counts, bool with_rounded = false) {
    register_once();
    Builder build(program);
    parameter = build.parameter("p", shape, {});
    const TensorId gradient = build.data("g", shape, DType::f32);
    std::vector<Gradient> gradients{
        {.parameter = parameter, .tensor = gradient, .scale = build.data("scale", {1}, DType::f64), .partial = {}}};
    const Mesh mesh;
    UpdateStage stage(build, gradients, mesh);
    if (with_rounded) rounded = stage.state(gradients[0], "rounded", shape, DType::bf16);
    if (with_counts) counts = stage.state(gradients[0], "counts", shape);
    stage.append("test_update", gradients[0], {rounded, counts}, {{"learning_rate", 0.5}, {"weight_decay", 0.25}});
  }
  const Op& op() const { return program.ops.back(); }
};

TEST(Optimizer, StatesLeftOutHaveNoOutput) {
  const Built with({4}, true), without({4}, false);
  EXPECT_EQ(with.op().outputs, (std::vector<TensorId>{with.parameter, with.counts}));
  EXPECT_EQ(without.op().outputs, std::vector<TensorId>{without.parameter});
  for (const Built* built : {&with, &without}) verify(built->program, "test");
}

TEST(Optimizer, WeightDecaySparesVectors) {
  EXPECT_EQ(Built({4}, false).op().attributes.real("weight_decay"), 0);
  EXPECT_EQ(Built({4, 2}, false).op().attributes.real("weight_decay"), 0.25);
}

// The seed, and a stream that is the state's own, come where a state is rounded to and nowhere else.
TEST(Optimizer, RoundedStatesGetTheirStream) {
  const Built exact({4}, true), rounded({4}, true, true);
  EXPECT_FALSE(exact.op().inputs[UpdateView::kSeed]);
  EXPECT_FALSE(exact.op().attributes.has("stream.1"));
  EXPECT_EQ(rounded.op().inputs[UpdateView::kSeed], rounded.program.find(kSeedScalar));
  EXPECT_TRUE(rounded.op().attributes.has("stream.0"));
  EXPECT_FALSE(rounded.op().attributes.has("stream.1"));
  Program without_seed = rounded.program;
  without_seed.ops.back().inputs[UpdateView::kSeed] = {};
  EXPECT_NE(test::message_of([&] { verify(without_seed, "test"); }).find("with states of 16 bits, seed"),
            std::string::npos);
}

TEST(Optimizer, WrongStatesAreRefused) {
  Built built({4}, true);
  built.program[built.counts].shape = {5};
  const std::string message = test::message_of([&] { verify(built.program, "test"); });
  EXPECT_NE(message.find("then the states: [bf16], [counts]"), std::string::npos) << message;
}

TEST(Optimizer, AScaleOfNanChangesNothing) {
  for (const char* backend : {"cpu", "reference"}) {
    const Built built({3}, true);
    std::vector<float> p{1, 2, 3}, counts{0, 0, 0};
    const std::vector<float> g{1, 1, 2};
    double step = 7, factor = 2, scale = std::nan("");
    Threads threads(1);
    const OpView view(built.program, built.op());
    const auto at = [](const auto& values) { return const_cast<float*>(values.data()); };
    const Launch launch = view.op().kind->kernels.at(backend).bind(
        Binding(view, {at(p), at(g), &step, &factor, &scale, nullptr, nullptr, at(counts)}, {at(p), at(counts)},
                nullptr, threads));
    launch();
    EXPECT_EQ(p, (std::vector<float>{1, 2, 3}));
    EXPECT_EQ(counts, (std::vector<float>{0, 0, 0}));
    scale = 0.5;  // read when it runs
    launch();
    EXPECT_EQ(p, (std::vector<float>{0.5, 1.5, 2}));
    EXPECT_EQ(counts, (std::vector<float>{7, 7, 7}));
  }
}

}  // namespace
}  // namespace strata::optimizer_test
