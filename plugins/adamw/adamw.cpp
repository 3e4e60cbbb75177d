// The AdamW optimizer as a plugin: its options, its op kind and the op for each parameter.
// The mathematics is in adamw_kernel.h.
#include <cmath>

#include "plugins/adamw/adamw_kernel.h"
#include "strata/convert.h"
#include "strata/plugin.h"
#include "strata/random.h"

namespace {

using strata::Attributes;
using strata::Binding;
using strata::DType;
using strata::OpView;
using strata::TensorId;
using strata::TensorSpec;

// Inputs: parameter, gradient, m, v (…, one shape), step, learning_rate_factor, [gradient scale], [seed] (f64 {1}).
// Beside an f32 parameter the gradient may have 16 bits, and m and v may be bf16, which is rounded to stochastically.
// Outputs: parameter, m, v, in place.
std::vector<TensorSpec> shape(const OpView& view) {
  const auto scalar = [&](int i) {
    return view.input(i).dtype == DType::f64 && view.input(i).shape == strata::Shape{1};
  };
  bool right = view.inputs() >= 6 && view.inputs() <= 8;
  for (int i = 0; right && i < 6; ++i) right = view.has_input(i);
  for (int i = 1; right && i < 4; ++i) {
    const DType type = view.input(i).dtype, own = view.input(0).dtype;
    right = view.input(i).shape == view.input(0).shape &&
            (type == own ||
             (own == DType::f32 && (i == 1 ? strata::is_half(type) : type == DType::bf16 && view.has_input(7))));
  }
  right = right && view.input(2).dtype == view.input(3).dtype &&
          (view.input(0).dtype == DType::f32 || view.input(0).dtype == DType::f64) && scalar(4) && scalar(5) &&
          (!view.has_input(6) || scalar(6)) && (!view.has_input(7) || scalar(7));
  require(
      right, view,
      "parameter, gradient, m and v of one shape, then the f64 (1) scalars step, factor, scale and, with moments in "
      "bf16, seed");
  const auto like = [&](int i) { return TensorSpec{view.input(i).shape, view.input(i).dtype}; };
  return {like(0), like(2), like(3)};
}

strata::adamw::Settings settings(const Binding& b) {
  const Attributes& a = b.attributes();
  return {.beta1 = a.real("beta1"),
          .beta2 = a.real("beta2"),
          .epsilon = a.real("epsilon"),
          .learning_rate = a.real("learning_rate") * *b.in<double>(5),
          .weight_decay = a.real("weight_decay"),
          .gradient_scale = b.has_input(6) ? *b.in<double>(6) : 1.0};
}

strata::Launch bind_cpu(const Binding& b) {
  require(b.input(0).dtype == DType::f32, b, "f32 tensors on the cpu backend");
  const int64_t count = strata::elements(b.input(0).shape);
  const DType gradient = b.input(1).dtype, moment = b.input(2).dtype;
  strata::adamw::Rounding rounding{.global = strata::GlobalIndex(b.input(0))};
  const uint64_t streams[] = {uint64_t(b.attributes().integer("m_stream", 0)),
                              uint64_t(b.attributes().integer("v_stream", 0))};
  return [=]() mutable {
    const strata::adamw::Settings s = settings(b);
    if (std::isnan(s.gradient_scale)) return;
    const double step = *b.in<double>(4);
    const auto factors = strata::adamw::factors<float>(s, step);
    if (gradient == DType::f32 && moment == DType::f32)
      return strata::adamw::update(b.threads(), b.out<float>(0), b.in<float>(1), b.out<float>(1), b.out<float>(2),
                                   count, factors);
    const uint64_t of_step = uint64_t(step) * 0x9E3779B97F4A7C15;
    if (moment != DType::f32)
      rounding = {uint64_t(*b.in<double>(7)), streams[0] ^ of_step, streams[1] ^ of_step, rounding.global};
    strata::adamw::update(b.threads(), b.out<float>(0), b.in<void>(1), gradient, b.out<void>(1), b.out<void>(2), moment,
                          count, factors, rounding);
  };
}

template <class T>
strata::Launch bind_reference(const Binding& b) {
  strata::require(!strata::is_half(b.input(1).dtype) && !strata::is_half(b.input(2).dtype), b,
                  "f32 or f64 tensors on the reference backend");
  return [b] {
    if (std::isnan(settings(b).gradient_scale)) return;
    strata::adamw::reference_update(b.out<T>(0), b.in<T>(1), b.out<T>(1), b.out<T>(2),
                                    strata::elements(b.input(0).shape), settings(b), *b.in<double>(4));
  };
}

// Called when the plugin is made, not when its library is loaded: the engine checks that the library fits in between.
void register_once() {
  static bool done = false;
  if (done) return;
  done = true;
  strata::OpKind kind;
  kind.name = "adamw";
  kind.summary = "parameter, gradient, m, v, step, factor, [scale], [seed] -> parameter, m, v";
  kind.shape = shape;
  // About 12 operations an element; every tensor is read once and all but the gradient written.
  kind.cost = [](const OpView& view) {
    const double count = double(strata::elements(view.input(0).shape));
    return strata::Cost{.flops = 12 * count,
                        .bytes = 2 * double(view.input(0).bytes() + view.input(2).bytes() + view.input(3).bytes()) +
                                 double(view.input(1).bytes())};
  };
  kind.kernels["cpu"] = {bind_cpu, {}};
  kind.kernels["reference"] = {[](const Binding& b) {
                                 return b.input(0).dtype == DType::f64 ? bind_reference<double>(b)
                                                                       : bind_reference<float>(b);
                               },
                               {}};
  register_kind(std::move(kind));
}

class AdamW final : public strata::Plugin {
 public:
  AdamW() { register_once(); }

