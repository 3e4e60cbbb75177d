// SM3 as a plugin: one number a row and one a column instead of one an element. The mathematics is in sm3_kernel.h.
#include <cmath>

#include "plugins/sm3/sm3_kernel.h"
#include "strata/plugin.h"

namespace {

using strata::Binding;
using strata::DType;
using strata::OpView;
using strata::Shape;
using strata::TensorId;
using strata::TensorSpec;

// Inputs: parameter, gradient, row, [column], [momentum], learning_rate_factor, [gradient scale]; a parameter of one
// dimension has no column, and its row holds a number an element. Outputs: parameter, row, [column], [momentum], in
// place.
int64_t columns_of(const OpView& v) { return v.has_input(3) ? v.input(3).shape[0] : 0; }
int64_t rows_of(const OpView& v) { return v.input(2).shape[0]; }

std::vector<TensorSpec> shape(const OpView& v) {
  bool right = v.inputs() == 7;
  for (int i : {0, 1, 2, 5}) right = right && v.has_input(i);
  right = right && v.input(1).shape == v.input(0).shape &&
          rows_of(v) * std::max<int64_t>(1, columns_of(v)) == strata::elements(v.input(0).shape) &&
          (!v.has_input(4) || v.input(4).shape == v.input(0).shape);
  strata::require(right, v, "parameter, gradient, row, [column], [momentum], factor, [scale]");
  const auto spec = [&](int i) { return TensorSpec{v.input(i).shape, v.input(i).dtype}; };
  std::vector<TensorSpec> specs{spec(0), spec(2)};
  if (v.has_input(3)) specs.push_back(spec(3));
  if (v.has_input(4)) specs.push_back(spec(4));
  return specs;
}

strata::sm3::Settings settings(const Binding& b) {
  const auto& a = b.attributes();
  return {.learning_rate = a.real("learning_rate") * *b.in<double>(5),
          .momentum = a.real("momentum"),
          .epsilon = a.real("epsilon"),
          .weight_decay = a.real("weight_decay"),
          .gradient_scale = b.has_input(6) ? *b.in<double>(6) : 1.0};
}

// Outputs are in place, so their pointers are the inputs'.
template <class T>
T* state(const Binding& b, int input) {
  return b.has_input(input) ? const_cast<T*>(b.in<T>(input)) : nullptr;
}

strata::Launch bind_cpu(const Binding& b) {
  strata::require(b.input(0).dtype == DType::f32, b, "f32 tensors on the cpu backend");
  return [b] {
    if (std::isnan(settings(b).gradient_scale)) return;
    float *p = b.out<float>(0), *row = state<float>(b, 2), *column = state<float>(b, 3), *m = state<float>(b, 4);
    if (column)
      strata::sm3::update_matrix(b.threads(), p, b.in<float>(1), row, column, m, rows_of(b), columns_of(b), settings(b),
                                 b.workspace<float>());
    else
      strata::sm3::update_vector(b.threads(), p, b.in<float>(1), row, m, rows_of(b), settings(b));
  };
}

template <class T>
strata::Launch bind_reference(const Binding& b) {
  return [b] {
    if (std::isnan(settings(b).gradient_scale)) return;
    strata::sm3::reference_update(b.out<T>(0), b.in<T>(1), state<T>(b, 2), state<T>(b, 3), state<T>(b, 4), rows_of(b),
                                  columns_of(b), settings(b), b.workspace<T>());
  };
}

void register_once() {
  static const bool once = [] {
    strata::OpKind kind;
    kind.name = "sm3";
    kind.summary = "parameter, gradient, row, [column], [momentum], factor, [scale] -> parameter and states";
    kind.shape = shape;
    kind.cost = [](const OpView& v) {
      const double bytes = double(v.input(0).bytes());
      return strata::Cost{.flops = 10 * double(strata::elements(v.input(0).shape)),
                          .bytes = bytes * (v.has_input(4) ? 5 : 3)};
    };
    kind.kernels["cpu"] = {bind_cpu, [](const OpView& v, int threads) { return columns_of(v) * threads * 4; }};
    kind.kernels["reference"] = {[](const Binding& b) {
                                   return b.input(0).dtype == DType::f64 ? bind_reference<double>(b)
                                                                         : bind_reference<float>(b);
                                 },
                                 [](const OpView& v, int) { return columns_of(v) * 8; }};
    register_kind(std::move(kind));
    return true;
  }();
  (void)once;
}

class Sm3 final : public strata::Plugin {
 public:
  Sm3() { register_once(); }

  void options(strata::Options& o) override {
    o.add("learning_rate", settings_.learning_rate, "step size at the schedule's peak").positive();
    o.add("momentum", settings_.momentum, "decay of the average of updates; 0: none, and no state for it")
        .range(0, 0.9999999);
    o.add("epsilon", settings_.epsilon, "added under the root").positive();
    o.add("weight_decay", settings_.weight_decay, "decoupled decay of tensors with two dimensions or more")
        .non_negative();
  }

  strata::Capabilities capabilities() const override { return {.provides = {"optimizer", "lowers optimizer_state"}}; }

  void update(strata::UpdateStage& stage) override {
    strata::Builder& build = stage.build();
    const TensorId factor = build.scalar(strata::kLearningRateFactor);
    for (const strata::Gradient& stored : stage.gradients()) {
      const strata::Gradient gradient = stage.in_f32(stored);
      const Shape shape = build[gradient.parameter].shape;  // a copy: adding states moves the list
      const bool matrix = shape.size() >= 2;
      const int64_t columns = matrix ? shape.back() : 1;
      const TensorId row = stage.state(gradient, "sm3.row", {strata::elements(shape) / columns}, DType::f32,
                                       {shape.size() <= 2 ? 0 : strata::UpdateStage::kNone});
      const TensorId column =
          matrix ? stage.state(gradient, "sm3.column", {columns}, DType::f32, {int(shape.size()) - 1}) : TensorId{};
      const TensorId momentum = settings_.momentum > 0 ? stage.state(gradient, "sm3.momentum", shape) : TensorId{};
      std::vector<TensorId> outputs{gradient.parameter, row};
      if (column) outputs.push_back(column);
      if (momentum) outputs.push_back(momentum);
      build.emit_all("sm3", {gradient.parameter, gradient.tensor, row, column, momentum, factor, gradient.scale},
                     {{"learning_rate", settings_.learning_rate},
                      {"momentum", settings_.momentum},
                      {"epsilon", settings_.epsilon},
                      {"weight_decay", matrix ? settings_.weight_decay : 0.0}},
                     outputs);
      if (column) stage.max_over_parts(gradient, column);
    }
  }

 private:
  strata::sm3::Settings settings_;
};

}  // namespace

STRATA_PLUGIN(Sm3, "sm3", "1.0.0", "SM3: adaptive step sizes from one number a row and column")
