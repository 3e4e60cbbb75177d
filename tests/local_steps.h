// Two plugins with phases, for tests and as examples (docs/plugins.md). Both can also be made "by hand": for the
// program of one step's phases alone, without declaring any.
#pragma once
#include <optional>
#include <string>

#include "strata/plugin.h"

namespace strata::test {

class WithPhases : public Plugin {
 protected:
  WithPhases() = default;
  explicit WithPhases(int64_t step) : by_hand_(step) {}
  void declare(PhaseStage& stage, const std::string& name, const Steps& steps) const {
    if (!by_hand_) stage.declare(name, steps);
  }
  bool in(const Phases& phases, const std::string& name, const Steps& steps) const {
    return by_hand_ ? steps.contain(*by_hand_) : phases.in(name);
  }

 private:
  std::optional<int64_t> by_hand_;  // the step
};

// Gradients wait on the rank that made them for `every` steps; in the last of those they are summed over ranks and
// used. Three programs: one sets what waits, one adds to it, one adds, exchanges and updates.
class LocalSteps final : public WithPhases {
 public:
  LocalSteps() = default;
  explicit LocalSteps(int64_t step) : WithPhases(step) {}
  void options(Options& o) override { o.add("every", every_, "steps between updates").positive().unit("steps"); }
  Capabilities capabilities() const override { return {.provides = {"summed_gradients"}, .early = true}; }

  void phases(PhaseStage& stage) override {
    declare(stage, kFirst, first());
    declare(stage, kExchange, last());
  }
  void exchange(ExchangeStage& stage) override {
    if (!in(stage.phases(), kExchange, last())) return;
    for (const Gradient& gradient : stage.gradients()) stage.want(gradient, {});
  }
  void gradients(GradientStage& stage) override {
    Builder& build = stage.build();
    const bool is_first = in(stage.phases(), kFirst, first()), is_last = in(stage.phases(), kExchange, last());
    for (Gradient& gradient : stage.gradients()) {
      const Tensor made = build[gradient.tensor];
      const TensorId waiting =
          build.state(parameter_name(build.program(), gradient) + ".waiting", made.shape, made.dtype);
      // Each rank has another one: together they are one tensor, of which each holds its rows.
      if (const int ranks = stage.mesh().size(kDataAxis); ranks > 1)
        build.program()[waiting].layout =
            Layout{{.dimension = 0, .axis = std::string(kDataAxis), .full = made.shape[0] * ranks, .unseen = true}};
      if (is_last && is_first) continue;
      if (is_last) {
        gradient.tensor = build.emit("add", {waiting, gradient.tensor});
        build.program()[gradient.tensor].layout = made.layout;
      } else if (is_first) {
        build.emit_all("cast", {gradient.tensor}, {{"dtype", std::string(name_of(made.dtype))}}, {waiting});
      } else {
        build.emit_all("add", {waiting, gradient.tensor}, {}, {waiting});
      }
    }
    if (!is_last) stage.gradients().clear();  // nobody updates anything
  }

 private:
  static constexpr const char *kFirst = "local steps: first", *kExchange = "local steps: exchange";
  Steps first() const { return {.every = every_}; }
  Steps last() const { return {.first = every_, .every = every_}; }
  int64_t every_ = 3;
};

// From a step on, the sum of parameters as they were after each update.
class SumParameters final : public WithPhases {
 public:
  SumParameters() = default;
  explicit SumParameters(int64_t step) : WithPhases(step) {}
  void options(Options& o) override { o.add("from", from_, "first step").positive().unit("steps"); }
  Capabilities capabilities() const override { return {.requires_ = {"optimizer"}}; }

  void phases(PhaseStage& stage) override { declare(stage, kName, {.first = from_}); }
  void update(UpdateStage& stage) override {
    if (!in(stage.phases(), kName, {.first = from_})) return;
    for (const Gradient& gradient : stage.gradients()) {
      const TensorId sum = stage.state(gradient, "sum", stage.build()[gradient.parameter].shape);
      stage.build().emit_all("add", {sum, gradient.parameter}, {}, {sum});
    }
  }

 private:
  static constexpr const char* kName = "sum of parameters";
  int64_t from_ = 5;
};

}  // namespace strata::test