  void options(strata::Options& o) override {
    o.add("learning_rate", settings_.learning_rate, "step size at the schedule's peak").positive();
    o.add("beta1", settings_.beta1, "decay of the first moment").range(0, 0.9999999);
    o.add("beta2", settings_.beta2, "decay of the second moment").range(0, 0.9999999);
    o.add("epsilon", settings_.epsilon, "added to the root of the second moment").positive();
    o.add("weight_decay", settings_.weight_decay, "decoupled decay of tensors with two dimensions or more")
        .non_negative();
  }

  strata::Capabilities capabilities() const override { return {.provides = {"optimizer"}}; }

  void update(strata::UpdateStage& stage) override {
    strata::Builder& build = stage.build();
    const TensorId step = build.scalar(strata::kStepScalar), factor = build.scalar(strata::kLearningRateFactor);
    for (const strata::Gradient& gradient : stage.gradients()) {
      const strata::Tensor parameter = build[gradient.parameter];  // a copy: adding states moves the list
      const DType type = stage.rounded_state();
      const TensorId m = stage.state(gradient, "adamw.m", parameter.shape, type);
      const TensorId v = stage.state(gradient, "adamw.v", parameter.shape, type);
      std::vector<TensorId> inputs{gradient.parameter, gradient.tensor, m, v, step, factor};
      if (gradient.scale || type != DType::f32) inputs.push_back(gradient.scale);
      if (type != DType::f32) inputs.push_back(build.scalar(strata::kSeedScalar));
      Attributes attributes{{"beta1", settings_.beta1},
                            {"beta2", settings_.beta2},
                            {"epsilon", settings_.epsilon},
                            {"learning_rate", settings_.learning_rate},
                            {"weight_decay", parameter.shape.size() >= 2 ? settings_.weight_decay : 0.0}};
      if (type != DType::f32) {  // rounding is the same wherever a moment is updated, and in whichever copy
        attributes.set("m_stream", int64_t(strata::stream_of(build[m].name)));
        attributes.set("v_stream", int64_t(strata::stream_of(build[v].name)));
      }
      build.emit_all("adamw", inputs, std::move(attributes), {gradient.parameter, m, v});
    }
  }

 private:
  strata::adamw::Settings settings_;
};

}  // namespace

STRATA_PLUGIN(AdamW, "adamw", "1.0.0", "AdamW: Adam with decoupled weight decay")
