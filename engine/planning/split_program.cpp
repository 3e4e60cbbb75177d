// Layouts carried forward op by op; see split_program.h.
#include "engine/planning/split_program.h"

#include <algorithm>

#include "engine/planning/splitter.h"
#include "strata/communicator.h"
#include "strata/convert.h"

namespace strata {

Splitter::Splitter(Program& program, const std::vector<NamedSplit>& splits, const std::vector<TensorId>& kept,
                   const Mesh& mesh)
    : program_(program), splits_(splits), mesh_(mesh), build_(program), kept_(program.tensors.size(), false) {
  for (const auto* list : {&kept, &std::as_const(program.losses)})
    for (TensorId id : *list)
      if (id) kept_[size_t(id.value)] = true;
  for (size_t t = 0; t < program.tensors.size(); ++t)
    if (program.tensors[t].step_output) kept_[t] = true;
  uses_.assign(program.tensors.size(), 0);
  reader_.resize(program.tensors.size());
  for (const Op& op : program.ops)
    for (TensorId id : op.inputs)
      if (id) ++uses_[size_t(id.value)], reader_[size_t(id.value)] = size_t(&op - program.ops.data());
}

void Splitter::run() {
  split_parameters(program_, splits_, mesh_);
  split_data(program_, splits_, mesh_);
  original_ = std::move(program_.ops);
  program_.ops.clear();
  track();
  for (const Op& op : original_) place(op);
  replicate_parameters();
}

void Splitter::track() {
  const size_t before = partial_.size(), now = program_.tensors.size();
  partial_.resize(now), depends_.resize(now), producer_.resize(now, -1), uses_.resize(now, 1);
  kept_.resize(now, false);
  for (size_t t = before; t < now; ++t)
    if (program_.tensors[t].role == Role::parameter) depends_[t] = true;
  for (; tracked_ < program_.ops.size(); ++tracked_) track(program_.ops[tracked_]);
}

void Splitter::track(const Op& op) {
  const OpView view(program_, op);
  std::vector<Partial> inputs;
  bool depends = false;
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    if (op.inputs[i]) depends |= differentiable(op.inputs[i]);
    if (int(i) < view.inputs())
      inputs.push_back(view.has_input(int(i)) ? partial_[size_t(op.inputs[i].value)] : Partial());
  }
  const std::vector<Partial> outputs = partial_of(view, inputs, &mesh_);
  for (size_t o = 0; o < op.outputs.size(); ++o) {
    const size_t id = size_t(op.outputs[o].value);
    partial_[id] = outputs[o];
    depends_[id] = depends_[id] || depends;
    producer_[id] = int32_t(tracked_);
  }
  if (counting_) count_uses(op);
}

void Splitter::count_uses(const Op& op) {
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    if (!op.inputs[i] || program_[op.inputs[i]].role != Role::parameter) continue;
    for (const Axis& axis : mesh_.axes()) {
      if (axis.size == 1 || split_over(program_[op.inputs[i]], axis.name)) continue;
      const bool split = std::any_of(op.inputs.begin(), op.inputs.end(), [&](TensorId id) {
        return id && program_[id].role != Role::parameter && split_over(program_[id], axis.name);
      });
      Uses& uses = parameter_uses_[{op.inputs[i].value, axis.name}];
      if (split)
        uses.split.push_back({tracked_, i});
      else
        uses.whole = true;
    }
  }
}

void Splitter::place(Op op) {
  build_.step_part = op.step_part;
  build_.block_index = op.block;
  build_.microbatch = op.microbatch;
  build_.role = Role::activation;
  if (op.stream == Stream::receive) {
    for (TensorId id : op.outputs) receive_split(id);
  } else if (op.stream == Stream::send) {
    op.inputs[0] = as_received(op.inputs[0], op);
  }
  const auto plain = [&](TensorId id) { return !id || is_plain(id); };
  if (op.stream == Stream::send || std::all_of(op.inputs.begin(), op.inputs.end(), plain)) {
    program_.ops.push_back(std::move(op));
    track();
    for (TensorId id : std::vector<TensorId>(program_.ops.back().outputs)) settle(id);
    return;
  }
  const std::vector<TensorId> outputs = op.outputs;
  std::vector<std::pair<int, TensorId>> addends;
  const OpView view(program_, op);
  for (int o = 0; o < view.outputs(); ++o)
    if (view.accumulates(o)) addends.push_back({o, view.addend(o)});
  op.inputs.resize(size_t(view.inputs()));
  op.accumulate = 0;
  const bool replaced = emit(std::move(op));
  for (const auto& [o, addend] : addends) add_back(o, outputs[size_t(o)], addend, replaced);
  for (TensorId id : outputs) settle(id);
}

