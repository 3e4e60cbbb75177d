// AdamW with 8-bit moments as a plugin. The mathematics is in adamw8bit_kernel.h.
#include "plugins/adamw8bit/adamw8bit_kernel.h"
#include "plugins/adamw8bit/adamw8bit_part.h"
#include "strata/optimizer.h"
#include "strata/plugin.h"

namespace {

using strata::DType;
using strata::Shape;
using strata::TensorId;
using strata::Update;
using strata::UpdateView;

enum State { kFirst, kFirstScale, kSecond, kSecondScale };  // moments m and v

// Blocks lie within rows; a vector is one row.
int64_t rows_of(const Shape& shape) { return shape.size() > 1 ? shape[0] : 1; }
int64_t columns_of(const Shape& shape) {  // also where a rank has no row
  return shape.size() > 1 ? strata::elements({shape.begin() + 1, shape.end()}) : shape[0];
}
// `shape`: of a part, rows of which are whole; a vector's is that of all of it.
Shape scales_of(const Shape& shape) {
  const int64_t of_row = strata::adamw8bit::blocks(columns_of(shape));
  return shape.size() > 1 ? Shape{shape[0], of_row} : Shape{of_row};
}

bool fits(const UpdateView& v) {
  const Shape& shape = v.parameter().shape;
  return v.parameter().dtype == DType::f32 && v.states() == 4 && v.state_is(kFirst, shape, DType::u8) &&
         v.state_is(kSecond, shape, DType::u8) && v.state_is(kFirstScale, scales_of(shape), DType::f32) &&
         v.state_is(kSecondScale, scales_of(shape), DType::f32);
}

strata::Launch bind(const Update& u) {
  return [u, rows = rows_of(u.parameter().shape), columns = columns_of(u.parameter().shape)] {
    const auto& a = u.attributes();
    const strata::adamw8bit::Settings settings{.beta1 = a.real("beta1"),
                                               .beta2 = a.real("beta2"),
                                               .epsilon = a.real("epsilon"),
                                               .learning_rate = u.scalars().rate(),
                                               .weight_decay = u.scalars().weight_decay,
                                               .gradient_scale = u.scalars().gradient_scale()};
    strata::adamw8bit::update(u.threads(), u.parameter<float>(), u.gradient<float>(), u.state<uint8_t>(kFirst),
                              u.state<float>(kFirstScale), u.state<uint8_t>(kSecond), u.state<float>(kSecondScale),
                              rows, columns, settings, u.scalars().step());
  };
}

class AdamW8Bit final : public strata::Plugin {
 public:
  AdamW8Bit() {
    strata::register_update(
        {.name = "adamw_8bit",
         .states = "m, its scales, v and its scales: u8 of the parameter's shape, f32 a block",
         .fits = fits,
         .flops = 60,
         .bytes = [](const UpdateView& v) { return 16 * double(strata::elements(v.parameter().shape)); },
         .cpu = {bind},
         .reference = {bind}});
    strata::adamw8bit::register_part_kinds();
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
    return {.provides = {"optimizer", "lowers optimizer_state"}, .effect = strata::Effect::program()};
  }

  void update(strata::UpdateStage& stage) override {
    const strata::Attributes attributes{{"beta1", settings_.beta1},
                                        {"beta2", settings_.beta2},
                                        {"epsilon", settings_.epsilon},
                                        {"learning_rate", settings_.learning_rate},
                                        {"weight_decay", settings_.weight_decay}};
    std::vector<strata::adamw8bit::VectorPart> vectors;  // of which ranks hold parts
    for (const strata::Gradient& stored : stage.gradients()) {
      const strata::Gradient gradient = stage.in_f32(stored);
      const strata::Tensor parameter = stage.build()[gradient.parameter];  // a copy: adding states moves the list
      const bool vector = parameter.shape.size() == 1;
      bool columns_are_split = false;
      for (const strata::Split& part : parameter.layout) {
        columns_are_split |= part.dimension != 0;
        if (part.dimension != 0 && parameter.shape.size() > 2)
          throw strata::Error("adamw8bit takes parts of the rows of matrices, but axis \"" + part.axis +
                              "\" splits dimension " + std::to_string(part.dimension) + " of " + parameter.name + " " +
                              strata::text(parameter.full_shape()) +
                              "; leave that dimension whole, or use another optimizer.");
      }
      const Shape scales = columns_are_split ? Shape{parameter.shape[0], scales_of(parameter.full_shape())[1]}
                                             : scales_of(vector ? parameter.full_shape() : *parameter.shape);
      std::vector<TensorId> states;
      for (const char* moment : {"m", "v"}) {
        states.push_back(stage.state(gradient, std::string("adamw8bit.") + moment, parameter.shape, DType::u8));
        states.push_back(stage.state(
            gradient, std::string("adamw8bit.") + moment + "_scale", scales, DType::f32,
            vector ? std::vector<int>{strata::UpdateStage::kNone} : std::vector<int>{0, strata::UpdateStage::kNone}));
      }
      if (vector && !parameter.layout.empty())
        vectors.push_back({gradient, states});
      else if (columns_are_split)
        strata::adamw8bit::update_columns(stage, gradient, states, attributes);
      else
        stage.append("adamw_8bit", gradient, states, attributes);
    }
    strata::adamw8bit::update_vectors(stage, vectors, attributes);
  }

 private:
  strata::adamw8bit::Settings settings_;
};

}  // namespace

STRATA_PLUGIN(AdamW8Bit, "adamw8bit", "1.0.0", "AdamW with 8-bit moments in blocks, a quarter of their memory")
