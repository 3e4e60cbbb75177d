// The Adafactor optimizer as a plugin: its options, its op kind and the op for each parameter.
// The mathematics is in adafactor_kernel.h.
#include <cmath>
#include <numeric>

#include "plugins/adafactor/adafactor_kernel.h"
#include "plugins/adafactor/adafactor_part.h"
#include "plugins/adafactor/adafactor_reference.h"
#include "strata/plugin.h"

namespace {

using strata::Binding;
using strata::DType;
using strata::OpView;
using strata::Shape;
using strata::TensorId;
using strata::TensorSpec;
using strata::adafactor::Matrices;
using strata::adafactor::Settings;

// Inputs of the op kind. Outputs: parameter, then m where there is one, then the second moment, all in place.
enum Input { kParameter, kGradient, kStep, kFactor, kScale, kMoment, kSecond, kColumn };

bool factored(const OpView& view) { return view.inputs() == 8; }

Shape row_shape(Shape shape) {
  shape.pop_back();
  return shape;
}
// Of the matrices that a tensor is: its own last two dimensions, or those fused in it.
Shape column_shape(Shape shape, const std::vector<int64_t>& fused) {
  if (!fused.empty()) return {int64_t(fused.size()), shape.back()};
  shape.erase(shape.end() - 2);
  return shape;
}

std::vector<TensorSpec> shape(const OpView& view) {
  bool right = view.inputs() == 7 || view.inputs() == 8;
  for (int i : {kParameter, kGradient, kStep, kFactor, kSecond}) right = right && view.has_input(i);
  const auto is = [&](int i, const Shape& shape, DType dtype) {
    return view.input(i).shape == shape && view.input(i).dtype == dtype;
  };
  std::vector<TensorSpec> outputs;
  if (right) {
    const TensorSpec p{view.input(kParameter).shape, view.input(kParameter).dtype};
    const std::vector<int64_t> fused = strata::adafactor::fused_of(view.attributes());
    right = (p.dtype == DType::f32 || p.dtype == DType::f64) && is(kGradient, p.shape, p.dtype) &&
            is(kStep, {1}, DType::f64) && is(kFactor, {1}, DType::f64) &&
            (!view.has_input(kScale) || is(kScale, {1}, DType::f64)) &&
            (!view.has_input(kMoment) || is(kMoment, p.shape, p.dtype));
    outputs.push_back(p);
    if (view.has_input(kMoment)) outputs.push_back(p);
    if (right && factored(view)) {
      right = p.shape.size() >= 2 && view.has_input(kColumn) && is(kSecond, row_shape(p.shape), p.dtype) &&
              is(kColumn, column_shape(p.shape, fused), p.dtype);
      if (right)
        outputs.insert(outputs.end(), {{row_shape(p.shape), p.dtype}, {column_shape(p.shape, fused), p.dtype}});
    } else if (right) {
      right = is(kSecond, p.shape, p.dtype);
      outputs.push_back(p);
    }
  }
  require(right, view,
          "parameter, gradient, the f64 (1) scalars step, factor and scale, then the first moment and the second "
          "moment (whole, or its rows and columns)");
  return outputs;
}

Matrices matrices(const OpView& view) {
  const Shape& shape = view.input(kParameter).shape;
  const std::vector<int64_t> fused = strata::adafactor::fused_of(view.attributes());
  return factored(view) ? strata::adafactor::matrices_of(shape, fused)
                        : strata::adafactor::vectors_of(strata::elements(shape), fused);
}

Settings settings(const Binding& b) {
  const strata::Attributes& a = b.attributes();
  return {.step = *b.in<double>(kStep),
          .learning_rate = a.real("learning_rate"),
          .factor = *b.in<double>(kFactor),
          .scale_parameter = a.integer("scale_parameter") != 0,
          .clip_threshold = a.real("clip_threshold"),
          .decay = a.real("decay"),
          .epsilon1 = a.real("epsilon1"),
          .epsilon2 = a.real("epsilon2"),
          .beta1 = a.real("beta1"),
          .weight_decay = a.real("weight_decay"),
          .gradient_scale = b.has_input(kScale) ? *b.in<double>(kScale) : 1.0};
}

// The op's arrays. States are updated in place.
template <class T>
struct Arrays {
  T *parameter, *m, *second, *column;
  const T* gradient;
  explicit Arrays(const Binding& b) {
    const int second_output = b.has_input(kMoment) ? 2 : 1;
    parameter = b.out<T>(0);
    m = b.has_input(kMoment) ? b.out<T>(1) : nullptr;
    second = b.out<T>(second_output);
    column = factored(b) ? b.out<T>(second_output + 1) : nullptr;
    gradient = b.in<T>(kGradient);
  }
};

strata::Launch bind_cpu(const Binding& b) {
  require(b.input(kParameter).dtype == DType::f32, b, "f32 tensors on the cpu backend");
  return [b, a = Arrays<float>(b), shape = matrices(b)] {
    const Settings s = settings(b);
    if (std::isnan(s.gradient_scale)) return;
    if (factored(b))
      update_matrix(b.threads(), a.parameter, a.gradient, a.second, a.column, a.m, shape, s, b.workspace());
    else
      update_vector(b.threads(), a.parameter, a.gradient, a.second, a.m, shape, s, b.workspace());
  };
}

template <class T>
strata::Launch bind_reference(const Binding& b) {
  return [b, a = Arrays<T>(b), shape = matrices(b)] {
    if (std::isnan(settings(b).gradient_scale)) return;
    if (factored(b))
      strata::adafactor::reference_matrix(a.parameter, a.gradient, a.second, a.column, a.m, shape, settings(b));
    else
      strata::adafactor::reference_vector(a.parameter, a.gradient, a.second, a.m, shape, settings(b));
  };
}

// Called when the plugin is made, not when its library is loaded: the engine checks that the library fits in between.
void register_once() {
  static bool done = false;
  if (done) return;
  done = true;
  strata::OpKind kind;
  kind.name = "adafactor";
  kind.summary = "parameter, gradient, step, factor, [scale], [m], v | row, column -> parameter, [m], v | row, column";
  kind.shape = shape;
  // The gradient is read three times, the parameter twice and written once, the moment read and written.
  kind.cost = [](const OpView& view) {
    const double count = double(strata::elements(view.input(0).shape));
    return strata::Cost{.flops = 15 * count,
                        .bytes = (view.has_input(kMoment) ? 8 : 6) * double(view.input(0).bytes())};
  };
  kind.kernels["cpu"] = {bind_cpu, [](const OpView& view, int) {
                           return factored(view)
                                      ? strata::adafactor::matrix_workspace(matrices(view))
                                      : strata::adafactor::vector_workspace(strata::elements(view.input(0).shape));
                         }};
  kind.kernels["reference"] = {[](const Binding& b) {
                                 return b.input(0).dtype == DType::f64 ? bind_reference<double>(b)
                                                                       : bind_reference<float>(b);
                               },
                               {}};
  register_kind(std::move(kind));
  strata::adafactor::register_part_kinds();
}

class Adafactor final : public strata::Plugin {
 public:
  Adafactor() { register_once(); }

