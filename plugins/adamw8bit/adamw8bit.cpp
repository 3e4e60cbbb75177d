// AdamW with 8-bit moments as a plugin. The mathematics is in adamw8bit_kernel.h.
#include <cmath>

#include "plugins/adamw8bit/adamw8bit_kernel.h"
#include "strata/plugin.h"

namespace {

using strata::Binding;
using strata::DType;
using strata::OpView;
using strata::Shape;
using strata::TensorId;
using strata::TensorSpec;

// Blocks lie within rows; a vector is one row.
int64_t rows_of(const Shape& shape) { return shape.size() > 1 ? shape[0] : 1; }
Shape scales_of(const Shape& shape) {
  const int64_t of_row = strata::adamw8bit::blocks(strata::elements(shape) / rows_of(shape));
  return shape.size() > 1 ? Shape{shape[0], of_row} : Shape{of_row};
}

// Inputs: parameter, gradient, m, m_scale, v, v_scale, step, learning_rate_factor, [gradient scale].
// Outputs: parameter, m, m_scale, v, v_scale, in place.
std::vector<TensorSpec> shape(const OpView& v) {
  bool right = v.inputs() == 9;
  for (int i = 0; right && i < 8; ++i) right = v.has_input(i);
  right = right && v.input(0).dtype == DType::f32 && v.input(1).dtype == DType::f32 && v.input(2).dtype == DType::u8 &&
          v.input(4).dtype == DType::u8;
  for (int i : {1, 2, 4}) right = right && v.input(i).shape == v.input(0).shape;
  for (int i : {3, 5}) right = right && v.input(i).shape == scales_of(v.input(0).shape);
  strata::require(right, v,
                  "parameter, gradient (f32), m, m_scale, v, v_scale (u8 with f32 a block), step, factor, [scale]");
  std::vector<TensorSpec> specs;
  for (int i : {0, 2, 3, 4, 5}) specs.push_back({v.input(i).shape, v.input(i).dtype});
  return specs;
}

strata::Launch bind(const Binding& b) {
  return [b] {
    const auto& a = b.attributes();
    const strata::adamw8bit::Settings settings{.beta1 = a.real("beta1"),
                                               .beta2 = a.real("beta2"),
                                               .epsilon = a.real("epsilon"),
                                               .learning_rate = a.real("learning_rate") * *b.in<double>(7),
                                               .weight_decay = a.real("weight_decay"),
                                               .gradient_scale = b.has_input(8) ? *b.in<double>(8) : 1.0};
    if (std::isnan(settings.gradient_scale)) return;
    strata::adamw8bit::update(b.threads(), b.out<float>(0), b.in<float>(1), b.out<uint8_t>(1), b.out<float>(2),
                              b.out<uint8_t>(3), b.out<float>(4), rows_of(b.input(0).shape),
                              strata::elements(b.input(0).shape) / rows_of(b.input(0).shape), settings,
                              *b.in<double>(6));
  };
}

void register_once() {
  static const bool once = [] {
    strata::register_kind(
        {.name = "adamw_8bit",
         .summary = "parameter, gradient, m, m_scale, v, v_scale, step, factor, [scale] -> all but gradient",
         .shape = shape,
         .cost =
             [](const OpView& v) {
               const double count = double(strata::elements(v.input(0).shape));
               return strata::Cost{.flops = 60 * count, .bytes = 16 * count};
             },
         .kernels = {{"cpu", {bind, {}}}, {"reference", {bind, {}}}}});
    return true;
  }();
  (void)once;
}

class AdamW8Bit final : public strata::Plugin {
 public:
  AdamW8Bit() { register_once(); }

  void options(strata::Options& o) override {
    o.add("learning_rate", settings_.learning_rate, "step size at the schedule's peak").positive();
    o.add("beta1", settings_.beta1, "decay of the first moment").range(0, 0.9999999);
    o.add("beta2", settings_.beta2, "decay of the second moment").range(0, 0.9999999);
    o.add("epsilon", settings_.epsilon, "added to the root of the second moment").positive();
    o.add("weight_decay", settings_.weight_decay, "decoupled decay of tensors with two dimensions or more")
        .non_negative();
  }

  strata::Capabilities capabilities() const override { return {.provides = {"optimizer", "lowers optimizer_state"}}; }

  void update(strata::UpdateStage& stage) override {
    strata::Builder& build = stage.build();
    const TensorId step = build.scalar(strata::kStepScalar), factor = build.scalar(strata::kLearningRateFactor);
    for (const strata::Gradient& stored : stage.gradients()) {
      const strata::Gradient gradient = stage.in_f32(stored);
      const Shape shape = build[gradient.parameter].shape;  // a copy: adding states moves the list
      const Shape scales = scales_of(shape);
      std::vector<TensorId> states;
      for (const char* moment : {"m", "v"}) {
        states.push_back(stage.state(gradient, std::string("adamw8bit.") + moment, shape, DType::u8));
        states.push_back(stage.state(gradient, std::string("adamw8bit.") + moment + "_scale", scales, DType::f32,
                                     shape.size() > 1 ? std::vector<int>{0, strata::UpdateStage::kNone}
                                                      : std::vector<int>{strata::UpdateStage::kNone}));
      }
      std::vector<TensorId> inputs{gradient.parameter, gradient.tensor}, outputs{gradient.parameter};
      inputs.insert(inputs.end(), states.begin(), states.end());
      outputs.insert(outputs.end(), states.begin(), states.end());
      inputs.insert(inputs.end(), {step, factor, gradient.scale});
      build.emit_all("adamw_8bit", inputs,
                     {{"beta1", settings_.beta1},
                      {"beta2", settings_.beta2},
                      {"epsilon", settings_.epsilon},
                      {"learning_rate", settings_.learning_rate},
                      {"weight_decay", shape.size() >= 2 ? settings_.weight_decay : 0.0}},
                     outputs);
    }
  }

 private:
  strata::adamw8bit::Settings settings_;
};

}  // namespace

STRATA_PLUGIN(AdamW8Bit, "adamw8bit", "1.0.0", "AdamW with 8-bit moments in blocks, a quarter of their memory")
