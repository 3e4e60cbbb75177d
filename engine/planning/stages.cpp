// What the stages of planning do for plugins (strata/stages.h).
#include "strata/stages.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "strata/convert.h"
#include "strata/pattern.h"
#include "strata/random.h"

namespace strata {
namespace {

void keep_layout(Program& program, TensorId from, TensorId to) {
  if (program[to].shape == program[from].shape) program[to].layout = program[from].layout;
}

}  // namespace

void ModelStage::define(std::string name, Module module) {
  const auto [at, inserted] = defined_.emplace(name, std::move(module));
  if (!inserted) throw Error("module \"" + name + "\" is defined twice; to change a module, replace or wrap it.");
}

void ModelStage::replace(std::string name, Module module) {
  const auto [at, inserted] = replaced_.emplace(name, std::move(module));
  if (!inserted) throw Error("module \"" + name + "\" is replaced by two plugins; enable only one of them.");
}

void ModelStage::wrap(std::string name, std::function<TensorId(Builder&, TensorId, const Module&)> wrapper) {
  wraps_[std::move(name)].push_back(std::move(wrapper));
}

TensorId ModelStage::call(std::string_view name, Builder& build, TensorId input) const {
  auto found = replaced_.find(name);
  if (found == replaced_.end()) {
    found = defined_.find(name);
    if (found == defined_.end()) {
      std::vector<std::string> names;
      for (const auto& [known, module] : defined_) names.push_back(known);
      throw Error("no module is named \"" + std::string(name) + "\"." + did_you_mean(name, names));
    }
  }
  Module module = found->second;
  if (const auto wraps = wraps_.find(name); wraps != wraps_.end())
    for (const auto& wrapper : wraps->second)
      module = [wrapper, inner = std::move(module)](Builder& b, TensorId x) { return wrapper(b, x, inner); };
  return module(build, input);
}

TensorId ProgramStage::gradient_of(TensorId tensor) const {
  if (gradients)
    for (const Gradient& gradient : *gradients)
      if (gradient.parameter == tensor) return gradient.tensor;
  for (size_t i = 0; i < wanted.size() && i < wanted_gradients.size(); ++i)
    if (wanted[i] == tensor) return wanted_gradients[i];
  if (gradients && program[tensor].role == Role::parameter) return {};
  throw Error("the gradient of " + program[tensor].name +
                  " is asked for, which has none here; put the tensor into ProgramStage::wanted in stage forward, and "
                  "ask in stage backward.",
              ExitCode::failed);
}

void GradientStage::append(std::string_view kind, std::initializer_list<std::reference_wrapper<Gradient>> gradients,
                           Attributes attributes, const std::vector<TensorId>& more) {
  for (Gradient& gradient : gradients) {
    materialize(gradient);
    build_.role = Role::gradient;
    const TensorId before = gradient.tensor;
    std::vector<TensorId> inputs{before};
    inputs.insert(inputs.end(), more.begin(), more.end());
    gradient.tensor = build_.emit(kind, inputs, attributes, build_[before].name);
    keep_layout(build_.program(), before, gradient.tensor);
  }
}

void GradientStage::scale(Gradient& gradient, TensorId factor) {
  if (gradient.scale) {
    build_.role = Role::workspace;
    factor = build_.emit("multiply_scalars", {gradient.scale, factor});
  }
  gradient.scale = factor;
}

void GradientStage::materialize(Gradient& gradient) {
  if (!gradient.scale) return;
  const auto [mark, is_new] = marks_.emplace(gradient.scale, gradient.scale);
  if (is_new) {
    build_.role = Role::workspace;
    mark->second = build_.emit("overflow_mark", {gradient.scale});
    marks_.emplace(mark->second, mark->second);
  } else if (mark->second == gradient.scale) {
    return;  // multiplied in before
  }
  build_.role = Role::gradient;
  const TensorId before = gradient.tensor;
  gradient.tensor = build_.emit("scale", {before, gradient.scale}, {}, build_[before].name);
  keep_layout(build_.program(), before, gradient.tensor);
  gradient.scale = mark->second;
}

std::string take_data_axes(const Mesh& mesh, std::vector<std::string>& partial) {
  std::vector<std::string> found;
  size_t in_all = 0;
  for (std::string_view axis : mesh.parts_of(kDataAxis)) {
    in_all += mesh.size(axis) > 1;
    if (std::erase(partial, axis) && mesh.size(axis) > 1) found.emplace_back(axis);
  }
  if (found.empty()) return "";
  if (found.size() == in_all) return std::string(kDataAxis);
  partial.insert(partial.end(), found.begin() + 1, found.end());
  return found.front();
}

std::vector<TensorId> GradientStage::over_all(std::string_view each, std::string_view together) {
  build_.role = Role::workspace;
  std::map<std::vector<std::string>, std::vector<TensorId>> parts;  // by the axes that split the gradients
  for (const Gradient& gradient : gradients_) {
    if (!gradient.counts) continue;
    std::vector<std::string> axes;
    for (const Split& split : build_[gradient.tensor].layout)
      if (mesh_.size(split.axis) > 1) axes.push_back(split.axis);
    axes.insert(axes.end(), gradient.partial.begin(), gradient.partial.end());
    parts[axes].push_back(build_.emit(each, {gradient.tensor}));
  }
  std::vector<TensorId> values;
  for (const auto& [axes, list] : parts) {
    TensorId value = build_.emit(together, list);
    for (const std::string& axis : axes)
      value = build_.emit("all_reduce", {value}, {{"axis", axis}, {"reduction", "sum"}});
    values.push_back(value);
  }
  // Ranks with programs of their own have other gradients, split over other axes; what all have is one sum.
  if (mesh_.programs().size == 1) return values;
  TensorId sum = build_.emit(together, values);
  for (const Axis& axis : mesh_.axes())
    if (axis.own_programs && axis.size > 1)
      sum = build_.emit("all_reduce", {sum}, {{"axis", axis.name}, {"reduction", "sum"}});
  return {sum};
}

// Axis by axis, as every tensor's splits are applied; an exchange takes no more tensors than it can change in place.
std::vector<TensorId> UpdateStage::over_parts(const std::vector<Gradient>& gradients, std::vector<TensorId> partials,
                                              const std::string& reduction, int along) {
  constexpr size_t kMost = 256;
  STRATA_CHECK(gradients.size() == partials.size());
  std::vector<std::string> axes;
  std::map<std::string, std::vector<size_t>> split;  // by axis: which of the gradients' parameters
  for (size_t g = 0; g < gradients.size(); ++g)
    for (const Split& one : build_[gradients[g].parameter].layout) {
      if (mesh_.size(one.axis) == 1 || (along != kAll && one.dimension != along)) continue;
      if (!split.contains(one.axis)) axes.push_back(one.axis);
      split[one.axis].push_back(g);
    }
  for (const std::string& axis : axes)
    for (size_t first = 0; first < split[axis].size(); first += kMost) {
      const std::vector<size_t>& all = split[axis];
      const std::vector<size_t> some(all.begin() + int64_t(first),
                                     all.begin() + int64_t(std::min(all.size(), first + kMost)));
      std::vector<TensorId> inputs, outputs;
      for (size_t g : some) {
        inputs.push_back(partials[g]);
        outputs.push_back(build_[partials[g]].persistent ? partials[g] : TensorId{});
      }
      const std::vector<TensorId> sums =
          build_.emit_all("all_reduce", inputs, {{"axis", axis}, {"reduction", reduction}}, outputs);
      for (size_t i = 0; i < some.size(); ++i) partials[some[i]] = sums[i];
    }
  return partials;
}

std::string parameter_name(const Program& program, const Gradient& gradient) {
  return parameter_name(program, gradient.parameter);
}

std::vector<std::vector<size_t>> buckets_of(const Program& program, const std::vector<Gradient>& gradients,
                                            int64_t bytes) {
  std::vector<int64_t> final_at(gradients.size(), -1), written(program.tensors.size(), -1);
  for (size_t i = 0; i < program.ops.size(); ++i)
    for (TensorId id : program.ops[i].outputs)
      if (id) written[size_t(id.value)] = int64_t(i);
  for (size_t g = 0; g < gradients.size(); ++g)
    if (gradients[g].tensor) final_at[g] = written[size_t(gradients[g].tensor.value)];
  std::vector<size_t> order(gradients.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return final_at[a] < final_at[b]; });
  std::vector<std::vector<size_t>> buckets;
  int64_t room = 0;
  for (size_t g : order) {
    if (room <= 0) buckets.emplace_back(), room = bytes;
    buckets.back().push_back(g);
    room -= program[gradients[g].tensor].bytes();
  }
  return buckets;
}

