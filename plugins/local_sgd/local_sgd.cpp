// Local SGD and DiLoCo as a plugin: ranks of an axis train apart, and every so many steps what they changed since the
// last time is averaged and makes one outer update of what they have together, from which all go on.
#include <algorithm>

#include "strata/plugin.h"

namespace {

using strata::Binding;
using strata::DType;
using strata::OpView;
using strata::Role;
using strata::TensorId;
using strata::TensorSpec;

strata::Cost elementwise_cost(const OpView& v, double flops) {
  strata::Cost cost{.flops = flops * double(strata::elements(v.input(0).shape)), .bytes = 0};
  for (int i = 0; i < v.inputs(); ++i) cost.bytes += double(v.input(i).bytes());
  for (int o = 0; o < v.outputs(); ++o) cost.bytes += double(v.output(o).bytes());
  return cost;
}

// All of one shape, f32.
void require_alike(const OpView& v, int least, int most) {
  bool right = v.inputs() >= least && v.inputs() <= most;
  for (int i = 0; right && i < v.inputs(); ++i)
    right = v.has_input(i) && v.input(i).dtype == DType::f32 && v.input(i).shape == v.input(0).shape;
  require(right, v, "f32 tensors of one shape");
}

void add_kind(strata::OpKind kind, double flops, void (*run)(const Binding&, int64_t begin, int64_t end)) {
  kind.cost = [flops](const OpView& v) { return elementwise_cost(v, flops); };
  const strata::Kernel kernel{[run](const Binding& b) -> strata::Launch {
    return [run, b] {
      b.threads().split(strata::elements(b.input(0).shape), 4096,
                        [&](int64_t begin, int64_t end) { run(b, begin, end); });
    };
  }};
  kind.kernels = {{"cpu", kernel}, {"reference", kernel}};
  register_kind(std::move(kind));
}

void register_change() {
  add_kind({.name = "local_sgd_change",
            .summary = "outer parameter (…), a rank's own of its shape -> outer − own",
            .shape = [](const OpView& v) -> std::vector<TensorSpec> {
              require_alike(v, 2, 2);
              return {{v.input(0).shape, DType::f32}};
            }},
           1, [](const Binding& b, int64_t begin, int64_t end) {
             const float *outer = b.in<float>(0), *own = b.in<float>(1);
             float* change = b.out<float>(0);
             for (int64_t i = begin; i < end; ++i) change[i] = outer[i] - own[i];
           });
}

// The outer gradient is the mean change; SGD with Nesterov's momentum as PyTorch has it, whose first step has the
// momentum of the gradient alone. What a rank keeps of its own parameter is what it learnt while changes were on their
// way (streaming).
void register_outer() {
  add_kind({.name = "local_sgd_outer",
            .summary =
                "sum of changes (…), outer parameter, each rank's own, [momentum] -> outer parameter, own: keep own + "
                "(1 - keep) outer, [momentum]; attributes ranks, learning_rate, momentum, keep",
            .shape = [](const OpView& v) -> std::vector<TensorSpec> {
              require_alike(v, 3, 4);
              return std::vector<TensorSpec>(size_t(v.inputs() - 1), {v.input(0).shape, DType::f32});
            },
            .in_place = {{0, 1}, {1, 2}, {2, 3}}},
           8, [](const Binding& b, int64_t begin, int64_t end) {
             const strata::Attributes& a = b.attributes();
             const float ranks = float(a.integer("ranks")), rate = float(a.real("learning_rate")),
                         decay = float(a.real("momentum")), keep = float(a.real("keep"));
             const bool has_momentum = b.inputs() == 4;
             const float *sum = b.in<float>(0), *before = b.in<float>(1), *learnt = b.in<float>(2),
                         *momentum = has_momentum ? b.in<float>(3) : nullptr;
             float *outer = b.out<float>(0), *own = b.out<float>(1), *next = has_momentum ? b.out<float>(2) : nullptr;
             for (int64_t i = begin; i < end; ++i) {
               float step = sum[i] / ranks;
               if (has_momentum) {
                 next[i] = decay * momentum[i] + step;
                 step += decay * next[i];
               }
               outer[i] = before[i] - rate * step;
               own[i] = keep == 0 ? outer[i] : keep * learnt[i] + (1 - keep) * outer[i];
             }
           });
}

class LocalSgd final : public strata::Plugin {
 public:
  LocalSgd() {
    static const bool once = (register_change(), register_outer(), true);
    (void)once;
  }

