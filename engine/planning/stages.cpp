// What the stages of planning do for plugins (strata/stages.h).
#include "strata/stages.h"

#include <algorithm>
#include <numeric>

#include "strata/convert.h"

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

void GradientStage::append(std::string_view kind, std::initializer_list<std::reference_wrapper<Gradient>> gradients,
                           Attributes attributes) {
  for (Gradient& gradient : gradients) {
    materialize(gradient);
    build_.role = Role::gradient;
    const TensorId before = gradient.tensor;
    gradient.tensor = build_.emit(kind, {before}, attributes, build_[before].name);
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
  build_.role = Role::gradient;
  const TensorId before = gradient.tensor;
  gradient.tensor = build_.emit("scale", {before, gradient.scale}, {}, build_[before].name);
  keep_layout(build_.program(), before, gradient.tensor);
  gradient.scale = {};
}

TensorId GradientStage::sum_over(TensorId partial, const Layout& layout) {
  for (const Split& split : layout) {
    if (mesh_.size(split.axis) == 1) continue;
    build_.stream = Stream::exchange;
    partial = build_.emit("all_reduce", {partial}, {{"axis", split.axis}, {"reduction", "sum"}});
    build_.stream = Stream::compute;
  }
  return partial;
}

TensorId UpdateStage::over_parts(const Gradient& gradient, TensorId partial, const std::string& reduction) {
  const Layout layout = build_[gradient.parameter].layout;
  for (const Split& split : layout) {
    if (mesh_.size(split.axis) == 1) continue;
    build_.stream = Stream::exchange;
    std::vector<TensorId> outputs;
    if (build_[partial].persistent) outputs = {partial};
    partial = build_.emit_all("all_reduce", {partial}, {{"axis", split.axis}, {"reduction", reduction}}, outputs)[0];
    build_.stream = Stream::compute;
  }
  return partial;
}

std::vector<std::vector<size_t>> buckets_of(const Program& program, const std::vector<Gradient>& gradients,
                                            int64_t bytes) {
  std::vector<int64_t> final_at(gradients.size(), -1);
  for (size_t i = 0; i < program.ops.size(); ++i)
    for (TensorId id : program.ops[i].outputs)
      for (size_t g = 0; g < gradients.size(); ++g)
        if (gradients[g].tensor == id) final_at[g] = int64_t(i);
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

TensorId UpdateStage::state(const Gradient& gradient, std::string_view name, const Shape& shape, DType dtype,
                            bool whole) {
  const Program& program = build_.program();
  const TensorId id =
      build_.state(program[program.whole(gradient.parameter)].name + "." + std::string(name), shape, dtype);
  const Tensor& parameter = program[gradient.parameter];
  if (!whole && !parameter.layout.empty() && shape[0] == parameter.shape[0])
    build_.program()[id].layout = parameter.layout;
  return id;
}

}  // namespace strata
