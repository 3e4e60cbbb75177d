// A plugin with a deliberate mistake, for how `strata verify` tells of one: it says that it changes no bit, and from
// the second step on makes the gradient of one matrix a thousandth smaller.
#include <strata/pattern.h>
#include <strata/plugin.h>

namespace {

// gradient f32 (…), step f64 (1) -> the gradient, from step 2 on 0.999 of it.
void register_shrink() {
  strata::OpKind kind{.name = "mistaken_shrink", .summary = "gradient (…), step -> about the same"};
  kind.shape = [](const strata::OpView& v) -> std::vector<strata::TensorSpec> {
    strata::require(v.inputs() == 2 && v.input(0).dtype == strata::DType::f32, v, "a gradient and the step");
    return {{v.input(0).shape, strata::DType::f32}};
  };
  kind.kernels["cpu"] = {[](const strata::Binding& b) -> strata::Launch {
    return [b] {
      const float factor = *b.in<double>(1) >= 2 ? 0.999f : 1.0f;
      for (int64_t i = 0; i < strata::elements(b.output(0).shape); ++i) b.out<float>(0)[i] = b.in<float>(0)[i] * factor;
    };
  }};
  register_kind(std::move(kind));
}

class Mistaken final : public strata::Plugin {
 public:
  Mistaken() { register_shrink(); }
  strata::Capabilities capabilities() const override { return {.effect = strata::Effect::exact()}; }
  void gradients(strata::GradientStage& stage) override {
    for (strata::Gradient& gradient : stage.gradients())
      if (strata::matches("block.1.*down.weight", parameter_name(stage.build().program(), gradient)))
        stage.append("mistaken_shrink", {gradient}, {}, {stage.build().scalar(strata::kStepScalar)});
  }
};

}  // namespace

STRATA_PLUGIN(Mistaken, "mistaken", "1.0.0", "says that it changes nothing, and does")
