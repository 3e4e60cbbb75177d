// The AdamW optimizer as a plugin: its options, its op kind and the op for each parameter.
// The mathematics is in adamw_kernel.h.
#include "plugins/adamw/adamw_kernel.h"
#include "strata/convert.h"
#include "strata/optimizer.h"
#include "strata/plugin.h"

namespace {

using strata::Attributes;
using strata::DType;
using strata::TensorId;
using strata::Update;
using strata::UpdateView;

enum State { kFirst, kSecond };  // moments m and v

// Moments are of the parameter's type, or bf16 beside an f32 parameter, which is rounded to stochastically.
bool fits(const UpdateView& v) {
  if (v.states() != 2 || !v.has_state(kFirst)) return false;
  const DType own = v.parameter().dtype, moment = v.state(kFirst).dtype;
  for (int i : {kFirst, kSecond})
    if (!v.state_is(i, v.parameter().shape, moment)) return false;
  return moment == own || (own == DType::f32 && moment == DType::bf16);
}

strata::adamw::Settings settings(const Update& u) {
  const Attributes& a = u.attributes();
  return {.beta1 = a.real("beta1"),
          .beta2 = a.real("beta2"),
          .epsilon = a.real("epsilon"),
          .learning_rate = u.scalars().rate(),
          .weight_decay = u.scalars().weight_decay,
          .gradient_scale = u.scalars().gradient_scale()};
}

strata::Launch bind_cpu(const Update& u) {
  const DType gradient = u.gradient().dtype, moment = u.state(kFirst).dtype;
  strata::adamw::Rounding rounding{.global = strata::GlobalIndex(u.parameter())};
  return [=, m_stream = u.stream(kFirst), v_stream = u.stream(kSecond)]() mutable {
    const strata::UpdateScalars& scalars = u.scalars();
    const auto factors = strata::adamw::factors<float>(settings(u), scalars.step());
    if (gradient == DType::f32 && moment == DType::f32)
      return strata::adamw::update(u.threads(), u.parameter<float>(), u.gradient<float>(), u.state<float>(kFirst),
                                   u.state<float>(kSecond), u.count(), factors);
    if (moment != DType::f32)
      rounding = {scalars.seed(), scalars.in_step(m_stream), scalars.in_step(v_stream), rounding.global};
    strata::adamw::update(u.threads(), u.parameter<float>(), u.gradient<void>(), gradient, u.state<void>(kFirst),
                          u.state<void>(kSecond), moment, u.count(), factors, rounding);
  };
}

template <class T>
strata::Launch bind_reference(const Update& u) {
  return [u] {
    strata::adamw::reference_update(u.parameter<T>(), u.gradient<T>(), u.state<T>(kFirst), u.state<T>(kSecond),
                                    u.count(), settings(u), u.scalars().step());
  };
}

class AdamW final : public strata::Plugin {
 public:
  AdamW() {
    strata::register_update({.name = "adamw",
                             .states = "m and v of the parameter's shape, of its type or bf16",
                             .fits = fits,
                             .half_gradients = true,
                             .flops = 12,
                             .cpu = {bind_cpu},
                             .reference = {strata::by_type(bind_reference<float>, bind_reference<double>)}});
  }

  void options(strata::Options& o) override {
    o.add("learning_rate", settings_.learning_rate, "step size at the schedule's peak").positive();
    o.add("beta1", settings_.beta1, "decay of the first moment").range(0, 0.9999999);
    o.add("beta2", settings_.beta2, "decay of the second moment").range(0, 0.9999999);
    o.add("epsilon", settings_.epsilon, "added to the root of the second moment").positive();
    o.add("weight_decay", settings_.weight_decay, "decoupled decay of tensors with two dimensions or more")
        .non_negative();
  }

  strata::Capabilities capabilities() const override {
    return {.provides = {"optimizer"}, .effect = strata::Effect::program()};
  }

  void update(strata::UpdateStage& stage) override {
    for (const strata::Gradient& gradient : stage.gradients()) {
      const strata::Shape shape = stage.build()[gradient.parameter].shape;  // a copy: adding states moves the list
      const DType type = stage.rounded_state();
      const TensorId m = stage.state(gradient, "adamw.m", shape, type);
      const TensorId v = stage.state(gradient, "adamw.v", shape, type);
      stage.append("adamw", gradient, {m, v},
                   {{"beta1", settings_.beta1},
                    {"beta2", settings_.beta2},
                    {"epsilon", settings_.epsilon},
                    {"learning_rate", settings_.learning_rate},
                    {"weight_decay", settings_.weight_decay}});
    }
  }

 private:
  strata::adamw::Settings settings_;
};

}  // namespace

STRATA_PLUGIN(AdamW, "adamw", "1.0.0", "AdamW: Adam with decoupled weight decay")
