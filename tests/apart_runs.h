// Runs of ranks that train apart (ExchangeStage::leave) on made-up gradients, beside what NumPy programs of the papers
// make of them (tests/reference/apart.py), and what all plugins that let ranks train apart have in common.
#pragma once
#include <cmath>
#include <map>
#include <mutex>

#include "engine/runtime/saver.h"
#include "tests/apart_recorded.h"
#include "tests/exchange_runs.h"

namespace strata::test {

// Gradients of norms' weights become functions of element, rank and step, as the recorded programs have them.
class MadeUpGradients final : public Plugin {
 public:
  explicit MadeUpGradients(std::string axis) : axis_(std::move(axis)) {
    static const bool once = [] {
      OpKind kind{.name = "made_up_gradient", .summary = "gradient (…), step -> another"};
      kind.shape = [](const OpView& v) -> std::vector<TensorSpec> { return {{v.input(0).shape, DType::f32}}; };
      kind.kernels["cpu"] = {[](const Binding& b) -> Launch {
        return [b, global = GlobalIndex(b.input(0)), rank = double(b.attributes().integer("coordinate")) + 1,
                ranks = double(b.attributes().integer("ranks"))] {
          const double step = *b.in<double>(1);
          // Of the mean over all sequences.
          for (int64_t j = 0; j < elements(b.output(0).shape); ++j) {
            const auto i = double(global(j));
            b.out<float>(0)[j] =
                float((std::sin(1.7 * i + 2.3 * rank + 0.9 * step) + 0.3 * std::cos(0.5 * i * rank)) / ranks);
          }
        };
      }};
      register_kind(std::move(kind));
      return true;
    }();
    (void)once;
  }

  Capabilities capabilities() const override { return {.early = true}; }

  void backward(ProgramStage& stage) override {
    Builder build(stage.program);
    build.step_part = StepPart::backward;
    build.role = Role::gradient;
    for (Gradient& gradient : *stage.gradients) {
      if (stage.program[gradient.parameter].lasting->initializer.kind != Initializer::Kind::ones) continue;
      name = parameter_name(stage.program, gradient);
      const Layout layout = build[gradient.tensor].layout;
      gradient.tensor = build.emit(
          "made_up_gradient", {gradient.tensor, build.scalar(kStepScalar)},
          {{"axis", axis_}, {"coordinate", int64_t{0}}, {"ranks", stage.mesh.size("data") * stage.batch.microbatches}});
      stage.program[gradient.tensor].layout = layout;
    }
  }
  std::string name;  // of one of them

 private:
  std::string axis_;
};

// Each rank's parameters after each step, beside f64: 1e-5 of values near 1. `ranks`: of the data, in groups of
// neighbours that share what `plugins` divide among them.
inline void expect_recorded(
    const std::string& plugins,
    const double (&recorded)[apart::recorded::kSteps][apart::recorded::kRanks][apart::recorded::kElements],
    int in_group = 1) {
  using namespace apart::recorded;
  const std::string axis = in_group > 1 ? "replicate" : "data";
  std::string text = exchange_config(32, 4, kRanks * in_group, plugins + "axis = \"" + axis + "\"\n", 1,
                                     in_group > 1 ? "replicate = " + std::to_string(kRanks) + "\n" : "");
  const auto put = [&](const std::string& before, const std::string& after) {
    text.replace(text.find(before), before.size(), after);
  };
  put("global_batch = 8", "global_batch = 6");
  put("learning_rate = 1e-3", "learning_rate = 1e-2\nbeta1 = 0.9\nbeta2 = 0.95\nepsilon = 1e-2");
  int looked = 0;
  std::mutex mutex;
  run_local(
      kRanks * in_group,
      [&](World& world) {
        MadeUpGradients gradients(axis);
        Runner runner(text, {{"made_up", &gradients}}, Goal::train, {}, &world);
        const std::vector<int32_t> tokens(128, 3);
        for (int step = 0; step < kSteps; ++step) {
          runner.run_step(tokens.data(), tokens.data());
          const std::vector<float> values = runner.values(gradients.name);
          const std::lock_guard lock(mutex);
          for (int i = 0; i < kElements; ++i)
            EXPECT_NEAR(values[size_t(i)], recorded[step][world.rank() / in_group][i], 1e-5)
                << "step " << step + 1 << ", rank " << world.rank() << ", element " << i;
          ++looked;
        }
      },
      60);
  EXPECT_EQ(looked, kRanks * in_group * kSteps);
}

// What each rank has of all persistent tensors when a run of so many steps has been made or, with none, a checkpoint
// has been loaded; saved to a folder if one is named.
struct ApartRun {
  std::vector<std::map<std::string, std::vector<float>>> values;  // by rank and name
  Saver::Loaded loaded;                                           // of rank 0
};
inline ApartRun run_apart(int ranks, const std::string& text, int steps, const std::string& from, const std::string& to,
                          bool everything = true) {
  ApartRun run;
  run.values.resize(size_t(ranks));
  std::mutex mutex;
  run_losses(ranks, text, steps, [&](Runner& runner, World& world, int step) {
    if (step != steps - 1) return;
    Threads threads(1);
    const Mesh mesh(world.rank(), {{"replicate", 1}, {"shard", ranks}});
    if (!to.empty()) std::filesystem::create_directories(to);
    world.gather("");
    Saver saver(*runner.storage, mesh, world, threads, to.empty() ? from : to, 1, false);
    if (!from.empty()) {
      Saver::Loaded loaded = saver.load(find_checkpoint(from, ""), everything, 1);
      const std::lock_guard lock(mutex);
      if (world.rank() == 0) run.loaded = std::move(loaded);
    }
    if (!to.empty()) {
      EXPECT_EQ(saver.save({steps, 8 * steps, {}, "text"}), "");
    }
    {
      const std::lock_guard lock(mutex);
      for (const Tensor& tensor : runner.storage->persistent_tensors())
        if (tensor.dtype == DType::f32) run.values[size_t(world.rank())][tensor.name] = runner.values(tensor.name);
    }
    world.gather("");
  });
  return run;
}

}  // namespace strata::test
