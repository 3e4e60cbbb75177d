// SM3 as a plugin: one number a row and one a column instead of one an element. The mathematics is in sm3_kernel.h.
#include "plugins/sm3/sm3_kernel.h"
#include "strata/optimizer.h"
#include "strata/plugin.h"

namespace {

using strata::DType;
using strata::Shape;
using strata::TensorId;
using strata::Update;
using strata::UpdateView;

// A parameter of one dimension has no column, and its row holds a number an element.
enum State { kRow, kColumn, kMomentum };
int64_t columns_of(const UpdateView& v) { return v.has_state(kColumn) ? v.state(kColumn).shape[0] : 0; }
int64_t rows_of(const UpdateView& v) { return v.state(kRow).shape[0]; }

bool fits(const UpdateView& v) {
  return v.states() == 3 && v.has_state(kRow) &&
         rows_of(v) * std::max<int64_t>(1, columns_of(v)) == strata::elements(v.parameter().shape) &&
         (!v.has_state(kMomentum) || v.state(kMomentum).shape == v.parameter().shape);
}

strata::sm3::Settings settings(const Update& u) {
  const auto& a = u.attributes();
  return {.learning_rate = u.scalars().rate(),
          .momentum = a.real("momentum"),
          .epsilon = a.real("epsilon"),
          .weight_decay = u.scalars().weight_decay,
          .gradient_scale = u.scalars().gradient_scale()};
}

strata::Launch bind_cpu(const Update& u) {
  return [u] {
    float *p = u.parameter<float>(), *row = u.state<float>(kRow), *column = u.state<float>(kColumn),
          *m = u.state<float>(kMomentum);
    if (column)
      strata::sm3::update_matrix(u.threads(), p, u.gradient<float>(), row, column, m, rows_of(u), columns_of(u),
                                 settings(u), u.workspace<float>());
    else
      strata::sm3::update_vector(u.threads(), p, u.gradient<float>(), row, m, rows_of(u), settings(u));
  };
}

template <class T>
strata::Launch bind_reference(const Update& u) {
  return [u] {
    strata::sm3::reference_update(u.parameter<T>(), u.gradient<T>(), u.state<T>(kRow), u.state<T>(kColumn),
                                  u.state<T>(kMomentum), rows_of(u), columns_of(u), settings(u), u.workspace<T>());
  };
}

class Sm3 final : public strata::Plugin {
 public:
  Sm3() {
    strata::register_update(
        {.name = "sm3",
         .states = "row, [column], [momentum of the parameter's shape]",
         .fits = fits,
         .bytes = [](const UpdateView& v) { return double(v.parameter().bytes()) * (v.has_state(kMomentum) ? 5 : 3); },
         .cpu = {bind_cpu, [](const UpdateView& v, int threads) { return columns_of(v) * threads * 4; }},
         .reference = {strata::by_type(bind_reference<float>, bind_reference<double>),
                       [](const UpdateView& v, int) { return columns_of(v) * 8; }}});
  }

  void options(strata::Options& o) override {
    o.add("learning_rate", settings_.learning_rate, "step size at the schedule's peak").positive();
    o.add("momentum", settings_.momentum, "decay of the average of updates; 0: none, and no state for it")
        .range(0, 0.9999999);
    o.add("epsilon", settings_.epsilon, "added under the root").positive();
    o.add("weight_decay", settings_.weight_decay, "decoupled decay of tensors with two dimensions or more")
        .non_negative();
  }

  strata::Capabilities capabilities() const override {
    return {.provides = {"optimizer", "lowers optimizer_state"}, .effect = strata::Effect::program()};
  }

  void update(strata::UpdateStage& stage) override {
    for (const strata::Gradient& stored : stage.gradients()) {
      const strata::Gradient gradient = stage.in_f32(stored);
      const Shape shape = stage.build()[gradient.parameter].shape;  // a copy: adding states moves the list
      const bool matrix = shape.size() >= 2;
      const int64_t columns = matrix ? shape.back() : 1;
      const TensorId row = stage.state(gradient, "sm3.row", {strata::elements(shape) / columns}, DType::f32,
                                       {shape.size() <= 2 ? 0 : strata::UpdateStage::kNone});
      const TensorId column =
          matrix ? stage.state(gradient, "sm3.column", {columns}, DType::f32, {int(shape.size()) - 1}) : TensorId{};
      const TensorId momentum = settings_.momentum > 0 ? stage.state(gradient, "sm3.momentum", shape) : TensorId{};
      stage.append("sm3", gradient, {row, column, momentum},
                   {{"learning_rate", settings_.learning_rate},
                    {"momentum", settings_.momentum},
                    {"epsilon", settings_.epsilon},
                    {"weight_decay", settings_.weight_decay}});
      if (column) {  // the largest over a dimension is known when all its parts have been looked at
        stage.max_over_parts(gradient, row, int(shape.size()) - 1);
        for (int d = 0; d + 1 < int(shape.size()); ++d) stage.max_over_parts(gradient, column, d);
      }
    }
  }

 private:
  strata::sm3::Settings settings_;
};

}  // namespace

STRATA_PLUGIN(Sm3, "sm3", "1.0.0", "SM3: adaptive step sizes from one number a row and column")
