// Clipping by the global norm of all gradients (Pascanu et al., arXiv 1211.5063), as a scalar that the update reads:
// gradients are read once for the norm and never rewritten.
#include <algorithm>
#include <cmath>
#include <utility>

#include "strata/exact_sum.h"
#include "strata/plugin.h"

namespace {

// norm = scale·√Σ, factor = min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_. In a step that
// overflowed (the scale is NaN) the norm is told as 0, and the factor does not matter.
strata::Kernel factor_kernel() {
  return {[](const strata::Binding& b) -> strata::Launch {
            const double limit = b.attributes().real("max_norm");
            return [b, limit] {
              const double scale = b.has_input(1) ? *b.in<double>(1) : 1;
              const double norm = std::isnan(scale) ? 0 : scale * std::sqrt(strata::value_of_sum(b.in<double>(0)));
              *b.out<double>(0) = std::min(1.0, limit / (norm + 1e-6));
              *b.out<double>(1) = norm;
            };
          },
          {}};
}

class Clip final : public strata::Plugin {
 public:
  Clip() {
    static const bool once = [] {
      strata::OpKind kind;
      kind.name = "clip_factor";
      kind.summary = "exact sum of squares, [scale f64 (1)] -> factor f64 (1), norm f64 (1)";
      kind.shape = [](const strata::OpView& v) -> std::vector<strata::TensorSpec> {
        strata::require(
            (v.inputs() == 1 || v.inputs() == 2) && v.input(0).shape == strata::Shape{strata::kExactSum}, v,
            "an exact sum and at most a scalar");
        return {{{1}, strata::DType::f64}, {{1}, strata::DType::f64}};
      };
      kind.kernels = {{"cpu", factor_kernel()}, {"reference", factor_kernel()}};
      strata::register_kind(std::move(kind));
      return true;
    }();
    (void)once;
  }

  void options(strata::Options& o) override { o.add("max_norm", max_norm_, "largest global norm").positive(); }

  strata::Capabilities capabilities() const override {
    return {.after = {"summed_gradients", "unscaled_gradients"}, .effect = strata::Effect::program()};
  }

  void gradients(strata::GradientStage& stage) override {
    auto& build = stage.build();
    if (stage.gradients().empty()) return;
    // One scale that is pending on all of them is a factor of their norm. Of several, each is multiplied in.
    const auto shared = [&] {
      return std::all_of(stage.gradients().begin(), stage.gradients().end(), [&](const strata::Gradient& gradient) {
        return gradient.scale == stage.gradients().front().scale;
      });
    };
    if (!shared())
      for (auto& gradient : stage.gradients()) stage.materialize(gradient);
    const strata::TensorId scale = shared() ? stage.gradients().front().scale : strata::TensorId{};
    const std::vector<strata::TensorId> sums = stage.over_all("sum_of_squares", "add_sums");
    std::vector<strata::TensorId> inputs{sums.size() == 1 ? sums[0] : build.emit("add_sums", sums)};
    if (scale) inputs.push_back(scale);
    const auto out = build.emit_all("clip_factor", inputs, {{"max_norm", max_norm_}}, {}, "clip");
    norm_ = build[out[1]].name;
    build.program()[out[1]].step_output = true;
    for (auto& gradient : stage.gradients()) stage.scale(gradient, out[0]);
  }

  void step_end(strata::StepContext& context) override {
    if (!norm_.empty()) context.log("gradient_norm", context.scalar(norm_));  // without gradients there is none
  }

 private:
  double max_norm_ = 1;
  std::string norm_;
};

}  // namespace

STRATA_PLUGIN(Clip, "clip", "1.0.0", "scales gradients down to a global norm")