Layout Splitter::of_names(const Tensor& tensor) const {
  Layout layout;
  Shape left = tensor.full_shape();
  for (const Role role : {Role::data, Role::activation})
    for (const NamedSplit& split : splits_) {
      const int d = named_dimension(tensor, split.dimension), ranks = mesh_.size(split.axis);
      if (split.role != role || d < 0 || ranks == 1) continue;
      int64_t& size = left[size_t(d)];
      layout.push_back({.dimension = d, .axis = split.axis, .full = size, .pair = split.paired ? size / ranks / 2 : 0});
      size = share_of(size, 0, ranks).count();
    }
  return layout;
}

void Splitter::receive_split(TensorId id) {
  const Layout layout = of_names(program_[id]);
  Shape shape = program_[id].shape;
  for (const Split& split : layout)
    shape[size_t(split.dimension)] = share_of(shape[size_t(split.dimension)], 0, mesh_.size(split.axis)).count();
  program_[id].layout = layout;
  program_[id].shape = std::move(shape);
}

TensorId Splitter::as_received(TensorId id, const Op& op) {
  const Layout wanted = of_names(program_[id]);
  for (const std::string& axis : Partial(partial_[size_t(id.value)])) sum(id, axis);
  if (program_[id].layout == wanted) return id;
  if (!wanted.empty())
    throw Error(program_[id].name + " " + text(program_[id].full_shape(), program_[id].dimensions) +
                " is sent to ranks that take it split as its dimensions are named, but what makes it splits it "
                "otherwise; split it alike, or let other blocks end the stage.");
  return whole(id, op);
}

bool Splitter::emit(Op op) {
  std::vector<std::pair<std::string, int>> replaced;  // axis, size
  if (op.kind->exchange) {
    // It says itself what it makes.
  } else if (!has_rule(*op.kind)) {
    for (TensorId& id : op.inputs)
      if (id) id = whole(id, op);
  } else {
    for (const Axis& axis : mesh_.axes())
      if (const int factor = prepare(op, axis.name); factor >= 0 && is_replaced(op.kind->sharding, factor))
        replaced.push_back({axis.name, axis.size});
  }
  if (replaced.size() > 1)
    throw Error("op kind " + in_quotes(op.kind->name) + " cannot be split over axes " + in_quotes(replaced[0].first) +
                " and " + in_quotes(replaced[1].first) + " at once, as " + program_[op.inputs[1]].name +
                " is; split it over one of them.");
  if (!replaced.empty()) {
    replace(op, replaced[0].first, replaced[0].second);
    return true;
  }
  Op bare = op;  // shapes and layouts come from the inputs alone
  bare.outputs.clear();
  const OpView view(program_, bare);
  const std::vector<TensorSpec> specs = op.kind->shape(view);
  std::vector<Layout> layouts = layouts_of(view);
  layouts.resize(specs.size());
  for (size_t o = 0; o < specs.size(); ++o) {
    Tensor& output = program_[op.outputs[o]];
    output.shape = specs[o].shape;
    output.layout = layouts[o];
  }
  program_.ops.push_back(std::move(op));
  track();
  return false;
}

void Splitter::replace(const Op& op, const std::string& axis, int size) {
  const size_t first = program_.ops.size();
  const std::vector<TensorId> made = op.kind->sharding.replace(build_, OpView(program_, op), axis, size);
  STRATA_CHECK(made.size() == op.outputs.size());
  counting_ = false;  // what takes the place of an op answers for its parameters' gradients
  track();
  counting_ = true;
  for (size_t o = 0; o < made.size(); ++o) {
    Tensor &to = program_[op.outputs[o]], &from = program_[made[o]];
    to.shape = from.shape, to.layout = from.layout;
    partial_[size_t(op.outputs[o].value)] = partial_[size_t(made[o].value)];
    depends_[size_t(op.outputs[o].value)] = depends_[size_t(made[o].value)];
    for (size_t i = first; i < program_.ops.size(); ++i) {
      std::replace(program_.ops[i].inputs.begin(), program_.ops[i].inputs.end(), made[o], op.outputs[o]);
      std::replace(program_.ops[i].outputs.begin(), program_.ops[i].outputs.end(), made[o], op.outputs[o]);
    }
    producer_[size_t(op.outputs[o].value)] = producer_[size_t(made[o].value)];
  }
}