  void options(strata::Options& o) override {
    o.add("learning_rate", settings_.learning_rate, "step size at the schedule's peak; 0: min(0.01, 1/sqrt(step))")
        .non_negative();
    o.add("scale_parameter", settings_.scale_parameter, "multiply the step size by the parameter's RMS");
    o.add("clip_threshold", settings_.clip_threshold, "largest RMS of an update before the step size").positive();
    o.add("decay", settings_.decay, "the second moment's decay at step t is 1 - t^-decay").range(0.01, 1);
    o.add("epsilon1", settings_.epsilon1, "added to squared gradients").positive();
    o.add("epsilon2", settings_.epsilon2, "least RMS of a parameter").positive();
    o.add("beta1", settings_.beta1, "decay of the first moment; 0: none is kept").range(0, 0.9999999);
    o.add("weight_decay", settings_.weight_decay, "decoupled decay of tensors with two dimensions or more")
        .non_negative();
  }

  strata::Capabilities capabilities() const override { return {.provides = {"optimizer", "lowers optimizer_state"}}; }

  void update(strata::UpdateStage& stage) override {
    strata::Builder& build = stage.build();
    const TensorId step = build.scalar(strata::kStepScalar), factor = build.scalar(strata::kLearningRateFactor);
    for (const strata::Gradient& stored : stage.gradients()) {
      const strata::Gradient gradient = stage.in_f32(stored);
      const Shape shape = build[gradient.parameter].shape;  // copies: adding states moves the list
      const std::vector<int64_t> fused = build[gradient.parameter].fused;
      const bool split = !build[gradient.parameter].layout.empty();
      std::vector<TensorId> inputs{gradient.parameter, gradient.tensor, step, factor, gradient.scale, {}};
      std::vector<TensorId> outputs{gradient.parameter};
      const auto state = [&](std::string_view name, const Shape& state_shape, std::vector<int> follows = {}) {
        outputs.push_back(stage.state(gradient, name, state_shape, DType::f32, follows));
        return outputs.back();
      };
      if (settings_.beta1 > 0) inputs[kMoment] = state("adafactor.m", shape);
      if (shape.size() >= 2) {
        // Rows follow all dimensions but the last, columns all but the last but one.
        std::vector<int> rows(shape.size()), columns;
        std::iota(rows.begin(), rows.end(), 0);
        columns = rows;
        rows.pop_back();
        columns.erase(columns.end() - 2);
        if (!fused.empty()) columns.insert(columns.begin(), strata::UpdateStage::kNone);  // a row for each matrix
        inputs.push_back(state("adafactor.row", row_shape(shape), rows));
        inputs.push_back(state("adafactor.column", column_shape(shape, fused), columns));
      } else {
        inputs.push_back(state("adafactor.v", shape));
      }
      strata::Attributes attributes{{"learning_rate", settings_.learning_rate},
                                    {"scale_parameter", int64_t{settings_.scale_parameter}},
                                    {"clip_threshold", settings_.clip_threshold},
                                    {"decay", settings_.decay},
                                    {"epsilon1", settings_.epsilon1},
                                    {"epsilon2", settings_.epsilon2},
                                    {"beta1", settings_.beta1},
                                    {"weight_decay", shape.size() >= 2 ? settings_.weight_decay : 0.0}};
      if (!fused.empty()) attributes.set("fused", strata::adafactor::text_of(fused));
      // In reproducible runs one rank takes the sums that several would, which do not depend on who has which rows.
      const bool exact = stage.reproducible() && shape.size() == 2;
      if (exact) attributes.set("exact", int64_t{1});
      if (!split && !exact)
        build.emit_all("adafactor", inputs, attributes, outputs);
      else
        strata::adafactor::update_part(stage, gradient, inputs, std::move(attributes));
    }
  }

 private:
  Settings settings_;
};

}  // namespace

STRATA_PLUGIN(Adafactor, "adafactor", "1.0.0", "Adafactor: sublinear memory by factored second moments")
