// The AdamW optimizer as a plugin: its options, its op kind and the op for each parameter.
// The mathematics is in adamw_kernel.h.
#include <algorithm>
#include <map>
#include <set>

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

template <class T>
strata::Launch bind_frozen(const Update& u) {
  return [u, frozen = double(u.attributes().integer("frozen"))] {
    const auto factors = strata::adamw::frozen_factors<T>(settings(u), u.scalars().step(), frozen);
    u.threads().split(u.count(), 4096, [&](int64_t begin, int64_t end) {
      strata::adamw::frozen_update(u.parameter<T>(), u.gradient<T>(), u.state<T>(kFirst), u.state<T>(kSecond), begin,
                                   end, factors);
    });
  };
}

void register_contribution() {
  strata::OpKind kind{.name = "adamw_contribution",
                      .summary =
                          "gradient (…), m of its shape, f32 -> beta1 share m + (1 - beta1) gradient; attributes "
                          "beta1, share"};
  kind.in_place = {{0, 0}};
  kind.shape = [](const strata::OpView& v) -> std::vector<strata::TensorSpec> {
    require(v.inputs() == 2 && v.has_input(0) && v.has_input(1) && v.input(0).shape == v.input(1).shape &&
                v.input(0).dtype == DType::f32 && v.input(1).dtype == DType::f32,
            v, "a gradient and m of its shape, f32");
    return {{v.input(0).shape, DType::f32}};
  };
  const strata::Kernel kernel{[](const strata::Binding& b) -> strata::Launch {
    return [b, beta1 = float(b.attributes().real("beta1")), share = float(b.attributes().real("share"))] {
      const float *gradient = b.in<float>(0), *m = b.in<float>(1);
      float* made = b.out<float>(0);
      b.threads().split(strata::elements(b.input(0).shape), 4096, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) made[i] = strata::adamw::contribution(m[i], gradient[i], beta1, share);
      });
    };
  }};
  kind.kernels = {{"cpu", kernel}, {"reference", kernel}};
  register_kind(std::move(kind));
}

class AdamW final : public strata::Plugin {
 public:
  AdamW() {
    static const bool once = (register_contribution(), true);
    (void)once;
    strata::register_update({.name = "adamw_frozen",
                             .states = "m and v of the parameter's shape and type",
                             .elementwise = true,
                             .flops = 6,
                             .cpu = {bind_frozen<float>},
                             .reference = {strata::by_type(bind_frozen<float>, bind_frozen<double>)}});
    strata::register_update({.name = "adamw",
                             .states = "m and v of the parameter's shape, of its type or bf16",
                             .fits = fits,
                             .half_gradients = true,
                             .elementwise = true,
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
    o.add(
         "freeze", freeze_,
         "steps after which the second moment stays as it is and the first crosses between ranks, not gradients (1-bit "
         "Adam); 0: never")
        .non_negative()
        .unit("steps");
  }

  strata::Capabilities capabilities() const override {
    return {.provides = {"optimizer"}, .early = freeze_ > 0, .effect = strata::Effect::program()};
  }

  void phases(strata::PhaseStage& stage) override {
    if (freeze_ > 0) stage.declare(kFrozen, {.first = std::min(freeze_, strata::Steps::kEnd - 1) + 1});
  }

  // Before the exchange: what ranks sum is the next first moment, in whatever form gradients cross.
  void gradients(strata::GradientStage& stage) override {
    if (!is_frozen(stage.phases())) return;
    strata::Builder& build = stage.build();
    first_.clear();
    for (strata::Gradient& gradient : stage.gradients()) {
      const std::string name = parameter_name(build.program(), gradient);
      const strata::Tensor made = build[gradient.tensor];
      if (made.dtype != DType::f32 || build[gradient.parameter].dtype == DType::f16)
        throw strata::Error(
            "freeze lets the first moment cross between ranks, in f32 and unscaled; train in bf16 or f32, "
            "with gradients in f32.");
      double ranks = 1;
      for (const std::string& axis : gradient.partial) ranks *= stage.mesh().size(axis);
      const TensorId m = first_[name] = build.state(name + ".adamw.m", made.shape, DType::f32);
      build.program()[m].layout = made.layout;
      gradient.tensor = build.emit("adamw_contribution", {gradient.tensor, m},
                                   {{"beta1", settings_.beta1}, {"share", 1 / ranks}}, made.name);
      build.program()[gradient.tensor].layout = made.layout;
    }
  }

  void update(strata::UpdateStage& stage) override {
    if (is_frozen(stage.phases())) require_summed_once(stage);
    for (const strata::Gradient& gradient : stage.gradients()) {
      const strata::Shape shape = stage.build()[gradient.parameter].shape;  // a copy: adding states moves the list
      const DType type = stage.rounded_state();
      if (is_frozen(stage.phases())) {
        update_frozen(stage, gradient, type);
        continue;
      }
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
  static constexpr const char* kFrozen = "adamw: frozen variance";
  bool is_frozen(const strata::Phases& phases) const { return freeze_ > 0 && phases.in(kFrozen); }

  // What is added to a sum later would be added to the first moment as it is.
  void require_summed_once(strata::UpdateStage& stage) const {
    std::set<int32_t> added;
    for (const strata::Op& op : stage.build().program().ops)
      if (op.kind->name == "add" || op.kind->name == "receive")
        for (TensorId id : op.outputs) added.insert(id.value);
    for (const strata::Gradient& gradient : stage.gradients())
      if (added.contains(gradient.tensor.value))
        throw strata::Error(
            "freeze needs each gradient to be summed over ranks once, but what several ops make of that of " +
            parameter_name(stage.build().program(), gradient) +
            " is summed apart (run.reproducible, stages of a pipeline that share it, block order); leave one "
            "of them out, or untie the model.");
  }

  void update_frozen(strata::UpdateStage& stage, const strata::Gradient& gradient, DType type) {
    const strata::Shape shape = stage.build()[gradient.parameter].shape;
    const TensorId m = first_.at(parameter_name(stage.build().program(), gradient));
    if (stage.build()[m].shape != shape)
      throw strata::Error(
          "freeze lets each rank add to the whole first moment, of which ranks that divide optimizer "
          "states have a share; sum whole gradients (data_parallel).");
    if (type != DType::f32) throw strata::Error("freeze keeps its moments in f32; leave states = \"bf16\" out.");
    stage.append("adamw_frozen", gradient, {m, stage.state(gradient, "adamw.v", shape)},
                 {{"beta1", settings_.beta1},
                  {"beta2", settings_.beta2},
                  {"epsilon", settings_.epsilon},
                  {"learning_rate", settings_.learning_rate},
                  {"weight_decay", settings_.weight_decay},
                  {"frozen", freeze_}});
  }

  strata::adamw::Settings settings_;
  int64_t freeze_ = 0;
  std::map<std::string, TensorId> first_;  // by parameter, of the program that is planned
};

}  // namespace

STRATA_PLUGIN(AdamW, "adamw", "1.0.0", "AdamW: Adam with decoupled weight decay")