Gradient UpdateStage::in_f32(const Gradient& gradient) {
  if (!is_half(build_[gradient.tensor].dtype)) return gradient;
  Gradient wide = gradient;
  build_.role = Role::gradient;
  // The scale is no factor here: it only keeps the wide copy from being made before the update can run.
  wide.tensor =
      build_.emit("cast", {gradient.tensor, gradient.scale}, {{"dtype", "f32"}}, build_[gradient.tensor].name);
  keep_layout(build_.program(), gradient.tensor, wide.tensor);
  build_.role = Role::workspace;
  return wide;
}

void UpdateStage::append(std::string_view kind, const Gradient& gradient, const std::vector<TensorId>& states,
                         Attributes attributes) {
  bool rounds = false;
  std::vector<TensorId> outputs{gradient.parameter};
  for (size_t i = 0; i < states.size(); ++i) {
    if (!states[i]) continue;
    outputs.push_back(states[i]);
    if (!is_half(build_[states[i]].dtype)) continue;
    rounds = true;  // the same wherever a state is updated, and in whichever copy
    attributes.set("stream." + std::to_string(i), int64_t(stream_of(build_[states[i]].name.text())));
  }
  attributes = adjusted(gradient, std::move(attributes));
  std::vector<TensorId> inputs{gradient.parameter,
                               gradient.tensor,
                               build_.scalar(kStepScalar),
                               build_.scalar(kLearningRateFactor),
                               gradient.scale,
                               rounds ? build_.scalar(kSeedScalar) : TensorId{}};
  inputs.insert(inputs.end(), states.begin(), states.end());
  build_.emit_all(kind, std::move(inputs), std::move(attributes), std::move(outputs));
}

