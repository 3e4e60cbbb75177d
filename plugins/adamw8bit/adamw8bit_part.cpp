// The two ops of a part; see adamw8bit_part.h.
#include "plugins/adamw8bit/adamw8bit_part.h"

#include <algorithm>

#include "plugins/adamw8bit/adamw8bit_kernel.h"
#include "strata/layout.h"

namespace strata::adamw8bit {
namespace {

Settings settings(const Binding& b, const UpdateScalars& scalars) {
  const Attributes& a = b.attributes();
  return {.beta1 = a.real("beta1"),
          .beta2 = a.real("beta2"),
          .epsilon = a.real("epsilon"),
          .learning_rate = scalars.rate(),
          .weight_decay = scalars.weight_decay,
          .gradient_scale = scalars.gradient_scale()};
}

bool is(const OpView& v, int i, const Shape& shape, DType dtype) {
  return v.has_input(i) && v.input(i).shape == shape && v.input(i).dtype == dtype;
}

// gradient, m, its scales, v, its scales from input `first` on.
bool fits(const OpView& v, int first) {
  if (!v.has_input(first) || v.input(first).shape.size() != 1) return false;
  const Shape& shape = v.input(first).shape;
  const Shape scales{blocks(elements(v.input(first).full_shape()))};
  return is(v, first, shape, DType::f32) && is(v, first + 1, shape, DType::u8) &&
         is(v, first + 2, scales, DType::f32) && is(v, first + 3, shape, DType::u8) &&
         is(v, first + 4, scales, DType::f32);
}

// gradient, m, m_scale, v, v_scale; step, factor, [scale] -> (2, blocks of the whole vector).
Launch bind_largest(const Binding& b) {
  const Tensor& like = b.input(0);
  return [b, scalars = update_scalars(b, 5), begin = box_of(like).offset[0], count = elements(like.shape),
          whole = elements(like.full_shape())] {
    if (scalars.skips()) return void(std::fill_n(b.out<float>(0), 2 * blocks(whole), 0.0f));
    largest_of_part(b.in<float>(0), b.in<uint8_t>(1), b.in<float>(2), b.in<uint8_t>(3), b.in<float>(4), begin, count,
                    whole, settings(b, scalars), scalars.step(), b.out<float>(0));
  };
}

// parameter, gradient, m, m_scale, v, v_scale, largest; step, factor, [scale] -> all but gradient and largest in place.
Launch bind_update(const Binding& b) {
  const Tensor& like = b.input(1);
  return [b, scalars = update_scalars(b, 7), begin = box_of(like).offset[0], count = elements(like.shape),
          whole = elements(like.full_shape())] {
    if (scalars.skips()) return;
    update_part(b.out<float>(0), b.in<float>(1), b.out<uint8_t>(1), b.out<float>(2), b.out<uint8_t>(3), b.out<float>(4),
                b.in<float>(6), begin, count, whole, settings(b, scalars), scalars.step());
  };
}

}  // namespace

void register_part_kinds() {
  OpKind largest{.name = "adamw_8bit_largest",
                 .summary = "gradient, m, its scales, v, its scales, step, factor, [scale] -> the largest moments of "
                            "each of the whole vector's blocks, as far as they are here (2, blocks)"};
  largest.shape = [](const OpView& v) -> std::vector<TensorSpec> {
    require(v.inputs() == 8 && fits(v, 0), v, "a part of a vector's gradient, moments and the whole vector's scales");
    return {{{2, v.input(2).shape[0]}, DType::f32}};
  };
  OpKind update{.name = "adamw_8bit_part",
                .summary = "parameter, gradient, m, its scales, v, its scales, the largest moments, step, factor, "
                           "[scale] -> parameter and states in place"};
  update.shape = [](const OpView& v) -> std::vector<TensorSpec> {
    require(v.inputs() == 10 && v.has_input(0) && fits(v, 1) && is(v, 0, v.input(1).shape, DType::f32) &&
                is(v, 6, {2, v.input(3).shape[0]}, DType::f32),
            v, "a part of a vector, its gradient and moments, and the whole vector's scales, old and new");
    std::vector<TensorSpec> specs;
    for (int i : {0, 2, 3, 4, 5}) specs.push_back({v.input(i).shape, v.input(i).dtype});
    return specs;
  };
  for (const char* backend : {"cpu", "reference"}) {
    largest.kernels[backend] = {bind_largest, {}};
    update.kernels[backend] = {bind_update, {}};
  }
  register_kind(std::move(largest));
  register_kind(std::move(update));
}

void update_vectors(UpdateStage& stage, const std::vector<VectorPart>& vectors, const Attributes& attributes) {
  Builder& build = stage.build();
  const TensorId step = build.scalar(kStepScalar), factor = build.scalar(kLearningRateFactor);
  Attributes undecayed = attributes;  // as UpdateStage::append does it
  undecayed.set("weight_decay", 0.0);
  std::vector<Gradient> gradients;
  std::vector<TensorId> largest;
  for (const VectorPart& vector : vectors) {
    std::vector<TensorId> inputs{vector.gradient.tensor};
    inputs.insert(inputs.end(), vector.states.begin(), vector.states.end());
    inputs.insert(inputs.end(), {step, factor, vector.gradient.scale});
    gradients.push_back(vector.gradient);
    largest.push_back(build.emit("adamw_8bit_largest", inputs, undecayed));
  }
  largest = stage.max_over_parts(gradients, std::move(largest));
  for (size_t i = 0; i < vectors.size(); ++i) {
    const auto& [gradient, states] = vectors[i];
    std::vector<TensorId> inputs{gradient.parameter, gradient.tensor}, outputs{gradient.parameter};
    inputs.insert(inputs.end(), states.begin(), states.end());
    inputs.insert(inputs.end(), {largest[i], step, factor, gradient.scale});
    outputs.insert(outputs.end(), states.begin(), states.end());
    build.emit_all("adamw_8bit_part", inputs, undecayed, outputs);
  }
}

}  // namespace strata::adamw8bit
