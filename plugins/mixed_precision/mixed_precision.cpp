// Mixed precision (Micikevicius et al., arXiv 1710.03740): products, activations and a working copy of the parameters
// in 16 bits; master weights, statistics, sums and optimizer states in f32. The update changes the master, and a cast
// makes the next working copy from it. fp16 scales the loss, so that small gradients do not vanish (loss_scale.h).
#include <map>

#include "plugins/mixed_precision/loss_scale.h"
#include "strata/convert.h"
#include "strata/plugin.h"

namespace {

using strata::DType;
using strata::Error;
using strata::Op;
using strata::Program;
using strata::Role;
using strata::Tensor;
using strata::TensorId;

class MixedPrecision final : public strata::Plugin {
 public:
  MixedPrecision() { strata::mixed_precision::register_loss_scale_kinds(); }

  void options(strata::Options& o) override {
    o.add("dtype", dtype_, "of products, activations and the working copy of parameters").choices({"bf16", "fp16"});
    o.add("gradients", gradients_, "type in which gradients are summed over microbatches and ranks")
        .choices({"f32", "bf16"});
    o.add("states", states_, "type of the optimizer's moments; bf16 is rounded to stochastically (arXiv 1502.02551)")
        .choices({"f32", "bf16"});
    o.add("loss_scale", loss_scale_, "first factor of the loss, only with fp16; 0: 65536").non_negative();
    o.add("loss_scale_window", window_, "steps without overflow after which the factor doubles; 0: it is fixed")
        .non_negative()
        .unit("steps");
  }

  strata::Capabilities capabilities() const override {
    return {.provides = {"unscaled_gradients", "lowers activations", "lowers parameters"},
            .requires_ = {"optimizer"},
            .after = {"summed_gradients"},
            .effect = strata::Effect::lossy(0.02)};
  }

  void forward(strata::ProgramStage& stage) override {
    half_ = dtype_ == "bf16" ? DType::bf16 : DType::f16;
    const double scale = loss_scale_ == 0 ? 65536 : loss_scale_;
    if (half_ == DType::f16 && scale <= 1)
      throw Error(
          "dtype = \"fp16\" needs loss scaling, or small gradients become zero; leave out loss_scale, or set it "
          "above 1.");
    if (half_ != DType::f16 && (loss_scale_ != 0 || window_ != 2000))
      throw Error(
          "loss_scale and loss_scale_window work only with dtype = \"fp16\"; bf16 has the range of f32 and needs "
          "no scaling.");
    Program& program = stage.program;
    for (TensorId id : program.with_role(Role::parameter)) {
      const std::string name = program[id].name;
      if (program[id].dtype != DType::f32)
        throw Error("parameter " + name + " is " + std::string(name_of(program[id].dtype)) + ", expected f32.");
      program.rename(id, name + "." + dtype_);
      program[id].lasting.change([&](strata::Lasting& lasting) { lasting.rounded_from = name; });
      program[id].dtype = half_;
    }
    narrow(program);
    if (gradients_ == "bf16") stage.gradient_dtype = DType::bf16;
    if (states_ == "bf16") stage.state_dtype = DType::bf16;
    if (half_ == DType::f16 && stage.goal == strata::Goal::train)
      stage.loss_gradient = persistent(program, "loss_scale", scale);
  }

  // From here on the parameter that is updated is the master: as much of it as this rank updates.
  void gradients(strata::GradientStage& stage) override {
    strata::Builder& build = stage.build();
    Program& program = build.program();
    if (half_ == DType::f16) unscale(stage);
    working_.clear();
    for (strata::Gradient& gradient : stage.gradients()) {
      const Tensor working = program[gradient.parameter], whole = program[program.whole(gradient.parameter)];
      const strata::Lasting& of = *whole.lasting;
      const TensorId master = build.state(of.rounded_from.text(), working.shape, DType::f32, of.initializer);
      program[master].layout = working.layout;
      program[master].lasting = of;
      program[master].lasting.change([](strata::Lasting& lasting) { lasting.rounded_from = {}; });
      program[master].dimensions = whole.dimensions;
      working_[master.value] = gradient.parameter;
      gradient.parameter = master;
    }
  }