  void options(strata::Options& o) override {
    o.add("every", every_, "steps that ranks train apart before an outer update").positive().unit("steps");
    o.add(
         "outer", outer_,
         "nesterov: the mean change is a gradient, with momentum (DiLoCo); average: the mean of parameters (local SGD)")
        .choices({"nesterov", "average"});
    o.add("learning_rate", learning_rate_, "of outer = \"nesterov\"").positive();
    o.add("momentum", momentum_, "of outer = \"nesterov\": decay of the average of outer gradients")
        .range(0, 0.9999999);
    o.add("axis", axis_, "whose ranks train apart: all that see different sequences, or groups of them")
        .choices({"data", "replicate"});
    o.add("parts", parts_, "in which parameters are exchanged, each every so many steps, but one after the other")
        .range(1, 14);
    o.add("overlap", overlap_,
          "changes cross behind the step after the one in which they were taken, and ranks go on meanwhile");
    o.add("keep", keep_, "with overlap: share of its own parameters that a rank keeps in an outer update")
        .range(0, 0.99);
    o.add("bucket", bucket_, "changes that are exchanged together").positive().unit("bytes");
  }

  strata::Capabilities capabilities() const override {
    return {.provides = {"summed_gradients", "ranks apart"},
            .requires_ = {"optimizer"},
            .conflicts = {{"reproducible sums",
                           "ranks that train apart learn other things than one rank; leave one of the two out"},
                          {"ranks apart", "each has ranks train apart in its own way; leave one of the two out"}},
            .effect = strata::Effect::lossy(0.2)};
  }

  void phases(strata::PhaseStage& stage) override {
    if (every_ < parts_)
      throw strata::Error("every = " + std::to_string(every_) +
                          " steps are too few for parts = " + std::to_string(parts_) + "; each has a step of its own.");
    if (is_one_program()) return;
    for (int64_t part = 0; part < parts_; ++part) {
      if (overlap_) stage.declare(name_of("takes changes", part), {.first = taken_in(part), .every = every_});
      stage.declare(name_of("outer update", part),
                    {.first = std::min(taken_in(part), strata::Steps::kEnd - 1) + overlap_, .every = every_});
    }
  }

  void exchange(strata::ExchangeStage& stage) override {
    if (outer_ == "average" && (learning_rate_ != kLearningRate || momentum_ != kMomentum))
      throw strata::Error("learning_rate and momentum are of outer = \"nesterov\" alone; leave them out.");
    if (!overlap_ && keep_ != kKeep)
      throw strata::Error("without overlap an outer update leaves nothing to keep; leave keep out.");
    if (stage.mesh().size(axis_) == 1)
      stage.note("it does nothing here: axis \"" + axis_ + "\" of the mesh has one rank.");
    for (const strata::Gradient& gradient : stage.gradients()) stage.leave(gradient, axis_);
  }

  // Changes that were taken in the step before cross and are used, then others are taken.
  void update(strata::UpdateStage& stage) override {
    if (stage.mesh().size(axis_) == 1) return;
    const std::vector<std::vector<strata::Gradient>> parts = in_parts(stage);
    for (int64_t part = 0; part < parts_; ++part)
      if (in(stage, "outer update", part)) {
        std::vector<TensorId> changes;
        for (const strata::Gradient& gradient : parts[size_t(part)])
          changes.push_back(overlap_ ? taken(stage, gradient) : change(stage, gradient, {}));
        update_outer(stage, parts[size_t(part)], changes);
      }
    for (int64_t part = 0; part < parts_; ++part)
      if (overlap_ && in(stage, "takes changes", part))
        for (const strata::Gradient& gradient : parts[size_t(part)]) change(stage, gradient, taken(stage, gradient));
  }

 private:
  static constexpr double kLearningRate = 0.7, kMomentum = 0.9, kKeep = 0.5;  // of the papers

  bool is_one_program() const { return every_ == 1 && !overlap_; }
  // Parts take turns: the last in the last of `every` steps.
  int64_t taken_in(int64_t part) const { return int64_t((__int128(part + 1) * every_ + parts_ - 1) / parts_); }
  std::string name_of(const std::string& what, int64_t part) const {
    return "local_sgd: " + what + (parts_ == 1 ? "" : " of part " + std::to_string(part + 1));
  }
  bool in(const strata::UpdateStage& stage, const std::string& what, int64_t part) const {
    return is_one_program() || stage.phases().in(name_of(what, part));
  }