Attributes UpdateStage::adjusted(const Gradient& gradient, Attributes attributes) const {
  const Program& program = build_.program();
  const Lasting& own = *program[program.whole(gradient.parameter)].lasting;
  if (program[gradient.parameter].shape.size() < 2)
    attributes.set("weight_decay", 0.0);
  else if (own.weight_decay_factor != 1)
    attributes.set("weight_decay", attributes.real("weight_decay") * own.weight_decay_factor);
  if (own.learning_rate_factor != 1) attributes.set("learning_rate_factor", own.learning_rate_factor);
  return attributes;
}

TensorId UpdateStage::state(const Gradient& gradient, std::string_view name, Shape shape, DType dtype,
                            const std::vector<int>& follows) {
  Program& program = build_.program();
  const std::string full_name = program[program.whole(gradient.parameter)].name + "." + std::string(name);
  const Tensor parameter = program[gradient.parameter];
  const auto followed = [&](size_t dimension) { return follows.empty() ? int(dimension) : follows[dimension]; };
  bool right = follows.empty() ? shape == parameter.shape : follows.size() == shape.size();
  for (size_t d = 0; right && d < shape.size(); ++d)
    right = followed(d) == kNone || (followed(d) >= 0 && size_t(followed(d)) < parameter.shape.size() &&
                                     shape[d] == parameter.shape[size_t(followed(d))]);
  if (!right)
    throw Error("state " + full_name + " of shape " + text(shape) + " does not say which dimensions of its parameter " +
                    text(parameter.shape) + " it follows.",
                ExitCode::failed);
  const TensorId id = build_.state(full_name, shape, dtype);
  for (Split split : parameter.layout)
    for (size_t d = 0; d < shape.size(); ++d)
      if (followed(d) == split.dimension) {
        split.dimension = int(d);
        program[id].layout.push_back(split);
        break;
      }
  return id;
}

}  // namespace strata