  void update(strata::UpdateStage& stage) override {
    if (states_ == "bf16" && !stage.keeps_rounded_states())
      throw Error("states = \"bf16\", but the enabled optimizer keeps no moments that can be rounded; leave it out.");
    strata::Builder& build = stage.build();
    for (const strata::Gradient& gradient : stage.gradients())
      build.emit_all("cast", {gradient.parameter}, {{"dtype", std::string(name_of(half_))}},
                     {working_.at(gradient.parameter.value)});
  }

  void step_end(strata::StepContext& context) override {
    if (half_ == DType::f16) context.log("loss_scale", context.scalar("loss_scale"));
  }

 private:
  static TensorId persistent(Program& program, const std::string& name, double value) {
    strata::Builder build(program);
    return build.state(name, {1}, DType::f64, {strata::Initializer::Kind::constant, value});
  }

  // Every op in 16 bits where its kind can; around the others, casts.
  void narrow(Program& program) {
    std::vector<Op> ops;
    std::map<int32_t, TensorId> wide, narrowed;  // by tensor: its copy in the other type
    const auto cast = [&](TensorId from, DType to, const Op& beside) {
      Tensor copy{
          .name = program[from].name + "." + std::string(name_of(to)), .shape = program[from].shape, .dtype = to};
      const TensorId id = program.add(std::move(copy));
      ops.push_back({.kind = &strata::find_kind("cast"),
                     .inputs = {from},
                     .outputs = {id},
                     .attributes = {{"dtype", std::string(name_of(to))}},
                     .block = beside.block});
      return id;
    };
    for (Op op : program.ops) {
      for (TensorId& id : op.inputs) {
        if (!id) continue;
        if (op.kind->half) {
          if (const auto found = narrowed.find(id.value); found != narrowed.end()) id = found->second;
        } else if (strata::is_half(program[id].dtype)) {
          TensorId& copy = wide[id.value];
          if (!copy) copy = cast(id, DType::f32, op);
          id = copy;
        }
      }
      // What another stage of a pipeline sends is narrowed there, too.
      if (op.kind->name == "receive" && op.attributes.string("dtype") == name_of(DType::f32))
        op.attributes.set("dtype", std::string(name_of(half_)));
      const auto specs = op.kind->shape(strata::OpView(program, op));
      for (size_t o = 0; o < op.outputs.size(); ++o) program[op.outputs[o]].dtype = specs[o].dtype;
      ops.push_back(op);
      if (op.kind->half) continue;
      for (TensorId id : op.outputs)
        if (program[id].dtype == DType::f32 && program[id].role == Role::activation && !program[id].step_output &&
            std::find(program.losses.begin(), program.losses.end(), id) == program.losses.end())
          narrowed[id.value] = cast(id, half_, op);
    }
    program.ops = std::move(ops);
  }

  // One factor for all gradients: 1/scale, or NaN after an overflow anywhere.
  void unscale(strata::GradientStage& stage) {
    strata::Builder& build = stage.build();
    std::vector<TensorId> flags = stage.over_all("overflowed", "any_overflowed");
    const TensorId scale = build.program().find("loss_scale");
    const TensorId good = persistent(build.program(), "loss_scale.good_steps", 0);
    flags.insert(flags.end(), {scale, good});
    const TensorId factor = build.emit_all("next_loss_scale", flags, {{"window", window_}}, {{}, scale, good})[0];
    for (strata::Gradient& gradient : stage.gradients()) stage.scale(gradient, factor);
  }

  std::string dtype_ = "bf16", gradients_ = "f32", states_ = "f32";
  double loss_scale_ = 0;
  int64_t window_ = 2000;
  DType half_ = DType::bf16;
  std::map<int32_t, TensorId> working_;  // by master
};

}  // namespace

STRATA_PLUGIN(MixedPrecision, "mixed_precision", "1.0.0", "bf16 or fp16 compute with f32 master weights")
