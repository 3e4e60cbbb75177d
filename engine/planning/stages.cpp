// What the stages of planning do for plugins (strata/stages.h).
#include "strata/stages.h"

#include <algorithm>

namespace strata {

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

void GradientStage::append(std::string_view kind, std::initializer_list<std::reference_wrapper<Gradient>> gradients,
                           Attributes attributes) {
  for (Gradient& gradient : gradients) {
    materialize(gradient);
    build_.role = Role::gradient;
    gradient.tensor = build_.emit(kind, {gradient.tensor}, attributes, build_[gradient.tensor].name);
  }
}

void GradientStage::scale(Gradient& gradient, TensorId factor) {
  if (gradient.scale) materialize(gradient);
  gradient.scale = factor;
}

void GradientStage::materialize(Gradient& gradient) {
  if (!gradient.scale) return;
  build_.role = Role::gradient;
  gradient.tensor = build_.emit("scale", {gradient.tensor, gradient.scale}, {}, build_[gradient.tensor].name);
  gradient.scale = {};
}

TensorId UpdateStage::state(const Gradient& gradient, std::string_view name, const Shape& shape, DType dtype) {
  return build_.state(build_[gradient.parameter].name + "." + std::string(name), shape, dtype);
}

}  // namespace strata
