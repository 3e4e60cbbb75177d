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

// The rows that are here, one of a vector, and which elements of each.
struct Part {
  int64_t rows, first, columns, whole;
  int64_t most_rows;  // that any rank has here: what is exchanged has room for as many on every rank
  Part(const OpView& v, const Tensor& like) {
    const bool matrix = like.shape.size() > 1;
    rows = matrix ? like.shape[0] : 1;
    first = box_of(like).offset[matrix];
    columns = like.shape.back();
    whole = like.full_shape().back();
    most_rows = v.attributes().integer("most_rows", rows);
  }
  int64_t of_moment() const { return most_rows * blocks(whole); }  // largest of m, then as many of v
};

// gradient, m, its scales, v, its scales from input `first` on.
bool fits(const OpView& v, int first) {
  if (!v.has_input(first) || v.input(first).shape.empty() || v.input(first).shape.size() > 2) return false;
  const Shape& shape = v.input(first).shape;
  const int64_t of_row = blocks(v.input(first).full_shape().back());
  const Shape scales = shape.size() > 1 ? Shape{shape[0], of_row} : Shape{of_row};
  return is(v, first, shape, DType::f32) && is(v, first + 1, shape, DType::u8) &&
         is(v, first + 2, scales, DType::f32) && is(v, first + 3, shape, DType::u8) &&
         is(v, first + 4, scales, DType::f32);
}

// gradient, m, m_scale, v, v_scale; step, factor, [scale] -> (2, blocks of the whole vector or of the whole rows).
Launch bind_largest(const Binding& b) {
  return [b, part = Part(b, b.input(0)), scalars = update_scalars(b, 5)] {
    float* const out = b.out<float>(0);
    std::fill_n(out, 2 * part.of_moment(), 0.0f);
    if (scalars.skips()) return;
    b.threads().split(part.rows, 16, [&](int64_t row, int64_t end) {
      for (; row < end; ++row) {
        const int64_t i = row * part.columns, block = row * blocks(part.whole);
        largest_of_part(b.in<float>(0) + i, b.in<uint8_t>(1) + i, b.in<float>(2) + block, b.in<uint8_t>(3) + i,
                        b.in<float>(4) + block, part.first, part.columns, part.whole, settings(b, scalars),
                        scalars.step(), out + block, out + part.of_moment() + block);
      }
    });
  };
}

// parameter, gradient, m, m_scale, v, v_scale, largest; step, factor, [scale] -> all but gradient and largest in place.
Launch bind_update(const Binding& b) {
  return [b, part = Part(b, b.input(1)), scalars = update_scalars(b, 7)] {
    if (scalars.skips()) return;
    const float* const largest = b.in<float>(6);
    b.threads().split(part.rows, 16, [&](int64_t row, int64_t end) {
      for (; row < end; ++row) {
        const int64_t i = row * part.columns, block = row * blocks(part.whole);
        update_part(b.out<float>(0) + i, b.in<float>(1) + i, b.out<uint8_t>(1) + i, b.out<float>(2) + block,
                    b.out<uint8_t>(3) + i, b.out<float>(4) + block, largest + block, largest + part.of_moment() + block,
                    part.first, part.columns, part.whole, settings(b, scalars), scalars.step());
      }
    });
  };
}

}  // namespace

void register_part_kinds() {
  OpKind largest{.name = "adamw_8bit_largest",
                 .summary =
                     "gradient, m, its scales, v, its scales, step, factor, [scale] -> the largest moments of "
                     "each block of the whole vector or rows, as far as they are here (2, blocks)"};
  largest.shape = [](const OpView& v) -> std::vector<TensorSpec> {
    require(v.inputs() == 8 && fits(v, 0), v, "a part's gradient, moments and the scales of the whole vector or rows");
    return {{{2, Part(v, v.input(0)).of_moment()}, DType::f32}};
  };
  OpKind update{.name = "adamw_8bit_part",
                .summary =
                    "parameter, gradient, m, its scales, v, its scales, the largest moments, step, factor, "
                    "[scale] -> parameter and states in place"};
  update.shape = [](const OpView& v) -> std::vector<TensorSpec> {
    require(v.inputs() == 10 && v.has_input(0) && fits(v, 1) && is(v, 0, v.input(1).shape, DType::f32) &&
                is(v, 6, {2, Part(v, v.input(1)).of_moment()}, DType::f32),
            v, "a part, its gradient and moments, and the scales of the whole vector or rows, old and new");
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

namespace {

TensorId largest(UpdateStage& stage, const VectorPart& part, const Attributes& attributes) {
  Builder& build = stage.build();
  std::vector<TensorId> inputs{part.gradient.tensor};
  inputs.insert(inputs.end(), part.states.begin(), part.states.end());
  inputs.insert(inputs.end(), {build.scalar(kStepScalar), build.scalar(kLearningRateFactor), part.gradient.scale});
  return build.emit("adamw_8bit_largest", inputs, attributes);
}

void change(UpdateStage& stage, const VectorPart& part, TensorId largest, const Attributes& attributes) {
  Builder& build = stage.build();
  const auto& [gradient, states] = part;
  std::vector<TensorId> inputs{gradient.parameter, gradient.tensor}, outputs{gradient.parameter};
  inputs.insert(inputs.end(), states.begin(), states.end());
  inputs.insert(inputs.end(), {largest, build.scalar(kStepScalar), build.scalar(kLearningRateFactor), gradient.scale});
  outputs.insert(outputs.end(), states.begin(), states.end());
  build.emit_all("adamw_8bit_part", inputs, attributes, outputs);
}

}  // namespace

void update_vectors(UpdateStage& stage, const std::vector<VectorPart>& vectors, const Attributes& attributes) {
  std::vector<Gradient> gradients;
  std::vector<TensorId> of_parts;
  for (const VectorPart& vector : vectors) {
    gradients.push_back(vector.gradient);
    of_parts.push_back(largest(stage, vector, stage.adjusted(vector.gradient, attributes)));
  }
  of_parts = stage.max_over_parts(gradients, std::move(of_parts));
  for (size_t i = 0; i < vectors.size(); ++i)
    change(stage, vectors[i], of_parts[i], stage.adjusted(vectors[i].gradient, attributes));
}

void update_columns(UpdateStage& stage, const Gradient& gradient, const std::vector<TensorId>& states,
                    Attributes attributes) {
  attributes = stage.adjusted(gradient, std::move(attributes));
  attributes.set("most_rows", stage.build()[gradient.parameter].shape[0]);
  const VectorPart part{gradient, states};
  change(stage, part, stage.max_over_parts(gradient, largest(stage, part, attributes), 1), attributes);
}

}  // namespace strata::adamw8bit