  // Parameters in the order of the model, in parts of about as many bytes.
  std::vector<std::vector<strata::Gradient>> in_parts(strata::UpdateStage& stage) const {
    std::vector<std::vector<strata::Gradient>> parts{size_t(parts_)};
    double all = 0, before = 0;
    const auto bytes = [&](const strata::Gradient& gradient) {
      return double(stage.build()[gradient.parameter].bytes());
    };
    for (const strata::Gradient& gradient : stage.gradients()) all += bytes(gradient);
    for (const strata::Gradient& gradient : stage.gradients()) {
      const double middle = before + bytes(gradient) / 2;
      parts[std::min(size_t(parts_ - 1), size_t(middle / all * double(parts_)))].push_back(gradient);
      before += bytes(gradient);
    }
    return parts;
  }

  // Outer parameters less the rank's own, as a gradient or in a state.
  static TensorId change(strata::UpdateStage& stage, const strata::Gradient& gradient, TensorId into) {
    strata::Builder& build = stage.build();
    const TensorId outer = outer_of(stage, gradient);
    build.role = Role::gradient;
    const TensorId made = build.emit_all("local_sgd_change", {outer, gradient.parameter}, {}, {into})[0];
    if (!into) build.program()[made].layout = build[gradient.parameter].layout;
    return made;
  }
  static TensorId taken(strata::UpdateStage& stage, const strata::Gradient& gradient) {
    const TensorId change = state(stage, gradient, "local_sgd.change");
    stage.build().program()[change].lasting.change([](strata::Lasting& lasting) { lasting.begins_anew = true; });
    return change;
  }

  void update_outer(strata::UpdateStage& stage, const std::vector<strata::Gradient>& gradients,
                    const std::vector<TensorId>& changes) const {
    const bool nesterov = outer_ == "nesterov";
    const std::vector<TensorId> sums = stage.sum_over(axis_, gradients, changes, bucket_.count);
    const strata::Attributes attributes{{"ranks", int64_t(stage.mesh().size(axis_))},
                                        {"learning_rate", nesterov ? learning_rate_ : 1.0},
                                        {"momentum", nesterov ? momentum_ : 0.0},
                                        {"keep", overlap_ ? keep_ : 0.0}};
    for (size_t g = 0; g < sums.size(); ++g) {
      const TensorId own = gradients[g].parameter, outer = outer_of(stage, gradients[g]);
      std::vector<TensorId> inputs{sums[g], outer, own}, outputs{outer, own};
      if (nesterov && momentum_ > 0) {
        const TensorId momentum = state(stage, gradients[g], "local_sgd.momentum");
        stage.build().program()[momentum].lasting.change(
            [](strata::Lasting& lasting) { lasting.alike = lasting.begins_anew = true; });
        inputs.push_back(momentum), outputs.push_back(momentum);
      }
      stage.build().emit_all("local_sgd_outer", inputs, attributes, outputs);
    }
  }

  // Each is declared once in a program, however often it is used there.
  static TensorId state(strata::UpdateStage& stage, const strata::Gradient& gradient, const std::string& name) {
    strata::Program& program = stage.build().program();
    const std::string full_name = program[program.whole(gradient.parameter)].name + "." + name;
    if (const TensorId known = program.find(full_name)) return known;
    return stage.state(gradient, name, program[gradient.parameter].shape);
  }

  static TensorId outer_of(strata::UpdateStage& stage, const strata::Gradient& gradient) {
    strata::Program& program = stage.build().program();
    const TensorId outer = state(stage, gradient, "local_sgd.outer");
    program[outer].lasting.change([&](strata::Lasting& lasting) {
      lasting.initializer = program[program.whole(gradient.parameter)].lasting->initializer;
      lasting.stands_for = parameter_name(program, gradient);
      lasting.alike = true;
    });
    return outer;
  }

  int64_t every_ = 100, parts_ = 1;
  bool overlap_ = false;
  std::string outer_ = "nesterov", axis_{strata::kDataAxis};
  double learning_rate_ = kLearningRate, momentum_ = kMomentum, keep_ = kKeep;
  strata::Bytes bucket_{25 << 20};
};

}  // namespace

STRATA_PLUGIN(LocalSgd, "local_sgd", "1.0.0", "local SGD and DiLoCo: ranks train apart and meet every so many steps")