void Splitter::add_back(int output, TensorId result, TensorId addend, bool replaced) {
  const bool alike = program_[result].layout == program_[addend].layout &&
                     partial_[size_t(result.value)] == partial_[size_t(addend.value)];
  if (alike && !replaced) {
    Op& op = program_.ops.back();
    op.inputs.push_back(addend);
    op.accumulate |= 1u << output;
    return;
  }
  const TensorId bare = displace(result, ".bare");
  Op add = make_op("add", {addend, bare}, {result});
  add.step_part = build_.step_part, add.block = build_.block_index, add.microbatch = build_.microbatch;
  emit(std::move(add));
}

void Splitter::settle(TensorId id) {
  for (const NamedSplit& split : splits_)
    if (split.role == Role::activation && mesh_.size(split.axis) > 1)
      if (const int d = named_dimension(program_[id], split.dimension); d >= 0) lay_out(id, split.axis, d);
  if (is_loss(id) && mesh_.size(kSequenceAxis) > 1) settle_loss(id);
  const bool whole = kept_[size_t(id.value)], named = !program_[id].dimensions.empty();
  if (whole || named || uses_[size_t(id.value)] > 1)
    for (const std::string& axis : Partial(partial_[size_t(id.value)]))
      if (axis != kSequenceAxis || !is_loss(id)) sum(id, axis);
  while (whole && !program_[id].layout.empty()) {
    const Split split = program_[id].layout.back();
    Attributes attributes = along(split.axis, split.dimension);
    attributes.set("gradient", std::string("whole"));
    exchange("all_gather", displace(id, ".share"), split.axis, attributes, "", id);
  }
}

void Splitter::settle_loss(TensorId id) const {
  if (!partial_[size_t(id.value)].contains(std::string(kSequenceAxis)))
    throw Error("the loss " + program_[id].name + " is not a sum over tokens, which axis " +
                in_quotes(std::string(kSequenceAxis)) +
                " divides; give the kinds that make it sharding rules (OpKind::sharding), or set mesh.sequence to 1.");
}

void Splitter::lay_out(TensorId id, const std::string& axis, int d) {
  if (split_over(program_[id], axis)) return;
  if (program_[id].shape[size_t(d)] % mesh_.size(axis) != 0)
    throw Error(program_[id].name + " " + text(program_[id].shape, program_[id].dimensions) + ": its dimension " +
                in_quotes(program_[id].dimensions[size_t(d)].name) + " cannot be divided evenly among " +
                ranks_of(mesh_, axis) + "; choose another size, or do not split it.");
  if (partial_[size_t(id.value)].contains(axis))
    sum(id, axis, d);
  else
    exchange("local_slice", displace(id, ".whole"), axis, along(axis, d), "", id);
}

void Splitter::replicate_parameters() {
  std::vector<std::pair<Use, std::string>> inserted;
  for (const auto& [key, uses] : parameter_uses_)
    if (uses.whole)
      for (const Use& use : uses.split) inserted.push_back({use, key.second});
  std::stable_sort(inserted.begin(), inserted.end(),
                   [](const auto& a, const auto& b) { return b.first.op < a.first.op; });
  for (const auto& [use, axis] : inserted) {
    Op& user = program_.ops[use.op];
    const TensorId parameter = user.inputs[use.input];
    Tensor copy{.name = program_[parameter].name + ".replicated",
                .shape = program_[parameter].shape,
                .dtype = program_[parameter].dtype,
                .layout = program_[parameter].layout};
    Op replicated = make_op("replicated", {parameter}, {}, {{"axis", axis}});
    replicated.step_part = user.step_part, replicated.block = user.block, replicated.microbatch = user.microbatch;
    const TensorId made = program_.add(std::move(copy));
    user.inputs[use.input] = made;
    replicated.outputs = {made};
    program_.ops.insert(program_.ops.begin() + int64_t(use.op), std::move(replicated));
  }
}

void split_program(Program& program, const std::vector<NamedSplit>& splits, const std::vector<TensorId>& kept,
                   const Mesh& mesh) {
  const auto splits_something = [&](const NamedSplit& split) { return mesh.size(split.axis) > 1; };
  if (std::any_of(splits.begin(), splits.end(), splits_something)) Splitter(program, splits, kept, mesh).run();
}

}  // namespace strata
