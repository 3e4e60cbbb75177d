// Builder: emits ops with inferred outputs (builder.h).
#include "strata/builder.h"

#include "engine/program/op_limit.h"
#include "engine/program/sharding.h"

namespace strata {

TensorId Builder::parameter(std::string_view name, const Shape& shape, Initializer initializer, Dimensions dimensions) {
  const std::string full = scoped(name);
  if (const TensorId known = program_->find(full)) {
    Tensor& tensor = (*program_)[known];
    const bool both = !tensor.dimensions.empty() && !dimensions.empty();
    if (tensor.shape != shape || (both && tensor.dimensions != dimensions))
      throw Error("parameter \"" + full + "\" is declared as " + text(tensor.shape, tensor.dimensions) + " and as " +
                  text(shape, dimensions) + ".");
    return dimensions.empty() ? known : name_dimensions(known, std::move(dimensions));
  }
  const TensorId id = program_->add({.name = full,
                                     .shape = shape,
                                     .role = Role::parameter,
                                     .persistent = true,
                                     .lasting = Lasting{.initializer = initializer}});
  return name_dimensions(id, std::move(dimensions));
}

TensorId Builder::state(std::string_view name, const Shape& shape, DType dtype, Initializer initializer) {
  return program_->add({.name = scoped(name),
                        .shape = shape,
                        .dtype = dtype,
                        .role = Role::optimizer_state,
                        .persistent = true,
                        .lasting = Lasting{.initializer = initializer}});
}

TensorId Builder::scalar(std::string_view name) {
  if (const TensorId known = program_->find(name)) return known;
  return program_->add(
      {.name = std::string(name), .shape = {1}, .dtype = DType::f64, .role = Role::scalar, .persistent = true});
}

TensorId Builder::data(std::string_view name, const Shape& shape, DType dtype, Dimensions dimensions) {
  const TensorId id = program_->add({.name = scoped(name), .shape = shape, .dtype = dtype, .role = Role::data});
  return name_dimensions(id, std::move(dimensions));
}

TensorId Builder::name_dimensions(TensorId activation, Dimensions dimensions) {
  Tensor& tensor = (*program_)[activation];
  tensor.dimensions = std::move(dimensions);
  require_names_fit(tensor);
  return activation;
}

TensorId Builder::emit(std::string_view kind, std::vector<TensorId> inputs, Attributes attributes, const Name& result) {
  return emit_all(kind, std::move(inputs), std::move(attributes), {}, result).at(0);
}

std::vector<TensorId> Builder::emit_all(std::string_view kind, std::vector<TensorId> inputs, Attributes attributes,
                                        std::vector<TensorId> outputs, const Name& result) {
  require_room_for_ops(double(program_->ops.size()) + 1, "the program of a step",
                       "it needs fewer layers or microbatches.");
  Op op = make_op(kind, std::move(inputs), {}, std::move(attributes));
  if (!op.kind->exchange) op.stream = stream;
  op.step_part = step_part;
  op.block = block_index;
  op.microbatch = microbatch;
  const std::vector<TensorSpec> specs = op.kind->shape(OpView(*program_, op));
  std::vector<Layout> layouts = layouts_of(OpView(*program_, op));
  layouts.resize(specs.size());
  outputs.resize(specs.size());
  for (size_t i = 0; i < specs.size(); ++i)
    if (!outputs[i]) {
      std::string name = scoped(result.empty() ? std::string(kind) : result.text());
      if (i > 0) name += "." + std::to_string(i);
      outputs[i] = program_->add({.name = std::move(name),
                                  .shape = specs[i].shape,
                                  .dtype = specs[i].dtype,
                                  .role = role,
                                  .layout = layouts[i]});
    }
  op.outputs = outputs;
  program_->ops.push_back(std::move(op));
  return outputs;
}

void Builder::accumulate_onto(int output, TensorId addend) {
  Op& op = program_->ops.back();
  STRATA_CHECK((op.kind->accumulates >> output) & 1 && !((op.accumulate >> output) & 1));
  const int first = int(op.inputs.size()) - op.addends();
  const int before = __builtin_popcount(op.accumulate & ((1u << output) - 1));
  op.inputs.insert(op.inputs.begin() + first + before, addend);
  op.accumulate |= 1u << output;
}

TensorId Builder::add_onto(TensorId x, TensorId y) {
  const Op& last = program_->ops.back();
  if (last.outputs.front() == y && last.kind->accumulates & ~last.accumulate & 1) {
    accumulate_onto(0, x);
    return y;
  }
  return emit("add", {x, y}, {}, "sum");
}

Builder::Scope::Scope(Builder& builder, std::string_view name, int block)
    : builder_(builder), length_(builder.prefix_.size()), block_(builder.block_index) {
  builder.prefix_ += std::string(name) + ".";
  if (block != -2) builder.block_index = block;
}

Builder::Scope::~Scope() {
  builder_.prefix_.resize(length_);
  builder_.block_index = block_;
}

}  // namespace strata
